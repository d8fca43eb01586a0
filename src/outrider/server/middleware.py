"""What every request passes through: its line in the log, and the checks of its key and its size."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import traceback
import uuid

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.errors import quoted
from outrider.server.errors import ServerError, Timeout, TooLarge, Unauthorised, WrongHost, body_of
from outrider.server.fleet.fleet import Fleet
from outrider.server.log import log
from outrider.server.options import ServerOptions
from outrider.server.responses import ClientGone

OPEN = ("/health", "/", "/favicon.ico", "/v1/cluster/auth")  # need no key for a GET, like all under /static/
LONGEST_PATH = 500  # characters of a path that the log repeats: ours are shorter
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class RequestGuard:
    """Lets requests in that have the key, are meant for this host, and have a body of a bearable size in time."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._most, self._seconds = app, options.max_body, options.timeout
        self._keys, self._hosts = [key.encode() for key in options.keys], options.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_host(headers)
            self._check_key(scope, headers)
            self._check_length(headers)
            receive = await self._read_in_time(receive, scope["state"]["begun"])
        except ClientGone:
            return
        except ServerError as error:
            status, body, more = body_of(scope["path"], error)
            await JSONResponse(body, status, {**more, "connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """A page from elsewhere can have its own name bound to 127.0.0.1, and then its browser lets it read us."""
        host = _host_of(headers.get(b"host", b""))
        if self._hosts and host and host not in self._hosts and not host.endswith(".localhost"):
            names = ", ".join(self._hosts)
            raise WrongHost(f"the Host header is {quoted(host)}; send one of {names} (others: serve --host 0.0.0.0)")

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Also says whose request it is."""
        reads = scope["method"] in ("GET", "HEAD")
        scope["state"]["tenant"] = ""
        if not self._keys or (reads and (scope["path"] in OPEN or scope["path"].startswith("/static/"))):
            return
        given = headers.get(b"authorization", b"")
        given = given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        if not sum(hmac.compare_digest(given, key) for key in self._keys):  # all of them: the time tells of none
            raise Unauthorised("the API key is missing or wrong; send it as Authorization: Bearer KEY")
        scope["state"]["tenant"] = hashlib.sha256(given).hexdigest()

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most:
            raise TooLarge(f"the body has {int(length)} bytes; at most {self._most} are taken (serve --max-body)")

    async def _read_in_time(self, receive: Receive, begun: float) -> Receive:
        try:
            async with asyncio.timeout_at(begun + self._seconds):
                return await self._read(receive)
        except TimeoutError:
            raise Timeout(f"the body did not come within {self._seconds:g} s; send it faster") from None

    async def _read(self, receive: Receive) -> Receive:
        """The body, counted as it comes: not every client says its length. It is then there for the app to take."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._most:
                raise TooLarge(f"the body has more than {self._most} bytes (serve --max-body)")
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return first.pop() if first else await receive()

        return replayed


class RequestLog:
    """Gives every request an id and a time when it began, and the log a line when it is over."""

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app, self._metrics = app, fleet.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = _request_id(scope)
        scope.setdefault("state", {}).update(request_id=id, begun=asyncio.get_running_loop().time())
        begin, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # a fault of ours: it is told, and the server goes on
            log("failed", level="error", request_id=id, trace=traceback.format_exc())
            if not status:
                code, body, _ = body_of(scope["path"], error)
                await JSONResponse(body, code)(scope, receive, noted)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.http.labels(path, str(status)).inc()
            seconds = round(time.perf_counter() - begin, 4)
            log(
                "request",
                method=scope["method"],
                path=scope["path"][:LONGEST_PATH],
                status=status,
                seconds=seconds,
                request_id=id,
                refused=scope["state"].get("refused"),
            )


def _request_id(scope: Scope) -> str:
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _host_of(header: bytes) -> str:
    """ "localhost:8000" -> "localhost", "[::1]:8000" -> "::1" """
    text = header.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")
