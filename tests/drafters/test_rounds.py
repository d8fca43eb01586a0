"""Drafters on a GPU without the host: rounds of drafts, passes and verdicts write what plain decoding writes.

The kernels are interpreted on a CPU."""

import itertools
from dataclasses import replace

import pytest
import torch
from looped import adapters, draft_model, drain, engine, plain, sequences, target, watch
from tiny import family, outputs, plainly
from torch.overrides import TorchFunctionMode

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.eagle.device_guesser import HeadGuesses
from outrider.drafters.rounds import base, loop, writer
from outrider.drafters.rounds.loop import DeviceLoop
from outrider.engine import unattended
from outrider.engine.policy import DraftingPolicy
from outrider.models.base import Feed

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]


@pytest.fixture
def loops(monkeypatch):
    """How many sequences each part of the device's loop has, and the nodes of their drafts in each round."""
    calls = []

    def seen(seqs, found):
        nodes = [[len(each.round(n).tokens) for n in range(len(each.tokens))] for each in found]
        calls.append((len(seqs), nodes))

    watch(monkeypatch, seen)
    return calls


SEEDED = SamplingParams(5, 0.9, seed=3)
GUESSERS = {
    "eagle:head=it,tree=6,width=3,length=3": (SEEDED, {"eagle"}),
    "eagle:head=it,tree=16,width=2,length=8": (SEEDED, {"eagle"}),
    "ngram:length=3,tree=0": (SEEDED, {"ngram"}),
    "ngram:length=3,tree=6": (SEEDED, {"ngram"}),
    "medusa:head=three": (SamplingParams(5), {"medusa"}),
    "ngram:length=3,tree=4+eagle:head=it,tree=6,width=3,length=3": (SEEDED, {"ngram", "eagle"}),
    "block:head=slots": (SEEDED, {"block"}),
    "block:head=seen,tree=6,width=3,length=3": (SEEDED, {"block"}),
    "ngram:length=3,tree=4+block:head=slots,tree=5,width=2,length=3": (SEEDED, {"ngram", "block"}),
    "layer_skip:layers=1": (SEEDED, {"layer_skip"}),
    "draft_model:model=same,length=3": (SEEDED, {"draft_model"}),
    "draft_model:model=like,length=3": (SEEDED, {"draft_model"}),
    "ngram:length=3,tree=4+draft_model:model=like,length=2": (SEEDED, {"ngram", "draft_model"}),
    "draft_model:model=like,length=2+eagle:head=it,tree=6,width=3,length=3": (SEEDED, {"eagle", "draft_model"}),
}


@pytest.mark.parametrize("spec", GUESSERS)
def test_rounds_write_what_plain_decoding_writes(loops, spec):
    """Greedy, and under a seed's own noise, of different lengths; the draft of each is counted as its own."""
    other, names = GUESSERS[spec]
    params = [SamplingParams(8), other]
    seqs = drain(engine(spec), sequences(params))
    assert outputs(seqs) == outputs(plain(params))
    assert (loops[0][0], len(loops[0][1][0])) == (2, 2)
    assert set(seqs[0].stats.drafted_by_drafter) == names
    assert {token.drafter for token in seqs[0].output} <= {*names, None}
    for seq in seqs:
        kept = sum(token.drafter is not None for token in seq.output)
        assert seq.stats.accepted == kept == sum(seq.stats.accepted_by_drafter.values())
        assert seq.stats.drafted == sum(seq.stats.drafted_by_drafter.values())


class Operations(TorchFunctionMode):
    """How many there were of torch."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("owner", "name"), [(HeadGuesses, "_show"), (DeviceLoop, "_send_texts")])
def test_what_the_first_round_reads_is_sent_in_one_copy_for_all(monkeypatch, owner, name):
    """A copy for each text kept the device waiting where there are many."""
    own, counts = getattr(owner, name), {}

    def counted(self, *given):
        with Operations() as operations:
            own(self, *given)
        counts.setdefault(texts, operations.count)

    monkeypatch.setattr(owner, name, counted)
    for texts in (2, 6):
        made = engine("ngram:length=3,tree=4+eagle:head=it,tree=6,width=3,length=3")
        seqs = sequences([SamplingParams(3)] * texts)
        for seq in seqs:
            made.add(seq)
        while texts not in counts:
            made.step()
        for seq in seqs:
            made.cancel(seq.id)
    assert counts[6] - counts[2] <= 4, counts  # no operation for each text but its length


@pytest.fixture
def rounds(monkeypatch):
    """Each round's text before it, and its draft."""
    found = []

    def seen(seqs, parts):
        for seq, part in zip(seqs, parts, strict=True):
            text = list(seq.tokens)
            for number, written in enumerate(part.tokens):
                found.append((list(text), part.round(number)))
                text += written

    watch(monkeypatch, seen)
    return found


def test_the_trees_of_rounds_are_those_of_the_host(rounds):
    """Of the same text and budget, round after round; and branches after the first are kept, too."""
    params, later = [SamplingParams(12)] * 2, 0
    assert outputs(drain(engine("ngram:length=3,tree=7"), sequences(params))) == outputs(plain(params))
    assert len(rounds) > 4
    for text, one in rounds:
        host = drafters.build("ngram:length=3,tree=7", BuildContext(target(), draft_model))
        (draft,) = host.propose([Sequence(0, text)], [7])
        assert (tuple(one.tokens), tuple(one.parents)) == (draft.tokens, draft.parents)
        first = next((node for node, parent in enumerate(one.parents[1:], 1) if parent < 0), len(one.tokens))
        later += any(node >= first for node in one.path)
    assert later


def test_beside_a_head_lookup_has_up_to_a_third_of_the_nodes_and_matches_alone(monkeypatch, rounds):
    """Common tokens are left to the head, and so are the nodes for which lookup finds nothing."""
    monkeypatch.setattr(base, "ROW_BUDGETS", ((1 << 30, 19),))
    params, begun, of_head = [SamplingParams(9)], set(), set()
    seqs = drain(engine("eagle:head=it,tree=24,width=4,length=3+ngram"), sequences(params))
    assert outputs(seqs) == outputs(plain(params))
    assert rounds
    for text, one in rounds:
        copied = [node for node, source in enumerate(one.sources) if source == "ngram"]
        assert len(copied) <= 6
        assert 12 <= len(one.sources) - len(copied) <= 18 - len(copied)
        of_head.add(len(one.sources) - len(copied))
        first = {one.tokens[node] for node in copied if one.parents[node] < 0}
        assert first <= {text[place] for place in range(1, len(text)) if text[place - 1] == text[-1]}
        begun |= first
    assert begun
    assert max(of_head) == 18


@pytest.mark.parametrize(
    "spec", ["eagle:head=it,length=2", "block:head=slots,length=2", "ngram:length=3,tree=4", "none"]
)
def test_sequences_with_adapters_are_written_without_the_host_too(loops, spec):
    """Two adapters and none in one batch, in rounds or by the target alone; each writes what it writes plainly."""
    params = [SamplingParams(8), SamplingParams(6), SamplingParams(7)]
    wanted = []
    for seq, own in zip(sequences(params), adapters()[1], strict=True):
        wanted.append(plainly(family("llama")[1], seq.tokens, seq.params, adapter=own, dice=Dice(seq.id)))
    assert outputs(wanted) != outputs(plain(params)), "the adapters change nothing"
    seqs = sequences(params)
    for seq, own in zip(seqs, adapters()[0], strict=True):
        seq.adapter = own
    made, passes = engine(spec), []
    made.model.on_pass = lambda: passes.append(1)  # before and after each pass that the host asks for
    try:
        drain(made, seqs)
    finally:
        made.model.on_pass = None
    assert outputs(seqs) == outputs(wanted)
    assert bool(loops) == (spec != "none")
    assert len(passes) <= 2 * 3, "the host looked at every token"


def test_a_batch_has_smaller_drafts(monkeypatch, loops):
    """Their rows are shared out, and a sequence's draft never outgrows its own."""
    monkeypatch.setattr(base, "ROW_BUDGETS", ((2, 16), (1 << 30, 8)))
    params = [SamplingParams(6)] * 3
    seqs = drain(engine("eagle:head=it,tree=16,width=3,length=3+ngram:length=4"), sequences(params))
    assert outputs(seqs) == outputs(plain(params))
    assert all(count == 3 and max(map(max, nodes)) == 1 for count, nodes in loops)


def test_an_evaluation_drafts_as_much_as_it_is_asked_for(monkeypatch, loops):
    """A table of tokens per pass is made with many prompts at once, and says what drafts of that size keep."""
    monkeypatch.setattr(base, "ROW_BUDGETS", ((1 << 30, 4),))
    made = engine(rounds=False)
    seqs = drain(made, sequences([SamplingParams(8), SamplingParams(8)]))
    assert not loops
    assert all(seq.stats.drafted > 2 * seq.stats.drafts for seq in seqs), "in rounds each would have one node"
    assert outputs(seqs) == outputs(plain([SamplingParams(8), SamplingParams(8)]))


@pytest.mark.parametrize("spec", ["eagle:head=it,length=2", "block:head=slots,length=2"])
def test_a_chain_that_a_loop_wrote_goes_on_outside_of_it(loops, spec):
    """Half of the text in rounds, then another request asks for log-probabilities, which the host must see."""
    params = [SamplingParams(9), SamplingParams(2, logprobs=1)]
    first, other = sequences(params)
    made = engine(spec)
    made.add(first)
    while not loops:
        made.step()
    made.add(other)
    while made.busy:
        made.step()
    assert outputs([first, other]) == outputs(plain(params))


def test_what_comes_after_the_end_is_not_committed(loops):
    (reference,) = plain([SamplingParams(8)])
    end = reference.tokens[-3]
    cut = reference.tokens[reference.prompt :].index(end) + 1
    (seq,) = drain(engine("eagle:head=it,length=2"), sequences([SamplingParams(8)], ends=frozenset({end})))
    assert loops
    assert seq.finish == "stop"
    assert seq.tokens[seq.prompt :] == reference.tokens[reference.prompt :][:cut]
    assert target().length(seq.id) == 0


@pytest.mark.parametrize(
    ("spec", "prediction", "looped"),
    [
        ("auto:head=it,length=2", (), True),
        ("auto:head=slots,length=2", (), True),
        ("auto:head=it,length=2", (1, 2), False),
        ("eagle:head=it+history", (), False),
    ],
)
def test_some_write_without_the_others_where_these_were_not_asked_for(spec, prediction, looped):
    made = engine(spec)
    (seq,) = sequences([SamplingParams(6)])
    seq.prediction = prediction
    made.add(seq)
    made.step()  # the prompt
    assert not made.stats.steps
    assert (made._pool.writer([seq], made.scheduler.widest) is not None) == looped
    made.cancel(seq.id)


def test_what_the_target_writes_by_itself_is_what_single_passes_choose():
    """Greedy, with the states that were shown, and under a seed's noise; in two parts."""
    model, layers, tokens, states = target(), (0, 1), [3], []
    drawn, dice, heat = [3], Dice(7), SamplingParams(temperature=0.9)
    for id in (101, 102, 103, 104):
        model.forward([Feed(id, [5, 7, 9])])
    for _ in range(3):
        (output,) = model.forward([Feed(101, tokens[-1:])], layers)
        states.append(output.hidden[0])
        tokens.append(int(output.logits.argmax()))
        (output,) = model.forward([Feed(104, drawn[-1:])])
        drawn.append(int(model.choose(output.logits, [heat], [dice], [3 + len(drawn)])))
    plan = itertools.chain([2, 1], itertools.repeat(0))  # the second part is under way when the first is read
    given = [102, 103], [3, 3], [None, dice], [SamplingParams(), heat]
    parts = list(model.write(*given, lambda unread: next(plan), lambda: None, layers))
    assert [len(part.tokens) for part in parts] == [2, 1]
    assert torch.cat([part.tokens for part in parts]).T.tolist() == [tokens[1:], drawn[1:]]
    assert torch.equal(torch.cat([part.hidden for part in parts])[:, 0], torch.stack(states))
    assert model.length(102) == 6
    for id in (101, 102, 103, 104):
        model.free(id)


@pytest.mark.parametrize("spec", ["eagle:head=it,length=2", "block:head=slots,length=2"])
def test_a_head_goes_on_after_plain_writing(loops, monkeypatch, spec):
    """Both ways by turns; the head has been shown what the target wrote by itself."""
    made, ways = engine(spec, DraftingPolicy()), itertools.cycle([True, False])
    monkeypatch.setattr(made.policy.trial, "drafts", lambda *batch: next(ways))
    monkeypatch.setattr(made.policy.trial, "prefers_plain", lambda *batch: False)
    monkeypatch.setattr(writer, "PART", 2)
    monkeypatch.setattr(unattended, "FIRST_PASSES", 2)
    seqs = drain(made, sequences([SamplingParams(16)]))
    assert outputs(seqs) == outputs(plain([SamplingParams(16)]))
    assert len(loops) > 1


class TestParts:
    """While the host looks at some rounds the device is at the next ones."""

    @pytest.fixture
    def asked(self, monkeypatch):
        """How many rounds were under way when more of them were asked for; parts of two rounds in a ring of three."""
        found, rounds = [], DeviceLoop.rounds

        def counted(self, seqs, wanted, unread=0):
            found.append(unread)
            return rounds(self, seqs, wanted, unread)

        monkeypatch.setattr(DeviceLoop, "rounds", counted)
        monkeypatch.setattr(writer, "PART", 2)
        monkeypatch.setattr(loop, "MOST_ROUNDS", 3)
        return found

    def test_parts_write_what_plain_decoding_writes(self, loops, asked):
        params = [SamplingParams(14), SamplingParams(9, 0.9, seed=5)]
        seqs = drain(engine("eagle:head=it,length=2"), sequences(params))
        assert outputs(seqs) == outputs(plain(params))
        assert len(loops) > 2
        assert 2 in asked
        assert target().free_pages == target()._pages.count - 1

    def test_an_end_while_the_next_rounds_are_under_way(self, loops, asked):
        params = [SamplingParams(14)] * 2
        one, two = plain(params)
        end = one.tokens[one.prompt + 4]
        seqs = sequences(params)
        seqs[0].ends = frozenset({end})
        drain(engine("eagle:head=it,length=2"), seqs)
        cut = one.tokens.index(end, one.prompt) + 1
        assert seqs[0].finish == "stop"
        assert seqs[0].tokens == one.tokens[:cut]
        assert seqs[1].tokens == two.tokens
        assert 2 in asked
        assert target().free_pages == target()._pages.count - 1

    @pytest.mark.parametrize("spec", ["eagle:head=it,tree=3,width=2,length=2", "draft_model:model=like,length=2"])
    def test_where_one_ends_the_others_go_on(self, loops, asked, monkeypatch, spec):
        """Without a new beginning, until half of the places are free; the rows of the one that ended are nobody's."""
        begun, begin, written = [], DeviceLoop._begin, []

        def seen(seqs, found):
            if len(seqs) == 4:
                written.append([len(tokens) for tokens in found[0].tokens])

        watch(monkeypatch, seen)
        monkeypatch.setattr(DeviceLoop, "_begin", lambda *given: (begun.append(len(given[1])), begin(*given))[1])
        params = [SamplingParams(2), SamplingParams(9), SamplingParams(9, 0.9, seed=5), SamplingParams(14)]
        seqs = drain(engine(spec), sequences(params))
        assert outputs(seqs) == outputs(plain(params))
        assert begun == [4, 1]
        assert (min(written[0]), max(written[-1])) == (1, 0)
        assert target().free_pages == target()._pages.count - 1

    def test_one_that_draws_ends_before_the_others(self, loops, asked):
        """Under rejection too, whose kernels look at the laws of all rows: the others' texts are the same."""
        later = [SamplingParams(8, 1.0)] * 3
        early, late = (
            drain(engine("eagle:head=it,length=2"), sequences([SamplingParams(count, 1.0), *later])) for count in (2, 8)
        )
        assert outputs(early)[1:] == outputs(late)[1:]
        assert outputs(early)[0] == outputs(late)[0][:2]

    def test_somebody_who_waits_gets_the_place_of_one_that_ends(self, loops, asked):
        made = engine("ngram:length=3,tree=3")
        made.scheduler.limits = replace(made.scheduler.limits, batch=3)
        params = [SamplingParams(2), *[SamplingParams(12)] * 3]
        seqs = drain(made, sequences(params))
        assert outputs(seqs) == outputs(plain(params))
        assert len(seqs[3].output) == 12

    def test_a_cancel_while_rounds_are_under_way(self, loops, asked):
        params = [SamplingParams(14)] * 2
        one, two = plain(params)
        made, seqs = engine("ngram:length=3,tree=3"), sequences(params)

        def cancel():
            if len(seqs[0].output) > 3:
                made.cancel(0)

        made.meanwhile = cancel
        drain(made, seqs)
        assert seqs[0].finish == "cancelled"
        assert seqs[0].tokens == one.tokens[: len(seqs[0].tokens)]
        assert seqs[1].tokens == two.tokens
        assert target().free_pages == target()._pages.count - 1

    def test_a_step_ends_where_somebody_waits(self, loops, asked):
        made = engine("ngram:length=3,tree=3")
        made.interrupted = lambda: True
        (seq,) = drain(made, sequences([SamplingParams(12)]))
        assert outputs([seq]) == outputs(plain([SamplingParams(12)]))
        assert len(loops) > 1
        assert set(asked) == {0}

    def test_no_memory_for_more_rounds_ends_the_step(self, loops, asked, monkeypatch):
        calls, reserve = [], target().reserve

        def scarce(ids, count):
            calls.append(count)
            return reserve(ids, count) if len(calls) % 2 else None

        monkeypatch.setattr(target(), "reserve", scarce)
        (seq,) = drain(engine("ngram:length=3,tree=3"), sequences([SamplingParams(12)]))
        assert outputs([seq]) == outputs(plain([SamplingParams(12)]))
        assert len(calls) > 2
