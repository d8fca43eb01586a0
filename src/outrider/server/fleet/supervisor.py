"""The server's end of a worker process: start it, exchange frames with it, and start it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from outrider.backends.base import BackendLoad
from outrider.core.adapter import AdapterChoice
from outrider.core.errors import OutriderError
from outrider.core.request import Chunk, Request, Result, joined
from outrider.core.stats import estimated_speedup
from outrider.server.errors import Busy, Failed, Gone
from outrider.server.fleet import wire
from outrider.server.fleet.adapters import AdapterBook
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.spec import LaunchSpec, settings_as_dict
from outrider.server.log import log
from outrider.server.metrics import Metrics


@dataclass(frozen=True)
class Fit:
    """What a worker does for a request beside running it."""

    pieces: bool = False  # send the text of every token
    clip: bool = False  # cut max_tokens to what the context holds beside the prompt
    truncate: int = 0  # keep only this many of the prompt's last tokens; 0: all


class ServerStream:
    """The answer to one request, as it comes from the worker: iterate over its chunks, or wait for its result."""

    def __init__(self, worker: Worker, id: int, samples: int, adapter: AdapterChoice = "") -> None:
        self._worker, self.id, self.samples, self._adapter = worker, id, samples, adapter
        self._chunks: deque[Chunk] = deque()
        self._changed = asyncio.Event()
        self._result: Result | None = None
        self._error: Exception | None = None
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.prompt_tokens = 0  # of its prompt, once it is accepted
        self.begun = time.perf_counter()
        self.last: dict[int, float] = {}  # when each of its samples was last heard of

    @property
    def done(self) -> bool:
        return self._result is not None or self._error is not None

    @property
    def uid(self) -> str:
        return self._worker.uid

    @property
    def model(self) -> str:
        """Who answers, as a request may name it."""
        return f"{self.uid}:{self._adapter}" if self._adapter and isinstance(self._adapter, str) else self.uid

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            while self._chunks:  # a client that is slower than the worker gets fewer and longer ones
                waiting = joined([self._chunks.popleft() for _ in range(len(self._chunks))])
                for chunk in waiting:
                    yield chunk
            if self.done:
                break
            self._changed.clear()
            await self._changed.wait()
        self._outcome()

    async def result(self) -> Result:
        """Wait for the end. Chunks that nobody took are dropped."""
        while not self.done:
            self._changed.clear()
            await self._changed.wait()
        return self._outcome()

    def cancel(self) -> None:
        """Stop writing; its place in the batch is free within a step."""
        if not self.done:
            self._worker.cancel(self)

    def piece(self, token: int) -> bytes:
        """The bytes of a token, if the request was submitted with `pieces`."""
        return self._worker.pieces.get(token, b"")

    def special(self, token: int) -> bool:
        """Whether a token stands for no text (the end of an answer, say)."""
        return token in self._worker.special

    def estimated_speedup(self, samples: Iterable[Result]) -> float | None:
        """Over plain decoding, of all samples together."""
        return estimated_speedup([sample.stats for sample in samples])

    def accept(self, prompt_tokens: int) -> None:
        """The engine has taken it in."""
        self.prompt_tokens = prompt_tokens
        if not self.accepted.done():
            self.accepted.set_result(None)

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._changed.set()

    def finish(self, outcome: Result | Exception) -> None:
        if self.done:
            return
        if isinstance(outcome, Result):
            self._result = outcome
        else:
            self._error = outcome
        if not self.accepted.done():
            self.accepted.set_result(None)
        self._changed.set()

    def _outcome(self) -> Result:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Process:
    """One life of a worker process, and the socket to it."""

    def __init__(
        self, uid: str, child: subprocess.Popen[bytes], reader: Any, writer: Any, farewell: float = 0.0
    ) -> None:
        """`farewell`: seconds that it has to end by itself once its socket is closed."""
        self.uid, self.child, self._reader, self._writer, self._farewell = uid, child, reader, writer, farewell
        self.heard = time.monotonic()
        self.ended_for = ""  # why we have ended it; "": it was not us
        self.printed: deque[str] = deque(maxlen=20)  # the last lines on its stderr
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(
        cls, uid: str, settings: Mapping[str, Any], farewell: float = 0.0, adapters: Sequence[wire.Json] = ()
    ) -> Process:
        ours, theirs = socket.socketpair()
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-m", "outrider.server.fleet.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the server alone
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # the launch was given up
            ours.close()
            child.kill()
            raise
        process = cls(uid, child, reader, writer, farewell)
        process.send({"settings": dict(settings), "adapters": list(adapters)})
        return process

    def send(self, message: Mapping[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.pack(message))

    async def receive(self) -> wire.Json | None:
        """The next message; None when the process is gone."""
        try:
            head = await self._reader.readexactly(wire.LENGTH.size)
            body = await self._reader.readexactly(wire.LENGTH.unpack(head)[0])
        except (asyncio.IncompleteReadError, OSError):
            return None
        self.heard = time.monotonic()
        return wire.unpack(body)

    async def ready(self, timeout: float) -> wire.Json:
        """Wait until the model is loaded; what the worker says of it."""
        try:
            message = await asyncio.wait_for(self.receive(), timeout)
        except TimeoutError:
            raise Failed(f"{self.uid} was not loaded within {timeout:g} s") from None
        if message is None:
            raise Failed(f"the worker of {self.uid} ended while it loaded: {await self.how_it_ended()}")
        if "ready" not in message:
            raise OutriderError(message.get("failed", "its worker sent something else than ready or failed first"))
        return dict(message["ready"])

    async def how_it_ended(self) -> str:
        """It has closed its socket, so it has ended or is about to."""
        await asyncio.wait({self._listener}, timeout=2)
        try:
            code = await asyncio.to_thread(self.child.wait, 2)
        except subprocess.TimeoutExpired:
            self.kill()
            code = await asyncio.to_thread(self.child.wait)
        if self.ended_for:
            return self.ended_for
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {self.printed[-1]}" if self.printed else how

    async def close(self) -> None:
        """End it now, or as soon as it has written down what it keeps."""
        self._writer.close()
        if self._farewell and not self.ended_for:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.child.wait, self._farewell)
        self.kill()
        await asyncio.to_thread(self.child.wait)
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def end_for(self, why: str) -> None:
        """It has failed: end it, and the supervisor starts another."""
        self.ended_for = self.ended_for or why
        self.kill()

    def kill(self) -> None:
        """With all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended by itself
            os.killpg(self.child.pid, signal.SIGKILL)

    async def _listen(self) -> None:
        """Whatever it prints goes into the log."""
        assert self.child.stdout is not None
        loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 16)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self.child.stdout)
        try:
            while line := await _line(lines):
                self.printed.append(line)
                log("worker", level="warning", model=self.uid, line=line)
        finally:
            transport.close()


async def _line(lines: asyncio.StreamReader) -> str:
    """The next line that is not empty; "" at the end."""
    while True:
        try:
            raw = await lines.readline()
        except ValueError:  # longer than the limit: skipped
            continue
        line = raw.decode(errors="replace").strip()
        if line or not raw:
            return line


class Worker:
    """A launched model, through all lives of its process."""

    def __init__(self, spec: LaunchSpec, limits: WorkerLimits, metrics: Metrics) -> None:
        self.spec, self._limits, self._metrics = spec, limits, metrics
        self.uid, self.status, self.reason = spec.uid, "loading", ""
        self.created, self.restarts = int(time.time()), 0
        self.info: dict[str, Any] = {}
        self.adapters = AdapterBook(spec.uid)
        self.running = self.waiting = 0
        self.cache = 0.0  # the share of keys and values that is spoken for
        self.pieces: dict[int, bytes] = {}
        self.special: set[int] = set()
        self._process: Process | None = None
        self._streams: dict[int, ServerStream] = {}
        self._samples = 0  # of all requests under way
        self._next = 0
        self._request_seconds = 1.0  # that a request takes: a moving average
        self._supervisor: asyncio.Task[None] | None = None
        self._emptied = asyncio.Event()
        self._emptied.set()

    async def start(self) -> None:
        """Load the model; from then on the process is watched, and started again when it dies."""
        await self._load()
        self._supervisor = asyncio.create_task(self._supervise())

    async def submit(self, request: Request, fit: Fit) -> ServerStream:
        process = self._ready()
        self.refuse_when_full(request.params.n)
        body = wire.request_to_json(request)
        stream = self.open_stream(request.params.n, request.adapter)
        process.send({"submit": stream.id, "request": body, "fit": asdict(fit)})
        return await self.taken_in(stream)

    async def load_adapter(self, name: str, path: str, named: bool) -> None:
        await self.adapters.load(self._ready().send, name, path, named)

    async def unload_adapter(self, name: str) -> None:
        await self.adapters.unload(self._ready().send, name)

    def _ready(self) -> Process:
        if self._process is None or self.status != "ready":
            raise Gone(f"the model {self.uid} is {self.status}: {self.reason or 'not ready yet'}; try again soon")
        return self._process

    @property
    def answering(self) -> bool:
        """Whether an answer is under way."""
        return bool(self._streams)

    def open_stream(self, samples: int, adapter: AdapterChoice = "") -> ServerStream:
        stream = ServerStream(self, self._next, samples, adapter)
        self._next += 1
        self._streams[stream.id] = stream
        self._samples += stream.samples
        self._emptied.clear()
        return stream

    async def taken_in(self, stream: ServerStream) -> ServerStream:
        """The stream, when the engine has taken its request in; an error says why it did not."""
        try:
            await stream.accepted
        except asyncio.CancelledError:
            stream.cancel()
            raise
        if stream.done and stream._error is not None:
            raise stream._error
        return stream

    def cancel(self, stream: ServerStream) -> None:
        if self._process is not None:
            self._process.send({"cancel": stream.id})

    async def idle(self, seconds: float) -> None:
        """Wait until nothing runs any more, but not for long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._emptied.wait(), seconds)

    async def close(self) -> None:
        if self.status == "closed":
            return
        self.status, self.reason = "closed", "it was terminated"
        self._metrics.forget(self.uid)  # before anything is waited for: from then on they may be its successor's
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        await self._end("it was terminated")

    def refuse_when_full(self, samples: int) -> None:
        most = self._limits.queue + self._places
        if self._samples + samples > most:
            wait = math.ceil(self._request_seconds * max(1.0, self._samples / self._places) / 2)
            raise Busy(
                f"the queue of {self.uid} is full ({self._samples} of {most} sequences); try again later",
                retry_after=min(max(wait, 1), 60),
            )

    @property
    def _places(self) -> int:
        """Sequences that run at once."""
        return self.spec.settings.max_batch

    async def _load(self) -> None:
        self.status = "loading" if not self.restarts else "restarting"
        settings = self.spec.settings
        farewell = self._limits.farewell_of(settings)
        if self.restarts:  # one that cannot be read any more is lost, and the model is not
            settings = replace(settings, adapters=None)
        process = await Process.spawn(self.uid, settings_as_dict(settings), farewell, self.adapters.written())
        self._process = process
        try:
            self._refuse_when_closed()
            self.info = await process.ready(self._limits.load)
            self._refuse_when_closed()
        except BaseException:
            await self._end("it could not be loaded")
            raise
        self.status, self.reason, self.pieces = "ready", "", {}
        self.adapters.begin(self.info)
        self._metrics.up.labels(self.uid).set(1)
        log("ready", model=self.uid, pid=process.child.pid, notes=self.info.get("notes"))

    def _refuse_when_closed(self) -> None:
        if self.status == "closed":
            raise Gone(f"the model {self.uid} was terminated while it was loaded")

    async def _supervise(self) -> None:
        wait = 0.0
        while True:
            began = time.monotonic()
            if self.status == "ready":
                await self._end(await self._serve())
            wait = self._limits.next_wait(wait, time.monotonic() - began)
            await asyncio.sleep(wait)
            self.restarts += 1
            self._metrics.restarts.labels(self.uid).inc()
            try:
                await self._load()
            except (OutriderError, OSError) as error:
                self.reason = str(error)
                log("restart failed", level="error", model=self.uid, reason=self.reason)

    async def _serve(self) -> str:
        """Listen until the process is gone; how it ended."""
        assert self._process is not None
        watchdog = asyncio.create_task(self._watch(self._process))
        try:
            while (message := await self._process.receive()) is not None:
                self._hear(message)
                if why := self._limits.overdue(BackendLoad(**message["load"]), self.spec.settings):
                    self._process.end_for(why)
        except Exception as error:  # a worker whose frames cannot be read is as good as dead
            self._process.end_for(f"a frame of its worker could not be read: {type(error).__name__}: {error}")
        finally:
            watchdog.cancel()
        self.status = "restarting"
        self._metrics.up.labels(self.uid).set(0)
        self.drop(self._process.ended_for or "its worker has died")
        return await self._process.how_it_ended()

    async def _watch(self, process: Process) -> None:
        """A process that sends nothing for long hangs: end it, and the rest follows."""
        while time.monotonic() - process.heard < self._limits.silence:
            await asyncio.sleep(self._limits.silence / 10)
        process.end_for(f"no frame came from its worker for {self._limits.silence:g} s")

    def _hear(self, message: wire.Json) -> None:
        self.adapters.hear(message)
        self._note(BackendLoad(**message["load"]))
        for token, piece in message.get("pieces", {}).items():
            self.pieces[int(token)] = piece.encode() if isinstance(piece, str) else bytes(piece)
        self.special.update(message.get("special", ()))
        for id, prompt in message.get("accepted", ()):
            if id in self._streams:
                self._streams[id].accept(prompt)
        for id, chunk in message.get("chunks", ()):
            self._chunk(id, wire.chunk_from_json(chunk))
        for id, result in message.get("results", ()):
            self._finish(id, wire.result_from_json(result))
        for id, reason in message.get("refused", ()):
            self._finish(id, OutriderError(reason))
        for id, reason in message.get("busy", ()):
            self._finish(id, Busy(reason))
        for id, reason in message.get("failed", ()):
            self._finish(id, Failed(reason))

    def _note(self, load: BackendLoad) -> None:
        """How full it is."""
        self.running, self.waiting, self.cache = load.running, load.waiting, load.cache
        self._metrics.running.labels(self.uid).set(self.running)
        self._metrics.waiting.labels(self.uid).set(self.waiting)
        self._metrics.cache.labels(self.uid).set(self.cache)
        self._metrics.adapters.labels(self.uid).set(len(self.adapters))
        self._metrics.adapters_in_memory.labels(self.uid).set(load.adapters)

    @cached_property
    def _gap(self) -> Any:
        """The histogram of its tokens' gaps, looked up once: every chunk is counted there."""
        return self._metrics.gap.labels(self.uid)

    def _chunk(self, id: int, chunk: Chunk) -> None:
        stream = self._streams.get(id)
        if stream is None:
            return
        now = time.perf_counter()
        if not stream.last:
            self._metrics.first_token.labels(self.uid).observe(now - stream.begun)
        elif chunk.tokens and chunk.index in stream.last:
            self._gap.observe((now - stream.last[chunk.index]) / len(chunk.tokens))
        stream.last[chunk.index] = now
        stream.put(chunk)

    def _finish(self, id: int, outcome: Result | Exception) -> None:
        stream = self._streams.pop(id, None)
        if stream is None:
            return
        self._samples -= stream.samples
        if not self._streams:
            self._emptied.set()
        stream.finish(outcome)
        if isinstance(outcome, Result):
            seconds = time.perf_counter() - stream.begun
            self._request_seconds += 0.1 * (seconds - self._request_seconds)
            self._record(stream, outcome, seconds)

    def _record(self, stream: ServerStream, result: Result, seconds: float) -> None:
        self._metrics.duration.labels(self.uid).observe(seconds)
        self._metrics.prompt_tokens.labels(self.uid).inc(len(result.prompt_token_ids))
        self._metrics.requests.labels(self.uid, result.finish_reason).inc()
        for sample in result.samples:
            self._metrics.record(self.uid, len(sample.prompt_token_ids), sample.stats)
        speedup = stream.estimated_speedup(result.samples)
        if speedup is not None:
            self._metrics.speedup.labels(self.uid).observe(speedup)

    async def _end(self, how: str) -> None:
        """The process is over, one way or the other; the clients that wait for it hear so."""
        process, self._process = self._process, None
        self.running = self.waiting = 0
        self.cache = 0.0
        if process is not None:
            await process.close()
        if self.status == "restarting":
            self.reason = f"its worker died ({how})"
            log("worker died", level="error", model=self.uid, reason=how)
        if self.status != "closed":
            self._metrics.up.labels(self.uid).set(0)
        self.drop(how)

    def drop(self, why: str) -> None:
        """End all requests under way; the clients that wait for them hear why."""
        self.adapters.drop(why)
        for id in list(self._streams):
            self._finish(id, Gone(f"the model {self.uid} stopped while it answered: {why}; try again"))
