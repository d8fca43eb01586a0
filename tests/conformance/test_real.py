"""The real SmolLM2: our forward is transformers' own, packed weights are the file's, drafters change nothing."""

import functools

import pytest
import torch

from outrider import LLM, OutriderError, SamplingParams, prompts
from outrider.core.draft import Draft
from outrider.models import sources
from outrider.models.base import Feed
from outrider.models.gguf import GGUFFile

pytestmark = pytest.mark.real

NAME, TOKENS = "smollm2-135m", 64
ASKED = [prompt.text for prompt in prompts.AUDIT] + [
    "Name three rivers of France.",
    "Count from one to twenty in words.",
]
PARAMS = SamplingParams(max_tokens=TOKENS, logprobs=2)
WAYS = {"greedy": PARAMS, "sampled": SamplingParams(max_tokens=32, temperature=1.0, seed=7, logprobs=0)}


@pytest.fixture(scope="module")
def path():
    try:
        return sources.pull(NAME)
    except OutriderError as error:
        pytest.skip(f"the weights cannot be had here: {error}")


@pytest.fixture(scope="module")
def chats():
    return [[{"role": "user", "content": text}] for text in ASKED]


@pytest.fixture(scope="module")
def packed(path):
    with LLM(NAME, draft="none", pace=False) as llm:  # also drafts that do not pay
        yield llm


@pytest.fixture(scope="module")
def chat(packed, chats):
    """What the packed model answers, by the way that it is asked; each is asked once, for all tests that look at it."""
    return functools.cache(lambda way, draft="none": packed.chat(chats, WAYS[way], draft=draft))


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    return request.param


@pytest.fixture(scope="module")
def dense(path):
    with LLM(NAME, draft="none", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def written(dense, chats):
    return dense.chat(chats, PARAMS)


@pytest.fixture(scope="module")
def theirs(path):
    """The same weights in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GGUFFile(path)
    said = file.config()
    config = LlamaConfig(
        vocab_size=said["vocab_size"],
        hidden_size=said["hidden_size"],
        intermediate_size=said["intermediate_size"],
        num_hidden_layers=said["num_layers"],
        num_attention_heads=said["num_heads"],
        num_key_value_heads=said["num_kv_heads"],
        rms_norm_eps=said["norm_eps"],
        max_position_embeddings=said["max_context"],
        rope_parameters={"rope_type": "default", "rope_theta": said["rope_theta"]},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: tensor.dequantize() for name, tensor in file.tensors()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is no weight
    return model.eval()


def test_float32_writes_what_transformers_writes(written, theirs, dense):
    """After each of our tokens theirs would be the next: that is the same text, told by one pass."""
    assert len(written) == 8
    for result in written:
        assert len(result.token_ids) == TOKENS or result.token_ids[-1] == dense.tokenizer.eos_token_id
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*result.prompt_token_ids, *result.token_ids]])).logits[0]
        said = logits[len(result.prompt_token_ids) - 1 : -1].argmax(-1)
        assert result.token_ids == said.tolist()


def test_packed_logits_are_those_of_the_dequantised_model(packed, dense, written):
    for result in written[:4]:
        text = [*result.prompt_token_ids, *result.token_ids]
        feed = Feed(-7, text[:1], Draft.chain(text[1:]))  # as a draft, so that every position shows its logits
        rows = [llm.backend.engine.model.forward([feed])[0].logits for llm in (packed, dense)]
        for llm in (packed, dense):
            llm.backend.engine.model.free(-7)
        assert torch.cosine_similarity(*rows, dim=-1).min() > 0.999


def test_packed_text_is_that_of_the_dequantised_model(chat, written):
    ours = chat("greedy")
    assert sum(a.token_ids == b.token_ids for a, b in zip(ours, written, strict=True)) >= 7


@pytest.mark.native
@pytest.mark.parametrize(
    "draft",
    [
        "ngram",
        "ngram:store=adaptive,min_n=1",
        "layer_skip:layers=28,length=4",
        "prediction",
        "eagle",
        "eagle:tree=16,lookup=3",
        "medusa",
    ],
)
def test_a_drafter_changes_nothing_not_even_the_last_bit(packed, chat, chats, draft, way):
    plain = chat(way)
    if draft == "prediction":
        guessed = ["I think that the answer is this: " + result.text for result in plain]
        drafted = packed.chat(chats, WAYS[way], draft=draft, prediction=guessed)
    else:
        drafted = chat(way, draft)
    assert sum(result.stats.accepted for result in drafted) > 0
    for a, b in zip(plain, drafted, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == b.logprobs


@pytest.mark.native
@pytest.mark.parametrize(("draft", "least"), [("eagle:stop=0", 1.9), ("eagle:tree=16,stop=0", 2.5), ("medusa", 1.3)])
def test_the_shipped_heads_are_found_and_trained(chat, draft, least):
    """An untrained head keeps next to nothing: 1.0 tokens per pass."""
    stats = [result.stats for result in chat("greedy", draft)]
    assert sum(each.tokens for each in stats) / sum(each.steps for each in stats) > least
