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
from outrider.server.errors import Bad, ServerError
from outrider.server.faces.adapters import ChosenAdapter, scaled, select
from outrider.server.faces.openai_bodies import ChatBody, OpenAIBody
from outrider.server.fleet.fleet import Description
from outrider.server.fleet.supervisor import ServerStream
from outrider.server.responses import EventStream, result_of, submit, time_limit
from outrider.server.tools import Dialect

Json = dict[str, Any]


async def converse(
    request: HttpRequest, body: ChatBody, pieces: bool = False, check: Callable[[Dialect], None] = lambda model: None
) -> tuple[ServerStream, Dialect]:
    """The answer to a conversation as it comes, and how its model writes. `pieces`: the text of each token is wanted,
    also where the body does not say so. `check` refuses what the model cannot do."""
    server = server_of(request)
    model, chosen = await chosen_by(request, body)
    dialect = tools.of(model.info.get("tools"))
    check(dialect)
    with naming_the_field(body, dialect):
        asked, clip = body.request(*drafting(server, model, chosen), dialect)
        asked = replace(asked, draft=asked.draft or chosen.draft, adapter=chosen.adapter)
        stream = await submit(request, model.uid, asked, pieces or shows(body, asked), clip)
    return stream, dialect


async def chosen_by(request: HttpRequest, body: OpenAIBody) -> tuple[Description, ChosenAdapter]:
    """The model that a body names, and its adapters."""
    async with time_limit(request):
        model, chosen = await select(server_of(request), body.model)
    if body.lora is None:
        return model, chosen
    if chosen.adapter:
        raise Bad("model names an adapter, and lora does, too; leave out one of them", param="lora")
    return model, replace(chosen, adapter=scaled(model, {each.id: each.scale for each in body.lora}))


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


def drafting(server: ServerContext, model: Description, chosen: ChosenAdapter) -> tuple[Access, str]:
    """What the request may name, and who drafts unless it does."""
    settings = model.spec.settings
    return server.access.on(settings.backend), chosen.draft or settings.drafter


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
