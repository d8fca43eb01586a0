// Small charts, drawn anew as tokens come: what was kept by depth, who was asked for drafts, and tokens over time.

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

// Two bars for each drafter: its share of the time that asking took, and of the tokens that were kept. The server tells
// both at the end; a drafter whose upper bar is the longer one costs more than the others for what it brings.
export function drawAsked(figure, meter) {
  const rows = meter?.asked() ?? [];
  figure.hidden = !rows.length;
  if (!rows.length) return;
  const wide = widthOf(figure, 272), left = 84, right = wide - 96;
  const sum = (place) => Math.max(1e-9, rows.reduce((all, row) => all + row[place], 0));
  const [seconds, kept] = [sum(2), sum(4)];
  const parts = rows.flatMap(([name, steps, took, drafted, brought], i) => {
    const y = 6 + i * 30;
    const block = (kind, share, top) =>
      drawing("rect", { class: kind, x: left, y: top, width: Math.max(1, share * (right - left)), height: 9 });
    return [
      letters(0, y + 9, name, "start"),
      letters(0, y + 21, `${steps} steps`, "start"),
      block("drafted", took / seconds, y),
      letters(wide, y + 9, `${(1000 * took).toFixed(1)} ms`, "end"),
      block("hit", brought / kept, y + 12),
      letters(wide, y + 21, `${brought} of ${drafted} kept`, "end"),
    ];
  });
  const words = rows.map(([name, steps, took, drafted, brought]) =>
    `${name}: asked in ${steps} steps, ${(1000 * took).toFixed(1)} ms, ${brought} of ${drafted} tokens kept`);
  put(figure, wide, 10 + rows.length * 30, words.join("; "), parts);
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
