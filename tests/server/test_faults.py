"""A worker whose engine cannot go on: it hangs, or its device is lost. Clients hear of it, and another one starts."""

import harmful_drafter as plugin
import pytest

from outrider.backends.base import BackendLoad
from outrider.server.fleet.limits import WorkerLimits
from outrider.settings import Settings


@pytest.fixture
def harmful(serve, quick, tmp_path, monkeypatch):
    """A server whose model drafts with a plug-in that hangs, or loses the device, when it is asked to."""
    plugin.install(tmp_path, monkeypatch)
    server = serve(limits=WorkerLimits(step=1.0, first_wait=3.0))
    server.launch(quick, "harmful", uid="tiny")
    assert ask(server, 2).status_code == 200
    return server


def ask(server, tokens):
    body = {"model": "tiny", "prompt": "the red fox", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body)


def told(server):
    """What /health and /metrics say while the worker is gone; it then comes back and answers."""
    server.wait_for(lambda: server.get("/health").json()["models"]["tiny"]["reason"])
    health = server.get("/health")
    assert (health.status_code, health.json()["models"]["tiny"]["status"]) == (503, "restarting")
    assert 'outrider_worker_up{model_name="tiny"} 0.0' in server.get("/metrics").text
    server.wait_for(lambda: server.get("/health").status_code == 200)
    assert server.fleet.describe("tiny").restarts == 1
    assert ask(server, 2).status_code == 200
    return health.json()["models"]["tiny"]["reason"]


def test_an_engine_that_hangs_is_started_again(harmful):
    """Its process still sends frames: only its own steps tell."""
    answer = ask(harmful, plugin.HANG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "no step has ended for" in answer.json()["error"]["message"]
    assert "no step has ended for" in told(harmful)


def test_a_lost_device_ends_the_worker(harmful):
    answer = ask(harmful, plugin.LOSE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "worker_error")
    assert "CUDA error: an illegal memory access" in answer.json()["error"]["message"]
    assert "exit code 1: the pass failed: AcceleratorError: CUDA error" in told(harmful)


def test_memory_that_runs_out_again_and_again_ends_the_worker(harmful):
    for _ in range(2):
        assert ask(harmful, plugin.FILL).status_code == 500
    assert ask(harmful, 2).status_code == 200  # a pass succeeds: it counts from the beginning
    for _ in range(3):
        assert harmful.get("/health").status_code == 200
        assert ask(harmful, plugin.FILL).status_code == 500
    assert "CUDA out of memory" in told(harmful)


class TestLimits:
    LIMITS = WorkerLimits(step=10.0, first_step=100.0, vllm_step=300.0)

    def test_a_worker_that_dies_again_and_again_is_started_ever_later(self):
        limits, waits = WorkerLimits(first_wait=0.5, longest_wait=3.0, steady=60.0), [0.0]
        for lived in (0.0, 1.0, 59.0, 2.0, 61.0, 0.0):
            waits.append(limits.next_wait(waits[-1], lived))
        assert waits[1:] == [0.5, 1.0, 2.0, 3.0, 0.5, 1.0]

    @pytest.mark.parametrize(
        ("since", "slowest", "hangs"),
        [
            (0.0, 0.0, False),  # idle
            (99.0, 0.0, False),  # the first step may compile
            (101.0, 0.0, True),
            (9.0, 0.1, False),
            (11.0, 0.1, True),
            (11.0, 1.0, False),  # steps of a second each: twenty are no surprise
            (21.0, 1.0, True),
        ],
    )
    def test_how_long_a_step_may_take(self, since, slowest, hangs):
        why = self.LIMITS.overdue(BackendLoad(1, since_step=since, slowest_step=slowest), Settings())
        assert bool(why) == hangs

    @pytest.mark.parametrize(
        ("settings", "since", "hangs"),
        [
            (Settings(piece=64), 9.0, False),
            (Settings(piece=64), 11.0, True),
            (Settings(piece=8192), 159.0, False),  # sixteen times the tokens of the usual chunk
            (Settings(piece=8192), 161.0, True),
            (Settings(backend="vllm"), 299.0, False),  # a prompt is read, and nothing tells of its steps
            (Settings(backend="vllm"), 301.0, True),
        ],
    )
    @pytest.mark.parametrize("slowest", [0.0, 0.1])
    def test_it_depends_on_what_a_step_is(self, settings, since, hangs, slowest):
        """`slowest` 0: the first step, which has a limit of its own; the longer one counts."""
        why = self.LIMITS.overdue(BackendLoad(1, since_step=since, slowest_step=slowest), settings)
        assert bool(why) == (hangs and (slowest > 0.0 or since > 100.0))
