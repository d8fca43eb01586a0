"""100 JSON extractions: `auto` under a schema against plain decoding under it, and against `auto` without a schema.

    PYTHONPATH=src python scripts/extraction_speed.py [--threads 2] [--rounds 2] [--output FILE]

The ways take turns, text by text, in changing order; before every answer the drafters forget what was written and the
target its prefixes, so that nothing is copied from another way's answer. The texts of both constrained ways must be
equal. A ratio is of the seconds for a token, summed over the texts (each text's median over the rounds), with the 95 %
interval of a bootstrap over the texts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from outrider import LLM, Result, SamplingParams
from outrider.bench.machine import describe
from outrider.models.base import SharesPrefixes

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from extractions import Extraction, extractions  # the collection is the tests' own

TOKENS = 160  # of an answer, at most
# Each way: its drafter, and whether the schema holds. The first is what the others are compared with.
WAYS = {"plain": ("none", True), "auto": ("auto", True), "auto without a schema": ("auto", False)}
SAMPLES = 2000  # of the bootstrap
WARM = 6  # answers before the clock counts: to other questions


class Measurement:
    def __init__(self, llm: LLM, ways: dict[str, tuple[str, bool]]) -> None:
        self._llm, self._ways = llm, ways
        self.writing: dict[str, dict[int, list[float]]] = {way: {} for way in ways}  # seconds a token, by text
        self.whole: dict[str, dict[int, list[float]]] = {way: {} for way in ways}  # the same, with the prompt
        self.tokens: dict[str, dict[int, int]] = {way: {} for way in ways}
        self.counts: dict[str, Counter[str]] = {way: Counter() for way in ways}
        self.differing: list[int] = []
        self.invalid: list[int] = []

    def warm(self) -> None:
        for number in range(WARM):
            for way in self._ways:
                schema = {"type": "object", "properties": {f"word{number}": {"type": "string"}}}
                self._answer(Extraction("", schema, f"Say a word that rhymes with {number}, as JSON."), way)

    def round(self, turn: int, texts: list[Extraction]) -> None:
        names = list(self._ways)
        for number, each in enumerate(texts):
            first = (turn + number) % len(names)
            found = {way: self._measure(number, each, way) for way in names[first:] + names[:first]}
            self._compare(number, each, found)

    def _measure(self, number: int, each: Extraction, way: str) -> Result:
        begun = time.perf_counter()
        result = self._answer(each, way)
        seconds, stats = time.perf_counter() - begun, result.stats
        written = len(result.token_ids)
        self.tokens[way][number] = written
        self.writing[way].setdefault(number, []).append(stats.writing_seconds / (written - 1))
        self.whole[way].setdefault(number, []).append(seconds / written)
        self.counts[way].update(
            {"tokens": written, "steps": stats.steps, "drafted": stats.drafted, "accepted": stats.accepted}
        )
        self.counts[way].update({f"drafted by {name}": count for name, count in stats.drafted_by_drafter.items()})
        self.counts[way].update({f"accepted of {name}": count for name, count in stats.accepted_by_drafter.items()})
        for phase, spent in stats.seconds.items():
            self.counts[way][f"microseconds {phase}"] += round(1e6 * spent)
        return result

    def _answer(self, each: Extraction, way: str) -> Result:
        draft, held = self._ways[way]
        self._llm.backend.forget_texts()
        if isinstance(self._llm.engine.model, SharesPrefixes):
            self._llm.engine.model.forget_prefixes()
        more: dict[str, Any] = {"json_schema": each.schema} if held else {}
        return self._llm.chat(each.messages, SamplingParams(max_tokens=TOKENS, **more), draft=draft)

    def _compare(self, number: int, each: Extraction, found: dict[str, Result]) -> None:
        held = [result for way, result in found.items() if self._ways[way][1]]
        if len({(tuple(result.token_ids), result.finish_reason) for result in held}) > 1:
            self.differing.append(number)
        for result in held[:1]:
            if result.finish_reason == "stop":
                try:
                    jsonschema.validate(json.loads(result.text), each.schema)
                except (ValueError, jsonschema.ValidationError):
                    self.invalid.append(number)

    def report(self) -> dict[str, Any]:
        base = next(iter(self._ways))
        ways = {
            way: {
                "milliseconds a token": 1e3 * self._seconds(self.writing, way),
                "with the prompt": 1e3 * self._seconds(self.whole, way),
                f"speed over {base}": self._ratio(self.writing, base, way),
                f"with the prompt, over {base}": self._ratio(self.whole, base, way),
                **self.counts[way],
            }
            for way in self._ways
        }
        return {"ways": ways, "texts that differ": self.differing, "invalid": self.invalid}

    def _seconds(self, times: dict[str, dict[int, list[float]]], way: str, picked: list[int] | None = None) -> float:
        """Of a token, over these texts."""
        picked = list(times[way]) if picked is None else picked
        tokens = self.tokens[way]
        total = sum(statistics.median(times[way][number]) * tokens[number] for number in picked)
        return total / sum(tokens[number] for number in picked)

    def _ratio(self, times: dict[str, dict[int, list[float]]], base: str, way: str) -> list[float]:
        """The ratio, and its interval."""
        choice, numbers = random.Random(1), list(times[base])
        samples = [choice.choices(numbers, k=len(numbers)) for _ in range(SAMPLES)]
        found = sorted(self._seconds(times, base, some) / self._seconds(times, way, some) for some in samples)
        middle = self._seconds(times, base) / self._seconds(times, way)
        return [round(value, 3) for value in (middle, found[SAMPLES // 40], found[-SAMPLES // 40])]


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--limit", type=int, default=0, help="only so many texts; 0: all")
    made.add_argument("--thirds", default="012", help="of the texts, by their number modulo 3: 01 keeps a third unseen")
    made.add_argument("--drafter", action="append", default=[], help="a further drafter under the schema")
    made.add_argument("--output", type=Path)
    given = made.parse_args()
    texts = [each for number, each in enumerate(extractions()) if str(number % 3) in given.thirds]
    texts = texts[: given.limit or None]
    ways = WAYS | {drafter: (drafter, True) for drafter in given.drafter}
    with LLM(given.model, draft="auto", threads=given.threads) as llm:
        measurement = Measurement(llm, ways)
        measurement.warm()
        for turn in range(given.rounds):
            measurement.round(turn, texts)
    found = {"command": sys.argv, "texts": len(texts), "rounds": given.rounds, **measurement.report()}
    for way, figures in found["ways"].items():
        print(way, json.dumps(figures, indent=1), sep=": ")
    print("texts that differ:", found["texts that differ"], "invalid:", found["invalid"])
    if given.output:
        given.output.write_text(json.dumps({"machine": describe(), **found}, indent=1))
    return 1 if found["texts that differ"] or found["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
