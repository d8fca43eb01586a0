"""Which stop sequence ended an answer: the text ends before it, and its tokens go on."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.request import Result
from outrider.server.fleet.supervisor import ServerStream


def stop_found(result: Result, stream: ServerStream, stops: Sequence[str]) -> str | None:
    """The first of them in what was written; None: the answer ended by itself, or at its limit. `stream` must know the
    text of every token."""
    if result.finish_reason != "stop" or not stops or stream.special(result.tokens[-1].id):
        return None
    written = b"".join(stream.piece(token.id) for token in result.tokens).decode("utf-8", "replace")
    places = [(written.find(stop), stop) for stop in stops]
    return min((found for found in places if found[0] >= 0), default=(0, None))[1]
