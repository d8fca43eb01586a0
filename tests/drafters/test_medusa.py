"""Medusa: trees of the likeliest combinations, measured ones and those of the moment; and what training rests on."""

import itertools

import packs
import pytest
import torch
from tiny import family, family_heads, lesson, medusa_head, new_engine, outputs, parts, plainly, prompts, run

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.medusa.drafter import Medusa, grow_paths
from outrider.models.native.packed import Packed
from outrider.train import medusa

RATES = [[0.6, 0.2, 0.1], [0.4, 0.15, 0.1], [0.2, 0.1, 0.05]]


def model():
    return family("llama")[1]


def value(path):
    product = 1.0
    for depth, rank in enumerate(path):
        product *= RATES[depth][rank]
    return product


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 20])
def test_a_grown_tree_holds_the_likeliest_nodes(nodes):
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    best = sorted((value(path) for path in every), reverse=True)[:nodes]
    paths = grow_paths(RATES, nodes)
    assert [value(path) for path in paths] == pytest.approx(best)
    assert all(path[:-1] in (*paths[:place], ()) for place, path in enumerate(paths))  # parents come first


def test_a_tree_cannot_have_more_nodes_than_there_are():
    assert len(grow_paths(RATES, 1000)) == 3 + 9 + 27
    assert grow_paths([], 5) == ()
    assert len(grow_paths([[0.0, 0.0]], 5)) == 2


def proposed(head, options="", prompt=None):
    parts = BuildContext(model(), None, heads={"own": head})
    drafter = drafters.build(f"medusa:head=own{options}", parts)
    engine = new_engine(model(), drafter)
    seq = Sequence(0, list(prompt or prompts(1)[0]), SamplingParams(max_tokens=20))
    engine.add(seq)
    engine.step()
    (draft,) = drafter.propose([seq], [64])
    logits = head_logits(head, seq.tokens)
    engine.cancel(0)
    return draft, logits


def head_logits(head, tokens):
    """[heads, vocab] what the heads say after the tokens, of which the last is the target's own choice."""
    learned = lesson(model(), head, [tokens])
    return torch.stack([state[0, -2] @ learned.output[head.draft_ids].T for state in head.states(learned.last)])


def test_a_measured_tree_is_used_as_it_is():
    head = medusa_head(model()).requires_grad_(False)
    head.tree = ((0,), (1,), (0, 0), (0, 2), (2,), (0, 0, 1))
    draft, logits = proposed(head)
    ranked = logits.argsort(descending=True)
    assert draft.parents == (-1, -1, 0, 0, -1, 2)
    assert list(draft.tokens) == [int(ranked[len(path) - 1, path[-1]]) for path in head.tree]


def test_a_measured_tree_is_cut_to_the_nodes_and_the_length_that_are_asked_for():
    head = medusa_head(model()).requires_grad_(False)
    head.tree = ((0,), (1,), (0, 0), (0, 0, 1), (2,))
    assert len(proposed(head, ",nodes=3")[0]) == 3
    assert proposed(head, ",length=2")[0].parents == (-1, -1, 0, -1)


def test_without_one_the_likeliest_combinations_are_drafted():
    head = medusa_head(model()).requires_grad_(False)
    draft, logits = proposed(head, ",nodes=12")
    laws = logits.softmax(-1).sort(descending=True)
    expected = grow_paths(laws.values[:, :10].tolist(), 12)
    assert list(draft.tokens) == [int(laws.indices[len(path) - 1, path[-1]]) for path in expected]
    assert len(draft) == 12


def test_a_draft_begins_from_the_state_of_what_was_kept():
    """Its first token is what the first head says after the same text, whatever became of the draft before."""
    own = family_heads("llama")["medusa"]
    drafter = drafters.build("medusa:head=medusa,nodes=24", parts("llama"))
    engine, seq = new_engine(model(), drafter), Sequence(0, prompts(4)[3], SamplingParams(max_tokens=24))
    engine.add(seq)
    engine.step()
    kept = 0
    while seq.left > 1:
        wanted = int(head_logits(own, seq.tokens)[0].argmax())
        (draft,) = drafter.propose([seq], [24])
        assert draft.tokens[0] == wanted
        engine.step()
        kept = max(kept, seq.stats.accepted)
    engine.cancel(0)
    assert kept > 0


def test_more_nodes_keep_more():
    def accepted(nodes):
        seqs = [Sequence(i, tokens, SamplingParams(max_tokens=24)) for i, tokens in enumerate(prompts(8))]
        return run(model(), drafters.build(f"medusa:head=medusa,nodes={nodes}", parts("llama")), seqs).stats.accepted

    assert accepted(24) > accepted(1) > 0


def test_under_shared_noise_it_guesses_what_the_noise_favours():
    """Of two runs with the same luck the one whose guesses know the noise keeps more."""
    kept = {}
    for rule in ("rejection", "coupled"):
        seqs = [
            Sequence(i, [i % 40, 3, 5, 7], SamplingParams(max_tokens=16, temperature=1.5), rule=rule, dice=Dice(i))
            for i in range(40)
        ]
        kept[rule] = run(model(), drafters.build("medusa:head=medusa,nodes=3", parts("llama")), seqs).stats.accepted
    assert kept["coupled"] > 1.3 * kept["rejection"]


def test_nothing_is_left_of_a_sequence_that_ended():
    drafter = drafters.build("medusa:head=medusa", parts("llama"))
    run(model(), drafter, [Sequence(i, tokens, SamplingParams(max_tokens=9)) for i, tokens in enumerate(prompts(8))])
    assert drafter._last == {}
    assert drafter._drafted == {}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("medusa:head=medusa,nodes=0", "medusa:nodes must be at least 1"),
        ("medusa:head=medusa,length=-1", "medusa:length must be at least 0"),
        ("medusa:head=eagle", "holds an EAGLE head; write eagle:head=eagle"),
        ("medusa", "no head for medusa is shipped for this target; train one"),
    ],
)
def test_what_cannot_work_is_refused(spec, reason):
    with pytest.raises(OutriderError, match=reason):
        drafters.build(spec, parts("llama"))


@pytest.mark.native
def test_beside_a_packed_target_the_output_matrix_is_packed():
    target = packs.family("llama", 4)[0]
    head = medusa_head(target, torch.arange(0, 40)).requires_grad_(False)
    drafter = Medusa(Medusa.Options(head="own"), BuildContext(target, None, heads={"own": head}))
    seqs = [Sequence(i, tokens, SamplingParams(max_tokens=12)) for i, tokens in enumerate(prompts(4))]
    run(target, drafter, seqs)
    assert outputs(seqs) == outputs([plainly(target, seq.tokens[: seq.prompt], seq.params) for seq in seqs])
    assert isinstance(drafter._outputs[0].linear, Packed)


class TestLoss:
    def texts(self):
        return [[*p, *outputs([plainly(model(), p, SamplingParams(max_tokens=12))])[0]][-14:] for p in prompts(4)]

    def test_it_falls_and_the_heads_learn(self):
        head = medusa.fresh(model(), num_heads=3)
        learned = lesson(model(), head, self.texts())
        optimizer = torch.optim.AdamW(head.parameters(), 1e-2)
        figures = []
        for _ in range(60):
            loss, said = medusa.loss(head, learned)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            figures.append({name: float(value) for name, value in said.items()})
        assert figures[-1]["loss"] < 0.9 * figures[0]["loss"]
        assert figures[-1]["hit2"] > figures[0]["hit2"]

    def test_fresh_heads_say_what_the_target_says(self):
        """Blocks of zeros let the state through."""
        head = medusa.fresh(model(), num_heads=2)
        learned = lesson(model(), head, self.texts())
        assert all(torch.equal(state, learned.last) for state in head.states(learned.last))

    def test_steps_counts_the_first_heads(self):
        head = medusa_head(model(), torch.arange(0, 40, 3))
        _, figures = medusa.loss(head, lesson(model(), head, self.texts()), 2)
        assert set(figures) == {"loss", "hit1", "hit2", "keep1", "keep2"}
