"""Beginnings of user turns, written by hand (openers.txt), and how their gaps are filled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

DOCUMENT = "{document}"  # the gap in an opener that a document fills
# Sections that fill gaps of other lines. `language` and `other` are two different ones.
_FILLINGS = {"topic": "topics", "code": "code", "place": "places", "reader": "readers", "person": "persons"}
_LANGUAGES = "languages"
WITH_WISH = 0.6  # share of the whole requests to which a wish is added, so that few are the same


@cache
def openers() -> dict[str, tuple[str, ...]]:
    """Lines by section; \\n is a new line in them."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in Path(__file__).with_name("openers.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            name = line[1:-1]
        elif line.strip() and name:
            found.setdefault(name, []).append(line.replace("\\n", "\n"))
    return {name: tuple(lines) for name, lines in found.items()}


def two_languages(random: Random) -> dict[str, str]:
    """For the gaps {language} and {other}; one of them is English as often as not."""
    language, other = random.sample(openers()[_LANGUAGES], 2)
    if random.random() < 0.5 and "English" not in (language, other):
        language, other = random.choice([(language, "English"), ("English", other)])
    return {"language": language, "other": other}


def pick(section: str, random: Random, filled: Mapping[str, str] | None = None) -> str:
    """A line of the section with its gaps filled in; a document's place stays open. `filled`: gaps that are decided."""
    line = random.choice(openers()[section])
    gaps = two_languages(random) if filled is None else filled
    for gap, value in gaps.items():
        line = line.replace(f"{{{gap}}}", value)
    for gap, filling in _FILLINGS.items():
        while f"{{{gap}}}" in line:
            line = line.replace(f"{{{gap}}}", random.choice(openers()[filling]), 1)
    return line


def is_whole(opener: str) -> bool:
    """Whether it is a request that nothing has to be added to."""
    return opener.endswith((".", "?", "!", "。", "？", "Summary:", DOCUMENT))


def with_wish(line: str, section: str, random: Random) -> str:
    """A whole request mostly gets a wish of that section ("": none); what has to be written on stays as it is."""
    if not section or not is_whole(line) or random.random() >= WITH_WISH:
        return line
    return f"{line} {pick(section, random)}"
