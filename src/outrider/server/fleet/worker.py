"""What runs inside a worker process: one backend, and a socket to the server.

    python -m outrider.server.fleet.worker FD

A thread reads what the server says, a few take requests in, the main one sends: whatever came since the last frame goes
into one, as often as the server can follow (pace.py). When the server is gone the process ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, Protocol

from outrider import build, drafters
from outrider.backends.adapters import AdapterRefused
from outrider.backends.base import Backend, BackendBusy, BackendStopped, Stream
from outrider.core.errors import OutriderError, one_line, quoted
from outrider.core.request import Request, Token, joined
from outrider.models.token_bytes import TokenBytes
from outrider.server import tools
from outrider.server.fleet import wire
from outrider.server.fleet.pace import Pace
from outrider.settings import from_mapping

_logger = logging.getLogger("outrider.worker")
BEAT = 1.0  # seconds between frames while there is nothing to send: each tells the load, and when a step last ended
FAREWELL = 5.0  # seconds in which a backend may write down what it keeps: a history of 10^6 tokens takes 0.1
CACHE_FAREWELL = 30.0  # the same where it keeps prefixes: 1 GiB takes some seconds on most disks
TAKERS = 4  # threads that tokenize and check new requests: one that loads a draft model holds nobody up
LOADERS = 2  # threads that read adapters: two, so that a slow disk does not hold up what lies on another
# Characters of a request from which on one thread alone tokenises it: 50 ms of a core. Several such requests at once
# would take the cores from those that run, and the other threads from short requests.
LONG = 64 << 10
# Characters of a prompt that take as long as one of a grammar, at the worst: 131,072 of these are compiled in 2 s.
GRAMMAR_WEIGHT = 16


class Link:
    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._file = sock, sock.makefile("rb")

    def read(self) -> wire.Json | None:
        """The next message; None when the server is gone."""
        head = self._file.read(wire.LENGTH.size)
        if len(head) < wire.LENGTH.size:
            return None
        (length,) = wire.LENGTH.unpack(head)
        body = self._file.read(length)
        return wire.unpack(body) if len(body) == length else None

    def send(self, message: wire.Json) -> None:
        self._sock.sendall(wire.pack(message))


class Sender(Protocol):
    def send(self, message: wire.Json) -> None: ...


class Session:
    """The requests of one worker."""

    def __init__(
        self, link: Sender, backend: Backend, farewell: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`farewell`: seconds in which the backend may write down what it keeps; 0: it keeps nothing."""
        self._link, self._backend, self._farewell = link, backend, farewell
        self._pace = Pace(clock)
        self._news: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._streams: dict[int, Stream] = {}
        self._coming: set[int] = set()  # requests that are being taken in
        self._cancelled: set[int] = set()  # those of them that nobody wants any more
        self._showing: set[int] = set()  # requests that want the text of every token
        self._woken: set[int] = set()  # streams that have something, as the sending thread knows or will hear
        self._takers = ThreadPoolExecutor(TAKERS, "outrider-taker")
        self._long_taker = ThreadPoolExecutor(1, "outrider-long-taker")
        self._loaders = ThreadPoolExecutor(LOADERS, "outrider-adapter-reader")
        self._pieces = TokenBytes(backend.tokenizer)
        self._shown: set[int] = set()  # tokens whose text the server has
        self._lock, self._closing = threading.Lock(), threading.Lock()

    def close(self) -> None:
        """The server is gone. What the backend keeps is written down, if that does not take long."""
        if not self._farewell:
            return
        closing = threading.Thread(target=self._backend.close, name="outrider-closer", daemon=True)
        with self._closing:  # another thread that comes here waits, and does not end the process meanwhile
            closing.start()
            closing.join(self._farewell)

    def hear(self, message: wire.Json) -> None:
        """One message of the server's; called by the reading thread."""
        if "submit" in message:
            with self._lock:
                self._coming.add(message["submit"])
            takers = self._takers if _characters(message["request"]) < LONG else self._long_taker
            takers.submit(self._take, message["submit"], message["request"], message["fit"])
        elif "cancel" in message:
            self._cancel(message["cancel"])
        elif "adapter" in message:
            self._loaders.submit(self._change_adapter, message)

    def send(self) -> str:
        """Wait for news, and send those that are due as one frame; without any, a frame with the load alone.

        Why the backend has stopped for good, once every request has heard of it; "" while it has not.
        """
        news = self._wait()
        ready = self._pace.release((id for kind, id, _ in news if kind == "woken"), self._urgent)
        told = [each for each in news if each[0] != "woken"]
        if news and not ready and not told:  # all of them wait
            return ""
        load = self._backend.load()
        frame: dict[str, Any] = {"load": asdict(load)}
        for kind, id, content in told:
            frame.setdefault(kind, []).append([id, content])
        for id in ready:
            self._empty(id, frame)
        self._pace.sent(len(frame.get("chunks", ())))
        self._link.send(frame)
        with self._lock:
            return "" if self._streams or self._coming else load.fault

    def _wait(self) -> list[tuple[str, int, Any]]:
        news, due = [], self._pace.wait
        with contextlib.suppress(queue.Empty):
            news.append(self._news.get(timeout=BEAT if due is None else min(due, BEAT)))
            while True:
                news.append(self._news.get_nowait())
        return news

    def _take(self, id: int, body: wire.Json, fit: wire.Json) -> None:
        try:
            stream = self._backend.submit(self._fitted(wire.request_from_json(body), fit))
        except BackendStopped as error:
            self._news.put(("failed", id, str(error)))
            self._came(id)
        except BackendBusy as error:
            self._news.put(("busy", id, str(error)))
            self._came(id)
        except OutriderError as error:
            self._news.put(("refused", id, str(error)))
            self._came(id)
        except Exception as error:
            _logger.exception("a request could not be taken in")
            self._news.put(("failed", id, one_line(error, named=True)))
            self._came(id)
        else:
            self._accept(id, stream, fit["pieces"])

    def _fitted(self, request: Request, fit: wire.Json) -> Request:
        """The prompt cut to its last tokens, and max_tokens to what fits beside it, where that is wanted."""
        if not fit["clip"] and not fit["truncate"]:
            return request
        ids = self._ids(request)[-fit["truncate"] :]
        request = replace(request, prompt=ids, messages=None)
        if not fit["clip"]:
            return request
        most = max(1, min(request.params.max_tokens, self._backend.longest - len(ids)))
        params = replace(request.params, max_tokens=most, min_tokens=min(request.params.min_tokens, most))
        return replace(request, params=params)

    def _ids(self, request: Request) -> list[int]:
        if request.messages is not None:
            return list(self._backend.render(request.messages, request.tools))
        assert request.prompt is not None
        return list(self._backend.encode(request.prompt))

    def _change_adapter(self, message: wire.Json) -> None:
        id = message["adapter"]
        try:
            if "load_adapter" in message:
                info = self._backend.load_adapter(message["load_adapter"], message["path"])
                self._news.put(("adapter_loaded", id, asdict(info)))
            else:
                self._backend.unload_adapter(message["unload_adapter"])
                self._news.put(("adapter_unloaded", id, message["unload_adapter"]))
        except OutriderError as error:
            self._news.put(("adapter_refused", id, str(error)))
        except Exception as error:  # of a file, or of the machine: this adapter is not there, the others are
            _logger.exception("an adapter could not be loaded")
            said = one_line(error, named=True)
            self._news.put(("adapter_refused", id, f"the adapter could not be loaded: {said}"))

    def _accept(self, id: int, stream: Stream, pieces: bool) -> None:
        with self._lock:
            self._streams[id] = stream
            if pieces:
                self._showing.add(id)
        cancelled = self._came(id)
        self._news.put(("accepted", id, stream.prompt_tokens))
        stream.watch(lambda: self._wake(id, stream))
        if cancelled:
            stream.cancel()

    def _wake(self, id: int, stream: Stream) -> None:
        """It has something; called by the backend's thread. What waits anyway is told again only where it is urgent."""
        if id not in self._woken or stream.urgent:
            self._woken.add(id)
            self._news.put(("woken", id, None))

    def _urgent(self, id: int) -> bool:
        """Whether its chunks do not wait: one of its samples begins or ends, or it is over."""
        stream = self._streams.get(id)
        return stream is None or stream.urgent

    def _came(self, id: int) -> bool:
        """The request is taken in, or refused; whether it was cancelled meanwhile."""
        with self._lock:
            cancelled = id in self._cancelled
            self._cancelled.discard(id)
            self._coming.discard(id)
        return cancelled

    def _cancel(self, id: int) -> None:
        with self._lock:
            stream = self._streams.get(id)
            if id in self._coming:
                self._cancelled.add(id)
        if stream is not None:
            stream.cancel()

    def _empty(self, id: int, frame: dict[str, Any]) -> None:
        """All that a stream has."""
        stream = self._streams.get(id)
        self._woken.discard(id)  # before it is emptied: what comes later is told
        if stream is None:
            return
        ended = stream.done  # looked at first: what came before the end is in the chunks
        chunks = joined(stream.take())
        if id in self._showing:
            self._show((token for chunk in chunks for token in chunk.tokens), frame)
        frame.setdefault("chunks", []).extend([id, wire.chunk_to_json(chunk)] for chunk in chunks)
        if ended:
            self._end(id, stream, frame)

    def _end(self, id: int, stream: Stream, frame: dict[str, Any]) -> None:
        try:
            result = stream.result()
        except AdapterRefused as error:
            frame.setdefault("refused", []).append([id, str(error)])
        except Exception as error:
            frame.setdefault("failed", []).append([id, str(error)])
        else:
            if id in self._showing:
                self._show(map(Token, result.prompt_token_ids), frame)
                self._show((token for sample in result.samples for token in sample.tokens), frame)
            frame.setdefault("results", []).append([id, wire.result_to_json(result)])
        with self._lock:
            del self._streams[id]
            self._showing.discard(id)

    def _show(self, tokens: Any, frame: dict[str, Any]) -> None:
        """The bytes of tokens that the server has not seen yet: valid text as text, parts of characters as numbers."""
        ids = {id for token in tokens for id in (token.id, *(other for other, _ in token.top))} - self._shown
        self._shown |= ids
        pieces = frame.setdefault("pieces", {})
        frame.setdefault("special", []).extend(filter(self._pieces.special, ids))
        for id in ids:
            piece = self._pieces(id)
            try:
                pieces[id] = piece.decode()
            except UnicodeDecodeError:
                pieces[id] = list(piece)


def _characters(request: wire.Json) -> int:
    """Of the texts that have to be tokenised, and of a grammar by the time that it takes to compile."""
    messages = request["messages"] or ()
    texts = [
        *request.values(),
        *(message.get(name) for message in messages for name in ("content", "reasoning_content")),
    ]
    called = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    texts += [json.dumps(each) for each in (*(request["tools"] or ()), *called)]
    grammars = [request["params"][name] for name in ("json_schema", "regex", "grammar")]
    weights = [*((text, 1) for text in texts), *((text, GRAMMAR_WEIGHT) for text in grammars)]
    return sum(len(text) * weight for text, weight in weights if isinstance(text, str))


def describe(backend: Backend) -> wire.Json:
    """What the server wants to know of the model and of this process."""
    told = {**backend.describe(), "adapters": [asdict(info) for info in backend.adapters()]}
    return {"pid": os.getpid(), "drafters": drafters.names(), "tools": tools.describe(backend.tokenizer), **told}


def read_again(backend: Backend, adapters: Iterable[wire.Json]) -> dict[str, str]:
    """The adapters that the worker before this one had; of each that cannot be had any more: why."""
    lost = {}
    for each in adapters:
        name = each["name"]
        try:
            info = backend.load_adapter(name, each["path"])
            if [list(file) for file in info.stamp] != each["stamp"]:
                backend.unload_adapter(name)
                raise OutriderError(f"the files of adapter {quoted(name)} have changed since it was loaded")
        except Exception as error:  # the model serves all others
            why = str(error) if isinstance(error, OutriderError) else one_line(error, named=True)
            _logger.error("an adapter did not come back: %s", why)
            lost[name] = f"{why}; load it again"
    return lost


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then says goodbye
    link = Link(socket.socket(fileno=fd))
    first = link.read()
    if first is None:
        return
    opened: Future[Session] = Future()
    threading.Thread(target=_read, args=(link, opened), name="outrider-reader", daemon=True).start()
    try:
        settings = from_mapping(first["settings"])
        backend = build.backend(settings)
        lost = read_again(backend, first.get("adapters", ()))
    except Exception as error:
        if not isinstance(error, OutriderError):
            _logger.exception("the model could not be loaded")
        link.send({"failed": str(error) if isinstance(error, OutriderError) else one_line(error, named=True)})
        return
    session = Session(link, backend, CACHE_FAREWELL if settings.cache_file else FAREWELL * settings.keeps_files)
    opened.set_result(session)
    try:
        link.send({"ready": {**describe(backend), "lost_adapters": lost}})
        while not (fault := session.send()):
            pass
    except (BrokenPipeError, ConnectionResetError):
        session.close()
        return
    _logger.error(fault)  # the last line on stderr: the server tells it as the reason why the worker ended
    os._exit(1)


def _read(link: Link, opened: Future[Session]) -> None:
    """Ends the process with its server, even while a model is being loaded."""
    while (message := link.read()) is not None:
        opened.result().hear(message)
    if opened.done():
        opened.result().close()
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main(int(sys.argv[1]))
    os._exit(0)
