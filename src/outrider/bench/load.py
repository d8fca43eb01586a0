"""Load on a server: streamed chat requests, a number of them at once, with the time of every chunk."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from outrider.core.errors import OutriderError


@dataclass
class Answer:
    """What one client saw of one request."""

    text: str = ""
    tokens: int = 0
    first_s: float = 0.0  # until the first chunk of text
    decode_s: float = 0.0  # from there to the last chunk
    pauses: list[float] = field(default_factory=list)  # seconds between chunks
    stats: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Load:
    """Clients of one server. They use nothing but sockets and threads: what is measured is the server."""

    def __init__(self, url: str, key: str = "", timeout: float = 120.0) -> None:
        self._place, self._timeout = _parse(url), timeout
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ended = False

    def wave(
        self, bodies: Sequence[Mapping[str, Any]], streams: int, done: Callable[[], None]
    ) -> tuple[list[Answer], float]:
        """Ask everything, `streams` at a time; the answers in the same order, and the seconds it took."""

        def one(body: Mapping[str, Any]) -> Answer:
            answer = self.ask(body)
            done()
            return answer

        with ThreadPoolExecutor(streams, "outrider-client") as pool:
            begin = time.perf_counter()
            try:
                answers = list(pool.map(one, bodies))
            except BaseException:  # Ctrl-C: requests under way are dropped
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise
        return answers, time.perf_counter() - begin

    def ask(self, body: Mapping[str, Any]) -> Answer:
        answer = Answer()
        try:
            self._stream(body, answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return answer

    def get(self, path: str) -> dict[str, Any]:
        """A JSON page; an OutriderError when no server answers."""
        try:
            with self._connected() as connection:
                connection.request("GET", self._place.path + path, headers=self._headers)
                response = connection.getresponse()
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise OutriderError(f"no server answers at {self._place.geturl()}: {error}") from error
        if response.status != 200:
            raise OutriderError(f"{self._place.geturl()}{path} answered {response.status}: {_reason(content)}")
        return dict(json.loads(content))

    def close(self) -> None:
        """Drop every request under way."""
        with self._lock:
            self._ended, open_ = True, list(self._open)
        for sock in open_:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self._place.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._place.hostname or "", self._place.port, timeout=self._timeout)
        connection.connect()
        sock: socket.socket = connection.sock  # the connection forgets it once the answer has begun
        try:
            with self._lock:
                if self._ended:
                    raise ConnectionAbortedError("the benchmark has ended")
                self._open.add(sock)
            yield connection
        finally:
            with self._lock:
                self._open.discard(sock)
            connection.close()

    def _stream(self, body: Mapping[str, Any], answer: Answer) -> None:
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._connected() as connection:
            begin = time.perf_counter()
            connection.request("POST", f"{self._place.path}/v1/chat/completions", json.dumps(whole), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                answer.error = f"status {response.status}: {_reason(response.read())}"
                return
            lines = list(_lines(response))
        _take_in(answer, begin, lines)


def _lines(response: http.client.HTTPResponse) -> Iterator[tuple[float, bytes]]:
    """When each event came, and its data. Reading it comes later, when no clock runs."""
    while line := response.readline():
        if line.startswith(b"data:"):
            yield time.perf_counter(), line[5:].strip()


def _take_in(answer: Answer, begin: float, lines: Sequence[tuple[float, bytes]]) -> None:
    times: list[float] = []
    for when, data in lines[:-1] if lines and lines[-1][1] == b"[DONE]" else lines:
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"].get("message", event["error"]))
        text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
        if text:
            answer.text += text
            times.append(when)
        answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
        answer.stats = event.get("metrics") or answer.stats
    if not answer.error and (not lines or lines[-1][1] != b"[DONE]"):
        answer.error = "the stream ended before its end"
    if times:
        answer.first_s, answer.decode_s = times[0] - begin, times[-1] - times[0]
        answer.pauses = [after - before for before, after in itertools.pairwise(times)]


def _reason(content: bytes) -> str:
    """The message of an error's body, in any of the usual shapes."""
    try:
        error = json.loads(content).get("error", {})
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return content[:200].decode("utf-8", "replace")


def _parse(url: str) -> SplitResult:
    try:
        place = urlsplit(url.rstrip("/").removesuffix("/v1"))
        usable = place.scheme in ("http", "https") and bool(place.hostname) and place.port is not False
    except ValueError:
        usable = False
    if not usable:
        raise OutriderError(f"{url!r} is no address of a server; write it as http://HOST:PORT")
    return place
