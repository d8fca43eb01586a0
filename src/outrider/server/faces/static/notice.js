// What went wrong, in words, with what can be done about it; and waiting for a busy server.

import { byId, element } from "./dom.js";

const place = byId("notice");

export function clear() {
  place.hidden = true;
  place.replaceChildren();
}

// `actions`: [words, what to do] ...
export function tell(message, actions = []) {
  const buttons = actions.map(([words, act]) => {
    const button = element("button", { type: "button" }, words);
    button.onclick = () => {
      clear();
      act();
    };
    return button;
  });
  place.replaceChildren(element("p", {}, message), ...buttons);
  place.hidden = false;
}

const MOST_TRIES = 20;

// Run it; while the server is busy, count down and run it again.
export async function patiently(run, signal) {
  for (let tries = 1; ; tries++) {
    try {
      return await run();
    } catch (trouble) {
      if (trouble.kind !== "busy" || tries >= MOST_TRIES) throw trouble;
      await countdown(trouble, signal);
    }
  }
}

function countdown(trouble, signal) {
  return new Promise((resolve, reject) => {
    let left = Math.max(1, Math.ceil(trouble.retry));
    const done = (settle) => () => {
      clearInterval(timer);
      signal.removeEventListener("abort", give);
      clear();
      settle();
    };
    const go = done(resolve);
    const give = done(() => reject(new DOMException("given up", "AbortError")));
    const count = () => {
      tell(`${trouble.message} Trying again in ${left} s.`, [["Try now", go], ["Give up", give]]);
      if (left-- <= 0) go();
    };
    const timer = setInterval(count, 1000);
    signal.addEventListener("abort", give);
    count();
  });
}
