"""TransformersModel against the model's own plain forward and its own generate, family by family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence as Text
from outrider.drafters import find
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.draft_model import ModelDrafter
from outrider.drafters.ngram import Ngram
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed
from outrider.models.transformers import FEW, TransformersModel

VOCAB = 61
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
LLAMA = {**SHAPE, "intermediate_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}

FAMILIES: dict[str, Callable[[], Any]] = {
    "opt": lambda: transformers.OPTConfig(
        **SMALL, **SHAPE, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=3, do_layer_norm_before=False
    ),
    "gpt2": lambda: transformers.GPT2Config(**SMALL, **GPT),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **LLAMA, sliding_window=8, layer_types=WINDOWS),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **LLAMA, sliding_window=8, layer_types=WINDOWS),  # eager
    "mistral": lambda: transformers.MistralConfig(**SMALL, **LLAMA, sliding_window=8),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL, **SHAPE, intermediate_size=64, num_hidden_layers=3),
    "phi": lambda: transformers.PhiConfig(**SMALL, **SHAPE, intermediate_size=64, num_hidden_layers=3),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SMALL, **LLAMA, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8
    ),
    "bloom": lambda: transformers.BloomConfig(**SMALL, hidden_size=32, n_layer=3, n_head=4),
    "falcon": lambda: transformers.FalconConfig(**SMALL, **SHAPE, num_hidden_layers=3),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        **SMALL,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=8,
        max_position_embeddings=128,
    ),
}
TOGETHER = {"opt", "gpt2", "gemma3", "gemma2", "mistral", "gpt_neox", "phi", "llama4"}

TREE = Draft((5, 6, 7, 8, 9, 10), (-1, -1, 0, 1, 0, 3))  # paths 5-7, 5-9, 6-8-10
MODELS: dict[str, Any] = {}


def make(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # as they come, models of this size hardly look at their context
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def plain(family: str) -> Any:
    if family not in MODELS:
        MODELS[family] = make(FAMILIES[family]())
    return MODELS[family]


@pytest.fixture
def model(plain: Any) -> TransformersModel:
    return TransformersModel(plain)


def tokens_of(count: int, start: int = 3) -> list[int]:
    return [(start * 17 + i * i * 7 + i * 5) % (VOCAB - 3) + 3 for i in range(count)]


@torch.no_grad()
def logits_of(plain: Any, tokens: Sequence[int]) -> Tensor:
    return plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


def expected(plain: Any, tokens: list[int], draft: Draft) -> Tensor:
    """Logits after the tokens and after each node, each by a plain run of its own path."""
    paths = [draft.path(node) for node in range(-1, len(draft))]
    return torch.stack([logits_of(plain, tokens + [draft.tokens[i] for i in path])[-1] for path in paths])


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_the_way_it_runs(family: str, model: TransformersModel) -> None:
    assert model._together == (family in TOGETHER)


def test_pieces_chains_and_trees(plain: Any, model: TransformersModel) -> None:
    tokens = tokens_of(40)
    model.forward([Feed(0, tokens[:25])])
    model.forward([Feed(0, tokens[25:38])])
    assert model.length(0) == 38
    (output,) = model.forward([Feed(0, tokens[38:], TREE)])
    assert output.logits.dtype == torch.float32
    assert model.length(0) == 46
    close(output.logits, expected(plain, tokens, TREE))

    chain = Draft.chain([5, 6, 7])
    (output,) = model.forward([Feed(1, tokens, chain)])
    close(output.logits, expected(plain, tokens, chain))


def test_ragged_feeds(plain: Any, model: TransformersModel) -> None:
    texts = [tokens_of(count, start) for start, count in enumerate([3, 40, 17, 1])]
    drafts = [TREE, EMPTY, Draft.chain([9, 9]), Draft((4, 5), (-1, -1))]
    for id, text in enumerate(texts):
        if len(text) > 3:
            model.forward([Feed(id, text[:-3])])
    pairs = zip(texts, drafts, strict=True)
    outputs = model.forward([Feed(id, text[-3:], draft) for id, (text, draft) in enumerate(pairs)])
    for text, draft, output in zip(texts, drafts, outputs, strict=True):
        close(output.logits, expected(plain, text, draft))


def test_long_and_short_feeds_in_one_call(plain: Any, model: TransformersModel) -> None:
    texts = [tokens_of(2), tokens_of(FEW + 10, 5), tokens_of(4, 7)]
    outputs = model.forward([Feed(id, text) for id, text in enumerate(texts)])
    for text, output in zip(texts, outputs, strict=True):
        close(output.logits, expected(plain, text, EMPTY))


def test_crop_keeps_a_branch(plain: Any, model: TransformersModel) -> None:
    tokens = tokens_of(20)
    model.forward([Feed(0, tokens, TREE)])
    model.crop(0, 20, (1, 3, 5))
    assert model.length(0) == 23
    kept = [*tokens, 6, 8, 10]
    (output,) = model.forward([Feed(0, [11, 12], TREE)])
    close(output.logits, expected(plain, [*kept, 11, 12], TREE))

    model.crop(0, 10)
    (output,) = model.forward([Feed(0, [13])])
    close(output.logits, expected(plain, [*tokens[:10], 13], EMPTY))

    model.free(0)
    model.free(0)
    model.crop(0, 5)
    assert model.length(0) == 0


def test_growth_past_the_first_buffer(plain: Any, model: TransformersModel) -> None:
    tokens = tokens_of(90)
    for begin in range(0, 90, 15):
        (output,) = model.forward([Feed(0, tokens[begin : begin + 15])])
    close(output.logits[0], logits_of(plain, tokens)[-1])


def test_hidden_states(family: str, plain: Any, model: TransformersModel) -> None:
    tokens = tokens_of(12)
    last = model.num_layers - 1
    model.forward([Feed(0, tokens[:5])])
    feeds = [Feed(0, tokens[5:], TREE), Feed(1, tokens[:3])]
    tree, short = model.forward(feeds, [last, 0])
    assert tree.hidden is not None
    assert short.hidden is not None
    assert tree.hidden.shape == (7 + len(TREE), 2, 32)
    for node in range(len(TREE)):
        path = [TREE.tokens[i] for i in TREE.path(node)]
        close(tree.hidden[7 + node], residuals(plain, tokens + path, [last, 0])[-1])
    close(tree.hidden[:7], residuals(plain, tokens, [last, 0])[5:])
    close(short.hidden, residuals(plain, tokens[:3], [last, 0]))


@torch.no_grad()
def residuals(plain: Any, tokens: list[int], layers: list[int]) -> Tensor:
    """[tokens, layers, hidden] after each block. transformers gives the last one after the final norm: undo by hook."""
    seen: list[Tensor] = []
    blocks = next(
        child
        for child in plain.modules()
        if isinstance(child, torch.nn.ModuleList) and len(child) == plain.config.num_hidden_layers
    )
    handles = [
        block.register_forward_hook(lambda m, i, o: seen.append(o[0] if isinstance(o, tuple) else o))
        for block in blocks
    ]
    states = plain(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    close(states[1][0], seen[0][0])  # hidden_states[0] is the embedding
    return torch.stack([seen[layer][0] for layer in layers], 1)


def test_first_layers(family: str, plain: Any, model: TransformersModel) -> None:
    head = model.first(2)
    config = FAMILIES[family]()
    if family == "gpt_neo":
        config.attention_types, config.attention_layers = [[["global", "local"], 1]], ["global", "local"]
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    config.num_hidden_layers = 2
    short = transformers.AutoModelForCausalLM.from_config(config).eval()
    names = set(short.state_dict())
    short.load_state_dict({name: value for name, value in plain.state_dict().items() if name in names})
    tokens = tokens_of(20)
    assert head.num_layers == 2
    (output,) = head.forward([Feed(0, tokens, TREE)])
    close(output.logits, expected(short, tokens, TREE))
    assert {id(p) for p in head._model.parameters()} < {id(p) for p in plain.parameters()}
    (output,) = model.forward([Feed(0, tokens)])
    close(output.logits[0], logits_of(plain, tokens)[-1])


def test_a_model_that_cannot_be_cut() -> None:
    config = transformers.Gemma3nTextConfig(
        **SMALL,
        **{**LLAMA, "num_hidden_layers": 4, "intermediate_size": [64] * 4},
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        laurel_rank=4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        activation_sparsity_pattern=[0.0] * 4,
    )
    plain = make(config)
    model = TransformersModel(plain)
    (output,) = model.forward([Feed(0, tokens_of(20), TREE)])
    close(output.logits, expected(plain, tokens_of(20), TREE))
    with pytest.raises(OutriderError, match="first 2 layers"):
        model.first(2)


def generate(plain: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, "eos_token_id": 2}
    return plain.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


class Bush(Drafter):
    """Drafts trees of made-up tokens, among them now and then the right one."""

    name = "bush"

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers = answers

    def propose(self, seqs: Sequence[Text], budgets: Sequence[int]) -> list[Draft]:
        return [self._tree(seq).cut(budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _tree(self, seq: Text) -> Draft:
        done = len(seq.tokens) - seq.prompt
        right = [*self._answers[seq.id][done : done + 2], 4, 4][:2]
        return Draft((3, right[0], 5, right[1], 6), (-1, -1, 0, 1, 3))


def drafters(plain: Any, model: TransformersModel, answers: dict[int, list[int]]) -> dict[str, Drafter]:
    parts = BuildContext(model, lambda name, quantize: model)
    small = make(transformers.GPT2Config(**{**SMALL, "vocab_size": VOCAB + 3}, n_embd=16, n_layer=1, n_head=2))
    return {
        "none": find("none")(find("none").Options(), parts),
        "ngram": Ngram(Ngram.Options(min_n=1), parts),
        "other": ModelDrafter(TransformersModel(small), VOCAB, 3, greedy=False),
        "itself": ModelDrafter(TransformersModel(plain), VOCAB, 3, greedy=False),
        "layer_skip": find("layer_skip")(find("layer_skip").Options(), parts),
        "bush": Bush(answers),
    }


def test_greedy_equals_generate(plain: Any, model: TransformersModel) -> None:
    prompts = [tokens_of(count, start) for start, count in enumerate([30, 3, 17, 9, 1])]
    answers = {id: generate(plain, prompt, 18) for id, prompt in enumerate(prompts)}
    for name, drafter in drafters(plain, model, answers).items():
        engine = Engine(model, drafter, Limits(chunk=16))
        seqs = [
            Text(id, list(prompt), SamplingParams(max_tokens=18), frozenset([2])) for id, prompt in enumerate(prompts)
        ]
        for seq in seqs:
            engine.add(seq)
        while engine.busy:
            engine.step()
        for seq in seqs:
            assert seq.tokens[seq.prompt :] == answers[seq.id], name
        if name in ("itself", "bush"):
            assert engine.stats.accepted > 15, name


def test_the_callers_model_is_left_alone() -> None:
    plain = make(FAMILIES["gpt2"]())
    plain.train()
    plain.config.use_cache = False
    before = plain.config.to_dict(), plain.config._attn_implementation
    model = TransformersModel(plain)
    model.first(1).forward([Feed(0, [3, 4])])
    model.forward([Feed(0, [3, 4], TREE)], [0, 2])
    assert plain.training
    assert (plain.config.to_dict(), plain.config._attn_implementation) == before
    assert not any(module._forward_hooks for module in plain.modules())
    assert {id(p) for p in model._model.parameters()} == {id(p) for p in plain.parameters()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention: str) -> None:
    plain = make(FAMILIES["gemma3"]())
    plain.set_attn_implementation(attention)
    model = TransformersModel(plain)
    assert model._together
    (output,) = model.forward([Feed(0, tokens_of(20), TREE)])
    close(output.logits, expected(plain, tokens_of(20), TREE))


def test_bfloat16() -> None:
    plain = make(FAMILIES["gpt2"]()).bfloat16()
    model = TransformersModel(plain)
    assert model._together
    (output,) = model.forward([Feed(0, tokens_of(10), TREE)])
    assert output.logits.dtype == torch.float32
    difference = (output.logits - expected(plain, tokens_of(10), TREE)).abs().max()
    assert difference < 0.05 * output.logits.abs().max()


def test_sizes() -> None:
    model = TransformersModel(make(FAMILIES["gemma3"]()), memory=1 << 20)
    assert (model.vocab_size, model.num_layers, model.context) == (VOCAB, 3, 128)
    assert model.capacity == (1 << 20) // (2 * 2 * 3 * 2 * 8 * 4)  # spare, keys and values, layers, heads, dim, bytes
    assert TransformersModel(make(FAMILIES["bloom"]())).context >= 1 << 16


def test_longrope_stops_where_its_angles_change() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    shape = {**SHAPE, "intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = transformers.Phi3Config(**SMALL, **shape, original_max_position_embeddings=32, rope_parameters=rope)
    assert TransformersModel(make(config)).context == 32


RECURRENT = {
    "mamba": lambda: transformers.MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=2),
    "rwkv": lambda: transformers.RwkvConfig(**SMALL, hidden_size=32, num_hidden_layers=2),
    "lfm2": lambda: transformers.Lfm2Config(
        **SMALL,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_are_refused(name: str) -> None:
    plain = transformers.AutoModelForCausalLM.from_config(RECURRENT[name]())
    with pytest.raises(OutriderError, match="keeps a recurrent state that cannot forget refused tokens"):
        TransformersModel(plain)


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(OutriderError, match="encoder-decoder"):
        TransformersModel(transformers.T5ForConditionalGeneration(config))


def test_models_without_a_head_are_refused() -> None:
    with pytest.raises(OutriderError, match="AutoModelForCausalLM"):
        TransformersModel(transformers.GPT2Model(FAMILIES["gpt2"]()))


def test_models_that_see_what_comes_are_refused() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.BertConfig(**SMALL, **shape))
    with pytest.raises(OutriderError, match="other logits"):
        TransformersModel(plain)
