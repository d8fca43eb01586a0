"""`outrider generate`: one prompt, one answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.backends.base import Stream
from outrider.cli import options
from outrider.cli.options import DEFAULT, PLAIN, SAMPLING
from outrider.cli.screen import note
from outrider.core.errors import OutriderError
from outrider.core.request import Result
from outrider.core.sampling import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.", show_default=False)],
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
    device: options.Device = DEFAULT.device,
    dtype: options.Dtype = DEFAULT.dtype,
    quantize: options.Quantize = DEFAULT.quantize,
    threads: options.Threads = DEFAULT.threads,
    cache_memory: options.CacheMemory = DEFAULT.cache_memory,
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
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Never write this. Repeatable.", rich_help_panel=SAMPLING)
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
    as_json: options.Json = False,
) -> None:
    """Answer a prompt, or continue it with [bold]--raw[/].

    [dim]$[/] outrider generate "Name three rivers."
    [dim]$[/] outrider generate "Once upon a time" --raw --temperature 0.8 --seed 7
    [dim]$[/] outrider generate "Fix the spelling: ..." --prediction draft.txt --json
    [dim]$[/] cat letter.txt | outrider generate - --draft ngram:max_n=6,length=12
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or (),
        bad_words=bad_word or (),
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    if logprobs is not None and not as_json:
        raise OutriderError("--logprobs are shown with --json only; add it")
    chosen = _drafter(draft, prediction)
    expected = _text_or_file(prediction)
    text = options.read_stdin_or(prompt)
    with options.opened(
        model, chosen, device=device, dtype=dtype, quantize=quantize, threads=threads, cache_memory=cache_memory
    ) as llm:
        stream = llm.stream(text if raw else [{"role": "user", "content": text}], params, prediction=expected)
        result = _result(stream, live=sys.stdout.isatty() and not as_json)
        if as_json:
            print(json.dumps({"model": model, "draft": chosen, "prompt": text, **result.as_dict()}, ensure_ascii=False))
        else:
            print("" if sys.stdout.isatty() else result.text)
            note(str(result.stats))


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


def _drafter(draft: str, prediction: str | None) -> str:
    if not draft:
        return DEFAULT.draft if prediction is None else "prediction"
    if prediction is not None and draft.partition(":")[0] != "prediction":
        raise OutriderError(f"--prediction is for the drafter prediction, not for {draft}; leave out one of the two")
    if draft.partition(":")[0] == "prediction" and prediction is None:
        raise OutriderError("the drafter prediction needs the text you expect; give it with --prediction")
    return draft


def _text_or_file(value: str | None) -> str | None:
    if value is None or not os.path.isfile(value):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"cannot read the prediction in {value} ({error}); give a text file") from error
