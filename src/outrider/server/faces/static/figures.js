// The figures beside an answer, live.

import { drawAsked, drawDepths } from "./charts.js";
import { byId, element, perFrame } from "./dom.js";
import { figure, speed } from "./meter.js";
import { hue } from "./tokens.js";

export class Figures {
  constructor() {
    this.meter = null;
    this.draw = perFrame(() => this.paint());
  }

  show(meter, title = "This answer") {
    this.meter = meter;
    byId("figures-title").textContent = title;
    this.paint();
  }

  paint() {
    const meter = this.meter;
    const told = meter?.totals;
    const kept = told?.drafted ? `${told.accepted} of ${told.drafted}` : String(meter?.kept ?? "–");
    const rows = [
      ["Tokens", String(meter?.tokens ?? "–")],
      ["Tokens a second", speed(meter?.rate ?? null)],
      ["First after", meter?.wait == null ? "–" : `${figure(meter.wait, 2)} s`],
      ["Tokens a step", figure(meter?.perStep ?? null, 2)],
      ["Kept", kept],
      ...(told?.estimated_speedup ? [["Estimated speed-up", `${figure(told.estimated_speedup, 2)}×`]] : []),
    ];
    const pairs = rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    byId("numbers").replaceChildren(...pairs);
    drawDepths(byId("depths"), meter);
    this.legend(meter);
    drawAsked(byId("asked"), meter);
  }

  legend(meter) {
    const drafters = [...(meter?.byDrafter ?? new Map())].map(([name, count]) =>
      element("li", {}, element("span", { class: `token kept first by-${hue(name)}` }, name), ` ${count}`));
    const own = meter?.tokens ? [element("li", {}, `model ${meter.tokens - meter.kept}`)] : [];
    byId("legend").replaceChildren(...drafters, ...own);
  }
}
