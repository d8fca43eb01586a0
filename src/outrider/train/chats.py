"""Conversations in a JSONL file as tokens to learn from: what the assistant says, in the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError, one_line
from outrider.models.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    tokens: tuple[int, ...]
    learned: tuple[bool, ...]  # of each token, whether the assistant wrote it


def read(path: Path) -> list[Chat]:
    """A JSON object a line: {"messages": [...]}, or {"prompt": ..., "answer": ...}."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other line breaks as they are
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OutriderError(f"cannot read the chats in {path}: {reason}") from error
    chats = [_chat(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not chats:
        raise OutriderError(f'{path} holds no chats; write a line {{"messages": [...]}} for each')
    return chats


def _chat(where: str, line: str) -> Chat:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OutriderError(f"{where} is not JSON ({one_line(error)})") from error
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str) and isinstance(entry.get("answer"), str):
        return [{"role": "user", "content": entry["prompt"]}, {"role": "assistant", "content": entry["answer"]}]
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise OutriderError(f"{where} has no messages with role and content, nor a prompt and an answer")
    if not any(message["role"] == "assistant" for message in messages):
        raise OutriderError(f"{where} has no message of the assistant, so there is nothing to learn from it")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
        and bool(message["content"].strip())
    )


def example(chat: Sequence[dict[str, str]], tokenizer: Tokenizer, longest: int) -> Example | None:
    """None: it is too long, or its template writes earlier messages differently later on."""
    try:
        tokens = _render(chat, tokenizer, answering=False)
        learned = [False] * len(tokens)
        for place, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before = _render(chat[:place], tokenizer, answering=True)
            after = _render(chat[: place + 1], tokenizer, answering=False)
            if tokens[: len(before)] != before or tokens[: len(after)] != after:
                return None
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
    except Exception as error:  # the template is the model's own code
        raise OutriderError(f"the chat template refused a chat: {one_line(error)}") from error
    return Example(tuple(tokens), tuple(learned)) if len(tokens) <= longest and any(learned) else None


def _render(chat: Sequence[dict[str, str]], tokenizer: Any, answering: bool) -> list[int]:
    text = tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=answering)
    return list(tokenizer.encode(text, add_special_tokens=False))
