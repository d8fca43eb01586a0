// Plain and speculative decoding of one prompt, side by side, compared token by token.

import { complete } from "./api.js";
import { drawTrack } from "./charts.js";
import { byId, element, perFrame } from "./dom.js";
import { figure, Meter, speed, summary } from "./meter.js";
import * as notice from "./notice.js";
import * as settings from "./settings.js";
import { Answer } from "./tokens.js";

class Lane {
  constructor(id, drafting) {
    this.place = byId(id);
    this.drafting = drafting;
    this.rate = this.place.querySelector(".rate");
    this.foot = this.place.querySelector(".foot");
    this.clear();
  }

  clear() {
    this.answer = new Answer(this.place.querySelector(".answer"));
    this.meter = new Meter();
    this.foot.textContent = "";
    this.draw();
  }

  draw() {
    const rate = this.meter.rate;
    const unit = element("small", {}, " tokens/s");
    this.rate.replaceChildren(...(rate === null ? [] : [speed(rate), unit]));
    const box = this.answer.place;
    if (box.classList.contains("writing")) box.scrollTop = box.scrollHeight;
  }

  get ids() { return this.answer.tokens.map((token) => token.id); }
}

export class Race {
  constructor(figures) {
    this.figures = figures;
    this.plain = new Lane("lane-plain", settings.plain);
    this.drafted = new Lane("lane-drafted", settings.drafting);
    this.turn = 0;
    this.draw = perFrame(() => this.paint());
    this.say("", "The same prompt, decoded twice: plainly, and with the drafter from the settings.",
      "At the end both are compared token by token.");
    this.paint();
  }

  paint() {
    this.plain.draw();
    this.drafted.draw();
    drawTrack(byId("track"), this.plain.meter, this.drafted.meter);
    this.figures.draw();
  }

  show() {
    this.figures.show(this.drafted.meter, "The speculative answer");
    this.paint();
  }

  async send(text, signal) {
    this.text = text;
    await this.again(signal);
  }

  async again(signal) {
    const fields = this.fields();
    for (const lane of [this.plain, this.drafted]) lane.clear();
    this.show();
    this.drafted.place.querySelector("h2").textContent = `Speculative, ${settings.drafterName()}`;
    this.say("", "Running …", "");
    byId("verdict").scrollIntoView({ block: "nearest" });
    try {
      await this.run(fields, signal);
    } catch (error) {
      this.say("", "No result", error.name === "AbortError" ? "The race was stopped." : "The race broke off.");
      if (error.name !== "AbortError") throw error;
      return;
    } finally {
      this.paint();
    }
    this.judge(fields);
  }

  fields() {
    settings.drafting(); // says what is missing before anything runs
    const fields = { ...settings.sampling(), messages: settings.messages([{ role: "user", content: this.text }]) };
    if (fields.temperature > 0) fields.seed ??= Math.floor(Math.random() * 2 ** 31); // or luck would differ
    return fields;
  }

  // Who begins changes from race to race, so that a warm machine favours neither.
  async run(fields, signal) {
    const lanes = this.turn++ % 2 ? [this.drafted, this.plain] : [this.plain, this.drafted];
    if (settings.together()) {
      await Promise.all(lanes.map((lane) => this.leg(lane, fields, signal)));
      return;
    }
    lanes[1].foot.textContent = "waits for its turn";
    for (const lane of lanes) await this.leg(lane, fields, signal);
  }

  async leg(lane, fields, signal) {
    lane.foot.textContent = "";
    lane.answer.writing = true;
    try {
      const end = await notice.patiently(() => this.ask(lane, fields, signal), signal);
      lane.meter.close(end.metrics);
    } finally {
      lane.answer.writing = false;
      lane.foot.textContent = summary(lane.meter);
    }
  }

  ask(lane, fields, signal) {
    lane.meter.begin = performance.now();
    return complete({ ...fields, ...lane.drafting() }, {
      signal,
      take: (tokens, text) => {
        lane.answer.add(tokens, text);
        lane.meter.take(tokens);
        this.draw();
      },
    });
  }

  judge(fields) {
    const [plain, drafted] = [this.plain.ids, this.drafted.ids];
    const at = firstDifference(plain, drafted);
    const seed = fields.temperature > 0 ? ` Both used the seed ${fields.seed}.` : "";
    if (at < 0) {
      this.say("same", "Identical output", `${plain.length} tokens, compared one by one. ${this.pace()}${seed}`);
      return;
    }
    for (const lane of [this.plain, this.drafted]) lane.answer.mark(at);
    const [a, b] = [this.plain, this.drafted].map((lane) => quote(lane.answer.tokens[at]));
    this.say("differs", `Different from token ${at + 1} on`, `Plain wrote ${a}, speculative ${b}.${seed}`);
  }

  pace() {
    const [plain, drafted] = [this.plain.meter.rate, this.drafted.meter.rate];
    if (!plain || !drafted) return "Too short to say which was faster.";
    return `In this race speculative decoding ran at ${figure(drafted / plain, 2)} times the speed of plain decoding.`;
  }

  say(state, strong, more) {
    const place = byId("verdict");
    place.className = `verdict ${state}`;
    place.replaceChildren(element("strong", {}, strong), element("span", {}, more));
  }
}

// The place of the first token that is not the same; -1: there is none.
export function firstDifference(a, b) {
  const longer = Math.max(a.length, b.length);
  for (let i = 0; i < longer; i++) if (a[i] !== b[i]) return i;
  return -1;
}

const quote = (token) => (token ? `${JSON.stringify(token.text ?? "")} (${token.id})` : "nothing more");
