"""vLLM, with its own speculation, behind our Backend interface: for more than one machine.

vLLM writes the tokens. Prompts, chat templates, text and stop strings stay ours, so they are the same on every backend.
How vLLM speculates is fixed when it is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import itertools
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.backends.base import BackendLoad, BackendStopped, StepClock, Stream
from outrider.backends.reader import Reader
from outrider.backends.speculation import to_vllm
from outrider.backends.text import Writer
from outrider.core.errors import OutriderError, one_line
from outrider.core.grammar import Grammars
from outrider.core.grammar_spec import GrammarSpec
from outrider.core.lark import as_lark
from outrider.core.params import SamplingParams
from outrider.core.request import Chunk, Finish, Request, Result, Token
from outrider.core.stats import Stats
from outrider.models.memory import available_memory
from outrider.models.tokenizer import Tokenizer

INSTALL = "run `make vllm` in outrider's repository and use .venv-vllm/bin/outrider (docs/guides/vllm.md)"
INSTALL_SUFFIX = "pip install --no-deps arctic-inference==0.1.1, with vLLM's Python (it is compiled: some minutes)"
GUIDANCE = "guidance"  # vLLM's name for llguidance, with which it has the masks that our own engine has
CLOSE = 10.0  # seconds that its processes have to end by themselves
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "cancelled"}
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for answers
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(eq=False)
class _Sample:
    """One of a request's samples as it grows."""

    writer: Writer | None
    alternatives: int = 0  # tokens whose log-probabilities are wanted beside its own
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    spec: Any = None  # vLLM's counts for it, which come with the end

    def take(self, output: Any) -> list[Token]:
        """The tokens that an output adds; none after a stop string."""
        if self.finish is not None:
            return []
        fresh = _tokens(output, self.alternatives)
        for number, token in enumerate(fresh, 1):
            if self.writer is not None and self.writer.push(token.id):
                fresh, self.finish = fresh[:number], "stop"
                break
        self.tokens += fresh
        if self.finish is None and output.finish_reason is not None:
            self.finish = _FINISH.get(output.finish_reason, "error")
        self.spec = output.spec_decode_metrics
        return fresh


@dataclass(eq=False)
class _VllmJob:
    """One request under way."""

    request: Request
    prompt: list[int]
    params: Any  # vLLM's
    samples: list[_Sample]
    stream: Stream
    before: Counter[str]  # vLLM's counters when it began
    alone: bool = True  # whether no other request has run beside it
    times: Any = None
    task: asyncio.Task[None] | None = None


class VLLM(Reader):
    def __init__(
        self,
        model: str,
        draft: str,
        device: str,
        speculation: Mapping[str, Any] | None,
        args: Mapping[str, Any],
        tokenizer: Tokenizer | None = None,
        ends: frozenset[int] = frozenset(),
        notes: Seq[str] = (),
    ) -> None:
        """`draft`: what requests may call the drafter. `speculation`: vLLM's speculative_config. `args`: its other
        engine arguments. `ends`: the tokens that end an answer."""
        self.tokenizer, self.notes, self._draft, self._ends = tokenizer, tuple(notes), draft, ends
        self._speculation = None if speculation is None else dict(speculation)
        self._grammars = Grammars(self._vocabulary)
        self._grammar_backend = _grammar_backend(args)
        self._jobs: set[_VllmJob] = set()
        self._clock = StepClock()
        self._engine: Any = None  # while it is open
        self._ids = itertools.count()
        self._lock = threading.Lock()
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        self._device = _device(device)
        arguments = self._arguments(model, args)
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(arguments, opened)), name="vllm", daemon=True
        )
        self._thread.start()
        try:
            opened.result()
        except OutriderError:
            raise
        except Exception as error:
            raise OutriderError(f"vLLM could not open {model}: {one_line(error, named=True)}") from error

    @property
    def context(self) -> int:
        return int(self._engine.model_config.max_model_len)

    def load(self) -> BackendLoad:
        """vLLM tells neither its queue nor its cache; a step has ended when an output comes."""
        fault = "vLLM's engine has died" if self._engine is not None and self._engine.errored else ""
        return BackendLoad(len(self._jobs), 0, 0.0, self._clock.waited, self._clock.slowest, fault)

    def prepare(self, draft: str) -> None:
        if draft not in ("", self._draft) and not _same(draft, self._draft):
            raise OutriderError(
                f"vLLM speculates as it was loaded ({self._draft}), the same for all requests; "
                f"{draft!r} needs a model of its own, or the backend local"
            )

    def submit(self, request: Request) -> Stream:
        refuse(request, self._speculation is not None, self._device == "cpu", self._grammar_backend)
        self.prepare(request.draft)
        if request.params.constraint is not None:
            self._grammars.get(request.params.constraint)  # one that cannot be used is refused as by our own engine
        params, prompt = self._params(request), self._prompt(request)
        self._check_length(prompt, request.params)
        stream = Stream(lambda: self._post(self._cancel, job), len(prompt))
        samples = [_Sample(self._writer(request), request.params.logprobs or 0) for _ in range(request.params.n)]
        job = _VllmJob(request, prompt, params, samples, stream, Counter())
        self._post(self._start, job)
        return stream

    def close(self) -> None:
        with self._lock:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._over.set)
                self._thread.join()

    def _post(self, call: Any, job: _VllmJob) -> None:
        with self._lock:
            if not self._thread.is_alive():
                raise BackendStopped("vLLM has been closed")
            self._loop.call_soon_threadsafe(call, job)

    def _arguments(self, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = [each.name for each in dataclasses.fields(AsyncEngineArgs)]
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=3) or known
                raise OutriderError(f"vLLM's engine has no argument {key!r}; it has: {', '.join(close)}")
        own: dict[str, Any] = {"model": model, "speculative_config": self._speculation, "use_tqdm_on_load": False}
        own |= {"skip_tokenizer_init": self.tokenizer is None}
        if self._speculation:
            own |= {"per_request_spec_decode_metrics": "detailed"}
        if self.tokenizer is not None:
            own |= {"structured_outputs_config": {"backend": GUIDANCE}}
        if self._device == "cpu" and "gpu_memory_utilization" not in given:  # it would take nearly all that there is
            own |= {"kv_cache_memory_bytes": available_memory() // 4}
        return {**{key: value for key, value in own.items() if key in known}, **given}

    async def _main(self, args: dict[str, Any], opened: Future[None]) -> None:
        """The thread's event loop: vLLM lives here from beginning to end."""
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        except BaseException as error:
            opened.set_exception(error)
            return
        self.vocab_size = int(self._engine.model_config.get_vocab_size())
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        opened.set_result(None)
        await self._over.wait()
        running = [job.task for job in self._jobs if job.task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._engine.shutdown(timeout=CLOSE)
        self._engine = None  # or it would shut itself down once more when the interpreter ends

    def _start(self, job: _VllmJob) -> None:
        for other in self._jobs:
            other.alone = job.alone = False
        if not self._jobs:
            self._clock.tick()
        self._jobs.add(job)
        job.before = self._counters()
        job.task = asyncio.ensure_future(self._run(job))
        job.task.add_done_callback(lambda _: self._done(job))

    def _done(self, job: _VllmJob) -> None:
        """A task that is cancelled before its first step never enters `_run`: its stream ends here."""
        self._jobs.discard(job)
        if not self._jobs:
            self._clock.stop()
        if not job.stream.done:
            try:
                self._end(job, "cancelled")
            except Exception as error:  # of a tokenizer
                job.stream.finish(OutriderError(f"the text could not be written: {one_line(error, named=True)}"))

    def _cancel(self, job: _VllmJob) -> None:
        if job.task is not None:
            job.task.cancel()

    async def _run(self, job: _VllmJob) -> None:
        from vllm import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=job.prompt)
        outputs = self._engine.generate(prompt, job.params, str(next(self._ids)))
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._clock.tick()
                    self._take(job, output)
                    if all(sample.finish is not None for sample in job.samples):
                        break
        except asyncio.CancelledError:
            self._end(job, "cancelled")
        except Exception as error:  # of the engine, or of a tokenizer
            job.stream.finish(OutriderError(f"vLLM could not answer: {one_line(error, named=True)}"))
        else:
            self._end(job, "error")

    def _take(self, job: _VllmJob, output: Any) -> None:
        job.times = output.metrics or job.times
        for part in output.outputs:
            # greedy samples are all the same, and vLLM writes them once
            for index in range(len(job.samples)) if job.params.n == 1 else (part.index,):
                self._add(job, index, part)

    def _add(self, job: _VllmJob, index: int, part: Any) -> None:
        sample = job.samples[index]
        over = sample.finish is not None
        fresh = sample.take(part)
        if job.request.stream and not over and (fresh or sample.finish is not None):
            self._send(job, index, fresh)

    def _send(self, job: _VllmJob, index: int, fresh: Seq[Token]) -> None:
        sample = job.samples[index]
        text = sample.writer.take(last=sample.finish is not None) if sample.writer else ""
        job.stream.put(Chunk(text, tuple(fresh), index, sample.finish))

    def _end(self, job: _VllmJob, finish: Finish) -> None:
        """Hand over the result; `finish` is how samples ended that did not say so themselves."""
        for index, sample in enumerate(job.samples):
            if sample.finish is None:
                sample.finish = finish
                if job.request.stream:
                    self._send(job, index, ())
        first, *others = (self._result(job, sample) for sample in job.samples)
        job.stream.finish(replace(first, others=tuple(others)))

    def _result(self, job: _VllmJob, sample: _Sample) -> Result:
        assert sample.finish is not None
        ids, logprobs = [token.id for token in sample.tokens], None
        if job.request.params.logprobs is not None:
            logprobs = [{token.id: token.logprob or 0.0, **dict(token.top)} for token in sample.tokens]
        error = "vLLM ended the request without a reason" if sample.finish == "error" else ""
        stats = self._stats(job, sample)
        return Result(
            self._text(sample, ids), ids, sample.finish, logprobs, stats, job.prompt, tuple(sample.tokens), error
        )

    def _text(self, sample: _Sample, ids: list[int]) -> str:
        if sample.writer is not None:
            sample.writer.take(last=True)
            return sample.writer.text
        return "" if self.tokenizer is None else str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _stats(self, job: _VllmJob, sample: _Sample) -> Stats:
        """vLLM's own counts for the request. It tells them when it ends a request itself; for one that a stop string or
        a caller has ended, the whole engine's counters are read, if nothing else ran beside it."""
        stats = Stats(tokens=len(sample.tokens), steps=len(sample.tokens))
        if sample.spec is not None:
            _count(stats, sample.spec.per_step_drafted, sample.spec.per_step_accepted)
        elif self._speculation and job.alone and len(job.samples) == 1:
            delta = self._counters() - job.before
            stats.drafts, stats.drafted, stats.accepted = (delta[name] for name in ("drafts", "drafted", "accepted"))
        name = str((self._speculation or {}).get("method", ""))
        if stats.drafted:
            stats.drafted_by_drafter[name], stats.accepted_by_drafter[name] = stats.drafted, stats.accepted
            stats.steps = max(1 + stats.drafts, stats.tokens - stats.accepted)  # the prompt's pass has no draft
        if job.times is not None and job.times.first_token_ts:
            stats.spend("prompt", job.times.first_token_ts - job.times.scheduled_ts)
            stats.first_seconds = stats.seconds["prompt"]
            stats.seconds["decode"] = job.times.last_token_ts - job.times.first_token_ts
        return stats

    def _counters(self) -> Counter[str]:
        """Drafts, drafted and accepted tokens of all requests so far."""
        found: Counter[str] = Counter()
        if self._speculation:
            from vllm.v1.metrics.reader import get_metrics_snapshot

            for metric in get_metrics_snapshot():
                if metric.name in _COUNTERS:
                    found[_COUNTERS[metric.name]] += int(getattr(metric, "value", 0))
        return found

    def _check_length(self, prompt: Seq[int], params: SamplingParams) -> None:
        if not prompt:
            raise OutriderError("the prompt is empty; give at least one token")
        left = self.context - len(prompt)
        if left < 1:
            raise OutriderError(
                f"the prompt has {len(prompt)} tokens and the context is {self.context}; shorten the prompt"
            )
        if params.max_tokens > left:
            raise OutriderError(
                f"the prompt has {len(prompt)} tokens and the context is {self.context}; "
                f"set max_tokens to at most {left}"
            )

    def _params(self, request: Request) -> Any:
        """Our sampling as vLLM's; what it cannot do is refused."""
        from vllm import SamplingParams as Theirs
        from vllm.sampling_params import RequestOutputKind

        params = request.params
        self._check_ids(params.token_ids())
        ends = () if params.ignore_eos else tuple(self._ends)
        same = {name: getattr(params, name) for name in _SAME} | {"n": 1 if params.greedy else params.n}
        try:
            return Theirs(
                **same,
                structured_outputs=_structured(params.constraint),
                stop_token_ids=sorted({*params.stop_token_ids, *ends}),
                logit_bias=dict(params.logit_bias) or None,
                allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
                bad_words=[str(word) for word in params.bad_words] or None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
        except Exception as error:  # vLLM has error classes of its own
            raise OutriderError(f"vLLM refuses the sampling parameters: {one_line(error, named=True)}") from error


def _structured(constraint: GrammarSpec | None) -> Any:
    """Our grammar as vLLM takes it."""
    if constraint is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(grammar=as_lark(constraint))


def _same(draft: str, own: str) -> bool:
    """Whether two ways to write a drafter mean the same to vLLM."""
    try:
        return to_vllm(draft) == to_vllm(own)
    except OutriderError:
        return False


def _device(wanted: str) -> str:
    """The one that vLLM was built for."""
    from vllm.platforms import current_platform

    if wanted.partition(":")[0] not in ("auto", current_platform.device_type):
        raise OutriderError(f"device {wanted}, but the vLLM that is installed runs on {current_platform.device_type}")
    return str(current_platform.device_type)


def _grammar_backend(args: Mapping[str, Any]) -> str:
    """What compiles grammars in vLLM; it is one for all requests. "": a choice of vLLM's own."""
    config = args.get("structured_outputs_config", {"backend": GUIDANCE})
    found = config.get("backend", "") if isinstance(config, Mapping) else getattr(config, "backend", "")
    return str(found)


def refuse(request: Request, speculating: bool, on_cpu: bool, grammar_backend: str = GUIDANCE) -> None:
    """What vLLM cannot do, with the reason."""
    params = request.params
    why = ""
    if request.prediction is not None:
        why = "a prediction: vLLM has no drafter that reads one"
    elif request.adapter:
        why = "an adapter: Outrider runs these on the backend local"
    elif params.processors:
        why = "processors: functions cannot be handed to vLLM's engine"
    elif params.constraint is not None and grammar_backend != GUIDANCE:
        why = (
            f"{params.constraint.parameter}: vLLM was loaded with the grammar backend {grammar_backend or 'auto'}, "
            f"which reads other grammars than ours; load it with {GUIDANCE}"
        )
    elif params.typical_p != 1.0:
        why = "typical_p: vLLM has no such option"
    elif any(not isinstance(word, str) for word in params.bad_words):
        why = "bad words as token ids: vLLM takes them as text"
    elif speculating and params.min_p > 0.0:
        why = "min_p: vLLM does not apply it while it speculates; use --draft none"
    elif speculating and params.logit_bias:
        why = "logit_bias: vLLM does not apply it while it speculates; use --draft none"
    elif speculating and on_cpu and not params.greedy:
        # 0.32 never fills in the temperature and top_p of drafted rows there: what it writes follows another law
        why = "sampling while it speculates on a CPU: vLLM loses the temperature; use --draft none, temperature 0"
    if why:
        raise OutriderError(f"the backend vllm cannot honour {why}, or the backend local")


def _tokens(output: Any, alternatives: int) -> list[Token]:
    tops = output.logprobs or itertools.repeat(None)
    return [_token(int(id), top, alternatives) for id, top in zip(output.token_ids, tops, strict=False)]


def _token(id: int, top: Mapping[int, Any] | None, alternatives: int) -> Token:
    """vLLM gives the token itself among the likeliest ones, whether it is one of them or not."""
    if top is None:
        return Token(id)
    likeliest = sorted((item for item in top.items() if item[1].rank <= alternatives), key=lambda item: item[1].rank)
    return Token(id, None, 0, top[id].logprob, tuple((other, found.logprob) for other, found in likeliest))


def _count(stats: Stats, drafted: Seq[int], accepted: Seq[int]) -> None:
    """Per step, how many tokens were drafted and how many of them kept: a chain, so depths are 1, 2, ..."""
    stats.drafts, stats.drafted, stats.accepted = len(drafted), sum(drafted), sum(accepted)
    stats.drafted_by_depth.update(depth for size in drafted for depth in range(1, size + 1))
    stats.accepted_by_depth.update(depth for size in accepted for depth in range(1, size + 1))


_SAME = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "logprobs",
)
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
