"""What a body says its text may be: OpenAI's `response_format`, LoRAX's, and vLLM's names for the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.core.errors import OutriderError
from outrider.server.errors import Bad, ServerError
from outrider.server.faces.fields import Note, StrictBody, Text, Word

MOST_CHOICES = 10_000  # texts of a choice; together they are bounded as a grammar
Choice = Annotated[list[Text], Field(max_length=MOST_CHOICES)]
Schema = dict[str, Any]


class TextFormat(StrictBody):
    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object; with a schema, as LoRAX and others have it, what the schema allows."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(None, alias="schema")


class NamedSchema(StrictBody):
    """The text is held to the schema whether it is strict or not."""

    name: Word
    schema_: Schema = Field(alias="schema")
    description: Note | None = None  # taken and not used
    strict: bool | None = None


class JsonSchemaFormat(StrictBody):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class LoraxSchemaFormat(StrictBody):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


LoraxResponseFormat = Annotated[TextFormat | JsonObjectFormat | LoraxSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(StrictBody):
    """vLLM's; how it writes spaces and keys is refused, unless the value asks for nothing."""

    json_: Schema | Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choice | None = None
    grammar: Text | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


@dataclass(frozen=True)
class Constraint:
    """What the text may be, as a field of a body has said it."""

    field: str
    parameter: str  # of SamplingParams
    value: Any

    @property
    def params(self) -> dict[str, Any]:
        return {self.parameter: self.value}

    def blamed(self, error: OutriderError) -> OutriderError:
        """The error with the name of the field, if it is about the constraint."""
        if isinstance(error, ServerError) or not str(error).startswith(f"{self.parameter} "):
            return error
        return Bad(str(error), param=self.field)


def of_format(given: TextFormat | JsonObjectFormat | JsonSchemaFormat | LoraxSchemaFormat | None) -> Constraint | None:
    if given is None or isinstance(given, TextFormat):
        return None
    if isinstance(given, JsonSchemaFormat):
        return Constraint("response_format", "json_schema", given.json_schema.schema_)
    if given.schema_ is None:
        return Constraint("response_format", "json_object", True)
    return Constraint("response_format", "json_schema", given.schema_)


class StructuredFields(StrictBody):
    """The fields of OpenAI's bodies."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Choice | None = None
    guided_grammar: Text | None = None

    def constraint(self) -> Constraint | None:
        """None: the text is free. Two of them would contradict each other."""
        wanted = [of_format(self.response_format), *self._structured(), *self._guided()]
        found = [each for each in wanted if each is not None]
        if len(found) > 1:
            names = " and ".join(dict.fromkeys(each.field for each in found))
            raise Bad(f"{names} say more than once what the text may be; leave all out but one", param=found[1].field)
        return found[0] if found else None

    def _structured(self) -> list[Constraint]:
        asked = self.structured_outputs
        if asked is None:
            return []
        values = {name: getattr(asked, name) for name in ("regex", "choice", "grammar")}
        values |= {"json_schema": asked.json_, "json_object": asked.json_object or None}
        return [Constraint("structured_outputs", name, value) for name, value in values.items() if value is not None]

    def _guided(self) -> list[Constraint]:
        names = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
        given = {name: getattr(self, f"guided_{name}") for name in names}
        return [Constraint(f"guided_{name}", names[name], value) for name, value in given.items() if value is not None]
