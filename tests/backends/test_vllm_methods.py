"""The drafters of vLLM that read heads, with heads that we have written: about 10 s for each engine."""

from __future__ import annotations

import json

import pytest
import torch
from on_vllm import EAGER, run
from tiny import eagle_head, lesson, medusa_head

from outrider import LLM, SamplingParams
from outrider.backends.speculation import for_head
from outrider.core.errors import OutriderError
from outrider.drafters.heads import files as heads
from outrider.train import kinds
from outrider.train.objective import Comparison

PROMPTS = ["the red fox", "count the stars, one, two", "a river ends in the sea"]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
TASKS = {"each": [{"prompt": text, "params": {"max_tokens": 40, "ignore_eos": True}} for text in PROMPTS]}
LENGTH = 3
# kind -> how it is made, the steps and the rate at which it learns, and its chain on our own engine
KINDS = {
    "eagle3": (eagle_head, 60, 1e-2, "eagle", "greedy=true"),
    "eagle": (lambda model: eagle_head(model, layers=()), 1600, 1e-2, "eagle", "greedy=true"),
    "medusa": (lambda model: medusa_head(model, heads=LENGTH), 150, 1e-2, "medusa", ""),
}


@pytest.fixture(scope="module")
def plain(wide_folder):
    with LLM(str(wide_folder), draft="none", threads=1, cache_memory=0.1) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(plain):
    return [plain.generate(text, GREEDY) for text in PROMPTS]


@pytest.fixture(scope="module")
def head(plain, texts, wide_folder, tmp_path_factory):
    """Writes a head of a kind that has learned what the target says to the prompts."""
    folder = tmp_path_factory.mktemp("heads")

    def write(kind):
        if not (folder / kind).is_dir():
            model = plain.backend.engine.model
            torch.manual_seed(5)
            new, steps, rate, *_ = KINDS[kind]
            learned = teach(new(model), model, [[*t.prompt_token_ids, *t.token_ids][:40] for t in texts], steps, rate)
            heads.write(learned, folder / kind, model, str(wide_folder), dtype=torch.float32)
        return folder / kind

    return write


def teach(head, model, texts, steps, rate):
    learned, optimizer = lesson(model, head, texts), torch.optim.AdamW(head.parameters(), rate)
    for _ in range(steps):
        loss, _ = kinds.loss(head, learned, Comparison(LENGTH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False)


def kept_by_us(kind, head, folder):
    """Drafted tokens that our own engine keeps, by depth, where it drafts the same chains."""
    *_, word, more = KINDS[kind]
    with LLM(str(folder), draft=f"{word}:head={head},length={LENGTH},{more}".rstrip(","), pace=False, threads=1) as llm:
        return [llm.generate(text, GREEDY).stats.accepted for text in PROMPTS]


@pytest.mark.vllm
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_ours_drafts_there(kind, head, texts, wide_folder, vllm_sessions):
    word = KINDS[kind][3]  # `eagle` is enough for both
    draft = f"{word}:head={head(kind)},length={LENGTH}"
    args = {**EAGER, "max_model_len": 512}
    answers = vllm_sessions.open(TASKS, model=str(wide_folder), draft=draft, engine_args=args)["each"]
    assert [answer["token_ids"] for answer in answers] == [text.token_ids for text in texts]
    for answer in answers:
        stats = answer["stats"]
        assert stats["by_drafter"] == {kind: {"drafted": stats["drafted"], "accepted": stats["accepted"]}}
    kept = [answer["stats"]["accepted"] for answer in answers]
    assert sum(kept) > 5
    if kind != "medusa":  # ours drafts a tree of the same heads
        # vLLM also counts what it has accepted past the end of an answer
        pairs = zip(kept, kept_by_us(kind, head(kind), wide_folder), strict=True)
        assert all(0 <= theirs - ours <= LENGTH for theirs, ours in pairs)


@pytest.mark.vllm
def test_suffix_needs_its_package(wide_folder, vllm_python):
    args = ("--raw", "-m", wide_folder, "--backend", "vllm", "--draft", "suffix")
    done = run("-m", "outrider", "generate", *args, "the fox")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install --no-deps arctic-inference==0.1.1" in done.stderr


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle"),
    ],
)
def test_the_head_tells_which_eagle_it_is(said, method, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert for_head({"method": "eagle", "model": "h"}, tmp_path) == {"method": method, "model": "h"}
    if method == "eagle":
        with pytest.raises(OutriderError, match="is no EAGLE-3 head; write eagle:head="):
            for_head({"method": "eagle3"}, tmp_path)


def test_a_head_without_a_config(tmp_path):
    with pytest.raises(OutriderError, match=r"no config.json that can be read"):
        for_head({"method": "eagle"}, tmp_path)
    assert for_head({"method": "ngram"}, tmp_path) == {"method": "ngram"}
