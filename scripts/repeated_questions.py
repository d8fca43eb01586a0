"""What the drafter `history` brings where questions come again: 200 of them, of which the second half repeats the first
with small changes. Plain decoding and the drafter take turns at every question; the whole time of a request counts.

    python scripts/repeated_questions.py [--model smollm2-135m] [--draft auto] [--tokens 64] [--threads 2] [--output F]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.bench import machine
from outrider.bench.ratios import interval

FORMS = (
    "What is {}?", "Explain {} to a child of ten years.", "Write three facts about {}.",
    "Give me a short plan for a lesson on {}.",
)  # fmt: skip
TOPICS = (
    "a volcano", "photosynthesis", "the Roman Empire", "a bicycle gear", "the moon", "a database index",
    "fermentation", "the French Revolution", "a black hole", "compound interest", "a vaccine", "the water cycle",
    "a suspension bridge", "the printing press", "a prime number", "an earthquake", "a coral reef", "the stock market",
    "a sonnet", "machine translation", "a compass", "the human heart", "a desert", "a recipe for bread", "a glacier",
)  # fmt: skip
CHANGES = ("Please: {}", "{} Thank you.", "Hello! {}", "{} Be brief.")  # of a question that comes again


def questions(count: int) -> list[str]:
    """Half of them, and the same with small changes; at most 200."""
    first = [form.format(topic) for topic in TOPICS for form in FORMS][: count // 2]
    return first + [CHANGES[number % len(CHANGES)].format(text) for number, text in enumerate(first)]


def summary(times: list[tuple[float, float]]) -> dict[str, float]:
    """How many times as fast as plain: the geometric mean over questions with its 95 % interval, and of the sums."""
    logs = [math.log(plain / drafted) for plain, drafted in times]
    low, high = interval([[each] for each in logs]) or (math.nan, math.nan)
    sums = sum(plain for plain, _ in times) / sum(drafted for _, drafted in times)
    return {"mean": math.exp(sum(logs) / len(logs)), "low": math.exp(low), "high": math.exp(high), "sums": sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    params, times, differ = SamplingParams(max_tokens=given.tokens), [], 0
    where = {"device": "cpu", "threads": given.threads}
    with LLM(given.model, draft="none", **where) as plain, LLM(given.model, draft=given.draft, **where) as drafted:
        for number, text in enumerate(questions(given.questions)):
            seconds, texts = {}, {}
            for name in ("plain", "drafted") if number % 2 else ("drafted", "plain"):
                begin = time.perf_counter()
                result = (plain if name == "plain" else drafted).chat([{"role": "user", "content": text}], params)
                seconds[name], texts[name] = time.perf_counter() - begin, result.token_ids
            times.append((seconds["plain"], seconds["drafted"]))
            differ += texts["plain"] != texts["drafted"]
    half = len(times) // 2
    found = {
        "draft": given.draft, "model": Path(given.model).name, "tokens": given.tokens, "texts_that_differ": differ,
        "first_half": summary(times[:half]), "second_half": summary(times[half:]), "machine": machine.describe(),
        "times": times,
    }  # fmt: skip
    for name in ("first_half", "second_half"):
        own = found[name]
        print(f"{name}: {own['mean']:.2f}x [{own['low']:.2f}-{own['high']:.2f}], of sums {own['sums']:.2f}x")
    print(f"{differ} texts differ")
    if given.output is not None:
        given.output.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
