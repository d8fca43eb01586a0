"""`outrider generate`: one prompt, one answer; or a file of queries and a file of answers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider import drafters
from outrider.backends.base import Stream
from outrider.cli import answers, options
from outrider.cli.answers import Query
from outrider.cli.fields import Given, command, fields
from outrider.cli.screen import note, print_json
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.core.request import Result
from outrider.settings import Config, Settings

if TYPE_CHECKING:
    from outrider.llm import LLM

FILES = "Many queries"
NO_GRAMMAR = "give one (--json-schema, --json-object, --regex, --choice or --grammar), or choose another drafter"


@dataclass(frozen=True)
class GenerateOptions(options.Printed, options.Constrained):
    raw: bool = option(False, "Continue the prompt as it is, without a chat template.")
    prediction: str | None = option(
        None, "The answer you expect, as a file or as text; it is used as the draft.", panel=options.MODEL
    )
    input: Path | None = option(
        None, "A JSONL file of queries, with the keys query and, if you like, id and retrieved.", panel=FILES
    )
    output: Path | None = option(
        None,
        "The file for the answers, one per line. Answers already in it are kept, and the run resumes.",
        panel=FILES,
    )


MODEL = options.settings(
    *("model", "draft", *options.ADAPTERS, *options.ENGINE, *options.MEMORY), draft={"shown": "auto"}
)
GIVEN = options.configured(MODEL, options.sampling())


@command
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; - reads it from stdin.", show_default=False)
    ] = None,
    *,
    given: Annotated[Given, GIVEN],
    own: Annotated[GenerateOptions, fields(GenerateOptions)],
) -> None:
    """Answer a prompt, continue it ([bold]--raw[/]), or answer a file of queries.

    [dim]$[/] outrider generate "Name three rivers."
    [dim]$[/] outrider generate "Once upon a time" --raw --temperature 0.8 --seed 7
    [dim]$[/] outrider generate "Fix the spelling: ..." --prediction draft.txt --json
    [dim]$[/] outrider generate "What colour is the sea?" --choice blue,green,grey
    [dim]$[/] outrider generate "Ada, 36, of London." --json-schema person.json
    [dim]$[/] cat letter.txt | outrider generate - --draft ngram:max_n=6,length=12
    [dim]$[/] outrider generate "Name three rivers." --adapter haiku=my-haiku
    [dim]$[/] outrider generate --config c.yaml --input q.jsonl --output a.jsonl
    """
    config = options.chosen(given)
    config = replace(
        config,
        settings=_with_drafter(config.settings, given.get("draft", ""), own.prediction),
        params=own.over(config.params),
    )
    options.refuse_without_grammar(config.settings.draft, config.params, NO_GRAMMAR)
    options.one_adapter(config.settings)  # several are refused before anything is loaded
    if own.input is not None or own.output is not None:
        raise typer.Exit(_answer_file(config, own, "config" in given, prompt))
    if prompt is None:
        raise OutriderError("what is to be answered? give a prompt, or a file of queries with --input")
    if config.params.logprobs is not None and not own.as_json:
        raise OutriderError("--logprobs are shown with --json only; add it")
    _answer(config, own, "config" in given, options.read_stdin_or(prompt))


def _answer(config: Config, own: GenerateOptions, configured: bool, text: str) -> None:
    expected = _text_or_file(own.prediction)
    with options.opened(config.settings, config.notes) as llm:
        asked = Query("", text).prompt(config.query_prefix, own.raw or _mute(llm, configured))
        stream = llm.stream(asked, config.params, prediction=expected, adapter=options.one_adapter(config.settings))
        result = _result(stream, live=sys.stdout.isatty() and not own.as_json)
        if own.as_json:
            about: dict[str, Any] = {"model": config.settings.model, "draft": config.settings.drafter, "prompt": text}
            if config.settings.rounded:
                about["rounded"] = config.settings.rounded
            print_json({**about, **result.as_dict()})
        else:
            print("" if sys.stdout.isatty() else result.text)
            note("; ".join([str(result.stats), *config.settings.rounded]))


def _answer_file(config: Config, own: GenerateOptions, configured: bool, prompt: str | None) -> int:
    if own.input is None or own.output is None:
        raise OutriderError("--input and --output go together: the queries, and where their answers go")
    if prompt is not None or own.as_json or own.prediction is not None:
        raise OutriderError("with --input there is no prompt, --json or --prediction; the answers are lines of JSON")
    queries = answers.read(own.input)
    with options.opened(config.settings, config.notes) as llm:
        failed = answers.answer(llm, config, queries, own.output, own.raw or _mute(llm, configured))
    return 1 if failed else 0


def _mute(llm: LLM, configured: bool) -> bool:
    """A config file may name a model that cannot chat: it continues the query, as the original does."""
    return configured and not getattr(llm.tokenizer, "chat_template", None)


def _result(stream: Stream, live: bool) -> Result:
    """Wait for the answer; where somebody looks on, show it as it comes."""
    if live:
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    result = stream.result()
    if result.finish_reason == "error":
        raise OutriderError(result.error)
    return result


def _with_drafter(settings: Settings, draft: str, prediction: str | None) -> Settings:
    predicts = options.reads_prediction(settings.draft)
    if prediction is not None and draft and not predicts:
        raise OutriderError(f"--prediction is for the drafter prediction, not for {draft}; leave out one of the two")
    if prediction is not None:
        return settings if predicts else replace(settings, draft=drafters.PREDICTION, speculative_config=None)
    if options.needs_prediction(settings.draft):
        raise OutriderError("the drafter prediction needs the text you expect; give it with --prediction")
    return settings


def _text_or_file(value: str | None) -> str | None:
    if value is None or not os.path.isfile(value):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"cannot read the prediction in {value} ({error}); give a text file") from error
