"""`outrider bench serve`: real runs with a tiny model, what clients measure, and the report from fixed numbers."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from serving import outrider_serve

from outrider.bench import serve as serving, serve_report as reports
from outrider.bench.load import Load
from outrider.bench.serve import LoadPlan, LoadResult, asked, body, parse_streams, speculative
from outrider.bench.workloads import BenchPrompt
from outrider.cli import main


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = {"copy": "the red fox and the blue fox", "count": "count the stars, one, two, three"}
    lines = [{"question_id": kind, "category": kind, "turns": [text]} for kind, text in texts.items()]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    """Where one listens that always drafts as much as it can: what is drafted does not depend on the clock."""
    file = tmp_path_factory.mktemp("server") / "c.yaml"
    file.write_text(f"model: {tiny_folder}\ndraft: ngram:min_n=1\nthreads: 1\nmax_batch: 4\npace: false\n")
    with outrider_serve("--config", file, "--log-level", "warning") as client:
        yield client.base_url


def outrider(capsys, *args):
    capsys.readouterr()
    code = main([str(arg) for arg in args])
    return code, *capsys.readouterr()


def reachable(url):
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname, place.port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_real_run_with_a_server_of_our_own(capsys, tiny_folder, prompts, tmp_path):
    args = ("--prompts", prompts, "--streams", "3,1", "--rounds", 2, "--max-tokens", 12, "--threads", 1)
    drafts, out = ("--draft", "ngram:min_n=1,length=4", "--draft", "layer_skip:layers=2"), tmp_path / "out"
    code, shown, _ = outrider(capsys, "bench", "serve", "--model", tiny_folder, *args, *drafts, "--output", out)
    assert code == 0
    assert "Throughput" in shown
    assert "Waiting, in milliseconds" in shown
    report = json.loads((out / "report.json").read_text())
    assert len(report["waves"]) == 2 * 2 * 3
    assert len(report["runs"]) == (2 + 3) * 2 * 3  # three streams want a third prompt: the first one again
    assert not any(run["error"] for run in report["runs"])
    rows = {(row["streams"], row["mode"]): row for row in report["summary"]["levels"]}
    assert list(rows) == [(n, mode) for n in (1, 3) for mode in ("none", *drafts[1::2])]
    for row in rows.values():
        assert row["as_alone"] == row["answers"]
        assert not row["void"]
        assert row["tokens_per_second"] > 0
        assert row["first_ms"]["p50"] > 0
    assert rows[1, "none"]["acceptance_rate"] is None  # off is off
    assert "| 1 | none |" in (out / "report.md").read_text()
    assert not reachable(re.search(r"http\S+", (out / "server.log").read_text())[0])  # it ended with the benchmark


def test_a_server_that_runs_already_with_luck_and_seeds(capsys, server, prompts, tmp_path):
    args = ("--prompts", prompts, "--streams", "2", "--rounds", 1, "--max-tokens", 12, "--temperature", 0.9)
    drafts, out = ("--draft", "ngram", "--draft", "layer_skip:layers=2"), tmp_path / "out"
    code, _, _ = outrider(capsys, "bench", "serve", "--url", server + "/", *args, *drafts, "--output", out)
    assert code == 0
    report = json.loads((out / "report.json").read_text())
    plain, *drafted = report["summary"]["levels"]
    assert [row["mode"] for row in (plain, *drafted)] == ["none", *drafts[1::2]]
    assert all((row["void"], row["as_alone"]) == (False, 2) for row in drafted)
    assert drafted[1]["acceptance_rate"] is not None
    assert "temperature 0.9 with a seed for each prompt" in (out / "report.md").read_text()
    assert reachable(server)


def test_what_the_server_refuses_is_said_before_anything_is_measured(capsys, server, prompts, tmp_path):
    args = ("--url", server, "--prompts", prompts, "--output", tmp_path / "out")
    code, _, err = outrider(capsys, "bench", "serve", *args, "--model", "nobody")
    assert code == 2
    assert "no model 'nobody' is launched" in err
    code, _, err = outrider(capsys, "bench", "serve", *args, "--draft", "draft_model:model=/etc")
    assert code == 2
    assert "the server refused a request with the drafter draft_model:model=/etc" in err


def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing_running(tiny_folder, prompts, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "outrider", "bench", "serve", "--model", str(tiny_folder), "--streams", "2"]
    command += ["--prompts", str(prompts), "--rounds", "100000", "--max-tokens", "12", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--output", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        log = out / "server.log"
        wait_for(lambda: log.exists() and "listening" in log.read_text(), 60)
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted: this is a partial report." in shown
    report = json.loads((out / "report.json").read_text())
    assert report["interrupted"]
    assert {run["error"] for run in report["runs"]} <= {""}  # only waves that were complete
    assert not reachable(re.search(r"http\S+", log.read_text())[0])


def wait_for(what, seconds):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_model_that_cannot_be_served_is_one_line(capsys, tmp_path):
    code, _, err = outrider(capsys, "bench", "serve", "--model", "no-such-model", "--output", tmp_path / "out")
    assert code == 2
    assert "no-such-model" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--streams", "0"], "--streams takes whole numbers from 1 to 1024"),
        (["--streams", "1,,2"], "--streams takes whole numbers"),
        (["--streams", "99999"], "--streams takes whole numbers"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--seconds", "-1"], "seconds must be at least 0"),
        (["--max-tokens", "1"], "max_tokens must be at least 2"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--timeout", "0"], "timeout must be more than 0"),
        (["--draft", "magic"], "unknown drafter 'magic'"),
        (["--kind", "poems"], "unknown kind 'poems'"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--prompts", "no-such-file.jsonl"], "cannot be read"),
        (["--url", "somewhere"], "'somewhere' is no address of a server"),
        (["--url", "http://host:port"], "is no address of a server"),
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--output", "/proc/nowhere"], "cannot write to the output folder"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(capsys, tmp_path, monkeypatch, args, why):
    monkeypatch.chdir(tmp_path)
    code, out, err = outrider(capsys, "bench", "serve", *args)
    assert (code, out) == (2, "")
    assert why in err
    assert err.count("\n") == 1


def test_options_of_bench_do_not_vanish_before_serve(capsys):
    code, _, err = outrider(capsys, "bench", "--rounds", 3, "serve")
    assert code == 2
    assert "--rounds stands before serve; write it after" in err


def test_the_library_takes_turns_with_the_server(capsys, tiny_folder, prompts, tmp_path):
    args = (
        "--prompts",
        prompts,
        "--streams",
        "1,3",
        "--rounds",
        2,
        "--max-tokens",
        6,
        "--threads",
        1,
        "--draft",
        "ngram",
    )
    more = ("--device", "cpu", "--library", "--ignore-eos", "--warm-up", "--output", tmp_path)
    code, shown, _ = outrider(capsys, "bench", "serve", "--model", tiny_folder, *args, *more)
    assert code == 0
    assert "The same calls without a server" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(row["streams"], row["mode"]) for row in report["library"]] == [
        (1, "none"), (1, "ngram"), (3, "none"), (3, "ngram"),
    ]  # fmt: skip
    for row in report["library"]:
        assert row["share"]["least"] <= row["share"]["value"] <= row["share"]["most"]
    assert {wave["round"] for wave in report["waves"]} == {1, 2}  # the first one did not count
    assert {wave["tokens"] for wave in report["waves"]} == {2 * 6, 3 * 6}  # no end token cut an answer short
    assert report["settings"]["device"] == "cpu"
    assert "share of it that the server keeps" in " ".join(shown.split())
    shares = re.findall(r"^\| (\d+) \| (\S+) \| [\d,.]+ \| [\d.]+ \[", (tmp_path / "report.md").read_text(), re.M)
    assert shares == [("1", "none"), ("1", "ngram"), ("3", "none"), ("3", "ngram")]


def test_server_and_library_load_beside_each_other(tiny_folder, tmp_path):
    """As on a GPU."""
    shown, own = [], {"device": "cpu"}
    made = plan(model=str(tiny_folder), output=tmp_path, library=True, ignore_eos=True, own=own)
    with ExitStack() as opened:
        show = lambda what, *_: shown.append(what)  # noqa: E731
        server, calls = serving.open_all(made, opened, show, together=True)
        assert reachable(server.url)
        assert list(calls) == ["none", "ngram"]
        assert calls["ngram"].wave(["the red fox"], 1, 4, 60.0)[0] == 4
    assert not reachable(server.url)
    assert [what.partition(": ")[2] for what in shown] == ["a server, the library with none, the library with ngram"]


def test_a_run_is_bounded_in_time_and_has_some_of_everything(capsys, tiny_folder, prompts, tmp_path):
    """The time is up while it loads: nothing is asked. Rounds go over all numbers of streams."""
    args = ("--model", tiny_folder, "--prompts", prompts, "--streams", "1,2", "--max-tokens", 4, "--threads", 1)
    more = ("--draft", "ngram", "--output", tmp_path)
    code, shown, _ = outrider(capsys, "bench", "serve", *args, *more, "--seconds", 0.01)
    assert code == 0
    assert "0 of 6 rounds of a number of streams: the time was up" in shown
    assert json.loads((tmp_path / "report.json").read_text())["waves"] == []


def test_rounds_go_over_all_numbers_of_streams(capsys, server, prompts, tmp_path):
    args = ("--url", server, "--prompts", prompts, "--streams", "2,1", "--rounds", 2, "--max-tokens", 4)
    code, _, _ = outrider(capsys, "bench", "serve", *args, "--draft", "ngram", "--output", tmp_path)
    assert code == 0
    waves = json.loads((tmp_path / "report.json").read_text())["waves"]
    assert [(wave["round"], wave["streams"]) for wave in waves[::2]] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_the_share_of_the_library_is_of_one_round():
    def wave(round, seconds, errors=0):
        return {"streams": 1, "mode": "none", "round": round, "tokens": 10, "seconds": seconds, "errors": errors}

    served = [wave(1, 2.0), wave(2, 10.0), wave(3, 4.0), wave(4, 1.0, errors=1)]
    library = [wave(1, 1.0), wave(2, 9.0), wave(3, 2.0), wave(4, 1.0)]
    [row] = reports._library(served, library)
    assert row["share"] == pytest.approx({"value": 0.5, "least": 0.5, "most": 0.9})


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--library",), "with --ignore-eos"),
        (("--library", "--ignore-eos", "--temperature", "1"), "greedy"),
        (("--url", "http://127.0.0.1:1", "--device", "cpu"), "device: only for a server of our own"),
    ],
)
def test_what_cannot_be_beside_the_library(capsys, args, why, tmp_path):
    code, _, err = outrider(capsys, "bench", "serve", *args, "--output", tmp_path)
    assert code == 2
    assert why in " ".join(err.split())


# What a request carries


def plan(**changes):
    prompts = (BenchPrompt("a", "copy", "A"), BenchPrompt("b", "copy", "B"))
    said = dict(model="m", url="", key="", drafts=("ngram",), streams=(1,), prompts=prompts, rounds=1, max_tokens=8)
    said |= dict(temperature=0.0, threads=1, seed=7, timeout=1.0, output=None)
    return LoadPlan(**said | changes)


def test_streams_are_counted_up():
    assert parse_streams("16,1,4,4") == (1, 4, 16)


def test_a_drafter_is_written_as_a_request_says_it():
    assert speculative("none") == {"off": True}
    assert speculative("ngram") == {"method": "ngram"}
    assert speculative("ngram:length=8, store=adaptive") == {"method": "ngram", "length": 8, "store": "adaptive"}


def test_every_stream_has_a_prompt_and_every_prompt_a_turn():
    assert asked(plan(), 1) == [0, 1]
    assert asked(plan(), 5) == [0, 1, 0, 1, 0]


def test_a_seed_for_each_prompt_where_luck_plays():
    assert "seed" not in body(plan(), "none", 1)
    assert body(plan(temperature=0.5), "none", 1)["seed"] == body(plan(temperature=0.5), "ngram", 1)["seed"] == 8
    assert body(plan(), "ngram", 0)["model"] == ""
    assert body(plan(url="http://h"), "ngram", 0)["model"] == "m"


# What a client measures, against a socket that says what it is told


def piece(text):
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 5}, "metrics": {"drafted": 4, "accepted": 3}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def _read_request(connection):
    """All of it: a socket that is closed with something unread resets the connection."""
    said = b""
    while b"\r\n\r\n" not in said or len(said.split(b"\r\n\r\n", 1)[1]) < int(LENGTH.search(said)[1]):
        said += connection.recv(65536)


LENGTH = re.compile(rb"(?i)content-length: (\d+)")


@pytest.fixture
def speaker():
    """An address that answers one request with these parts; a number is a pause."""
    listeners = []

    def speak(*parts):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer():
            with listener.accept()[0] as connection:
                _read_request(connection)
                for part in parts:
                    if isinstance(part, float):
                        time.sleep(part)
                    else:
                        connection.sendall(part)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield speak
    for listener in listeners:
        listener.close()


def test_times_begin_with_the_first_text(speaker):
    url = speaker(HEAD, piece(""), 0.15, piece("a"), 0.1, piece("bc"), 0.1, piece("d"), USAGE, b"data: [DONE]\n\n")
    answer = Load(url, timeout=5).ask({})
    assert (answer.text, answer.tokens, answer.error) == ("abcd", 5, "")
    assert answer.stats == {"drafted": 4, "accepted": 3}
    assert 0.14 < answer.first_s < 2.0
    assert 0.19 < answer.decode_s < 2.0
    assert len(answer.pauses) == 2
    assert sum(answer.pauses) == pytest.approx(answer.decode_s)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([HEAD, piece("a")], "the stream ended before its end"),
        ([HEAD, piece("a"), b'data: {"error": {"message": "the worker died"}}\n\n'], "the worker died"),
        ([b'HTTP/1.1 429 Busy\r\nconnection: close\r\n\r\n{"error": {"message": "full"}}'], "status 429: full"),
        ([b"HTTP/1.1 500 No\r\nconnection: close\r\n\r\noops"], "status 500: oops"),
        ([HEAD, b"data: {broken\n\n", b"data: [DONE]\n\n"], "JSONDecodeError"),
        ([b""], "RemoteDisconnected"),
    ],
)
def test_what_goes_wrong_is_in_the_answer(speaker, parts, why):
    assert why in Load(speaker(*parts), timeout=5).ask({}).error


def test_a_silent_server_counts_as_lost(speaker):
    assert "timed out" in Load(speaker(HEAD, 1.0), timeout=0.2).ask({}).error


def test_letting_go_ends_a_wave(speaker):
    load = Load(speaker(HEAD, piece("a"), 20.0), timeout=30)
    threading.Timer(0.3, load.close).start()
    begin = time.monotonic()
    assert load.ask({}).error
    assert time.monotonic() - begin < 15


# The report


def run(mode="none", streams=1, prompt="a", round=1, **changes):
    said = dict(streams=streams, mode=mode, prompt=prompt, question=prompt.split(" #")[0], kind="copy", round=round)
    said |= dict(tokens=21, first_s=0.1, decode_s=0.2, pauses=[0.01], text=f"text of {prompt[0]}", stats={}, error="")
    return said | changes


def wave(mode="none", streams=1, round=1, seconds=2.0, **changes):
    return dict(streams=streams, mode=mode, round=round, tokens=100, seconds=seconds, errors=0) | changes


def test_throughput_is_compared_round_by_round():
    waves = [wave(round=1), wave(round=2, seconds=4.0)]
    waves += [wave("ngram", round=1, seconds=1.0), wave("ngram", round=2, seconds=2.0)]
    said = reports.summarise(waves, [run(), run("ngram")], ["none", "ngram"])
    plain, drafted = said["levels"]
    assert plain["tokens_per_second"] == pytest.approx(35.36, abs=0.01)  # the geometric mean of 50 and 25
    assert drafted["ratio"]["value"] == pytest.approx(2.0)
    assert (drafted["ratio"]["low"], drafted["ratio"]["high"]) == (pytest.approx(2.0), pytest.approx(2.0))


def test_a_wave_that_lost_requests_says_nothing_about_speed():
    waves = [wave(), wave("ngram", errors=1, seconds=0.1)]
    said = reports.summarise(waves, [run(), run("ngram", error="gone", text="")], ["none", "ngram"])
    assert said["levels"][1]["ratio"] is None
    assert said["levels"][1]["errors"] == 1


def test_another_text_voids_the_speed_up():
    runs = [run(), run("ngram", text="other"), run(streams=4), run("ngram", streams=4)]
    waves = [wave(), wave("ngram"), wave(streams=4), wave("ngram", streams=4)]
    said = reports.summarise(waves, runs, ["none", "ngram"])
    assert [row["void"] for row in said["levels"]] == [False, True, False, False]
    assert [row["as_alone"] for row in said["levels"]] == [1, 0, 1, 1]
    assert said["by_kind"][0]["void"]


def test_a_text_that_changes_with_company_is_noted():
    runs = [run(), run(streams=4, text="other"), run(streams=4, prompt="a #2")]
    outcome = LoadResult()
    report = reports.assemble(plan(streams=(1, 4)), outcome, "outrider bench serve")
    report["summary"] = reports.summarise([wave(), wave(streams=4)], runs, ["none"])
    assert reports.notes(report) == ["4 at once, none: 1 of 2 texts are not those of the same prompt run alone."]


def test_alone_is_with_the_fewest_streams_in_whatever_order_they_ran():
    runs = [run(streams=4, text="crowded"), run(streams=1, round=2, text="later"), run(streams=1)]
    crowded, alone = reports.summarise([wave(streams=4), wave(round=1), wave(round=2)], runs, ["none"])["levels"]
    assert (crowded["as_alone"], crowded["answers"]) == (0, 1)
    assert (alone["as_alone"], alone["answers"]) == (1, 2)


def test_waiting_is_told_in_milliseconds():
    runs = [run(first_s=second, pauses=[0.01] * 98 + [0.5, 0.6]) for second in (0.1, 0.2, 0.3)]
    (row,) = reports.summarise([wave()], runs, ["none"])["levels"]
    assert row["first_ms"]["p50"] == 200
    assert row["token_ms"]["p50"] == 10  # 0.2 s for the 20 tokens after the first
    assert row["pause_ms"]["p50"] == 10
    assert row["pause_ms"]["p99"] > 490


def test_nothing_measured_is_still_a_report(tmp_path):
    report = reports.assemble(plan(), LoadResult(interrupted=True), "outrider bench serve")
    reports.write(report, tmp_path)
    assert "partial report" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["interrupted"]
