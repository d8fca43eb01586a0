"""Answers that end with their clients: a client that goes away, or waits too long, stops its sequence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.core.errors import OutriderError
from outrider.core.request import Request, Result
from outrider.server.context import id_of, server_of, tenant_of
from outrider.server.errors import Failed, Timeout, body_of
from outrider.server.fleet.supervisor import ServerStream
from outrider.server.log import log

T = TypeVar("T")
OURS = f"{OutriderError.__name__}: "  # before an error that a user may read
CHARACTERS_PER_TOKEN = 32  # a prompt with more for each token of the context is refused before it is encoded


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def submit(
    request: HttpRequest, name: str, asked: Request, pieces: bool = False, clip: bool = False, truncate: int = 0
) -> ServerStream:
    """`Fleet.submit`, unless the client goes away or waits too long before the worker has taken the request in."""
    fleet = server_of(request).fleet
    _refuse_long(asked, fleet.describe(name).info.get("context", 0))
    async with time_limit(request):
        work = fleet.submit(name, replace(asked, tenant=tenant_of(request)), pieces, clip, truncate)
        return await _unless_gone(request.receive, work)


def _refuse_long(asked: Request, context: int) -> None:
    """Before a worker tokenises it, which takes the cores from the requests that run. `context`: in tokens; 0: unknown.

    A token of English has 4 or 5 characters on average, of code 3; only made-up text, of spaces say, has 32.
    Of a long context that is much: workers tokenise such prompts one at a time.
    """
    length, most = sum(map(len, _texts(asked))), context * CHARACTERS_PER_TOKEN
    if 0 < most < length:
        raise OutriderError(
            f"the prompt has {length} characters, and at most {most} are read: the context is {context} tokens"
        )


def _texts(asked: Request) -> list[str]:
    """What has to be tokenised, about."""
    if isinstance(asked.prompt, str):
        return [asked.prompt]
    said = [f"{message['content']}{message.get('reasoning_content', '')}" for message in asked.messages or ()]
    called = [json.dumps(message["tool_calls"]) for message in asked.messages or () if message.get("tool_calls")]
    return [*said, *called, *(json.dumps(tool) for tool in asked.tools or ())]


async def result_of(request: HttpRequest, stream: ServerStream) -> Result:
    """The whole answer; an error of the engine's is raised."""
    try:
        async with time_limit(request):
            result = await _unless_gone(request.receive, stream.result())
    finally:
        stream.cancel()
    return checked(result)


def checked(result: Result) -> Result:
    for sample in result.samples:
        if sample.finish_reason == "error":
            raise (Failed if sample.error.startswith("the pass failed") else OutriderError)(
                sample.error.removeprefix(OURS)
            )
    return result


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class EventStream(Response):
    """Server-sent events: each item is the data of one, as text or as an object; a `type` in it is the event's name.
    `stream` ends with the client.

    What goes wrong on the way becomes an event in the shape of the path's API, and the last one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: HttpRequest,
        stream: Cancellable,
        events: AsyncGenerator[str | Mapping[str, Any]],
        headers: Mapping[str, str] | None = None,
        named: bool = False,
    ) -> None:
        """`named`: the API's events have types, so that an error has one, too."""
        self._request, self._stream, self._events, self._named = request, stream, events, named
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await _unless_gone(receive, self._write(send))
        except ClientGone:
            log("client gone", request_id=id_of(self._request))
        finally:
            self._stream.cancel()

    async def _write(self, send: Send) -> None:
        try:
            async with time_limit(self._request), contextlib.aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": _event(event), "more_body": True})
        except Exception as error:
            if not isinstance(error, OutriderError):
                log("failed", level="error", request_id=id_of(self._request), trace=traceback.format_exc())
            _, body, _ = body_of(self._request.url.path, error)
            body = {"type": "error", **body} if self._named else body
            await send({"type": "http.response.body", "body": _event(body), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str | Mapping[str, Any]) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    name = "" if isinstance(data, str) or "type" not in data else f"event: {data['type']}\n"
    return f"{name}data: {text}\n\n".encode("utf-8", "replace")


@contextlib.asynccontextmanager
async def time_limit(request: HttpRequest) -> AsyncIterator[None]:
    limit = server_of(request).options.timeout
    try:
        async with asyncio.timeout_at(request.state.begun + limit):  # for all that is done for it together
            yield
    except TimeoutError:
        raise Timeout(f"the answer took longer than {limit:g} s and was stopped; ask for fewer tokens") from None


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The work's outcome; when the client goes away the work is cancelled, and ClientGone raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
