"""The function library: greedy equals generate, rows equal single runs, sampled texts follow the target's law."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from scipy.stats import chisquare
from torch import Tensor

from outrider.compat.functions import (
    GreedyProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    Processor,
    TopKNucleusProcessor,
    TopKProcessor,
    autoregressive_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
    speculative_generate_batch,
)
from outrider.core.errors import OutriderError
from outrider.core.stats import Stats
from outrider.engine.engine import Engine
from outrider.models.transformers import TransformersModel

VOCAB = 61
SMALL = 5  # the vocabulary of the law tests


def make(seed: int, vocab: int = VOCAB, layers: int = 2, spread: float = 0.3) -> Any:
    torch.manual_seed(seed)
    config = transformers.OPTConfig(
        vocab_size=vocab,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
    return model


@pytest.fixture(scope="module")
def target() -> Any:
    return make(0)


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    """The target with a little noise: some of its drafts are kept, some are not."""
    model = make(0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return model


PROMPTS = [[5, 6, 7, 8, 9], [11], [20, 21, 22, 20, 21, 22, 20, 21], [40, 3, 9], [7] * 20]


def generate(model: Any, prompt: list[int], count: int, eos: int | list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, "eos_token_id": eos}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_generate(target: Any, draft: Any, prompt: list[int]) -> None:
    answer = generate(target, prompt, 24, 2)
    assert autoregressive_generate(prompt, target, max_gen_len=24, eos_tokens_id=2) == answer
    ids, alpha = speculative_generate(prompt, draft, target, gamma=4, max_gen_len=24, eos_tokens_id=2)
    assert ids == answer
    assert 0 < alpha <= 1
    ids, alpha = ngram_assisted_speculative_generate(prompt, 3, target, gamma=4, max_gen_len=24, eos_tokens_id=2)
    assert ids == answer
    assert 0 <= alpha <= 1


def test_rows_of_a_batch(target: Any, draft: Any) -> None:
    outputs, alpha, stats = speculative_generate_batch(
        PROMPTS,
        draft,
        target,
        logits_processor=GreedyProcessor(),
        gamma=4,
        max_gen_len=30,
        eos_tokens_id=2,
        pad_token_id=0,
    )
    for prompt, output, rate, row in zip(PROMPTS, outputs, alpha, stats, strict=True):
        assert (output, rate) == speculative_generate(prompt, draft, target, gamma=4, max_gen_len=30, eos_tokens_id=2)
        assert output == generate(target, prompt, 30, 2)
        assert rate == row.accepted / row.drafted
        assert row.tokens == len(output)
    assert len(set(alpha)) > 1  # they keep different numbers of tokens
    assert sum(stats, Stats()).tokens == sum(map(len, outputs))


def test_end_tokens(target: Any, draft: Any) -> None:
    free = [generate(target, prompt, 24, [VOCAB - 1]) for prompt in PROMPTS]
    ends = [free[0][5], free[2][9]]
    outputs, _, _ = speculative_generate_batch(PROMPTS, draft, target, max_gen_len=24, eos_tokens_id=ends)
    assert outputs == [generate(target, prompt, 24, ends) for prompt in PROMPTS]
    assert outputs[0][-1] in ends
    assert len({len(output) for output in outputs}) > 1
    unending, _, _ = speculative_generate_batch(PROMPTS, draft, target, max_gen_len=24, eos_tokens_id=[])
    assert {len(output) for output in unending} == {24}


def test_texts_stop_where_the_context_ends(target: Any, draft: Any) -> None:
    ids = autoregressive_generate([5] * 60, target, max_gen_len=40, eos_tokens_id=[])
    assert len(ids) == 4
    assert speculative_generate([5] * 60, draft, target, max_gen_len=40, eos_tokens_id=[])[0] == ids


def test_a_seed_decides(target: Any, draft: Any) -> None:
    options: dict[str, Any] = {"logits_processor": MultinomialProcessor(1.0), "eos_tokens_id": 2, "seed": 7}
    plain = [autoregressive_generate(prompt, target, **options) for prompt in PROMPTS]
    for gamma in (1, 4):
        outputs, alpha, _ = speculative_generate_batch(PROMPTS, draft, target, gamma=gamma, **options)
        assert outputs == plain
        assert sum(alpha) > 0
    assert [ngram_assisted_speculative_generate(prompt, 2, target, **options)[0] for prompt in PROMPTS] == plain
    assert autoregressive_generate(PROMPTS[0], target, **options | {"seed": 8}) != plain[0]


def test_wrapped_models(target: Any, draft: Any) -> None:
    wrapped = TransformersModel(target), TransformersModel(draft)
    for prompt in PROMPTS:
        assert speculative_generate(prompt, wrapped[1], wrapped[0]) == speculative_generate(prompt, draft, target)


def test_debug_prints(target: Any, draft: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "-".join(map(str, ids))

    ids, _ = speculative_generate(PROMPTS[0], draft, target, Tokenizer(), debug=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "-".join(map(str, ids))
    assert "tokens in" in shown[1]
    speculative_generate_batch(PROMPTS, draft, target)
    assert capsys.readouterr().out == ""


# What the processors mean, written independently of the engine

LAWS: dict[str, tuple[Processor, float, int, float]] = {
    "multinomial": (MultinomialProcessor(0.8), 0.8, SMALL, 1.0),
    "top_k": (TopKProcessor(1.2, 3), 1.2, 3, 1.0),
    "nucleus": (NucleusProcessor(1.0, 0.8), 1.0, SMALL, 0.8),
    "top_k_nucleus": (TopKNucleusProcessor(1.0, 4, 0.85), 1.0, 4, 0.85),
}
START = [3, 1, 4]


def law(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    probs = (logits / temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[:top_k]
    total, kept, mass = sum(probs[token] for token in order), [], 0.0
    for token in order:
        if mass < top_p * total:
            kept.append(token)
            mass += probs[token]
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(probs))]


@torch.no_grad()
def joint(model: Any, rules: tuple[float, int, float], length: int) -> dict[tuple[int, ...], float]:
    chances = {}
    for text in product(range(SMALL), repeat=length):
        logits = model(input_ids=torch.tensor([START + list(text)])).logits[0, len(START) - 1 :]
        chance = 1.0
        for row, token in zip(logits, text, strict=False):
            chance *= law(row, *rules)[token]
        chances[text] = chance
    return chances


def follows(texts: list[list[int]], chances: dict[tuple[int, ...], float]) -> float:
    """The p-value of a chi-square test; rare texts are counted together."""
    counts = Counter(map(tuple, texts))
    assert all(chances[text] > 0 for text in counts)
    expected = {text: chance * len(texts) for text, chance in chances.items()}
    common = [text for text in expected if expected[text] >= 8]
    seen, wanted = [counts[text] for text in common], [expected[text] for text in common]
    rest = len(texts) - sum(wanted)
    if rest >= 1:
        seen, wanted = [*seen, len(texts) - sum(seen)], [*wanted, rest]
    scale = sum(seen) / sum(wanted)
    return float(chisquare(seen, [value * scale for value in wanted]).pvalue)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return make(3, SMALL, 1, 0.35), make(4, SMALL, 1, 0.35)


@pytest.mark.parametrize("name", LAWS)
def test_law_under_rejection(name: str, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    processor, *rules = LAWS[name]
    random.seed(name)
    outputs, alpha, _ = speculative_generate_batch(
        [START] * 1200, draft, target, logits_processor=processor, gamma=2, max_gen_len=3, eos_tokens_id=None
    )
    assert 0 < sum(alpha) / len(alpha) < 1
    assert follows(outputs, joint(target, tuple(rules), 3)) > 1e-4
    assert follows(outputs, joint(draft, (1.0, SMALL, 1.0), 3)) < 1e-4  # the test can tell the two apart


def test_law_of_single_runs_with_seeds(pair: tuple[Any, Any]) -> None:
    processor, *rules = LAWS["top_k_nucleus"]
    target, draft = (TransformersModel(model) for model in pair)
    options: dict[str, Any] = {"logits_processor": processor, "gamma": 2, "max_gen_len": 2, "eos_tokens_id": None}
    outputs = [speculative_generate(START, draft, target, seed=seed, **options)[0] for seed in range(400)]
    assert follows(outputs, joint(pair[0], tuple(rules), 2)) > 1e-4


def test_law_of_ngram_drafts(pair: tuple[Any, Any]) -> None:
    target = TransformersModel(pair[0])
    random.seed(5)
    options: dict[str, Any] = {"logits_processor": MultinomialProcessor(1.0), "max_gen_len": 3, "eos_tokens_id": None}
    runs = [ngram_assisted_speculative_generate(START, 2, target, **options) for _ in range(500)]
    assert any(alpha > 0 for _, alpha in runs)
    assert follows([ids for ids, _ in runs], joint(pair[0], (1.0, SMALL, 1.0), 3)) > 1e-4


def test_alpha_is_the_overlap_of_the_laws(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    random.seed(6)
    count = 2000
    _, alpha, stats = speculative_generate_batch(
        [START] * count,
        draft,
        target,
        logits_processor=MultinomialProcessor(1.0),
        gamma=1,
        max_gen_len=2,
        eos_tokens_id=None,
    )
    with torch.no_grad():
        p, q = (model(input_ids=torch.tensor([START])).logits[0, -1].softmax(-1) for model in pair)
    overlap = float(torch.minimum(p, q).sum())
    assert sum(stats, Stats()).drafted == count
    assert abs(sum(alpha) / count - overlap) < 4 * (overlap * (1 - overlap) / count) ** 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "use_cache"),
        ({"skip_sample_adjustment": True}, "skip_sample_adjustment"),
        ({"gamma": 0}, "at least 1"),
        ({"max_gen_len": 0}, "max_tokens must be at least 1"),
        ({"logits_processor": lambda logits: logits}, "one of this module's processors"),
        ({"logits_processor": NucleusProcessor(1.0, 1.5)}, "top_p"),
    ],
)
def test_what_cannot_be_honoured_is_refused(target: Any, draft: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError, match=message):
        speculative_generate(PROMPTS[0], draft, target, **options)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], ["a"], [5] * 64])
def test_bad_prompts(target: Any, prompt: list[Any]) -> None:
    with pytest.raises(OutriderError):
        autoregressive_generate(prompt, target)


def test_zero_temperature_is_refused() -> None:
    with pytest.raises(OutriderError, match="GreedyProcessor"):
        MultinomialProcessor(0.0)


def test_an_interrupted_call_leaves_nothing_behind_in_the_callers_model(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TransformersModel(target)
    expected = autoregressive_generate([1, 2, 3], model, max_gen_len=8, eos_tokens_id=[])
    steps = iter(range(3))
    real = Engine.step

    def step(self: Engine) -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        autoregressive_generate([1, 2, 3], model, max_gen_len=8, eos_tokens_id=[])
    monkeypatch.undo()
    assert all(model.length(id) == 0 for id in range(10_000))
    assert autoregressive_generate([1, 2, 3], model, max_gen_len=8, eos_tokens_id=[]) == expected


def test_one_wrapped_model_may_be_both_draft_and_target(target: Any) -> None:
    model = TransformersModel(target)
    plain = autoregressive_generate([1, 2, 3], model, max_gen_len=12, eos_tokens_id=[])
    drafted, alpha = speculative_generate([1, 2, 3], model, model, max_gen_len=12, eos_tokens_id=[])
    assert drafted == plain
    assert alpha > 0.9
