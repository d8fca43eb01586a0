"""What a token is worth in a batch that somebody waits for as a whole."""

import pytest
from tiny import Markov, drain

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter
from outrider.engine.cost import PassCost
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.engine.worth import of_tokens


def test_all_alike_where_all_end_at_the_same_step():
    assert of_tokens([40.0] * 4, True, 3.0, 6.0) == pytest.approx([1.0] * 4)


def test_who_ends_last_by_far_saves_whole_passes_and_the_others_a_row():
    """A pass of one takes 3 ms and a further row 1 ms; on average a token takes 1.5 ms of a pass of four."""
    assert of_tokens([10.0, 10.0, 200.0, 30.0], True, 3.0, 6.0) == pytest.approx(
        [1.0 / 1.5, 1.0 / 1.5, 3.0 / 1.5, 1.0 / 1.5], rel=1e-3
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps", [[1.0, 1.0], [3.0, 50.0, 49.0, 70.0], [1.0, 1000.0]])
def test_together_they_are_worth_a_pass(steps, known):
    assert sum(of_tokens(steps, known, 3.0, 6.0)) == pytest.approx(len(steps))


def test_where_texts_may_end_at_any_token_little_is_known():
    sure, unsure = (of_tokens([60.0, 90.0], known, 3.0, 4.0)[1] for known in (True, False))
    assert 1.0 < unsure < 1.2 < sure


class Watching(DraftingPolicy):
    def __init__(self):
        super().__init__(PassCost({1: 0.003, 2: 0.004, 4: 0.006}))
        self.seen = []

    def asks_free(self, seqs):
        super().asks_free(seqs)
        return True

    def worth(self, seqs, together):
        found = super().worth(seqs, together)
        self.seen.append((len(seqs), together, found))
        return found


class Silent(Drafter):
    """Is asked, and guesses nothing."""

    name, is_free, reports_acceptance = "silent", True, True

    def __init__(self):
        pass

    def propose(self, seqs, budgets):
        return super().propose(seqs, budgets)


def seen(calls, lengths, batch=4):
    policy = Watching()
    engine = Engine(Markov(seed=1), Silent(), Limits(batch=batch), policy)
    for id, (call, length) in enumerate(zip(calls, lengths, strict=True)):
        engine.add(Sequence(id, [1, 2], SamplingParams(max_tokens=length), call=call))
    drain(engine)
    return policy.seen


def test_rows_go_to_those_who_are_behind_where_one_call_waits_for_all():
    count, together, found = seen([7, 7, 7], [9, 9, 40])[2]
    assert (count, together) == (3, True)
    assert found[0] == found[1] < 1.0 < found[2]


@pytest.mark.parametrize("calls", [[7, 7, 8], [None, None, None]])
def test_all_tokens_count_alike_where_several_wait(calls):
    assert all(not together and set(found) == {1.0} for _, together, found in seen(calls, [9, 9, 40]) if len(found) > 1)


def test_all_tokens_count_alike_while_others_wait_for_a_place():
    found = seen([7] * 3, [9, 20, 40], batch=2)
    assert [together for count, together, _ in found if count == 2] == [False] * 9 + [True] * 11
