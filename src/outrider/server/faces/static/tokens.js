// An answer, token by token. Model output only ever becomes text nodes.

import { element } from "./dom.js";

const HUES = 6;
const tip = document.getElementById("tip");
const said = document.getElementById("said");
const order = []; // drafters in the order of their hues

export function rank(names) {
  for (const name of names) hue(name);
}

export function hue(name) {
  if (!order.includes(name)) order.push(name);
  return order.indexOf(name) % HUES;
}

export class Answer {
  constructor(place) {
    this.place = place;
    this.tokens = [];
    this.spans = [];
    this.text = "";
    this.active = -1;
    place.replaceChildren();
    place.classList.add("answer");
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "Answer. Left and right arrows walk through its tokens.");
    place.onkeydown = (event) => this.walk(event);
    place.onpointerover = (event) => this.point(event);
    place.onpointerleave = (event) => event.pointerType === "mouse" && hide();
    place.onblur = () => this.activate(-1);
  }

  set writing(on) { this.place.classList.toggle("writing", on); }

  add(tokens, text) {
    this.text += text;
    const shares = spread(tokens, text);
    tokens.forEach((token, i) => this.push(token, shares[i]));
    if (!tokens.length) this.place.append(text);
  }

  push(token, text) {
    const first = token.drafter != null && token.depth === 1;
    const space = first ? text.match(/^\s*(?=\S)/)?.[0] ?? "" : ""; // a tint that begins with a space looks wrong
    if (space) this.place.append(space);
    const span = element("span", { class: "token" }, text.slice(space.length));
    if (token.drafter != null) span.classList.add("kept", `by-${hue(token.drafter)}`);
    if (first) span.classList.add("first");
    span.dataset.index = this.tokens.length;
    this.tokens.push(token);
    this.spans.push(span);
    this.place.append(span);
  }

  mark(index) { this.spans[index]?.classList.add("differs"); }

  point(event) {
    const span = event.target.closest?.(".token");
    if (span) show(this.tokens[span.dataset.index], span);
    else hide();
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const jump = { Home: 0, End: this.spans.length - 1 }[event.key];
    if (step === undefined && jump === undefined) return;
    if (!this.spans.length) return;
    event.preventDefault();
    const next = jump ?? this.active + step;
    this.activate(Math.min(Math.max(next, 0), this.spans.length - 1));
  }

  activate(index) {
    this.spans[this.active]?.classList.remove("active");
    this.active = index;
    if (index < 0) return hide();
    const span = this.spans[index];
    span.classList.add("active");
    span.scrollIntoView({ block: "nearest" });
    show(this.tokens[index], span);
    said.textContent = `${JSON.stringify(span.textContent)}: ${describe(this.tokens[index]).join(", ")}`;
  }
}

// Which part of the text each token wrote. Special tokens write nothing, and a character made of several tokens is the
// last one's; what fits nowhere is the last token's too, so that the shares always add up to the text.
export function spread(tokens, text) {
  let rest = text;
  const take = (count) => {
    const share = rest.slice(0, count);
    rest = rest.slice(count);
    return share;
  };
  const shares = tokens.map((token, i) => {
    if (token.special) return "";
    if (token.text && rest.startsWith(token.text)) return take(token.text.length);
    const next = tokens[i + 1]?.text;
    const gap = next ? rest.slice(0, 4 + next.length).indexOf(next) : -1;
    return gap > 0 ? take(gap) : "";
  });
  if (rest && shares.length) shares[shares.length - 1] += rest;
  return shares;
}

function describe(token) {
  const lines = [token.drafter == null ? "written by the model" : `drafted by ${token.drafter} at depth ${token.depth}, kept`];
  if (token.logprob != null)
    lines.push(`log-probability ${token.logprob.toFixed(3)} (${percent(Math.exp(token.logprob))})`);
  lines.push(`token ${token.id}`);
  return lines;
}

function percent(share) {
  return share < 0.001 ? "below 0.1 %" : `${(100 * share).toFixed(1)} %`;
}

let anchor = null; // the token that the tip is about

function show(token, span) {
  if (!token) return;
  const [first, ...rest] = describe(token);
  tip.replaceChildren(element("b", {}, first), ...rest.map((line) => element("span", {}, line)));
  tip.hidden = false;
  anchor = span;
  settle();
}

// The tip stays with its token while things scroll.
function settle() {
  if (tip.hidden || !anchor) return;
  const span = anchor;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const edge = Math.min(span.closest(".answer").getBoundingClientRect().right, innerWidth - 8); // not over the figures
  const left = Math.max(8, Math.min(at.left, edge - tip.offsetWidth));
  const above = at.top - tip.offsetHeight - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : at.bottom + 8}px`;
}

export function hide() {
  tip.hidden = true;
  anchor = null;
}

addEventListener("scroll", settle, { passive: true, capture: true });
addEventListener("pointerdown", (event) => event.target.closest?.(".token") || hide());
