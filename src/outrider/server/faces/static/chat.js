// The conversation.

import { complete } from "./api.js";
import { byId, element, perFrame } from "./dom.js";
import { Meter, summary } from "./meter.js";
import * as notice from "./notice.js";
import * as settings from "./settings.js";
import { Answer } from "./tokens.js";

const LETTER =
  "Dear Ms Hartmann,\n\nthank you for you letter of 3 March. We have recieved the parcel, but one of the lamps are broken " +
  "and the instruction are missing. Could you please send us a new lamp and the instructions until the end of the month?\n\n" +
  "Kind regards,\nJonas Weber";
const EXAMPLES = [
  ["Correct a letter", `Correct the mistakes in this letter and write out the whole letter again.\n\n${LETTER}`],
  ["Write a function", "Write a Python function that returns the prime numbers below n, with a docstring and three tests."],
  ["Plan a week", "Make a table of a week with the columns Day, Breakfast, Lunch and Dinner. Keep every cell short."],
  ["Explain tides", "Explain in a few short paragraphs why there are two high tides a day."],
];

export class Chat {
  constructor(figures) {
    this.figures = figures;
    this.log = byId("log");
    this.low = true; // whether the reader is at the end of the page, and wants to stay there
    this.follow = perFrame(() => this.low && scrollTo(0, document.documentElement.scrollHeight));
    addEventListener("scroll", () => (this.low = atBottom()), { passive: true });
    this.reset();
  }

  reset() {
    this.spoken = [];
    this.meter = null;
    this.log.replaceChildren(this.welcome());
    this.show();
  }

  welcome() {
    const buttons = EXAMPLES.map(([title, text]) => {
      const button = element("button", { type: "button" }, title);
      button.onclick = () => {
        byId("prompt").value = text;
        byId("prompt").dispatchEvent(new Event("input"));
        byId("prompt").focus();
      };
      return button;
    });
    const mark = element("span", { class: "token kept first by-0" }, "tinted words");
    return element(
      "div",
      { class: "welcome" },
      element("h2", {}, "The same text, sooner."),
      element("p", {}, "A drafter guesses ahead and the model checks. In an answer, ", mark,
        " were guessed and kept, plain ones the model wrote itself. Point at a word to see who wrote it."),
      element("div", { class: "examples", role: "group", "aria-label": "Examples" }, ...buttons),
    );
  }

  show() {
    this.figures.show(this.meter, "This answer");
  }

  async send(text, signal) {
    this.log.querySelector(".welcome")?.remove();
    const asked = element("div", { class: "asked" }, text);
    this.log.append(asked);
    this.spoken.push({ role: "user", content: text });
    await this.answer(signal);
  }

  async answer(signal) {
    const place = element("div");
    const foot = element("p", { class: "foot" });
    const turn = element("article", { class: "answered", "aria-label": "Answer" }, place, foot);
    this.log.append(turn);
    const answer = new Answer(place), meter = (this.meter = new Meter());
    this.show();
    answer.writing = true;
    this.low = true;
    this.follow();
    try {
      const end = await notice.patiently(() => this.ask(answer, meter, signal), signal);
      meter.close(end.metrics);
      foot.textContent = summary(meter) + (end.reason === "length" ? " · cut at the limit" : "");
    } catch (error) {
      foot.textContent = [summary(meter), error.name === "AbortError" ? "stopped" : "broke off"].filter(Boolean).join(" · ");
      if (error.name !== "AbortError") throw error;
    } finally {
      answer.writing = false;
      this.close(turn, answer);
      this.figures.draw();
    }
  }

  async ask(answer, meter, signal) {
    const body = { ...settings.sampling(), ...settings.drafting(), messages: settings.messages(this.spoken), logprobs: true };
    meter.begin = performance.now();
    return complete(body, {
      signal,
      take: (tokens, text) => {
        answer.add(tokens, text);
        meter.take(tokens);
        this.figures.draw();
        this.follow();
      },
    });
  }

  // What was written stays in the conversation; an answer without a word does not.
  close(turn, answer) {
    if (answer.text) this.spoken.push({ role: "assistant", content: answer.text });
    else turn.remove();
  }

  // The last question again, after something went wrong.
  async again(signal) {
    if (this.spoken.at(-1)?.role === "assistant") {
      this.spoken.pop();
      this.log.lastElementChild.remove();
    }
    await this.answer(signal);
  }
}

const atBottom = () => innerHeight + scrollY >= document.documentElement.scrollHeight - 60;
