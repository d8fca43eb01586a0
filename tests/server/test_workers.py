"""Worker processes: what goes over the wire, and what happens when one dies."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest

from outrider import LLM, OutriderError, SamplingParams
from outrider.backends.base import BackendBusy, BackendLoad, Stream
from outrider.core.adapter import AdapterMix
from outrider.core.request import Chunk, Request, Result
from outrider.core.sequence import Token
from outrider.core.stats import Stats, estimated_speedup
from outrider.models.token_bytes import TokenBytes
from outrider.server.errors import Busy, Failed, Gone
from outrider.server.fleet import supervisor, wire
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.pace import Pace
from outrider.server.fleet.spec import LaunchSpec, settings_as_dict
from outrider.server.fleet.supervisor import Process, Worker
from outrider.server.fleet.worker import GRAMMAR_WEIGHT, LONG, Session
from outrider.server.metrics import Metrics
from outrider.settings import Settings


def over_the_wire(message):
    packed = wire.pack(message)
    (length,) = wire.LENGTH.unpack(packed[: wire.LENGTH.size])
    assert len(packed) == wire.LENGTH.size + length
    return wire.unpack(packed[wire.LENGTH.size :])


class TestWire:
    def test_a_request_arrives_as_it_was(self):
        params = SamplingParams(
            7, 0.5, 3, 0.9, seed=-5, logit_bias={3: -1.5}, bad_words=["fox", (1, 2)], stop=["\n"], logprobs=2, n=2
        )
        request = Request("the ✓ fox", None, params, "ngram:length=3", [1, 2], stream=True, group="seven")
        assert wire.request_from_json(over_the_wire(wire.request_to_json(request))) == request
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        request = Request(messages=[{"role": "user", "content": "x"}], params=params, tools=tools, visible=(5, 6))
        assert wire.request_from_json(over_the_wire(wire.request_to_json(request))) == request

    def test_an_adapter_goes_by_name_or_as_a_mix(self):
        for adapter in ("a", AdapterMix(("a", "b"), (0.5, 1.0), "ties", 0.5, "frequency", 3)):
            request = Request("x", adapter=adapter)
            assert wire.request_from_json(over_the_wire(wire.request_to_json(request))) == request

    def test_a_schema_goes_as_text(self):
        """Inside of a request it is nested deeper than it was, and could be too deep to be written."""
        schema = {"type": "array", "items": {"enum": ["é", 1]}}
        told = over_the_wire(wire.request_to_json(Request("x", params=SamplingParams(json_schema=schema))))
        assert told["params"]["json_schema"] == json.dumps(schema, ensure_ascii=False)
        back = wire.request_from_json(told)
        assert back.params.constraint == SamplingParams(json_schema=schema).constraint

    def test_functions_cannot_go(self):
        request = Request("x", params=SamplingParams(processors=[lambda tokens, logits: logits]))
        with pytest.raises(OutriderError, match="processors"):
            wire.request_to_json(request)

    def test_chunks_and_results_arrive_as_they_were(self):
        tokens = (Token(1), Token(2, "ngram", 3), Token(3, None, 0, -0.5, ((3, -0.5), (9, -2.0))))
        chunk = Chunk("half \ud83d", tokens, 1, "stop")
        assert wire.chunk_from_json(over_the_wire({"c": wire.chunk_to_json(chunk)})["c"]) == chunk
        stats = Stats(5, 3, drafts=2, drafted=4, accepted=2, cached=7, seconds={"draft": 0.25})
        stats.drafted_by_depth, stats.accepted_by_depth = Counter({1: 2, 2: 2}), Counter({1: 1})
        stats.drafted_by_drafter["ngram"], stats.accepted_by_drafter["ngram"] = 4, 2
        scored = tuple(Token(id, None, 0, -1.0, ((id, -1.0),)) for id in (1, 2))
        other = Result("b", [1, 2], "length", None, Stats(), [4], (Token(1), Token(2)))
        result = Result("a", [1, 2], "error", [{1: -1.0}, {2: -1.0}], stats, [4], scored, "why", (other,))
        back = wire.result_from_json(over_the_wire(wire.result_to_json(result)))
        assert back == result
        assert wire.chunk_to_json(Chunk("ab", (Token(1), Token(2)))) == ["ab", [1, 2], 0, None]  # most are small
        assert back.stats.drafted_by_depth[7] == 0  # a Counter again


TEXT = "x" * LONG
PATTERN = "x" * (LONG // GRAMMAR_WEIGHT)
LONG_REQUESTS = {
    "prompts": [Request(TEXT), Request(messages=[{"role": "user", "content": TEXT}])],
    "tools": [Request(messages=[{"role": "user", "content": "x"}], tools=[{"function": {"description": TEXT}}])] * 2,
    "calls": [Request(messages=[{"role": "assistant", "tool_calls": [{"function": {"arguments": {"x": TEXT}}}]}])] * 2,
    "grammars": [
        Request("x", params=SamplingParams(regex=PATTERN)),
        Request("x", params=SamplingParams(json_schema={"enum": [PATTERN]})),
    ],
}


class TestTakingIn:
    @pytest.mark.parametrize("kind", LONG_REQUESTS)
    def test_long_ones_are_taken_in_one_at_a_time_and_hold_up_no_short_one(self, kind):
        class Blocking:
            """A backend that waits before it refuses what is long."""

            tokenizer = None

            def submit(self, request):
                if request.prompt != "short":
                    long.append(request)
                    assert go.wait(20)
                raise OutriderError("refused")

            def load(self):
                return BackendLoad()

        class Frames(list):
            send = list.append

        long, go, frames = [], threading.Event(), Frames()
        session = Session(frames, Blocking())
        fit = {"pieces": False, "clip": False, "truncate": 0}
        requests = LONG_REQUESTS[kind] * 4 + [Request("short")]
        for id, request in enumerate(requests):
            session.hear({"submit": id, "request": wire.request_to_json(request), "fit": fit})
        while not any("refused" in frame for frame in frames):
            session.send()
        assert [frame["refused"] for frame in frames if "refused" in frame] == [[[8, "refused"]]]
        assert len(long) == 1
        go.set()
        while sum(len(frame.get("refused", ())) for frame in frames) < len(requests):
            session.send()

    def test_what_is_taken_by_others_is_told_as_such(self):
        """Not as a mistake in the request: the same one may be tried again."""

        class Full:
            tokenizer = None

            def submit(self, request):
                raise BackendBusy("try again later")

            def load(self):
                return BackendLoad()

        class Frames(list):
            send = list.append

        async def heard(frame):
            worker = Worker(LaunchSpec(Settings()), WorkerLimits(), Metrics())
            stream = worker.open_stream(1)
            worker._hear(frame)
            await worker.taken_in(stream)

        frames, fit = Frames(), {"pieces": False, "clip": False, "truncate": 0}
        session = Session(frames, Full())
        session.hear({"submit": 0, "request": wire.request_to_json(Request("x")), "fit": fit})
        while not any("busy" in frame for frame in frames):
            session.send()
        with pytest.raises(Busy, match="try again later") as caught:
            asyncio.run(heard(over_the_wire(frames[-1])))
        assert (caught.value.status, "retry-after" in caught.value.headers) == (429, True)


class TestPace:
    """Many streams at once: fewer, longer chunks, and nothing is lost or late."""

    @pytest.fixture
    def streams(self):
        return [Stream(lambda: None, 3) for _ in range(100)]

    @pytest.fixture
    def session(self, streams):
        class Open:
            tokenizer = None

            def submit(self, request):
                return streams[int(request.prompt)]

            def load(self):
                return BackendLoad()

        class Frames(list):
            send = list.append

        self.now, self.frames = 1.0, Frames()
        session = Session(self.frames, Open(), clock=lambda: self.now)
        fit = {"pieces": False, "clip": False, "truncate": 0}
        for id in range(len(streams)):
            session.hear({"submit": id, "request": wire.request_to_json(Request(str(id))), "fit": fit})
        while len(self.told("accepted")) < len(streams):
            session.send()
        return session

    def told(self, kind):
        return [each for frame in self.frames for each in frame.get(kind, ())]

    def texts(self):
        texts = {}
        for id, (text, *_) in self.told("chunks"):
            texts[id] = texts.get(id, "") + text
        return texts

    def test_chunks_wait_and_become_longer_and_ends_do_not(self, session, streams):
        def step(text):
            for stream in streams:
                stream.put(Chunk(text, (Token(1),)))

        step("a")
        session.send()
        assert len(self.told("chunks")) == 100  # the first ones at once
        for text in "bcd":
            step(text)
            session.send()
            assert len(self.told("chunks")) == 100
        streams[7].finish(Result("abcd", [1] * 4, "stop", None, Stats(), [1]))
        session.send()
        assert self.told("chunks")[100:] == [[7, ["bcd", [1, 1, 1], 0, None]]]
        assert [id for id, _ in self.told("results")] == [7]
        self.now += 0.1  # now the others are due
        session.send()
        assert len(self.told("chunks")) == 200
        assert self.texts() == dict.fromkeys(range(100), "abcd")
        step("e")
        self.now += 0.1
        session.send()
        assert self.texts()[0] == "abcde"

    def test_each_sample_has_one_chunk_in_a_frame(self, session, streams):
        """Samples take turns: a step puts in a chunk of each."""
        four = streams[:20]

        def step(text, finish=None):
            for stream in four:
                for index in range(4):
                    stream.put(Chunk(text, (Token(1),), index, finish if index == 2 else None))

        step("a")
        session.send()
        assert len(self.told("chunks")) == 80
        for text in "bcd":
            step(text)
            session.send()
        assert len(self.told("chunks")) == 80
        step("e", finish="stop")
        session.send()
        found = {id: [chunk for other, chunk in self.told("chunks")[80:] if other == id] for id in range(20)}
        ends = [None, None, "stop", None]
        assert list(found.values()) == [[["bcde", [1] * 4, index, ends[index]] for index in range(4)]] * 20

    def test_the_beginning_and_the_end_of_a_sample_do_not_wait(self, session, streams):
        for stream in streams[1:]:
            stream.put(Chunk("a", (Token(1),)))
        session.send()
        assert len(self.told("chunks")) == 99

        def told(text, index, finish=None):
            """The texts of its chunks that are sent now: the clock stands still."""
            before = len(self.told("chunks"))
            streams[0].put(Chunk(text, (Token(1),), index, finish))
            session.send()
            return [(id, text, finish) for id, (text, _, _, finish) in self.told("chunks")[before:]]

        assert told("a", 0) == [(0, "a", None)]
        assert told("b", 0) == []
        assert told("x", 1) == [(0, "b", None), (0, "x", None)]  # it was waiting, and is told again
        assert told("y", 1) == []
        assert told("c", 0, "stop") == [(0, "y", None), (0, "c", "stop")]
        assert told("z", 1) == []
        assert told("", 1, "length") == [(0, "z", "length")]

    def test_a_slow_reader_gets_one_chunk_of_each_sample(self):
        async def heard():
            stream = Worker(LaunchSpec(Settings()), WorkerLimits(), Metrics()).open_stream(2)
            for text in "abc":
                for index in range(2):
                    stream.put(Chunk(text, (Token(1),), index, "stop" if text == "c" else None))
            stream.finish(Result("abc", [1] * 3, "stop", None, Stats(), [1]))
            return [(chunk.text, chunk.index, chunk.finish_reason) async for chunk in stream]

        assert asyncio.run(heard()) == [("abc", 0, "stop"), ("abc", 1, "stop")]

    def test_the_time_between_tokens_is_that_of_their_own_sample(self, monkeypatch):
        """Chunks of several samples come together: no sample has waited for the chunk of another."""
        metrics = Metrics()

        async def heard():
            worker = Worker(LaunchSpec(Settings(), "tiny"), WorkerLimits(), metrics)
            worker.open_stream(3)
            for now in (2.0, 3.0, 5.0):
                monkeypatch.setattr(supervisor.time, "perf_counter", lambda now=now: now)
                tokens = (Token(1), Token(2)) if now == 5 else (Token(1),)
                chunks = [[0, wire.chunk_to_json(Chunk("a", tokens, index))] for index in range(3)]
                worker._hear(over_the_wire({"load": asdict(BackendLoad()), "chunks": chunks}))

        asyncio.run(heard())
        (of_first,), (of_gaps,) = metrics.first_token.collect(), metrics.gap.collect()
        told = {each.name: each.value for each in [*of_first.samples, *of_gaps.samples] if "le" not in each.labels}
        assert told["outrider_time_to_first_token_seconds_count"] == 1
        assert told["outrider_inter_token_latency_seconds_count"] == 6
        assert told["outrider_inter_token_latency_seconds_sum"] == 6.0  # 1 s a token, each time

    def test_few_streams_do_not_wait(self, session, streams):
        for text in "abc":
            for stream in streams[:4]:
                stream.put(Chunk(text, (Token(1),)))
            session.send()
            self.now += 0.001
        assert [text for _, (text, *_) in self.told("chunks")] == [*"aaaa", *"bbbb", *"cccc"]

    def test_short_answers_do_not_hold_up_a_long_one(self):
        now, waited = 0.0, []
        pace = Pace(lambda: now)
        pace.sent(10)
        for step in range(200):  # 10 answers end in each ms: more than a server can pass on
            ended = range(1 + 10 * step, 11 + 10 * step)
            ready = pace.release([0, *ended], ended.__contains__)
            assert set(ready) >= set(ended)
            pace.sent(len(ready))
            waited.append(0 if 0 in ready else waited[-1] + 1 if waited else 1)
            now += 0.001
        assert 10 < max(waited) <= 51

    def test_none_waits_for_long(self, session, streams):
        for stream in streams * 2:
            stream.put(Chunk("x", (Token(1),)))
            session.send()
            self.now += 1e-6
        for stream in streams * 18:  # all of them wait: there is no news, for which `send` would wait by the real clock
            stream.put(Chunk("x", (Token(1),)))
        for stream in streams:
            stream.put(Chunk("y", (Token(1),)))
        self.now += 0.05
        session.send()
        assert all(text.endswith("y") for text in self.texts().values())


class TestTokenBytes:
    def test_bytes_of_tokens_add_up_to_the_text(self, tiny_folder):
        with LLM(str(tiny_folder), threads=1, cache_memory=0.1) as llm:
            pieces = TokenBytes(llm.tokenizer)
            text = "the fox — naïve ✓ 狐\n\t"
            ids = llm.tokenizer.encode(text)
            assert b"".join(map(pieces, ids)).decode() == text
            end = llm.tokenizer.eos_token_id
            assert (pieces(end), pieces.special(end), pieces.special(ids[0])) == (b"<|im_end|>", True, False)

    def test_sentencepiece(self):
        from tokenizers import Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast

        words = {"<unk>": 0, "▁fox": 1, "<0xE2>": 2, "x": 3}
        backend = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
        backend.decoder = decoders.Metaspace()
        pieces = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
        assert [pieces(id) for id in (1, 2, 3)] == [b" fox", b"\xe2", b"x"]

    def test_no_tokenizer(self):
        assert TokenBytes(None)(3) == b""


class TestSpeedup:
    def test_time_of_drafts_and_their_rows_counts_against_it(self):
        stats = Stats(tokens=30, steps=10, drafts=10, drafted=40, accepted=20)
        stats.seconds, stats.first_seconds = {"draft": 0.1, "target": 1.9, "verify": 0.0}, 1.0
        # 3 tokens a step; of 1 s after the first step 0.3 s went into drafting and the rows of the drafts
        stats.drafting_seconds = 0.3
        assert estimated_speedup([stats]) == pytest.approx(3 * 0.7)
        assert estimated_speedup([replace(stats, drafting_seconds=0.0)]) == pytest.approx(3)
        assert estimated_speedup([replace(stats, drafting_seconds=2.0)]) == 0.0

    def test_tokens_are_judged_with_drafts_and_without(self):
        stats = Stats(tokens=40, steps=10, drafts=9, drafted=40, accepted=30, drafting_seconds=0.2)
        stats.seconds, stats.first_seconds = {"draft": 0.2, "target": 0.8, "verify": 0.5}, 0.0
        # after the first step: 0.45 s of judging, 0.85 s of passes without drafts, each of which wrote 4 tokens
        assert estimated_speedup([stats]) == pytest.approx((4 * 0.85 + 0.45) / 1.5, abs=1e-3)

    def test_one_step_says_nothing(self):
        assert estimated_speedup([Stats(tokens=1, steps=1)]) is None
        assert estimated_speedup([Stats()]) is None

    def test_drafts_of_unknown_cost_say_nothing(self):
        stats = Stats(tokens=30, steps=10, drafts=9, seconds={"draft": 0.1, "target": 1.0})
        assert estimated_speedup([stats]) is not None
        assert estimated_speedup([replace(stats, unmeasured=1)]) is None

    def test_stats_know_the_time_of_the_prompt(self, tiny_folder):
        with LLM(str(tiny_folder), threads=1, cache_memory=0.1) as llm:
            stats = llm.generate("the fox " * 100, SamplingParams(max_tokens=20)).stats
        assert 0 < stats.first_seconds < sum(stats.seconds.values())


class TestLaunching:
    @pytest.mark.parametrize(
        ("model", "draft", "reason"),
        [
            ("/nowhere", "ngram", "no such file or folder"),
            (None, "teapot", "unknown drafter"),
            (None, "draft_model:model=/nowhere", "no such file or folder"),
        ],
    )
    def test_what_cannot_be_loaded_says_why(self, server, quick, model, draft, reason):
        with pytest.raises(OutriderError, match=reason):
            server.launch(model or quick, draft, uid="other")
        assert [model.uid for model in server.fleet.list()] == ["tiny"]

    def test_a_uid_is_taken_once(self, server, quick):
        with pytest.raises(OutriderError, match="already launched as 'tiny'"):
            server.launch(quick, uid="tiny")
        with pytest.raises(OutriderError, match="no uid"):
            server.launch(quick, uid="../tiny")

    def test_uids_are_made_from_names(self, serve, quick):
        server = serve()
        assert [server.launch(quick) for _ in range(2)] == ["quick.gguf", "quick.gguf-2"]
        assert server.fleet.describe("quick.gguf-2").info["context"] == 8192
        answer = server.post("/v1/completions", {"model": str(quick), "prompt": "the"})
        assert (answer.status_code, "several" in answer.text) == (404, True)
        server.call(server.fleet.terminate("quick.gguf-2"))
        assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 1}).json()["model"] == "quick.gguf"

    def test_killed_while_loading(self, serve, quick):
        server = serve()
        launching = threading.Thread(target=_suppressed, args=(server.launch, quick, "ngram", "tiny"))
        launching.start()
        server.wait_for(lambda: server.fleet._workers and server.fleet._workers["tiny"]._process)
        assert server.get("/health").json()["models"]["tiny"]["status"] == "loading"
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
        server.fleet._workers["tiny"]._process.child.kill()
        launching.join(20)
        assert server.fleet.list() == []

    def test_one_that_fails_late_leaves_its_successor(self, serve, quick):
        """Terminated while it loads, launched again, and only then does the first launch fail."""
        server = serve()
        spec = LaunchSpec(Settings(model=str(quick), threads=1, cache_memory=0.1), "tiny")

        async def twice():
            first = asyncio.create_task(server.fleet.launch(spec))
            while "tiny" not in server.fleet._workers or server.fleet._workers["tiny"]._process is None:
                await asyncio.sleep(0.001)
            ending = asyncio.create_task(server.fleet.terminate("tiny"))
            second = asyncio.create_task(server.fleet.launch(spec))
            return await asyncio.gather(first, ending, second, return_exceptions=True)

        first, ended, second = server.call(twice())
        assert (type(first), ended, second) == (Failed, None, "tiny")  # its worker was ended, no fault of the request
        assert [(model.uid, model.status) for model in server.fleet.list()] == [("tiny", "ready")]
        assert 'outrider_worker_up{model_name="tiny"} 1.0' in server.get("/metrics").text
        assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 1}).status_code == 200

    def test_one_that_is_terminated_while_its_process_starts(self, serve, quick, monkeypatch):
        """It must not run on outside the fleet."""
        server, spawn, spawned = serve(), Process.spawn, []

        async def terminated(uid, *given):
            spawned.append(await spawn(uid, *given))
            await server.fleet.terminate(uid)
            return spawned[0]

        monkeypatch.setattr(Process, "spawn", terminated)
        with pytest.raises(Gone, match="tiny was terminated while it was loaded"):
            server.launch(quick, uid="tiny")
        assert server.fleet.list() == []
        assert spawned[0].child.poll() is not None
        assert 'outrider_worker_up{model_name="tiny"}' not in server.get("/metrics").text

    def test_one_that_ends_late_leaves_its_successors_metrics(self):
        class Ending:
            """A process that takes its time to end."""

            async def close(self):
                await ended.wait()

        async def both():
            metrics = Metrics()
            worker = Worker(LaunchSpec(Settings(), "tiny"), WorkerLimits(), metrics)
            worker._process = Ending()
            closing = asyncio.create_task(worker.close())
            await asyncio.sleep(0)
            metrics.up.labels("tiny").set(1)  # its successor is ready
            ended.set()
            await closing
            return metrics.text().decode()

        ended = asyncio.Event()
        assert 'outrider_worker_up{model_name="tiny"} 1.0' in asyncio.run(both())


def _suppressed(work, *args):
    with contextlib.suppress(OutriderError):
        work(*args)


class Reader(threading.Thread):
    """Asks for a long stream."""

    def __init__(self, server, model, tokens=4000):
        super().__init__(daemon=True)
        self.server, self.model, self.tokens = server, model, tokens
        self.events = []
        self.times = []  # when each of them came
        self.start()

    def run(self):
        body = {"model": self.model, "prompt": "the red fox", "max_tokens": self.tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, timeout=30) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.times.append(time.monotonic())
                    self.events.append(line.removeprefix("data: "))

    def pause(self, begin, end=float("inf")):
        """The longest time without an event, of those that lie at least in part between the two times."""
        pairs = itertools.pairwise(self.times)
        return max((after - before for before, after in pairs if after > begin and before < end), default=0.0)

    @property
    def finished(self):
        return self.events[-1] == "[DONE]"

    @property
    def error(self):
        return json.loads(self.events[-1]).get("error")


def test_a_worker_is_killed_under_load(serve, quick):
    """Its clients hear of it while it is gone, the other model's streams go on, and it comes back."""
    server = serve(limits=WorkerLimits(first_wait=4.0))
    server.launch(quick, uid="a")
    server.launch(quick, uid="b")
    hit, others = [Reader(server, "a") for _ in range(6)], [Reader(server, "b") for _ in range(3)]
    for reader in (*hit, *others):
        server.wait_for(lambda reader=reader: len(reader.events) > 3)
    os.kill(server.pid("a"), signal.SIGKILL)
    for reader in hit:
        reader.join(30)
        assert reader.error["code"] == "unavailable"
    heard = [len(reader.events) for reader in others]
    for reader, events in zip(others, heard, strict=True):
        server.wait_for(lambda reader=reader, events=events: reader.finished or len(reader.events) > events + 20)
    server.wait_for(lambda: "signal 9" in server.get("/health").text)
    health = server.get("/health")
    assert (health.status_code, health.json()["models"]["a"]["status"]) == (503, "restarting")
    refused = server.post("/v1/completions", {"model": "a", "prompt": "x"})
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert "signal 9" in refused.json()["error"]["message"]
    server.wait_for(lambda: server.get("/health").status_code == 200)
    assert server.post("/v1/completions", {"model": "a", "prompt": "the", "max_tokens": 2}).status_code == 200
    assert 'outrider_worker_restarts_total{model_name="a"} 1.0' in server.get("/metrics").text
    for reader in others:
        reader.join(60)
        assert reader.finished


PAUSES = 10  # times the longest pause of any stream in the seconds before: what a kill may take to be heard, or cost


def test_a_kill_is_heard_at_once_and_costs_the_others_nothing(serve, quick):
    """In terms of the pauses that streams had in the same run, before anything was killed. A busy machine may stop for
    a moment at the wrong time: one of three kills has to be clean."""
    server = serve(limits=WorkerLimits(first_wait=2.0))
    server.launch(quick, uid="a")
    server.launch(quick, uid="b")
    seen = []
    while not any(max(each) <= PAUSES for each in seen):
        assert len(seen) < 3, f"heard after, others paused for, in pauses of before: {seen}"
        server.wait_for(lambda: server.get("/health").status_code == 200)
        seen.append(_killed(server))


def _killed(server):
    """After how long the clients of a killed worker heard of it, and how long other streams paused meanwhile; both
    as multiples of the longest pause before."""
    hit, others = [Reader(server, "a", 8000) for _ in range(3)], [Reader(server, "b", 2000) for _ in range(2)]
    for reader in (*hit, *others):
        server.wait_for(lambda reader=reader: len(reader.events) > 50)
    kill = time.monotonic()
    usual = max(reader.pause(0.0, kill) for reader in (*hit, *others))
    os.kill(server.pid("a"), signal.SIGKILL)
    for reader in hit:
        reader.join(30)
        assert reader.error["code"] == "unavailable"
    heard = max(reader.times[-1] for reader in hit)
    assert server.fleet.describe("a").status == "restarting"  # it is heard while the worker is gone
    for reader in others:
        reader.join(60)
        assert reader.finished
    return (heard - kill) / usual, max(reader.pause(kill, heard) for reader in others) / usual


def test_every_frame_is_a_sign_of_life(quick):
    """Or a worker that is well would be ended when it has run for as long as one may be silent."""

    async def heard():
        process = await Process.spawn("tiny", settings_as_dict(Settings(model=str(quick), threads=1, cache_memory=0.1)))
        times = [process.heard]
        await process.ready(60)
        times.append(process.heard)
        assert await process.receive() is not None
        times.append(process.heard)
        await process.close()
        return times

    spawned, ready, frame = asyncio.run(heard())
    assert spawned < ready < frame


def test_a_worker_that_hangs_is_ended(serve, quick):
    server = serve(limits=WorkerLimits(first_wait=0.05, silence=2.0))
    server.launch(quick, uid="tiny")
    reader = Reader(server, "tiny")
    server.wait_for(lambda: len(reader.events) > 3)
    os.kill(server.pid("tiny"), signal.SIGSTOP)
    reader.join(30)
    assert reader.error["code"] == "unavailable"
    server.wait_for(lambda: server.get("/health").status_code == 200)


def test_a_worker_that_cannot_come_back_is_tried_again(serve, quick, tmp_path):
    file = Path(shutil.copy(quick, tmp_path / "tiny.gguf"))
    server = serve()
    server.launch(file, uid="tiny")
    file.rename(tmp_path / "away")
    os.kill(server.pid("tiny"), signal.SIGKILL)
    server.wait_for(lambda: "no such file" in server.get("/health").json()["models"]["tiny"]["reason"])
    (tmp_path / "away").rename(file)
    server.wait_for(lambda: server.get("/health").status_code == 200)
    assert server.fleet.describe("tiny").restarts >= 2


def test_terminating_ends_what_runs(serve, quick):
    server = serve()
    server.launch(quick, uid="tiny")
    pid = server.pid("tiny")
    reader = Reader(server, "tiny")
    server.wait_for(lambda: len(reader.events) > 3)
    server.call(server.fleet.terminate("tiny"))
    reader.join(30)
    assert "terminated" in reader.error["message"]
    assert not Path(f"/proc/{pid}").exists()
    assert server.get("/health").json() == {"status": "ok", "models": {}}
    assert 'worker_up{model_name="tiny"}' not in server.get("/metrics").text


def test_a_worker_ends_with_its_server(quick):
    """Even when the server is killed and can say nothing."""
    code = (
        "import asyncio, time\n"
        "from outrider.server.fleet.fleet import Fleet\n"
        "from outrider.server.fleet.spec import LaunchSpec\n"
        "from outrider.settings import Settings\n"
        "async def main():\n"
        "    fleet = Fleet()\n"
        f"    uid = await fleet.launch(LaunchSpec(Settings(model={str(quick)!r}, cache_memory=0.1)))\n"
        "    print(fleet.describe(uid).info['pid'], flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < end, "the worker lives on"
        time.sleep(0.05)


def test_a_stream_that_nobody_waits_for_is_cancelled_before_it_is_accepted(server):
    """The client goes away while the request is on its way to the worker."""

    async def submit_and_leave():
        request = Request("the fox", params=SamplingParams(max_tokens=4000, ignore_eos=True))
        task = asyncio.create_task(server.fleet.submit("tiny", request))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(5):
        server.call(submit_and_leave())
    server.wait_for(lambda: server.fleet._workers["tiny"]._samples == 0, 30)


def test_gone_says_when_to_come_back():
    assert Gone("x", retry_after=7).headers == {"retry-after": "7"}
