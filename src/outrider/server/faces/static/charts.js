// Two small charts, drawn anew as tokens come: what was kept by depth, and tokens over time.

import { drawing } from "./dom.js";

const BASE = 72; // where the bars stand
const FLOOR = 146; // where the lines begin

// Bars: how often a draft reached each depth, solid where it was kept. The server tells what was drafted at the end.
export function drawDepths(figure, meter) {
  const rows = meter ? meter.depths() : [];
  const wide = widthOf(figure, 272), slots = Math.max(rows.length, 8);
  const most = Math.max(1, ...rows.map(([, kept, drafted]) => Math.max(kept, drafted ?? 0)));
  const bars = rows.flatMap((row) => bar(row, wide / slots, (BASE - 14) / most, slots <= 12));
  const note = !rows.length ? "nothing was drafted yet" : rows.some((row) => row[2]) ? "% of the drafted tokens" : "tokens kept";
  const words = rows.map(([depth, kept, drafted]) => `depth ${depth}: ${kept}${drafted ? ` of ${drafted}` : ""}`);
  put(figure, wide, BASE + 32, words.join(", ") || note, [
    axis(0, wide, BASE),
    ...bars,
    letters(wide, BASE + (rows.length ? 26 : -6), note, "end"),
  ]);
}

function bar([depth, kept, drafted], step, scale, roomy) {
  const x = (depth - 1) * step + 1, width = Math.max(step - 3, 2);
  const block = (name, count) =>
    drawing("rect", { class: name, x, width, y: BASE - count * scale, height: count * scale });
  const parts = [...(drafted ? [block("drafted", drafted)] : []), block("hit", kept)];
  if (!roomy && depth % 2 === 0) return parts;
  const top = BASE - Math.max(kept, drafted ?? 0) * scale - 4;
  const share = drafted ? Math.round((100 * kept) / drafted) : kept;
  return [...parts, letters(x + width / 2, top, share), letters(x + width / 2, BASE + 13, depth)];
}

// Lines: tokens over seconds, plain and drafted; the steeper one is the faster one.
export function drawTrack(figure, plain, drafted) {
  const runs = [["plain", plain], ["speculative", drafted]].filter(([, meter]) => meter.tokens);
  const wide = widthOf(figure, 640), right = wide - 76;
  const seconds = Math.max(0.1, ...runs.map(([, meter]) => meter.seconds));
  const tokens = Math.max(8, ...runs.map(([, meter]) => meter.tokens));
  const at = ([s, n]) => [(s / seconds) * right, FLOOR - (n / tokens) * (FLOOR - 14)];
  const time = (share) => letters(share * right, FLOOR + 15, `${(share * seconds).toFixed(seconds < 2 ? 2 : 1)} s`);
  const words = runs.map(([name, meter]) => `${name}: ${meter.tokens} tokens in ${meter.seconds.toFixed(1)} seconds`);
  put(figure, wide, FLOOR + 24, words.join("; ") || "no race yet", [
    axis(0, right, FLOOR),
    ...runs.flatMap(([name, meter]) => line(name, thin(meter.curve).map(at))),
    ...(runs.length ? [time(0.5), time(1)] : []),
  ]);
}

function line(name, points) {
  const path = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const [x, y] = points.at(-1);
  const end = letters(x + 6, y + (name === "plain" ? 14 : -2), name, "start"); // apart, where both end at one place
  end.classList.add(name);
  return [drawing("path", { class: `run ${name}`, d: path }), end];
}

function thin(curve, most = 240) {
  const every = Math.ceil(curve.length / most);
  return curve.filter((_, i) => i % every === 0 || i === curve.length - 1);
}

const axis = (x1, x2, y) => drawing("line", { class: "axis", x1, x2, y1: y + 0.5, y2: y + 0.5 });
const letters = (x, y, text, anchor = "middle") => drawing("text", { x, y, "text-anchor": anchor }, String(text));

// Drawn as wide as there is room, so that letters keep their size.
const widthOf = (figure, otherwise) => figure.clientWidth || otherwise;

function put(figure, width, height, words, parts) {
  const svg = drawing("svg", { width, height, role: "img", "aria-label": words }, ...parts);
  figure.querySelector("svg")?.remove();
  figure.append(svg);
}
