// Talking to the server: the models, and one streamed answer. Whatever goes wrong becomes a Trouble with words for a reader.

export class Trouble extends Error {
  constructor(message, { kind = "refused", retry = 0 } = {}) {
    super(message);
    this.kind = kind; // gone: nobody answers, busy: try again after `retry` seconds, key: a key is wanted, refused
    this.retry = retry;
  }
}

const KEY = "outrider-key";
export const readKey = () => sessionStorage.getItem(KEY) ?? "";
export const writeKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

const headers = () => ({
  "Content-Type": "application/json",
  ...(readKey() ? { Authorization: `Bearer ${readKey()}` } : {}),
});

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server does not answer. Is it still running?", { kind: "gone" });
  }
  if (!response.ok) throw await troubleOf(response);
  return response;
}

async function troubleOf(response) {
  const said = await response.json().catch(() => ({}));
  const error = said.error ?? {};
  const reason = (typeof error === "string" ? error : error.message) || said.detail || `status ${response.status}`;
  const retry = Number(response.headers.get("Retry-After")) || 0;
  if (response.status === 401 || response.status === 403)
    return new Trouble("The server wants an API key. Put it into the settings.", { kind: "key" });
  if (response.status === 429)
    return new Trouble("The server is busy: its queue is full.", { kind: "busy", retry: retry || 2 });
  if (response.status === 503) return new Trouble(sentence(reason), { kind: "busy", retry: retry || 3 });
  return new Trouble(sentence(String(reason)), { kind: response.status >= 500 ? "gone" : "refused" });
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

export async function offered() {
  return (await ask("outrider/models")).json();
}

// Streams one answer; `take(tokens, text)` hears of every piece. Resolves to {reason, usage, metrics}.
export async function complete(body, { signal, take }) {
  const whole = { ...body, stream: true, stream_options: { include_usage: true }, outrider: { tokens: true } };
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(whole), signal });
  const end = { reason: null, usage: null, metrics: null };
  for await (const event of events(response)) {
    if (event.error) throw new Trouble(sentence(event.error.message ?? "the answer broke off"), { kind: "gone" });
    end.usage = event.usage ?? end.usage;
    end.metrics = event.metrics ?? end.metrics;
    for (const choice of event.choices ?? []) {
      const text = choice.delta?.content ?? "";
      const tokens = choice.outrider?.tokens ?? [];
      if (text || tokens.length) take(tokens, text);
      end.reason = choice.finish_reason ?? end.reason;
    }
  }
  return end;
}

// The JSON of every server-sent event up to [DONE].
async function* events(response) {
  const broken = () => new Trouble("The connection broke before the answer was complete.", { kind: "gone" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw broken();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } catch (error) {
    throw error.name === "AbortError" || error instanceof Trouble ? error : broken();
  } finally {
    reader.cancel().catch(() => {});
  }
}
