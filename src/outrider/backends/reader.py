"""Text handling that all backends share: prompts and messages become tokens, and tokens become the answer's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from outrider.backends.base import Stream
from outrider.backends.text import Writer
from outrider.core.adapter import AdapterInfo
from outrider.core.errors import OutriderError, one_line, quoted
from outrider.core.grammar import Vocabulary
from outrider.core.request import Message, Prompt, Request
from outrider.models.token_bytes import vocabulary_of
from outrider.models.tokenizer import Tokenizer, encode_all

# Chats of one call from which on they are tokenised together. One takes a millisecond, and the threads that share the
# work have to start first; chosen by hand.
MANY = 16

NO_ADAPTERS = "adapters are for our own engine; use the backend local, or merge the adapter first (outrider merge)"


class Reader:
    tokenizer: Tokenizer | None  # None: prompts are token ids
    vocab_size: int
    notes: tuple[str, ...]
    _ends: frozenset[int]  # the tokens that end an answer

    @property
    def context(self) -> int:
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """The most tokens a sequence can have here."""
        return self.context

    def describe(self) -> dict[str, Any]:
        """What a user may want to know of the model."""
        return {
            "context": self.context,
            "vocab_size": self.vocab_size,
            "notes": list(self.notes),
            "text": self.tokenizer is not None,
            "chat": bool(getattr(self.tokenizer, "chat_template", None)),
        }

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            ids = _token_ids(prompt)
            self._check_ids(ids)
            return ids
        return list(self._need_tokenizer().encode(prompt, add_special_tokens=special))

    def render(self, messages: Seq[Message], tools: Seq[Mapping[str, Any]] | None = None) -> list[int]:
        """Messages as the model's own chat template writes them, ready for the answer. `tools`: which it may call."""
        return list(self._need_tokenizer().encode(self._chat(messages, tools), add_special_tokens=False))

    def _chat(self, messages: Seq[Message], tools: Seq[Mapping[str, Any]] | None) -> str:
        extra = {} if tools is None else {"tools": list(tools)}
        tokenizer = self._need_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise OutriderError("the model has no chat template; give a prompt instead of messages (--raw)")
        try:
            return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **extra)
        except OutriderError:
            raise
        except Exception as error:  # the template is the model's own code: whatever it raises is about the messages
            raise OutriderError(f"the chat template refused the messages: {one_line(error)}") from error

    def submit(self, request: Request) -> Stream:
        raise NotImplementedError

    def load_adapter(self, name: str, path: str | Path, allow_pickle: bool = False) -> AdapterInfo:
        raise OutriderError(NO_ADAPTERS)

    def unload_adapter(self, name: str) -> None:
        raise OutriderError(NO_ADAPTERS)

    def adapters(self) -> list[AdapterInfo]:
        return []

    def submit_all(self, requests: Seq[Request]) -> list[Stream]:
        """Start each of them; none goes on running when one is refused."""
        streams: list[Stream] = []
        try:
            for request in requests:
                streams.append(self.submit(request))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def _prompt(self, request: Request) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise OutriderError("a request has either a prompt or messages")
        if request.messages is not None:
            return self.render(request.messages, request.tools)
        assert request.prompt is not None
        return self.encode(request.prompt)

    def _prompts(self, requests: Seq[Request]) -> list[list[int]]:
        """The tokens of each; the texts of many chats at once, on all cores."""
        chats = [each.messages is not None and each.prompt is None for each in requests]
        if len(requests) < MANY or not all(chats):
            return list(map(self._prompt, requests))
        texts = [self._chat(each.messages or (), each.tools) for each in requests]
        return encode_all(self._need_tokenizer(), texts, add_special_tokens=False)

    def _writer(self, request: Request) -> Writer | None:
        """Text is written token by token only where somebody reads it so."""
        if request.params.stop:
            return Writer(self._need_tokenizer(), request.params.stop, request.params.min_tokens, request.visible)
        wanted = request.stream or request.visible
        return Writer(self.tokenizer, visible=request.visible) if wanted and self.tokenizer is not None else None

    def _vocabulary(self) -> Vocabulary:
        """For the grammars of requests."""
        return vocabulary_of(self._need_tokenizer(), self.vocab_size, self._ends)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise OutriderError("the model has no tokenizer, so text cannot be read; give token ids instead")
        return self.tokenizer

    def _check_ids(self, ids: Any) -> None:
        size = self.vocab_size
        bad = next((token for token in ids if not 0 <= token < size), None)
        if bad is not None:
            raise OutriderError(f"token id {bad} is outside the vocabulary of {size} tokens")


def _token_ids(prompt: Any) -> list[int]:
    try:
        return [int(token) for token in prompt]
    except (TypeError, ValueError) as error:
        raise OutriderError(f"a prompt must be text or a list of token ids, not {quoted(prompt)}") from error
