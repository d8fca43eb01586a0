"""What a pass costs on this machine, and which draft length pays at which acceptance."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.bench import gpu_peaks, machine
from outrider.bench.costs import BestLength, Costs, Point
from outrider.bench.profile_plan import DECODED, DEFAULT, DRAFT_ROUNDS, LENGTHS, TURNS, WRITTEN, ProfilePlan
from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.request import Token
from outrider.core.sequence import Sequence
from outrider.core.stats import Stats
from outrider.core.verify import Verdict
from outrider.drafters.base import Drafter, Step
from outrider.llm import LLM
from outrider.models import sources
from outrider.models.base import Feed, Model
from outrider.models.llama import Llama, PackedLlama
from outrider.models.native.peak import multiply_adds_per_second
from outrider.models.native.stack import NativeStack

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # acceptances for which the best length is shown

QUESTION = "Write a Python function that counts the words of a text, and a second one that counts its lines."
CHUNK, CHUNKS = 512, 3  # prompt tokens in one pass, and how many passes are timed
WARM_UP = 2  # rounds that do not count
PASSES, DRAFTS, PROMPT = -1, -2, -3  # ids of our sequences; the engine counts its own from 0

Progress = Callable[[str, int, int], None]  # (what is being done, steps done, steps in all)


@dataclass(frozen=True)
class GpuPasses:
    """Passes on a GPU: what the device itself takes, against what it could do at best."""

    card: gpu_peaks.GpuPeaks
    pass_bytes: int  # of weights that a pass reads
    device_ms: tuple[tuple[int, float], ...]  # by rows

    def share(self, ms: float) -> float:
        """Of the measured copy bandwidth."""
        return self.pass_bytes / ms / 1e9 / self.card.copy_tb_s


@dataclass(frozen=True)
class Profile:
    model: str
    draft: str
    dtype: str  # as it was asked for
    quantize: str
    threads: int
    plan: ProfilePlan
    costs: Costs
    drafts: tuple[Point, ...]  # by length; empty: nothing was drafted
    plain_tokens_per_second: float
    prefill_tokens_per_second: float
    prefill_piece: int  # tokens of the prompt chunk that was timed
    weight_bytes: int | None  # as stored
    kv_bytes_per_token: int | None
    seconds: float
    on_card: GpuPasses | None = None  # None: no GPU
    request: Stats = field(default_factory=Stats)  # of one answer with the drafter
    arithmetic: float | None = None  # share of the processor's peak while a prompt is read; None: no packed weights
    machine: dict[str, Any] = field(default_factory=machine.describe)

    @property
    def best(self) -> tuple[BestLength, ...]:
        return tuple(map(self.costs.best, ACCEPTANCES))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields, costs = {**asdict(self), "request": self.request.as_dict()}, self.costs
        fields["costs"] |= {"line": asdict(costs.line), "break_even": costs.break_even, "spread": costs.spread}
        return _rounded({**fields, "best": [asdict(choice) for choice in self.best]})


def profile(llm: LLM, plan: ProfilePlan = DEFAULT, progress: Progress | None = None) -> Profile:
    """Measure the model and its drafter; `plan` is refused before anything is run if it does not fit the model."""
    engine, settings = llm.engine, llm.settings
    plan.check(engine.model)
    begin = time.perf_counter()
    counter = _ProgressCounter(progress, (WARM_UP + plan.rounds) * len(plan.rows) + TURNS + CHUNKS + 2 * DECODED)
    passes = _time_passes(engine.model, plan, counter)
    drafts, draft_ms = _time_drafts(engine.model, engine.drafters[""], plan, counter)
    chunk, prefill = _time_prefill(engine.model, counter)
    plain = _time_plain(llm, plan, counter)
    return Profile(
        model=Path(settings.model).name if Path(settings.model).exists() else settings.model,
        draft=settings.draft,
        dtype=settings.numbers,
        quantize=settings.quantize,
        threads=torch.get_num_threads(),
        plan=plan,
        costs=Costs(passes, draft_ms),
        drafts=drafts,
        plain_tokens_per_second=plain,
        prefill_tokens_per_second=prefill,
        prefill_piece=chunk,
        weight_bytes=_weight_bytes(settings.model),
        kv_bytes_per_token=_kv_bytes(engine.model),
        seconds=time.perf_counter() - begin,
        on_card=_on_card(engine.model, plan),
        request=_request(llm, counter),
        arithmetic=_arithmetic(engine.model, prefill),
    )


@dataclass
class _ProgressCounter:
    progress: Progress | None
    total: int
    done: int = 0

    def add(self, what: str, steps: int = 1) -> None:
        self.done += steps
        if self.progress is not None:
            self.progress(what, self.done, self.total)


def _time_passes(model: Model, plan: ProfilePlan, counter: _ProgressCounter) -> tuple[Point, ...]:
    """All sizes take turns, in another order each round, so that a slow moment of the machine hits all alike."""
    samples, order = _Samples(), random.Random(0)
    turns = [order.sample(plan.rows, len(plan.rows)) for _ in range(WARM_UP + plan.rounds)]
    with _prompted(model, plan) as chain:
        for number, rows in ((number, rows) for number, sizes in enumerate(turns) for rows in sizes):
            ms = _pass_ms(model, chain(rows))
            model.crop(PASSES, plan.context)
            if number >= WARM_UP:
                samples.add(rows, ms)
            counter.add(f"passes of 1 to {plan.rows[-1]} rows")
    return samples.points()


@contextmanager
def _prompted(model: Model, plan: ProfilePlan) -> Iterator[Callable[[int], Feed]]:
    """A sequence of the planned context; yields a function that makes the feed of a pass of some rows after it."""
    text = _text(model.vocab_size, plan.context + plan.rows[-1])

    def chain(rows: int) -> Feed:
        first, *guessed = text[plan.context : plan.context + rows]
        return Feed(PASSES, [first], Draft.chain(guessed))

    with _kept(model, PASSES):
        for chunk in _chunks(text[: plan.context]):
            model.forward([Feed(PASSES, chunk)])
        yield chain


def _time_drafts(
    model: Model, drafter: Drafter, plan: ProfilePlan, counter: _ProgressCounter
) -> tuple[tuple[Point, ...], float]:
    """By length, and per token. The target takes its turn after each draft, so caches are as cold as in real life."""
    if drafter.name == Drafter.name:
        counter.add("drafts", TURNS)
        return (), 0.0
    text, samples = _text(model.vocab_size, plan.context + TURNS), _Samples()
    coming = text[plan.context :]
    seq = Sequence(DRAFTS, text[: plan.context], SamplingParams(max_tokens=WRITTEN), prediction=tuple(coming))
    order = random.Random(0)
    budgets = [budget for _ in range(DRAFT_ROUNDS) for budget in order.sample(LENGTHS, len(LENGTHS))]
    with _kept(model, DRAFTS, drafter):
        _take_in(model, drafter, seq)
        for number, (token, budget) in enumerate(zip(coming, [1, *budgets], strict=True)):
            length, ms = _step(model, drafter, seq, budget, token)
            if number and length:
                samples.add(length, ms)
            counter.add("drafts")
    return samples.points(), samples.ms_each()


def _take_in(model: Model, drafter: Drafter, seq: Sequence) -> None:
    """The prompt without its last token, as the engine feeds it."""
    for chunk in _chunks(seq.tokens[:-1]):
        (output,) = model.forward([Feed(seq.id, chunk)], drafter.layers)
        drafter.observe(Step(seq, chunk, EMPTY, None, output.hidden))


def _step(model: Model, drafter: Drafter, seq: Sequence, budget: int, token: int) -> tuple[int, float]:
    """One step in which nothing is kept and `token` is written: nodes drafted, and the drafter's time."""
    begin = time.perf_counter()
    (draft,) = drafter.propose([seq], [budget])
    ms = 1e3 * (time.perf_counter() - begin)
    fed = seq.tokens[model.length(seq.id) :]
    (output,) = model.forward([Feed(seq.id, fed, draft)], drafter.layers)
    model.crop(seq.id, len(seq.tokens))
    seq.append(Token(token))
    drafter.observe(Step(seq, fed, draft, Verdict((), token), output.hidden))
    return len(draft), ms


def _time_prefill(model: Model, counter: _ProgressCounter) -> tuple[int, float]:
    """Tokens of a chunk of a prompt, and tokens per second."""
    text = _text(model.vocab_size, min(CHUNK, model.context, model.capacity))
    took = []
    for _ in range(CHUNKS):
        with _kept(model, PROMPT):
            took.append(_pass_ms(model, Feed(PROMPT, text)))
        counter.add("a chunk of a prompt")
    return len(text), 1e3 * len(text) / statistics.median(took)


def _time_plain(llm: LLM, plan: ProfilePlan, counter: _ProgressCounter) -> float:
    """Tokens per second as a user gets them, after the first."""
    prompt = _text(llm.engine.model.vocab_size, plan.context)
    stream = llm.stream(prompt, SamplingParams(max_tokens=DECODED, ignore_eos=True), draft="none")
    times = []
    for chunk in stream:
        times += [time.perf_counter()] * len(chunk.tokens)
        counter.add("plain decoding", len(chunk.tokens))
    if error := stream.result().error:
        raise OutriderError(error)
    return (len(times) - 1) / (times[-1] - times[0])


def _request(llm: LLM, counter: _ProgressCounter) -> Stats:
    """An answer with the drafter: who was asked, and what that cost and brought."""
    params = SamplingParams(max_tokens=DECODED, ignore_eos=True)
    if llm.backend.describe()["chat"]:
        result = llm.chat([{"role": "user", "content": QUESTION}], params)
    else:
        result = llm.generate(_text(llm.engine.model.vocab_size, len(QUESTION.split())), params)
    counter.add("an answer", DECODED)
    return result.stats


def _on_card(model: Model, plan: ProfilePlan) -> GpuPasses | None:
    if not isinstance(model, gpu_peaks.OnDevice):
        return None
    found = []
    with _prompted(model, plan) as chain:
        for rows in plan.rows:
            model.forward([chain(rows)])
            model.crop(PASSES, plan.context)
            found.append((rows, gpu_peaks.pass_ms(model)))
    return GpuPasses(gpu_peaks.measure(torch.device("cuda")), gpu_peaks.pass_bytes(model), tuple(found))


def _arithmetic(model: Model, prefill: float) -> float | None:
    """Of the 8-bit multiply-adds that the processor can do, those of the layers' products: two for each weight."""
    stack = model.weights.stack if isinstance(model, Llama) else None
    if not isinstance(stack, NativeStack):
        return None
    peak = multiply_adds_per_second(torch.get_num_threads())
    return None if peak is None else 2 * stack.multiply_adds * prefill / peak


class _Samples:
    """Times by size."""

    def __init__(self) -> None:
        self._ms: dict[int, list[float]] = {}

    def add(self, size: int, ms: float) -> None:
        self._ms.setdefault(size, []).append(ms)

    def points(self) -> tuple[Point, ...]:
        return tuple(
            Point(size, *(float(ms) for ms in np.percentile(self._ms[size], (50, 10, 90)))) for size in sorted(self._ms)
        )

    def ms_each(self) -> float:
        """Of one token; 0 where there is none."""
        each = [ms / size for size, all_ms in self._ms.items() for ms in all_ms]
        return statistics.median(each) if each else 0.0


def _pass_ms(model: Model, feed: Feed) -> float:
    begin = time.perf_counter()
    (output,) = model.forward([feed])
    float(output.logits[-1, -1])  # waits for the device, if there is one
    return 1e3 * (time.perf_counter() - begin)


@contextmanager
def _kept(model: Model, id: int, drafter: Drafter | None = None) -> Iterator[None]:
    """The sequence is forgotten in the end, also after an error."""
    try:
        yield
    finally:
        model.free(id)
        if drafter is not None:
            drafter.forget(id)


def _text(vocab_size: int, length: int) -> list[int]:
    """A passage that repeats itself, so that drafters which copy have something to copy."""
    numbers = random.Random(0)
    passage = [numbers.randrange(vocab_size) for _ in range(48)]
    return [passage[place % len(passage)] for place in range(length)]


def _chunks(tokens: list[int]) -> list[list[int]]:
    return [tokens[begin : begin + CHUNK] for begin in range(0, len(tokens), CHUNK)]


def _weight_bytes(model: str) -> int | None:
    """Of the file, or of the folder's files; None where it would take a look into the hub."""
    if not (Path(model).expanduser().exists() or model in sources.KNOWN):
        return None
    path = sources.resolve(model)
    files: Seq[Path] = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) or None


def _kv_bytes(model: Model) -> int | None:
    if not isinstance(model, Llama):
        return None
    if isinstance(model, PackedLlama):
        return model.pages.bytes_per_token
    config = model.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize


def _rounded(value: Any) -> Any:
    """Six decimals, a nanosecond: more is noise."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
