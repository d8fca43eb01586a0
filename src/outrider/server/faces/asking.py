"""What the routes of several APIs share: a body becomes a request to a model, and its answer a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request as HttpRequest, Response
from fastapi.responses import JSONResponse

from outrider.core.errors import OutriderError
from outrider.core.request import Request, Result
from outrider.server import tools
from outrider.server.access import Access
from outrider.server.context import ServerContext, server_of
from outrider.server.errors import ServerError
from outrider.server.faces.adapters import select
from outrider.server.faces.openai_bodies import ChatBody, OpenAIBody
from outrider.server.fleet.fleet import Description
from outrider.server.fleet.supervisor import ServerStream
from outrider.server.responses import EventStream, result_of, submit
from outrider.server.tools import Dialect

Json = dict[str, Any]


async def converse(
    request: HttpRequest, body: ChatBody, pieces: bool = False, check: Callable[[Dialect], None] = lambda model: None
) -> tuple[ServerStream, Dialect]:
    """The answer to a conversation as it comes, and how its model writes. `pieces`: the text of each token is wanted,
    also where the body does not say so. `check` refuses what the model cannot do."""
    server = server_of(request)
    model, adapter = await select(server, body.model)
    dialect = tools.of(model.info.get("tools"))
    check(dialect)
    with naming_the_field(body, dialect):
        asked, clip = body.request(*drafting(server, model, adapter), dialect)
        asked = replace(asked, draft=asked.draft or adapter)
        stream = await submit(request, model.uid, asked, pieces or shows(body, asked), clip)
    return stream, dialect


@contextmanager
def naming_the_field(body: OpenAIBody, model: Dialect) -> Iterator[None]:
    """A grammar that cannot be used is an error of the field that gave it, also where only a worker finds it out."""
    try:
        yield
    except ServerError:
        raise
    except OutriderError as error:
        constraint = body.constrained(model)
        blamed = error if constraint is None else constraint.blamed(error)
        if blamed is error:
            raise
        raise blamed from error


def drafting(server: ServerContext, model: Description, adapter: str) -> tuple[Access, str]:
    """What the request may name, and who drafts unless it does."""
    settings = model.spec.settings
    return server.access.on(settings.backend), adapter or settings.drafter


def shows(body: OpenAIBody, asked: Request) -> bool:
    """Whether the text of every token is wanted."""
    return body.wants_tokens or asked.params.logprobs is not None


class Answering(Protocol):
    """How an API writes an answer."""

    streams: Sequence[ServerStream]
    named: bool  # its events have types

    def cancel(self) -> None: ...

    def whole(self, results: Sequence[Result]) -> Json: ...

    def events(self) -> AsyncGenerator[Json | str]: ...


async def respond(request: HttpRequest, streamed: bool, writer: Answering) -> Response:
    """The answer, as a whole or as a stream of events."""
    if streamed:
        return EventStream(request, writer, writer.events(), named=writer.named)
    try:
        results = await asyncio.gather(*(result_of(request, stream) for stream in writer.streams))
    finally:
        writer.cancel()
    return JSONResponse(writer.whole(results))
