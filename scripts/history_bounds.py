"""What the drafter `history` costs: time of a lookup by the size of the history, bytes a token, and a long run.

    python scripts/history_bounds.py [--tokens 10000000] [--capacity 1048576]

Texts are made up: words of a vocabulary of 49,152 by Zipf's law, in answers of 400 tokens of which three in four are
earlier answers with some tokens changed, so that lookups find long matches with several continuations. Lookups follow
such an answer as a running request does. Times are those of the thread on its core, without what others took of it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from outrider.core.draft import Draft
from outrider.drafters.confidence import MatchCalibration
from outrider.drafters.history.drafter import grown
from outrider.drafters.history.suffixes import SuffixIndex

VOCABULARY, ANSWER, CHANGED = 49_152, 400, 8
LENGTH, WIDTH, BUDGET = 16, 2, 63  # the drafter's defaults, and a budget that cuts nothing
LOOKUPS = 20_000


class Texts:
    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.known = [self._words(ANSWER) for _ in range(500)]

    def _words(self, count: int) -> list[int]:
        return [int(each) % VOCABULARY for each in self._random.zipf(1.2, count)]

    def next(self) -> list[int]:
        if self._random.random() < 0.25:
            return self._words(ANSWER)
        text = list(self.known[self._random.integers(len(self.known))])
        for place, token in zip(self._random.integers(0, ANSWER, CHANGED), self._words(CHANGED), strict=True):
            text[place] = token
        return text


def resident() -> float:
    """MiB of this process that lie in memory, without pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1024


def microseconds(index: SuffixIndex, texts: Texts, draws: bool) -> tuple[float, float, float]:
    """Median, 99th percentile and mean of a lookup; `draws`: and of making its draft."""
    calibration, taken, found = MatchCalibration(), [], 0
    while len(taken) < LOOKUPS:
        text = texts.next()
        for end in range(20, ANSWER, 3):
            tokens = text[:end]
            begin = time.thread_time()
            matched, rows = index.continuations(tokens, LENGTH)
            draft = grown(rows, matched, calibration, BUDGET, WIDTH) if draws and rows else Draft()
            taken.append(time.thread_time() - begin)
            found += len(rows) + len(draft)
    values = 1e6 * np.array(taken)
    return float(np.median(values)), float(np.percentile(values, 99)), float(values.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--capacity", type=int, default=1 << 20)
    args = parser.parse_args()
    texts, before = Texts(), resident()
    index, given, spent, next_line = SuffixIndex(args.capacity), 0, 0.0, 10_000
    print("| tokens given | held | MiB resident | bytes a token held | lookup: median, p99, mean µs | with its draft |")
    print("|---|---|---|---|---|---|")
    while given < args.tokens:
        text = texts.next()
        begin = time.thread_time()
        index.add(text, kept=0)
        spent, given = spent + time.thread_time() - begin, given + len(text)
        if given >= min(next_line, args.tokens):
            grew = resident() - before
            timed = [", ".join(f"{each:.1f}" for each in microseconds(index, texts, draws)) for draws in (False, True)]
            bytes_each = grew * 2**20 / len(index)
            print(f"| {given:,} | {len(index):,} | {grew:.1f} | {bytes_each:.1f} | {' | '.join(timed)} |", flush=True)
            next_line *= 10
    print(f"\narrays: {index.nbytes / index.capacity:.1f} bytes a token of the capacity ({index.capacity:,})")
    print(f"taking in: {1e6 * spent / given:.2f} µs a token")


if __name__ == "__main__":
    main()
