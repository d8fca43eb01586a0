"""Prompts that come with Outrider: for the demo, for the audit, and to build workloads from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import OutriderError


@dataclass(frozen=True)
class Prompt:
    name: str
    kind: str  # what the answer looks like: edit (mostly copied), code, data, prose, list, dialogue
    text: str


DEMO = Prompt(
    "notice",
    "edit",
    """Replace "Tuesday" with "Thursday" in this text:

The reading room of the town library will be closed on Tuesday for repairs to the roof. Books that are due that day \
may be brought back a day later without a fee. The children's corner on the ground floor stays open, and the story \
hour begins at ten o'clock as usual. If you have ordered a book from another library, you can collect it at the side \
door between two and five in the afternoon. We are sorry for the noise and thank you for your patience.""",
)

AUDIT = (
    Prompt(
        "rename",
        "code",
        "Rename the variable `total` to `amount` in this function and change nothing else:\n\n"
        "def bill(prices, tax):\n    total = 0\n    for price in prices:\n        total = total + price\n"
        "    return total * (1 + tax)\n",
    ),
    Prompt(
        "spelling",
        "edit",
        "Correct the spelling: The shipp left the harbour at dawn, and by noon the shipp was far from the harbour.",
    ),
    Prompt("rivers", "list", "List five long rivers and the country in which each of them ends."),
    Prompt("json", "data", 'Write a JSON array of three objects with the keys "name" and "age".'),
    Prompt("fox", "prose", "Tell a short story about a fox who learns to count the stars."),
    Prompt("naïve", "dialogue", "Write a short dialogue between Zoë and Søren about the café at No. 7, price: 3 €."),
)

# A few words to be repeated: whoever copies from the prompt has something to copy, and many words may come next.
LAW = Prompt("law", "list", "red, blue, green")


def read(path: str) -> tuple[Prompt, ...]:
    """One prompt per line; empty lines are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(
            f"cannot read the prompts in {path} ({error}); give a text file with a prompt per line"
        ) from error
    found = tuple(Prompt(f"line {number}", "own", line) for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise OutriderError(f"{path} has no prompts; write one per line")
    return found
