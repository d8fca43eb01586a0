// What one answer has shown so far: how many tokens, how fast, who wrote them, and how deep drafts were kept.

const LEAST = 0.001; // seconds: a drafter that drafted nothing and took less is not shown

export class Meter {
  constructor(now = performance.now()) {
    this.begin = now;
    this.first = null; // when the first piece came
    this.last = now;
    this.head = 0; // tokens that came with the first piece: they belong to the prompt's time
    this.tokens = 0;
    this.steps = 0;
    this.kept = 0;
    this.byDepth = new Map(); // depth -> tokens kept there
    this.byDrafter = new Map();
    this.drafted = null; // depth -> {drafted, accepted}: the server tells it at the end
    this.totals = null;
    this.curve = [[0, 0]]; // [seconds, tokens]
  }

  take(tokens, now = performance.now()) {
    for (const token of tokens) {
      if (token.drafter == null) continue;
      this.kept += 1;
      this.byDepth.set(token.depth, (this.byDepth.get(token.depth) ?? 0) + 1);
      this.byDrafter.set(token.drafter, (this.byDrafter.get(token.drafter) ?? 0) + 1);
    }
    this.steps += countSteps(tokens);
    this.tokens += tokens.length;
    this.last = now;
    if (this.first === null) {
      [this.first, this.head] = [now, this.tokens];
      this.curve.push([this.seconds, 0]);
    }
    this.curve.push([this.seconds, this.tokens]);
  }

  close(metrics) {
    this.totals = metrics;
    this.drafted = metrics?.by_depth ?? null;
    this.steps = metrics?.steps ?? this.steps;
  }

  get seconds() { return (this.last - this.begin) / 1000; }
  get wait() { return this.first === null ? null : (this.first - this.begin) / 1000; }

  // Tokens per second after the first piece: decoding only.
  get rate() {
    const seconds = (this.last - (this.first ?? this.last)) / 1000;
    return seconds > 0 ? (this.tokens - this.head) / seconds : null;
  }

  get perStep() { return this.steps ? this.tokens / this.steps : null; }

  // [drafter, steps in which it was asked, seconds, drafted, kept], of the drafters that took time or brought something.
  asked() {
    const told = this.totals?.asked ?? {}, nodes = this.totals?.by_drafter ?? {};
    const names = [...new Set([...Object.keys(nodes), ...Object.keys(told)])];
    return names
      .map((name) => [name, told[name]?.steps ?? 0, told[name]?.seconds ?? 0, nodes[name]?.drafted ?? 0, nodes[name]?.accepted ?? 0])
      .filter(([, , seconds, drafted]) => drafted || seconds >= LEAST);
  }

  // [depth, kept, drafted or null], from depth 1 down.
  depths() {
    const deepest = Math.max(0, ...this.byDepth.keys(), ...Object.keys(this.drafted ?? {}).map(Number));
    return Array.from({ length: deepest }, (_, i) => {
      const told = this.drafted?.[String(i + 1)];
      return [i + 1, told?.accepted ?? this.byDepth.get(i + 1) ?? 0, told?.drafted ?? null];
    });
  }
}

// A step ends with the target's own token; the last one of an answer may end within a draft.
function countSteps(tokens) {
  const own = tokens.filter((token) => token.drafter == null).length;
  return own + (tokens.length && tokens.at(-1).drafter != null ? 1 : 0);
}

export const figure = (value, digits = 1) => (value == null ? "–" : value.toFixed(digits));

export const speed = (rate) => figure(rate, rate !== null && rate < 10 ? 1 : 0);

export function summary(meter) {
  if (!meter.tokens) return "";
  const parts = [`${meter.tokens} tokens`];
  if (meter.rate !== null) parts.push(`${speed(meter.rate)} a second`);
  parts.push(`first after ${figure(meter.wait, 2)}\u00a0s`);
  if (meter.kept) parts.push(`${Math.round((100 * meter.kept) / meter.tokens)}\u00a0% drafted`);
  return parts.join(" · ");
}
