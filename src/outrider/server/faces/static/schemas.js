// The schema that an answer is held to, and examples of it.

import { Trouble } from "./api.js";
import { byId, element } from "./dom.js";

const text = (maxLength) => ({ type: "string", maxLength });
const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});

const EXAMPLES = {
  "a person": object({ name: text(40), age: { type: "integer", minimum: 0, maximum: 150 } }),
  "a verdict": object({ sentiment: { enum: ["positive", "neutral", "negative"] }, reason: text(120) }),
  "a list": { type: "array", items: text(40), minItems: 1, maxItems: 5 },
};

const written = (schema) => JSON.stringify(schema, null, 2);

export function offerExamples() {
  const names = Object.keys(EXAMPLES).map((name) => element("option", { value: name }, name));
  byId("example").append(...names);
  byId("example").addEventListener("change", () => {
    const chosen = EXAMPLES[byId("example").value];
    byId("schema").value = chosen ? written(chosen) : "";
  });
}

// The field of a request; none where the box is empty.
export function structure() {
  const given = byId("schema").value.trim();
  if (!given) return {};
  try {
    const schema = JSON.parse(given);
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
  } catch {
    byId("structure").open = true;
    throw new Trouble("The schema of the answer is no JSON. Mend it or empty the box.");
  }
}
