"""Beginnings of user turns, written by hand (openers.txt), and how their gaps are filled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

DOCUMENT = "{document}"  # the gap in an opener that a document fills
# Sections that fill gaps of other lines. `language` and `other` are two different ones.
_FILLINGS = {"topic": "topics", "code": "code", "place": "places", "reader": "readers", "person": "persons"}
_LANGUAGES, _BEGINNINGS = "languages", "beginnings"
WITH_ENGLISH = 0.85  # share of the pairs of two other languages of which one becomes English
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


def two_languages(random: Random, language: str = "") -> dict[str, str]:
    """For the gaps {language}, if it is not given, and {other}; one of them is English mostly."""
    every = openers()[_LANGUAGES]
    language = language or random.choice(every)
    other = random.choice([name for name in every if name != language])
    if "English" not in (language, other) and random.random() < WITH_ENGLISH:
        other = "English"
    return {"language": language, "other": other}


def _begun_sentence(random: Random) -> dict[str, str]:
    """For the gap {words}: the first of a sentence, with its language and another one."""
    language, _, words = random.choice(openers()[_BEGINNINGS]).partition(": ")
    return {"words": words, **two_languages(random, language)}


def pick(section: str, random: Random, filled: Mapping[str, str] | None = None) -> str:
    """A line of the section with its gaps filled in; a document's place stays open. `filled`: gaps that are decided."""
    line = random.choice(openers()[section])
    gaps = filled or (_begun_sentence(random) if "{words}" in line else two_languages(random))
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
