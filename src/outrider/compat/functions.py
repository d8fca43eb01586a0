"""Functions for callers that hold their own transformers models: plain, speculative, batched, n-gram assisted.

    target = AutoModelForCausalLM.from_pretrained("facebook/opt-350m")
    draft = AutoModelForCausalLM.from_pretrained("facebook/opt-125m")
    ids, alpha = speculative_generate(prompt_ids, draft, target, gamma=5, eos_tokens_id=tokenizer.eos_token_id)

Prompts are unpadded lists of token ids. What comes back are the written tokens alone, without the prompt; an end token
that was written is the last of them. `alpha` is the share of drafted tokens that were kept, 0.0 if nothing was drafted.
Texts stop after `max_gen_len` tokens or where the target's context ends. With a seed the same tokens come out with any
drafter, draft length and batch.

A model is a loaded transformers model or any `outrider.models.base.Model`. Wrapping takes a few passes over a few
tokens: a caller that comes often does it once, with `outrider.models.transformers.TransformersModel`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import PreTrainedModel

from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.stats import Stats
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.draft_model import ModelDrafter
from outrider.drafters.ngram import Ngram
from outrider.engine.engine import Engine
from outrider.models.base import Model
from outrider.models.transformers import TransformersModel

Loaded: TypeAlias = PreTrainedModel | Model
Ends: TypeAlias = int | Seq[int] | None


@dataclass(frozen=True)
class GreedyProcessor:
    """The likeliest token. The temperature changes nothing here; it is taken because the other processors have one."""

    temperature: float = 1.0

    def params(self) -> dict[str, Any]:
        return {"temperature": 0.0}


@dataclass(frozen=True)
class MultinomialProcessor:
    """Any token, by its probability."""

    temperature: float

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise OutriderError(
                f"temperature must be above 0, not {self.temperature!r}; use GreedyProcessor for greedy"
            )

    def params(self) -> dict[str, Any]:
        return {"temperature": self.temperature}


@dataclass(frozen=True)
class TopKProcessor(MultinomialProcessor):
    """One of the `top_k` likeliest tokens."""

    top_k: int

    def params(self) -> dict[str, Any]:
        return super().params() | {"top_k": self.top_k}


@dataclass(frozen=True)
class NucleusProcessor(MultinomialProcessor):
    """One of the likeliest tokens that together have the probability `top_p`, reckoned after the temperature."""

    top_p: float

    def params(self) -> dict[str, Any]:
        return super().params() | {"top_p": self.top_p}


@dataclass(frozen=True)
class TopKNucleusProcessor(MultinomialProcessor):
    """Top-k first, then the nucleus of what is left."""

    top_k: int
    top_p: float

    def params(self) -> dict[str, Any]:
        return super().params() | {"top_k": self.top_k, "top_p": self.top_p}


Processor: TypeAlias = GreedyProcessor | MultinomialProcessor
GREEDY = GreedyProcessor()


_ids = itertools.count()  # of sequences: callers may wrap a model once and use it often


def autoregressive_generate(
    inputs: Seq[int],
    model: Loaded,
    *,
    max_gen_len: int = 40,
    logits_processor: Processor = GREEDY,
    eos_tokens_id: Ends = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = True,
    seed: int | None = None,
) -> list[int]:
    """Plain decoding. `pad_token_id` is taken because callers pass it: nothing is ever padded with it."""
    _check(use_cache=use_cache)
    target = _model(model)
    (seq,) = _run([inputs], target, _plain(target), logits_processor, max_gen_len, eos_tokens_id, seed)
    return _written(seq)


def speculative_generate(
    inputs: Seq[int],
    drafter: Loaded,
    target: Loaded,
    tokenizer: Any = None,
    *,
    gamma: int = 5,
    logits_processor: Processor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: Ends = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = True,
    skip_sample_adjustment: bool = False,
    debug: bool = False,
    seed: int | None = None,
) -> tuple[list[int], float]:
    """One prompt with a draft model that writes `gamma` tokens ahead: the tokens and alpha.

    `debug` prints the text (with a `tokenizer`, else the ids) and the statistics.
    """
    outputs, alpha, _ = speculative_generate_batch(
        [inputs],
        drafter,
        target,
        tokenizer,
        gamma=gamma,
        logits_processor=logits_processor,
        max_gen_len=max_gen_len,
        eos_tokens_id=eos_tokens_id,
        pad_token_id=pad_token_id,
        use_cache=use_cache,
        skip_sample_adjustment=skip_sample_adjustment,
        debug=debug,
        seed=seed,
    )
    return outputs[0], alpha[0]


def speculative_generate_batch(
    input_ids: Seq[Seq[int]],
    draft_model: Loaded,
    target_model: Loaded,
    tokenizer: Any = None,
    *,
    logits_processor: Processor = GREEDY,
    gamma: int = 5,
    max_gen_len: int = 40,
    eos_tokens_id: Ends = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = True,
    skip_sample_adjustment: bool = False,
    collect_stats: bool = True,
    debug: bool = False,
    seed: int | None = None,
) -> tuple[list[list[int]], list[float], list[Stats]]:
    """Many prompts of different lengths at once: tokens, alpha and statistics of each, in the order of the prompts.

    Rows keep different numbers of drafted tokens and end at different times; each is what it would be alone.
    """
    _check(use_cache=use_cache, skip_sample_adjustment=skip_sample_adjustment)
    target = _model(target_model)
    draft = _model(draft_model)
    if draft is target:  # one model object has one cache: the draft gets its own, over the same weights
        draft = target.first(target.num_layers)
    drafter = ModelDrafter(draft, target.vocab_size, gamma, greedy=False)
    seqs = _run(input_ids, target, drafter, logits_processor, max_gen_len, eos_tokens_id, seed)
    if debug:
        _show(seqs, tokenizer)
    stats = [seq.stats for seq in seqs]
    return [_written(seq) for seq in seqs], [row.acceptance_rate for row in stats], stats if collect_stats else []


def ngram_assisted_speculative_generate(
    inputs: Seq[int],
    ngram: int,
    target: Loaded,
    tokenizer: Any = None,
    *,
    gamma: int = 5,
    logits_processor: Processor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: Ends = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = True,
    debug: bool = False,
    seed: int | None = None,
) -> tuple[list[int], float]:
    """One prompt without a draft model (Ou et al. 2024): the tokens and alpha.

    A storage counts what followed each n-gram of up to `ngram` tokens in the prompt and in what was written, and writes
    up to `gamma` tokens ahead; where it knows nothing it drafts nothing.
    """
    _check(use_cache=use_cache)
    model = _model(target)
    drafter = Ngram(Ngram.Options(max_n=ngram, min_n=1, length=gamma, store="adaptive"), _parts(model))
    seqs = _run([inputs], model, drafter, logits_processor, max_gen_len, eos_tokens_id, seed)
    if debug:
        _show(seqs, tokenizer)
    return _written(seqs[0]), seqs[0].stats.acceptance_rate


def _check(use_cache: bool = True, skip_sample_adjustment: bool = False) -> None:
    if not use_cache:
        raise OutriderError("use_cache=False cannot be honoured: the engine always keeps a cache; leave it out")
    if skip_sample_adjustment:
        raise OutriderError(
            "skip_sample_adjustment=True cannot be honoured: the text would not be the target's; leave it out"
        )


def _model(model: Loaded) -> Model:
    return TransformersModel(model) if isinstance(model, PreTrainedModel) else model


def _parts(target: Model) -> BuildContext:
    def load(name: str, quantize: str) -> Model:
        raise OutriderError(f"these functions load no models, not even {name}")

    return BuildContext(target, load)


def _plain(target: Model) -> Drafter:
    return Drafter(Drafter.Options(), _parts(target))


def _run(
    prompts: Seq[Seq[int]],
    target: Model,
    drafter: Drafter,
    processor: Processor,
    max_gen_len: int,
    ends: Ends,
    seed: int | None,
) -> list[Sequence]:
    if not isinstance(processor, GreedyProcessor | MultinomialProcessor):
        raise OutriderError(f"logits_processor must be one of this module's processors, not {type(processor).__name__}")
    engine = Engine(target, drafter)
    seqs = []
    for prompt in prompts:
        _check_prompt(prompt, target)
        length = min(max_gen_len, max(1, target.context - len(prompt)))
        params = SamplingParams(max_tokens=length, seed=seed, **processor.params())
        seqs.append(Sequence(next(_ids), list(prompt), params, _ends(ends), dice=Dice(seed)))
        engine.add(seqs[-1])
    try:
        while engine.busy:
            engine.step()
    finally:  # Ctrl-C in a notebook: the caller's model must not remember half a sequence
        for seq in seqs:
            target.free(seq.id)
            drafter.forget(seq.id)
    for seq in seqs:
        if seq.finish == "error":
            raise OutriderError(seq.error)
    return seqs


def _check_prompt(prompt: Seq[int], target: Model) -> None:
    for token in prompt:
        if not isinstance(token, int) or not 0 <= token < target.vocab_size:
            raise OutriderError(f"a prompt is a list of token ids from 0 to {target.vocab_size - 1}, {token!r} is none")


def _ends(ends: Ends) -> frozenset[int]:
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def _written(seq: Sequence) -> list[int]:
    return seq.tokens[seq.prompt :]


def _show(seqs: Seq[Sequence], tokenizer: Any) -> None:
    for seq in seqs:
        print(_written(seq) if tokenizer is None else tokenizer.decode(_written(seq)))
        print(seq.stats)
