"""Prompts that come with Outrider: for the demo, for the audit, and to build workloads from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import OutriderError


@dataclass(frozen=True)
class NamedPrompt:
    name: str
    kind: str  # what the answer looks like: edit (mostly copied), code, data, prose, list, dialogue
    text: str


DEMO = NamedPrompt(
    "notice",
    "edit",
    """Replace "Tuesday" with "Thursday" in this text:

The reading room of the town library will be closed on Tuesday for repairs to the roof. Books that are due that day \
may be brought back a day later without a fee. The children's corner on the ground floor stays open, and the story \
hour begins at ten o'clock as usual. If you have ordered a book from another library, you can collect it at the side \
door between two and five in the afternoon. We are sorry for the noise and thank you for your patience.""",
)

AUDIT = (
    NamedPrompt(
        "rename",
        "code",
        "Rename the variable `total` to `amount` in this function and change nothing else:\n\n"
        "def bill(prices, tax):\n    total = 0\n    for price in prices:\n        total = total + price\n"
        "    return total * (1 + tax)\n",
    ),
    NamedPrompt(
        "spelling",
        "edit",
        "Correct the spelling: The shipp left the harbour at dawn, and by noon the shipp was far from the harbour.",
    ),
    NamedPrompt("rivers", "list", "List five long rivers and the country in which each of them ends."),
    NamedPrompt("json", "data", 'Write a JSON array of three objects with the keys "name" and "age".'),
    NamedPrompt("fox", "prose", "Tell a short story about a fox who learns to count the stars."),
    NamedPrompt(
        "naïve", "dialogue", "Write a short dialogue between Zoë and Søren about the café at No. 7, price: 3 €."
    ),
)

# A few words to be repeated: a drafter that copies finds something to copy, and many words may come next.
LAW = NamedPrompt("law", "list", "red, blue, green")


def read(path: str) -> tuple[NamedPrompt, ...]:
    """One prompt per line; empty lines are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(
            f"cannot read the prompts in {path} ({error}); give a text file with a prompt per line"
        ) from error
    found = tuple(NamedPrompt(f"line {number}", "own", line) for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise OutriderError(f"{path} has no prompts; write one per line")
    return found
