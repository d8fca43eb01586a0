"""ChatForm: a body of another API as one of the chat API, and its errors in the other one's words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from outrider.core.errors import OutriderError
from outrider.server.errors import Bad, ServerError
from outrider.server.faces.openai_bodies import ChatBody

_MESSAGE = re.compile(r"\bmessages\.(\d+)\b")


def chat_body(**fields: Any) -> ChatBody:
    try:
        return ChatBody(**fields)
    except ValidationError as error:  # of bounds that only the whole conversation breaks
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise Bad(f"{place}: {first['msg']}", param=place) from None


@dataclass(frozen=True)
class ChatForm:
    chat: ChatBody
    places: Sequence[str]  # of each message of the conversation: where it stands in the body
    names: Sequence[tuple[re.Pattern[str], str]]  # what fields of the chat API are called instead

    @contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Errors are about the body that the client has sent."""
        try:
            yield
        except ServerError as error:
            error.args = (self._named(str(error)),)
            error.param = None if error.param is None else self._named(error.param)
            raise
        except OutriderError as error:
            error.args = (self._named(str(error)),)
            raise

    def _named(self, text: str) -> str:
        text = _MESSAGE.sub(lambda match: self._place(int(match[1])), text)
        for pattern, name in self.names:
            text = pattern.sub(name, text)
        return text

    def _place(self, message: int) -> str:
        return self.places[message] if message < len(self.places) else f"messages.{message}"
