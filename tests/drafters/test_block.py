"""Block heads: the runner computes what was trained, laws are stated as they are, and files keep a head as it is."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import VOCAB, block_head, family, lesson, new_heads, parts, prompts, run

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.block.head import BlockHead
from outrider.drafters.block.runner import BlockRunner
from outrider.drafters.heads import files
from outrider.drafters.heads.chooser import Chooser, offers_with_noise
from outrider.train import block
from outrider.train.objective import AnswerTokens

FORMS = {
    "own": {},
    "bidirectional": {"causal": False},
    "public": {"starts": False, "causal": False, "qk_norm": True, "sequential": "vanilla"},
    "gated": {"sequential": "gated"},
    "bare": {"rank": 0, "depth": 1},
}


@pytest.fixture
def model():
    return family("llama")[1]


def made(model, form):
    torch.manual_seed(1)
    ids = torch.arange(0, model.vocab_size, 2) if form == "public" else None
    return block_head(model, ids, **FORMS[form]).requires_grad_(False)


@torch.no_grad()
def learned_logits(head, batch):
    """[slots, b, t, draft vocabulary]: as the loss computes them, after the token at each place."""
    texts, rows = batch.tokens.shape
    every = AnswerTokens(torch.arange(texts * rows), torch.arange(texts * rows) % rows)
    slots, embedded = block._slots(head, batch, every, head.config.block)
    state = slots.new_zeros(slots.shape[1], head.config.rank)
    found = []
    for j, slot in enumerate(slots):
        if head.config.rank:
            token = head.markov_head.reduced(embedded.roll(-j, 0))
            g, state = head.markov_head.step(state, token, slot)
            slot = slot + head.markov_head.lift(g)
        found.append(slot @ block.output_matrix(head, batch.output).T)
    return torch.stack(found).unflatten(1, (texts, rows))


@pytest.mark.parametrize("form", FORMS)
def test_the_runner_says_what_the_loss_compares(model, form):
    """After every place of two texts, along the text itself; taken in at once, in parts, and beside each other."""
    head, texts = made(model, form), [[(7 * i + 3 * j) % VOCAB for j in range(20)] for i in (1, 2)]
    batch = lesson(model, head, texts)
    wanted = learned_logits(head, batch)
    runner, before = BlockRunner(head, model, head.config.block), 0
    for place in (3, 4, 9, 10, 13):  # rows of states that the head has taken in
        tokens = [text[before + 1 : place + 1] for text in texts]
        ahead = runner.extend([1, 2], tokens, batch.hidden[:, before:place].flatten(0, 1))
        for slot in range(head.config.block):
            torch.testing.assert_close(ahead.logits, wanted[slot, :, place], rtol=1e-4, atol=1e-4)
            drafted = torch.tensor([text[place + 1 + slot] for text in texts])
            if slot + 1 < head.config.block:
                ahead = runner.step([1, 2], drafted, ahead.states, torch.zeros(2, slot, dtype=torch.long))
        before = place


def test_branches_of_a_tree_hang_on_their_own_path(model):
    """Two tokens after the same place lead to different laws, each that of its own path."""
    head, text = made(model, "own"), [(5 * j) % VOCAB for j in range(12)]
    batch = lesson(model, head, [text])
    runner = BlockRunner(head, model, head.config.block)
    ahead = runner.extend([4], [text[1:9]], batch.hidden[0, :8])
    states = ahead.states.repeat_interleave(2, 0)
    both = runner.step([4], torch.tensor([11, 23]), states, torch.zeros(2, 0, dtype=torch.long))
    alone = runner.step([4], torch.tensor([23]), ahead.states, torch.zeros(1, 0, dtype=torch.long))
    torch.testing.assert_close(both.logits[1:], alone.logits)
    assert (both.logits[0] - both.logits[1]).abs().max() > 1e-3


def test_confidence_is_stated_between_0_and_1(model):
    head = made(model, "own")
    runner = BlockRunner(head, model, head.config.block)
    runner.extend([4], [[1, 2, 3]], lesson(model, head, [[0, 1, 2, 3]]).hidden[0, :3])
    assert runner.sure.shape == (1,)
    assert 0.0 < float(runner.sure) < 1.0


@pytest.mark.parametrize("form", FORMS)
def test_files_keep_a_head(model, form, tmp_path):
    head = made(model, form)
    files.write(head, tmp_path, model, "tiny", dtype=torch.float32)
    again = files.read(tmp_path, model)
    assert isinstance(again, BlockHead)
    public = form == "public"
    assert json.loads((tmp_path / "config.json").read_text())["speculators_model_type"] == (
        "dspark" if public else "outrider_block"
    )
    assert again.config.own_sequential == public  # written over the whole vocabulary, as others read it
    text = [(3 * j) % VOCAB for j in range(9)]
    hidden = lesson(model, head, [text]).hidden[0, :8]
    first, second = (BlockRunner(each, model, 5).extend([1], [text[1:]], hidden) for each in (head, again))
    torch.testing.assert_close(first.logits, second.logits, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_a_block_head_is_refused(model, tmp_path):
    files.write(made(model, "public"), tmp_path, model, "tiny")
    config = json.loads((tmp_path / "config.json").read_text())
    for changed, said in (
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"markov_head_type": "x"}, "markov_head_type"),
        ({"markov_rank": -1}, "markov_rank"),
        ({"block_size": 0}, "block_size"),
        ({"mask_token_id": "a"}, "mask_token_id"),
        ({"transformer_layer_config": 3}, "transformer_layer_config"),
        ({"aux_hidden_state_layer_ids": [99]}, "blocks"),
        ({"speculators_model_type": "dflash"}, "eagle3 and dspark"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(OutriderError, match=said):
            files.read(tmp_path, model)
    context = parts("llama")
    for spec in ("block:length=-1", "block:tree=-1", "block:width=0", "block:stop=1", "block:vocab=-1"):
        with pytest.raises(OutriderError, match=spec.split(":")[1].split("=")[0]):
            drafters.build(f"{spec},head=block", context)
    with pytest.raises(OutriderError, match="write eagle:head=eagle"):
        drafters.build("block:head=eagle", context)
    with pytest.raises(OutriderError, match="write block:head=block"):
        drafters.build("eagle:head=block", context)


def test_rows_with_shared_noise_are_offered_as_one_by_one(model):
    """Chains and trees of requests that share the target's noise are chosen together: the same tokens as each alone."""
    torch.manual_seed(3)
    params = SamplingParams(temperature=0.8, max_tokens=9)
    seqs = [Sequence(i, prompt, params, dice=Dice(5, i), rule="coupled") for i, prompt in enumerate(prompts(3))]
    choosers, ids = [Chooser(seq, 5, False) for seq in seqs], torch.arange(0, VOCAB, 2)
    assert all(chooser.shares_noise for chooser in choosers)
    logits = torch.randn(6, len(ids)) * 3
    tokens, logarithms = offers_with_noise(choosers, logits, ids, 2, 4)
    for row in range(6):
        full = torch.full((VOCAB,), float("-inf")).index_copy_(0, ids, logits[row])
        alone, values = choosers[row // 2].offers(full, [1, 2], 4)
        assert tokens[row].tolist() == alone.tolist()
        torch.testing.assert_close(logarithms[row], values, rtol=1e-3, atol=1e-4)


def test_a_chain_is_as_long_as_the_block(model):
    seqs = [Sequence(i, prompt, SamplingParams(max_tokens=12)) for i, prompt in enumerate(prompts(3))]
    engine = run(model, drafters.build("block:head=block,length=99", parts("llama")), seqs)
    assert len(engine.stats.by_depth) == dict(new_heads(model))["block"].config.block


@pytest.mark.parametrize("place", ["m.gguf.outrider-head", "m.outrider-head", "m.outrider-head/block", "heads/block"])
def test_a_head_beside_the_model_is_found(model, place, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_text("")
    assert files.beside("block", str(path)) is None
    files.write(made(model, "own"), tmp_path / place, model, "m")
    assert files.beside("block", str(path)) == tmp_path / place
    assert files.beside("eagle", str(path)) is None
    assert isinstance(files.find("block", "", model, str(path)), BlockHead)


def test_auto_takes_a_block_head_that_lies_in_the_model_folder(model, tmp_path):
    folder = tmp_path / "m"
    files.write(made(model, "own"), folder / "heads" / "block", model, "m")
    context = replace(parts("llama"), name=str(folder))
    assert "block" in [member.name for member in drafters.build("auto", context).members]
    assert drafters.find("auto").share(drafters.parse("auto").options, str(folder)) > 0
    files.write(dict(new_heads(model))["eagle"], folder / "heads" / "eagle", model, "m")
    names = [member.name for member in drafters.build("auto", context).members]
    assert "eagle" in names
    assert "block" not in names  # the kernels run EAGLE heads faster


def test_a_head_beside_the_model_that_does_not_fit_is_an_error(model, tmp_path):
    folder = tmp_path / "m.outrider-head"
    files.write(made(model, "own"), folder, model, "m")
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["hidden_size"] += 2
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "m").mkdir()
    with pytest.raises(OutriderError, match="hidden numbers"):
        files.find("block", "", model, str(tmp_path / "m"))
