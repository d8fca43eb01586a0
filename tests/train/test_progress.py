"""Honest progress: what is held out is never learned from, the best weights are written, time is divided by both."""

import json
import sys
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outrider.cli import main, screen
from outrider.train import held_out, loop, progress, run, texts
from outrider.train.checkpoint import TrainingState
from outrider.train.data.batches import GrowingOrder
from outrider.train.data.conversations import WrittenText
from outrider.train.data.corpus import FOLDER, Corpus
from outrider.train.job import TimeBudget
from outrider.train.loop import LossLog
from outrider.train.progress import HISTORY, Progress, advice
from outrider.train.texts import writing_seconds

CPU = torch.device("cpu")


def corpus(talks, length=20, first=0):
    """One text of each conversation number; its tokens say which one."""
    return Corpus.of([WrittenText([first + talk] * length, 5, talk) for talk in talks])


class TestHeldOut:
    def test_whole_conversations_are_held_out_and_nothing_else_is_lost(self):
        given = corpus([0, 7, 7, 8, 17, 18, 7])
        held = held_out.choose(given, 10_000)
        assert held.talks.tolist() == [7, 7, 17, 7]
        assert held_out.without(given, held).talks.tolist() == [0, 8, 18]

    def test_it_is_bounded_and_the_rest_of_those_conversations_is_not_learned_from_either(self):
        given = corpus([7, 7, 7, 17, 3])
        held = held_out.choose(given, 30)
        assert held.talks.tolist() == [7, 7]
        assert held_out.without(given, held).talks.tolist() == [17, 3]

    def test_less_of_a_large_corpus_is_held_out(self, monkeypatch):
        monkeypatch.setattr(held_out, "SMALL", 100)
        assert held_out.choose(corpus(range(60)), 10_000).talks.tolist() == [7, 47]

    def test_texts_keep_their_tokens_when_some_are_picked(self):
        given = Corpus.of([WrittenText([n] * (n + 1), 0, n) for n in range(6)])
        some = given.pick(torch.tensor([4, 1]))
        assert some.tokens.tolist() == [4] * 5 + [1] * 2
        assert (some.lengths.tolist(), some.talks.tolist()) == ([5, 2], [4, 1])

    def test_tokens_per_pass_follow_from_hits(self):
        assert held_out.tokens_per_pass({"hit1": 0.5, "hit2": 0.5, "hit3": 1.0, "keep1": 0.9}) == 1 + 0.5 + 0.25 + 0.25


class TestGrowingOrder:
    def order(self, segments):
        order = GrowingOrder(64, 64, 3, CPU)
        for step, old, new in segments:
            order.add(step, old, new)
        return order

    def test_new_texts_come_by_turns_with_old_ones_then_all(self):
        none, old, new = corpus([]), corpus(range(1, 5)), corpus(range(100, 103))
        order = self.order([(0, none, old), (6, old, new)])
        seen = [sorted(set(order.batch(step).tokens.flatten().tolist()) - {0}) for step in range(6, 6 + 6 + 7)]
        assert sorted(chain.from_iterable(seen[:6:2])) == [100, 101, 102]
        assert len(set(chain.from_iterable(seen[1:6:2])) & {1, 2, 3, 4}) == 3
        assert sorted(chain.from_iterable(seen[6:])) == [1, 2, 3, 4, 100, 101, 102]

    def test_a_step_has_the_same_batch_however_it_is_reached(self):
        old, new = corpus(range(9)), corpus(range(100, 105))
        segments = [(0, corpus([]), old), (6, old, new)]
        one, two = self.order(segments), self.order(segments)
        walked = [one.batch(step).tokens for step in range(6, 40)]
        for step in (39, 6, 17):
            assert torch.equal(two.batch(step).tokens, walked[step - 6])


class TestDividingTheTime:
    def test_as_much_is_written_as_is_learned_often_enough(self):
        seconds = writing_seconds(100.0, 4000.0, 5000.0, 0.0, 0.0, 0.0)
        assert seconds == pytest.approx(100 * 5000 / (texts.REPEATS * 4000 + 5000))
        learned, written = 5000 * (100 - seconds), 4000 * seconds
        assert learned / written == pytest.approx(texts.REPEATS)

    def test_a_gap_calls_for_more_text_and_none_for_less(self):
        usual, gap, none = (writing_seconds(100.0, 9000.0, 9000.0, 50_000.0, 50_000.0, g) for g in (0.06, 0.09, 0.03))
        assert none < usual < gap

    def test_a_wide_gap_does_not_leave_too_few_steps(self):
        seconds = writing_seconds(100.0, 4000.0, 5000.0, 0.0, 0.0, 9.0)
        assert 5000 * (100 - seconds) / (4000 * seconds) == pytest.approx(texts.FEWEST_REPEATS)

    def test_it_is_never_negative_nor_nearly_everything(self):
        assert writing_seconds(100.0, 1000.0, 10.0, 1e9, 0.0, 0.5) == 0.0
        assert writing_seconds(100.0, 1.0, 1e9, 0.0, 0.0, 0.5) == texts.LARGEST_SHARE * 100


class Scripted:
    """Held-out figures as a test says."""

    def __init__(self, hits):
        self.hits = iter(hits)

    def measure(self, student):
        return {"loss": 1.0, "hit1": (hit := next(self.hits)), "keep1": hit / 2}


def looked(tmp_path, hits, learned):
    """A progress after a look at each of these held-out hits, while training has those."""
    (tmp_path / FOLDER).mkdir(exist_ok=True)
    state, log, student = TrainingState(), LossLog(tmp_path, 0), nn.Linear(2, 2)
    watched = Progress(state, Scripted(hits), torch.float32)
    for step, hit in enumerate(learned):
        log.add(step, {"loss": torch.tensor(1.0), "hit1": torch.tensor(hit)})
        state.step = step + 1
        with torch.no_grad():
            student.weight.fill_(step + 1)
        watched.look(student, log, 1.0)
    return watched, state, log, student


class TestProgress:
    def test_the_best_weights_are_written_and_the_newest_stay(self, tmp_path):
        watched, state, _, student = looked(tmp_path, [0.2, 0.6, 0.4], [0.5, 0.5, 0.5])
        assert (state.best_step, state.best) == (2, pytest.approx(1.45))
        with watched.best_weights(student):
            assert student.weight.tolist() == [[2.0, 2.0]] * 2
        assert student.weight.tolist() == [[3.0, 3.0]] * 2

    def test_held_out_figures_stand_on_the_line_of_their_step(self, tmp_path):
        _, _, log, _ = looked(tmp_path, [0.2, 0.6], [0.5, 0.5])
        assert [line["held_hit1"] for line in log.lines()] == [0.2, 0.6]
        assert log.recent() == {"loss": 1.0, "hit1": 0.5}

    def test_it_warns_once_when_texts_are_learned_by_heart(self, tmp_path):
        watched, *_ = looked(tmp_path, [0.3, 0.3], [0.9, 0.9])
        assert not watched.warning()  # too few looks to tell
        watched, *_ = looked(tmp_path, [0.3] * 4, [0.9] * 4)
        assert "1.90 tokens per pass" in (said := watched.warning())
        assert "by heart" in said
        assert not watched.warning()

    def test_one_bad_look_is_no_reason_to_warn(self, tmp_path):
        watched, *_ = looked(tmp_path, [0.8, 0.8, 0.1], [0.8] * 3)
        assert watched.gap() == 0.0
        assert not watched.warning()

    def test_the_line_has_both(self, tmp_path):
        watched, _, log, _ = looked(tmp_path, [0.25, 0.5], [0.5, 0.5])
        assert "hits 0.50, held out 0.50, about 1.50 and 1.50 tokens per pass" in watched.line(log)

    @pytest.mark.parametrize(
        ("learned", "held", "said"),
        [
            ([3.0] * 10, [1.5] * 10, "more text"),
            ([2.0] * 10, [1.0 + n / 10 for n in range(10)], "more steps"),
            ([2.0] * 10, [2.0] * 10, "larger head"),
        ],
    )
    def test_the_end_says_what_would_help(self, learned, held, said):
        history = [[n, 1.0, a, b, 0.0] for n, (a, b) in enumerate(zip(learned, held, strict=True))]
        assert said in advice({HISTORY: history}, 4.0)
        assert "nothing was held out" in advice({}, 4.0)


def test_without_a_terminal_there_is_a_line_every_so_often(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with screen.bar(plain=10.0) as show:
        for second in range(25):
            now[0] = float(second)
            show(f"at {second}", second, None)
    assert capsys.readouterr().err.split("\n") == ["at 0", "at 10", "at 20", ""]


def test_what_says_nothing_for_long_has_its_lines_too(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = screen.PlainLines(10.0)
    lines.tick()  # nothing was shown yet
    lines.show("loading", 0, None)
    for second in range(1, 25):
        now[0] = float(second)
        lines.tick()
    assert capsys.readouterr().err.split("\n") == ["loading", "loading (for 10 s)", "loading (for 20 s)", ""]


def test_a_run_by_time_writes_more_text_and_says_how_it_goes(calm_folder, tmp_path, capsys, monkeypatch):
    """The first texts are few, so that learning would repeat them: more are written while it learns."""
    monkeypatch.setattr(texts, "FIRST_SHARE", 0.02)
    monkeypatch.setattr(texts, "LEAST_SECONDS", 0.1)
    monkeypatch.setattr(texts, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(progress, "BEFORE_PLANNED", 5)
    monkeypatch.setattr(run, "TABLE_TOKENS", 12)
    monkeypatch.setattr(run, "LOOK_TOKENS", 12)
    about = tmp_path / "about.txt"
    about.write_text("the red fox\nthe sea and\n")
    out = tmp_path / "head"
    args = ["train", "block", "--model", calm_folder, "--out", out, "--minutes", "0.4", "--batch-tokens", "512"]
    more = ["--rate", "0.1", "--writers", "16", "--layers", "1", "--block", "3", "--about", about]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["outrider"])
        assert main(list(map(str, args + more))) == 0
    said = json.loads((out / "provenance.json").read_text())["figures"]
    data = json.loads((out / FOLDER / "data.json").read_text())
    state = json.loads(_metadata(out / FOLDER / "checkpoint.safetensors")["state"])
    assert len(state["segments"]) > 1
    assert state["segments"][-1][1] == data["waves"] > state["segments"][0][1]
    assert said["advice"]
    assert (out / "training.png").stat().st_size > 1000
    shown = capsys.readouterr().err
    assert shown.count("the target wrote") == len(state["segments"])
    if HISTORY in said:
        assert said[HISTORY][-1][0] == state["step"]
        assert "would help" in shown
    else:  # on a busy machine the first texts are too few
        assert "nothing was held out" in shown


def _metadata(path):
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return file.metadata()


class TestPlan:
    """A run by time has as many steps as fit, however fast they turn out to be."""

    def learned(self, monkeypatch, seconds_of_step, limit=400.0):
        """The steps that were made, how many were planned at last, and the share of the rate at the last one."""
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(loop.time, "monotonic", lambda: clock.now)
        state, shares = TrainingState(), []
        state.warm = 1
        found = loop.TrainingLoop.__new__(loop.TrainingLoop)
        found._device, found.seconds, found.later, found._by_time = CPU, 0.0, 0.0, False
        found._order = SimpleNamespace(batch=lambda step: None)

        def step(batch, state, log):
            clock.now += seconds_of_step(state.step)
            shares.append(loop.rate(state.step, state.warm, state.planned))
            state.step += 1

        found._step = step
        budget = TimeBudget(limit / 60.0, 0.0)
        list(found.run(state, None, budget, 0.0, 0.0))
        return state.step, state.planned, shares[-1]

    @pytest.mark.parametrize("later", [0.05, 0.1, 0.2], ids=["faster", "as planned", "slower"])
    def test_the_rate_has_fallen_when_the_time_is_over(self, monkeypatch, later):
        steps, planned, share = self.learned(monkeypatch, lambda step: 0.1 if step < 1000 else later)
        assert steps == planned
        assert share < 0.05
        whole = 1000 + 300.0 / later
        assert 0.85 * whole < steps <= whole + 1
