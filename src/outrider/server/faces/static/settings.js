// What the settings say, as fields of a request.

import { Trouble } from "./api.js";
import { byId, element } from "./dom.js";
import { structure } from "./schemas.js";
import { rank } from "./tokens.js";

const NEUTRAL = { top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1 };
const OWN = ""; // the drafter that the model was launched with
let offer = { models: [], drafters: [] };

export function show(told) {
  offer = told;
  const before = byId("model").value;
  byId("model").replaceChildren(...told.models.map((model) => element("option", { value: model.id }, model.id)));
  if (told.models.some((model) => model.id === before)) byId("model").value = before;
  rank(told.drafters.map((drafter) => drafter.name).filter((name) => name !== "none"));
  showDrafters();
}

export function showDrafters() {
  const model = chosenModel();
  const before = byId("drafter").value;
  const names = model?.drafters ?? [];
  const own = model ? [element("option", { value: OWN }, `${model.draft}, as launched`)] : [];
  byId("drafter").replaceChildren(...own, ...names.map((name) => element("option", { value: name }, title(name))));
  byId("drafter").value = names.includes(before) ? before : OWN;
  showDrafter();
}

export function showDrafter() {
  const chosen = offer.drafters.find((each) => each.name === byId("drafter").value);
  const known = offer.drafters.find((each) => each.name === drafterName());
  byId("about").textContent = known?.about ?? "";
  byId("length-row").hidden = !chosen?.options.includes("length");
  byId("prediction-row").hidden = chosen?.name !== "prediction";
}

const chosenModel = () => offer.models.find((model) => model.id === byId("model").value);
const title = (name) => (name === "none" ? "none (plain decoding)" : name);

// The drafter's name as a reader knows it, without its options.
export function drafterName() {
  return (byId("drafter").value || chosenModel()?.draft || "").split(":")[0];
}

const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));

// Everything but the messages and who drafts; a field that is out of its range is shown instead.
export function sampling() {
  if (!byId("options").checkValidity()) {
    for (const box of byId("options").querySelectorAll("details:has(:invalid)")) box.open = true;
    byId("options").reportValidity();
    throw new Trouble("One of the settings is out of its range.");
  }
  const fields = { model: byId("model").value, temperature: number("temperature") ?? 0 };
  for (const [name, neutral] of Object.entries(NEUTRAL)) {
    const value = number(name);
    if (value !== null && value !== neutral) fields[name] = value;
  }
  if (number("seed") !== null) fields.seed = number("seed");
  if (number("max_tokens") !== null) fields.max_completion_tokens = number("max_tokens");
  return { ...fields, ...structure() };
}

export function drafting() {
  const name = byId("drafter").value;
  if (name === OWN) return {};
  if (name === "none") return plain();
  if (name === "prediction") return predicted();
  const length = byId("length-row").hidden ? null : number("length");
  return { speculative: { method: name, ...(length === null ? {} : { length }) } };
}

export const plain = () => ({ speculative: { off: true } });

function predicted() {
  const content = byId("prediction").value;
  if (!content) throw new Trouble("The drafter prediction needs the answer you expect. Write it into the settings.");
  return { prediction: { type: "content", content } };
}

export function messages(spoken) {
  const system = byId("system").value.trim();
  return system ? [{ role: "system", content: system }, ...spoken] : [...spoken];
}

export const together = () => byId("together").checked;
