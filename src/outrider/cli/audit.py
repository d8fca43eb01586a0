"""`outrider audit`: the proof as a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider import drafters, prompts as builtin
from outrider.audit.company_plan import CompanyPlan
from outrider.bench import machine, workloads
from outrider.bench.workloads import BenchPrompt
from outrider.cli import options
from outrider.cli.fields import command, fields
from outrider.cli.screen import bar, json_text, print_json
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.core.params import SamplingParams
from outrider.prompts import NamedPrompt
from outrider.settings import Settings

if TYPE_CHECKING:
    from outrider.audit import CompanyReport, Report, Variant
    from outrider.llm import LLM

COMPANY = "With --company"
SAMPLES = 300  # continuations of the law test
USUAL = CompanyPlan()
QUICK = CompanyPlan(batches=(1, 4), chunks=(128,), longest=320, max_tokens=12)
QUICK_PROMPTS = 4
COMPANY_ONLY = ("quick", "group", "batch", "chunk", "temperature", "longest", "runs")


def _numbers(name: str, kind: type, text: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise OutriderError(f"--{name} takes numbers with commas between them, not {text!r}") from None


def _joined(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _list_option(name: str, kind: type, usual: Sequence[float], text: str) -> Any:
    """Numbers with commas between them."""
    return option(None, text, shown=_joined(usual), panel=COMPANY, parse=partial(_numbers, name, kind))


@dataclass(frozen=True)
class AuditOptions(options.Printed, options.Constrained):
    draft: tuple[str, ...] = option(
        (),
        "The drafter to audit: NAME or NAME:key=value,... Repeatable.",
        flags=("--draft", "-d"),
        panel=options.MODEL,
        shown="all that run without arguments",
    )
    prompt: tuple[str, ...] = option((), "A prompt of your own. Repeatable.", shown="six built in; company: 38")
    prompts: str | None = option(
        None, "A text file with a prompt per line, or a .jsonl file in Spec-Bench form: its first turns."
    )
    limit: int | None = option(
        None, "Use at most this many prompts, evenly spread over all of them.", shown="all", least=1
    )
    raw: bool = option(False, "Continue the prompts as they are, without a chat template.")
    max_tokens: int | None = option(None, "Tokens to compare for each prompt.", shown=str(USUAL.max_tokens))
    samples: int | None = option(None, "Continuations to sample for the law test.", shown=str(SAMPLES), least=1)
    seed: int = option(0, "The same seed gives the same report.")
    output: Path | None = option(None, "Write the JSON to this file as well.")
    company: bool = option(False, "Compare each prompt run alone with the same prompt in batches.", panel=COMPANY)
    quick: bool = option(
        False,
        f"{QUICK_PROMPTS} prompts, batches of {_joined(QUICK.batches)}, chunks of {_joined(QUICK.chunks)}, sequences "
        f"of up to {QUICK.longest} tokens: minutes on a CPU instead of hours; --limit and --draft shorten it further.",
        panel=COMPANY,
    )
    group: tuple[str, ...] | None = option(
        None,
        "Groups of prompts: your own, generated ones around boundaries, and long ones.",
        shown=",".join(USUAL.groups),
        panel=COMPANY,
        parse=lambda text: tuple(text.split(",")),
    )
    batch: tuple[int, ...] | None = _list_option("batch", int, USUAL.batches, "Prompts at once; 1: alone.")
    chunk: tuple[int, ...] | None = _list_option("chunk", int, USUAL.chunks, "Prompt tokens that are read in one step.")
    temperature: tuple[float, ...] | None = _list_option(
        "temperature", float, USUAL.temperatures, "Temperatures; above 0 each prompt has a seed."
    )
    longest: int | None = option(
        None,
        "Tokens of the longest sequence; 0: the model's context.",
        shown="0 on a GPU, 1024 on a CPU",
        least=0,
        panel=COMPANY,
    )
    runs: int | None = option(
        None,
        "How often each variant runs; with 2 or more, draft statistics are compared.",
        shown=str(USUAL.runs),
        least=1,
        panel=COMPANY,
    )

    def check(self) -> None:
        """Refuse what is wrong or would have no effect, before anything is loaded."""
        if self.company and self.samples is not None:
            raise OutriderError("--samples is for the law test, which --company does not run; leave out one of them")
        for name in () if self.company else COMPANY_ONLY:
            if getattr(self, name) is not None and getattr(self, name) is not False:
                raise OutriderError(f"--{name} is an option of --company; add that, or leave it out")
        if self.output is not None and not _can_write(self.output):
            raise OutriderError(f"cannot write {self.output}: name a file in a folder that is there and can be written")
        held = self.over(SamplingParams(max_tokens=self.size))
        if self.company and held.constraint is not None:
            name = held.constraint.parameter.replace("_", "-")
            raise OutriderError(f"--{name} is not for --company, whose texts are free; leave out one of them")

    @property
    def size(self) -> int:
        """Tokens to compare for each prompt."""
        usual = QUICK if self.quick else USUAL
        return usual.max_tokens if self.max_tokens is None else self.max_tokens

    def plan(self) -> CompanyPlan:
        lists = {"groups": self.group, "batches": self.batch, "chunks": self.chunk, "temperatures": self.temperature}
        given: dict[str, Any] = {**lists, "longest": self.longest, "runs": self.runs}
        chosen = {name: value for name, value in given.items() if value is not None}
        return replace(QUICK if self.quick else USUAL, max_tokens=self.size, seed=self.seed, **chosen)

    def chosen_prompts(self) -> tuple[NamedPrompt, ...]:
        own = tuple(NamedPrompt(f"prompt {number}", "own", text) for number, text in enumerate(self.prompt, 1))
        found = own + (_read(self.prompts) if self.prompts is not None else ()) or self._built_in()
        count = min(len(found), self.limit or (QUICK_PROMPTS if self.quick else len(found)))
        return tuple(found[place * len(found) // count] for place in range(count))

    def _built_in(self) -> tuple[NamedPrompt, ...]:
        return builtin.AUDIT + (_named(workloads.built_in()) if self.company else ())


@command
def audit(
    *,
    settings: Annotated[Settings, options.settings("model", *options.PLACE, "cache_memory")],
    own: Annotated[AuditOptions, fields(AuditOptions)],
) -> None:
    """Prove that drafters change the speed and nothing else. The exit code is 1 if a drafter changes a text.

    Against plain decoding by the same model, each drafter is checked for
    [bold]greedy[/]: the same tokens, prompt by prompt;
    [bold]batch[/]: the same tokens with all prompts in one batch;
    [bold]seed[/]: the same tokens at temperature 1 under the same seed;
    [bold]law[/]: sampled continuations follow the model's own distribution (chi-square, alpha 1e-4).

    Where our own forward runs the model (Llama, Mistral, Qwen2, Qwen3) any different token is a failure in every
    dtype. Where transformers runs it, rounding depends on the shape of a pass: in bfloat16 and float16 a near tie
    may flip; flips are shown with their margin, and fail when it is 0.5 logits (float16: 0.25) or more.

    With [bold]--json-schema[/] or another grammar, all of this is about plain decoding under the same grammar.

    [bold]--company[/] proves that a text does not depend on what it shares the engine with. The reference is each
    prompt alone, plain, with nothing cached; against it: the same call again, batches in shuffled order, prompts in
    other chunks and from the cache, lengths around pages and chunks, long neighbours, every drafter, greedy and with
    seeds, each twice. One different token fails, in any dtype; so do draft statistics that differ between the two runs.

    [dim]$[/] outrider audit
    [dim]$[/] outrider audit --draft ngram:store=adaptive --draft layer_skip:layers=8 --json
    [dim]$[/] outrider audit --model ./my-model --draft draft_model:model=./small --prompts prompts.txt
    [dim]$[/] outrider audit --json-schema person.json --draft grammar --draft ngram
    [dim]$[/] outrider audit --company --quick
    [dim]$[/] outrider audit --company --device cuda --dtype bfloat16 --prompts spec_bench.jsonl --max-tokens 128
    """
    from outrider.cli import audit_report

    own.check()
    chosen, plan = own.chosen_prompts(), own.plan() if own.company else None
    opened = options.opened(replace(settings, draft=_first_drafter(own), pace=False))
    with opened as llm, bar("{task.completed:.0f}/{task.total:.0f}") as progress:
        report = _report(llm, own, chosen, plan, progress)
    content = _as_dict(report)
    failed = None if own.output is None else _write(own.output, json_text(content))
    if own.as_json:
        print_json(content)
    else:
        audit_report.show(report)
    if failed is not None:  # told last: hours of work are shown even where the disk is full
        raise failed
    raise typer.Exit(0 if report.passed else 1)


def _first_drafter(own: AuditOptions) -> str:
    """The drafter that the engine begins with: a mistake in it is told before the model is loaded."""
    return own.draft[0] if own.draft else drafters.PLAIN


def _report(
    llm: LLM,
    own: AuditOptions,
    prompts: Sequence[NamedPrompt],
    plan: CompanyPlan | None,
    progress: Callable[[str, int, int], None],
) -> Report | CompanyReport:
    from outrider.audit import audit, audit_company

    if plan is not None:
        found = (lambda variant: None) if sys.stderr.isatty() else _log  # a terminal has the bar
        return audit_company(llm, own.draft, prompts, plan, raw=own.raw, progress=progress, found=found)
    samples = own.samples or SAMPLES
    return audit(
        llm,
        own.draft,
        prompts,
        max_tokens=own.size,
        seed=own.seed,
        samples=samples,
        raw=own.raw,
        progress=progress,
        held=own.over(SamplingParams()),
    )


def _log(variant: Variant) -> None:
    print(variant.line, file=sys.stderr, flush=True)


def _as_dict(report: Report | CompanyReport) -> dict[str, Any]:
    """For JSON; a company report also says where it was made."""
    from outrider.audit import CompanyReport

    return report.as_dict() | ({"machine": machine.describe()} if isinstance(report, CompanyReport) else {})


def _read(path: str) -> tuple[NamedPrompt, ...]:
    return _named(workloads.read_jsonl(path)) if path.endswith(".jsonl") else builtin.read(path)


def _named(prompts: Iterable[BenchPrompt]) -> tuple[NamedPrompt, ...]:
    return tuple(NamedPrompt(prompt.id, prompt.kind, prompt.text) for prompt in prompts)


def _can_write(path: Path) -> bool:
    if path.exists() and not path.is_file():  # a pipe or a device, which is written as it is
        return not path.is_dir() and os.access(path, os.W_OK)
    return os.access(path.resolve().parent, os.W_OK)


def _write(path: Path, text: str) -> OutriderError | None:
    """Written beside its place and moved onto it: what was there before survives a full disk. Why it could not be."""
    part = path
    if not path.exists() or path.is_file():  # not of a pipe or a device
        path = path.resolve()
        part = path.with_name(f".{path.name}.new")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        if part != path:
            os.replace(part, path)
    except OSError as error:
        if part != path:
            part.unlink(missing_ok=True)
        return OutriderError(f"cannot write {path} ({error.strerror}); choose another file")
    return None
