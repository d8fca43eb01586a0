"""Prompts to measure with: our own in eight kinds (prompts/KIND.txt), or a JSONL in Spec-Bench form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError

KINDS = ("chat", "code", "edit", "summarise", "docqa", "translation", "maths", "extraction")
_OWN = Path(__file__).with_name("prompts")
_BETWEEN = "\n=====\n"


@dataclass(frozen=True)
class BenchPrompt:
    id: str
    kind: str
    text: str


def built_in() -> list[BenchPrompt]:
    texts = {kind: (_OWN / f"{kind}.txt").read_text(encoding="utf-8").split(_BETWEEN) for kind in KINDS}
    return [BenchPrompt(f"{kind}-{n}", kind, text.strip()) for kind in KINDS for n, text in enumerate(texts[kind], 1)]


def read_jsonl(path: str | Path) -> list[BenchPrompt]:
    """Lines with question_id, category and turns; the first turn is the prompt."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # JSON may hold other line breaks as they are
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutriderError(f"the prompt file {path} cannot be read: {reason}") from error
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise OutriderError(f"the prompt file {path} is empty; it needs a JSON object in each line")
    twice = _first_double(prompt.id for prompt in prompts)
    if twice is not None:
        raise OutriderError(f"the prompt file {path} has the question_id {twice} twice")
    return prompts


def _parse(path: str | Path, number: int, line: str) -> BenchPrompt:
    where = f"{path}, line {number}"
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise OutriderError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise OutriderError(f"{where} is not a JSON object with question_id, category and turns")
    missing = [key for key in ("question_id", "category", "turns") if key not in record]
    if missing:
        raise OutriderError(f"{where} has no {missing[0]!r}; it needs question_id, category and turns")
    turns = record["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise OutriderError(f"{where}: turns must be a list whose first item is the prompt's text")
    return BenchPrompt(str(record["question_id"]), str(record["category"]), turns[0])


def chosen(path: str | None, kinds: Sequence[str], limit: int | None) -> tuple[BenchPrompt, ...]:
    """The prompts of a file, or our own, as `select` has them."""
    return tuple(select(built_in() if path is None else read_jsonl(path), kinds, limit))


def select(prompts: Sequence[BenchPrompt], kinds: Sequence[str] = (), limit: int | None = None) -> list[BenchPrompt]:
    """The prompts of these kinds (all when none is named), at most `limit` of each."""
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    for kind in kinds:
        if kind not in known:
            raise OutriderError(f"unknown kind {kind!r}; known: {', '.join(known)}")
    if limit is not None and limit < 1:
        raise OutriderError(f"limit must be at least 1, not {limit}")
    wanted = [kind for kind in known if not kinds or kind in kinds]
    by_kind = [[prompt for prompt in prompts if prompt.kind == kind][:limit] for kind in wanted]
    return [prompt for group in by_kind for prompt in group]


def _first_double(ids: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for id in ids:
        if id in seen:
            return id
        seen.add(id)
    return None
