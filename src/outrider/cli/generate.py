"""`outrider generate`: one prompt, one answer; or a file of queries and a file of answers."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.backends.base import Stream
from outrider.cli import answers, options
from outrider.cli.answers import Query
from outrider.cli.options import DEFAULT, PLAIN, SAMPLING
from outrider.cli.screen import note
from outrider.core.errors import OutriderError
from outrider.core.request import Result
from outrider.llm import LLM
from outrider.settings import Config, Settings

FILES = "Many queries"


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; - reads it from stdin.", show_default=False)
    ] = None,
    config: options.ConfigFile = None,
    model: options.Model = DEFAULT.model,
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "-d",
            help="Who guesses ahead: NAME or NAME:key=value,...; none for plain decoding.",
            show_default="ngram, or prediction where one is given",
            rich_help_panel=options.MODEL,
        ),
    ] = "",
    prediction: Annotated[
        str | None,
        typer.Option(
            help="The answer you expect, as a file or as text: it is the draft.", rich_help_panel=options.MODEL
        ),
    ] = None,
    backend: options.Backend = DEFAULT.backend,
    speculative_config: options.SpeculativeConfig = None,
    device: options.Device = DEFAULT.device,
    dtype: options.Dtype = DEFAULT.dtype,
    quantize: options.Quantize = DEFAULT.quantize,
    threads: options.Threads = DEFAULT.threads,
    cache_memory: options.CacheMemory = DEFAULT.cache_memory,
    tensor_parallel_size: options.TensorParallelSize = DEFAULT.tensor_parallel_size,
    pipeline_parallel_size: options.PipelineParallelSize = DEFAULT.pipeline_parallel_size,
    data_parallel_size: options.DataParallelSize = DEFAULT.data_parallel_size,
    max_tokens: options.MaxTokens = PLAIN.max_tokens,
    temperature: options.Temperature = PLAIN.temperature,
    top_k: options.TopK = PLAIN.top_k,
    top_p: options.TopP = PLAIN.top_p,
    min_p: options.MinP = PLAIN.min_p,
    typical_p: options.TypicalP = PLAIN.typical_p,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = PLAIN.repetition_penalty,
    presence_penalty: options.PresencePenalty = PLAIN.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = PLAIN.frequency_penalty,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text. Repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-word", help="Never write this. Repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(help="Do not end before this many tokens.", rich_help_panel=SAMPLING)
    ] = PLAIN.min_tokens,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of the answer.", rich_help_panel=SAMPLING)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities of each token and of this many others.", show_default="none"),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, without chat template.")
    ] = False,
    input: Annotated[
        Path | None,
        typer.Option(help="A JSONL file of queries: query, and perhaps id and retrieved.", rich_help_panel=FILES),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where the answers go, a line each; what is there already is kept.", rich_help_panel=FILES),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Answer a prompt, or continue it with [bold]--raw[/]; or answer a file of queries.

    [dim]$[/] outrider generate "Name three rivers."
    [dim]$[/] outrider generate "Once upon a time" --raw --temperature 0.8 --seed 7
    [dim]$[/] outrider generate "Fix the spelling: ..." --prediction draft.txt --json
    [dim]$[/] cat letter.txt | outrider generate - --draft ngram:max_n=6,length=12
    [dim]$[/] outrider generate --config c.yaml --input q.jsonl --output a.jsonl
    """
    said = options.chosen(ctx, config)
    said = replace(said, settings=_with_drafter(said.settings, draft, prediction))
    if input is not None or output is not None:
        raise typer.Exit(_answer_file(said, input, output, raw, config is not None, prompt, as_json, prediction))
    if prompt is None:
        raise OutriderError("what is to be answered? give a prompt, or a file of queries with --input")
    if said.params.logprobs is not None and not as_json:
        raise OutriderError("--logprobs are shown with --json only; add it")
    expected = _text_or_file(prediction)
    text = options.read_stdin_or(prompt)
    with options.opened_as(said.settings, said.notes) as llm:
        asked = Query("", text).prompt(said.query_prefix, raw or _mute(llm, config is not None))
        stream = llm.stream(asked, said.params, prediction=expected)
        result = _result(stream, live=sys.stdout.isatty() and not as_json)
        if as_json:
            about = {"model": said.settings.model, "draft": said.settings.drafter, "prompt": text}
            print(json.dumps({**about, **result.as_dict()}, ensure_ascii=False))
        else:
            print("" if sys.stdout.isatty() else result.text)
            note(str(result.stats))


def _answer_file(
    said: Config,
    input: Path | None,
    output: Path | None,
    raw: bool,
    configured: bool,
    prompt: str | None,
    as_json: bool,
    prediction: str | None,
) -> int:
    if input is None or output is None:
        raise OutriderError("--input and --output go together: the queries, and where their answers go")
    if prompt is not None or as_json or prediction is not None:
        raise OutriderError("with --input there is no prompt, --json or --prediction; the answers are lines of JSON")
    queries = answers.read(input)
    with options.opened_as(said.settings, said.notes) as llm:
        failed = answers.answer(llm, said, queries, output, raw or _mute(llm, configured))
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
    predicts = settings.draft.partition(":")[0] == "prediction"
    if prediction is not None and draft and not predicts:
        raise OutriderError(f"--prediction is for the drafter prediction, not for {draft}; leave out one of the two")
    if prediction is not None:
        return settings if predicts else replace(settings, draft="prediction", speculative_config=None)
    if predicts:
        raise OutriderError("the drafter prediction needs the text you expect; give it with --prediction")
    return settings


def _text_or_file(value: str | None) -> str | None:
    if value is None or not os.path.isfile(value):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"cannot read the prediction in {value} ({error}); give a text file") from error
