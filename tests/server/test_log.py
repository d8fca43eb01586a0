"""The server's log: JSON, and no flood of lines that are all the same."""

import contextlib
import json
import logging
import resource
import socket
import subprocess
import sys

import pytest

from outrider.server.log import BURST, KINDS, WINDOW, JsonFormatter, RepeatFilter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def written(clock):
    """Write lines with it; what came through."""
    kept, repeats = [], RepeatFilter(clock)

    def write(message, **fields):
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), None)
        record.fields = fields
        if repeats.filter(record):
            kept.append(json.loads(JsonFormatter().format(record)))
        return kept

    return write


def test_equal_lines_are_written_a_few_times_and_counted(written, clock):
    for _ in range(BURST + 90):
        kept = written("no descriptor left")
    assert len(kept) == BURST
    assert [line.get("repeats") for line in kept] == [None] * (BURST - 1) + ["equal lines are left out for 10 s"]
    clock.now += WINDOW
    kept = written("no descriptor left")
    assert (len(kept), kept[-1]["repeats"]) == (BURST + 1, "90 equal lines were left out")


def test_lines_that_differ_are_all_written(written):
    for number in range(3 * BURST):
        written("request", request_id=number)
        written("request", request_id=-number, path=f"/{number}")
    assert len(written("end")) == 6 * BURST + 1


def test_lines_of_other_libraries_are_equal_but_for_numbers(clock):
    repeats = RepeatFilter(clock)
    lines = [f"Exception in callback f() at {number}\nhandle: <when={number}>" for number in range(3 * BURST)]
    records = [logging.LogRecord("asyncio", logging.ERROR, "", 0, line, (), None) for line in lines]
    assert sum(map(repeats.filter, records)) == BURST


def test_what_is_remembered_is_bounded(clock):
    repeats = RepeatFilter(clock)
    for number in range(3 * KINDS):
        record = logging.LogRecord("x", logging.INFO, "", 0, "request", (), None)
        record.fields = {"request_id": number}
        assert repeats.filter(record)
    assert len(repeats._seen) <= KINDS


def test_connections_without_a_descriptor_do_not_flood_the_log():
    """A server that may open few files, and more clients than that: they wait, and the log stays short."""
    code = (
        "from outrider.server.log import configure\n"
        "from outrider.server.run import ServePlan, run\n"
        "configure()\n"
        "run(ServePlan(port=0, ready=lambda url: print(url, flush=True)))\n"
    )
    limited = (resource.RLIMIT_NOFILE, (48, 48))
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(*limited),
    ) as server:
        port = int(server.stdout.readline().rpartition(":")[2])
        with contextlib.ExitStack() as clients:
            for _ in range(80):
                clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            first = server.stderr.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(2.0)  # one more round of accepting
        server.terminate()
        lines = [json.loads(line) for line in (first, *server.stderr)]
    assert any("out of system resource" in line["event"] for line in lines)
    assert len(lines) < 50
