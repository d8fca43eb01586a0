"""When a pass fails: what a backend survives, and what ends it for good. And how it tells that its engine steps."""

import threading

import pytest
import torch
from letters import Slow, backend
from tiny import Markov

from outrider.backends.base import BackendStopped, StepClock
from outrider.backends.faults import REPEATS, FaultCounter
from outrider.core.errors import OutriderError
from outrider.core.request import Request
from outrider.core.sampling import SamplingParams

LOST = torch.AcceleratorError("CUDA error: device-side assert triggered")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Failing(Markov):
    """A model whose passes fail with what it is told."""

    error: Exception | None = None
    freed = 0

    def forward(self, feeds, layers=()):
        if self.error is not None:
            raise self.error
        return super().forward(feeds, layers)

    def free(self, id):
        self.freed += 1
        super().free(id)


def ask(local, tokens=4):
    return local.submit(Request("ab", params=SamplingParams(max_tokens=tokens)))


class TestWhatEndsIt:
    @pytest.mark.parametrize("error", [LOST, RuntimeError("CUDA error: unspecified launch failure")])
    def test_a_lost_device(self, error):
        """Those that run and those that wait hear why; nobody touches the device again; the next one is refused."""
        model = Slow()
        local = backend("none", model=model, batch=1)
        running, waiting = ask(local), ask(local)
        model.forward = lambda feeds, layers=(): model.go.acquire() and _raise(error)
        model.go.release(2)
        for stream in (running, waiting):
            assert str(error) in stream.result().error
        assert str(error) in local.load().fault
        with pytest.raises(BackendStopped, match=r"has stopped .*CUDA error"):
            ask(local)
        local.close()

    def test_a_request_that_comes_in_while_it_ends(self):
        """It is in the inbox when the last pass fails: it must not wait for ever."""
        model = Slow()
        local = backend("none", model=model)
        model.forward = lambda feeds, layers=(): model.go.acquire() and _raise(LOST)
        first = ask(local)
        while not local.load().running:
            threading.Event().wait(0.001)
        late = ask(local)
        model.go.release()
        assert "CUDA error" in first.result().error
        with pytest.raises(BackendStopped, match="CUDA error"):
            late.result()
        assert not local._users.get("")
        local.close()

    def test_one_that_is_closed_meanwhile(self):
        """Once the thread waited for what `close` held, and `close` for the thread."""
        model = Slow()
        local = backend("none", model=model)
        model.forward = lambda feeds, layers=(): model.go.acquire() and _raise(LOST)
        stream = ask(local)
        while not local.load().running:
            threading.Event().wait(0.001)
        closing = threading.Thread(target=local.close, daemon=True)
        closing.start()
        while local._inbox.empty():
            threading.Event().wait(0.001)
        model.go.release()
        assert "CUDA error" in stream.result().error
        closing.join(timeout=10)
        assert not closing.is_alive()
        with pytest.raises(BackendStopped, match="CUDA error"):
            ask(local)

    def test_memory_that_runs_out_in_every_pass(self):
        model = Failing(seed=3)
        local = backend("none", model=model)
        model.error = FULL
        for _ in range(REPEATS):
            assert not local.load().fault
            assert "out of memory" in ask(local).result().error
        assert "out of memory" in local.load().fault
        local.close()

    def test_sequences_that_cannot_be_freed(self):
        """Once this ended the thread without a word, and every later request waited for ever."""
        model = Failing(seed=3)
        local = backend("none", model=model)
        model.error, model.free = ValueError("a pass"), lambda id: _raise(ValueError("no way"))
        assert "a pass" in ask(local).result().error
        assert "could not be freed: ValueError: no way" in local.load().fault
        local.close()


class Writes:
    """What writes rounds without the host, and fails at the first one. A lost device fails in every later pass, too."""

    def __init__(self, model, error):
        self.model, self.error, self.begun = model, error, 0

    def serves(self, seqs, budget):
        return True

    def can(self, seqs):
        return True

    def write(self, seqs, wait, going):
        self.begun += 1
        self.model.error = self.error if self.error is LOST else None
        raise self.error
        yield


class TestRoundsWithoutTheHost:
    def writing(self, error):
        model = Failing(seed=3)
        local = backend("ngram", model=model)
        [drafter] = local.engine.drafters.values()
        drafter.writer = Writes(model, error)
        return local, drafter.writer

    def test_a_device_that_is_lost_in_one(self):
        """A drafter that fails is left out, but this is no fault of a drafter's."""
        local, writer = self.writing(LOST)
        assert str(LOST) in ask(local).result().error
        assert writer.begun == 1
        assert str(LOST) in local.load().fault
        with pytest.raises(BackendStopped, match="CUDA error"):
            ask(local)
        local.close()

    def test_memory_that_runs_out_in_one(self):
        """The sequence goes on step by step, to the same text; so does the next one."""
        plain = backend("none", model=Failing(seed=3))
        local, writer = self.writing(FULL)
        for _ in range(2):
            assert ask(local, 8).result().text == ask(plain, 8).result().text
        assert writer.begun == 2  # once for each sequence
        assert not local.load().fault
        local.close()
        plain.close()


class TestWhatItSurvives:
    @pytest.mark.parametrize("error", [FULL, MemoryError("none left"), ValueError("cannot convert float NaN")])
    def test_one_pass_that_fails(self, error, caplog):
        model = Failing(seed=3)
        local = backend("none", model=model)
        model.error = error
        assert str(error) in ask(local).result().error
        model.error = None
        assert ask(local).result().finish_reason == "length"
        assert model.freed == 2
        assert "a pass failed" in caplog.text  # with its trace
        assert caplog.records[-1].exc_info[1] is error
        local.close()

    def test_any_number_of_passes_that_fail_for_their_requests(self):
        counter = FaultCounter()
        assert not any(counter.failed(ValueError("NaN")) for _ in range(10 * REPEATS))

    def test_memory_that_runs_out_now_and_then(self):
        counter = FaultCounter()
        for _ in range(3 * REPEATS):
            assert not counter.failed(FULL)
            counter.succeeded()

    def test_memory_that_runs_out_is_known_behind_the_words_for_the_user(self):
        error = OutriderError("a pass of 512 rows does not fit: lower --max-batch")
        error.__cause__ = FULL
        counter = FaultCounter()
        assert [counter.failed(error) for _ in range(REPEATS)] == [False] * (REPEATS - 1) + [True]


def _raise(error):
    raise error


class TestTheEnginesClock:
    def test_it_counts_from_the_end_of_a_step(self):
        now = iter([10.0, 12.0, 17.0, 18.0, 20.0, 30.0]).__next__
        clock = StepClock(now)
        assert (clock.waited, clock.slowest) == (0.0, 0.0)
        clock.tick()  # at 10: something to do
        clock.tick()  # at 12: a step has ended
        assert (clock.waited, clock.slowest) == (5.0, 2.0)  # at 17
        clock.tick()  # at 18
        assert clock.slowest == 6.0
        clock.stop()
        assert clock.waited == 0.0
        clock.tick()  # at 20: the idle time is no step
        assert (clock.slowest, clock.waited) == (6.0, 10.0)

    def test_a_backend_tells_how_long_its_step_takes(self):
        model = Slow()
        local = backend("none", model=model)
        assert (local.load().since_step, local.load().slowest_step) == (0.0, 0.0)
        stream = ask(local, tokens=2)
        while not local.load().running:
            threading.Event().wait(0.001)
        before = local.load().since_step
        assert 0.0 < before < local.load().since_step  # it grows while the pass hangs
        assert local.load().slowest_step == 0.0
        model.go.release(2)
        stream.result()
        while local.load().since_step:
            threading.Event().wait(0.001)
        assert local.load().slowest_step >= before
        local.close()
