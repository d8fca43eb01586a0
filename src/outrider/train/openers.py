"""Hand-written beginnings of user turns (openers.txt), by section, and how their gaps are filled."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

DOCUMENT = "{document}"


@cache
def sections() -> dict[str, tuple[str, ...]]:
    """turns, sources, documents, topics, languages."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            name = line[1:-1]
        elif line.strip() and name:
            found.setdefault(name, []).append(line.replace("\\n", "\n"))
    return {name: tuple(lines) for name, lines in found.items()}


def pick(section: str, random: Random) -> str:
    """A line of the section with topic and language filled in; a document's place stays open."""
    line = random.choice(sections()[section])
    line = line.replace("{topic}", random.choice(sections()["topics"]))
    return line.replace("{language}", random.choice(sections()["languages"]))
