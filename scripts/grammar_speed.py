"""What a grammar costs: plain decoding under one against plain decoding, masks of a large vocabulary, the first mask.

    PYTHONPATH=src python scripts/grammar_speed.py [--model smollm2-135m] [--rounds 12]

Both kinds of decoding take turns, prompt by prompt; a figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from outrider import LLM, SamplingParams
from outrider.core.grammar import Grammar, Matcher, Vocabulary
from outrider.core.grammar_spec import GrammarSpec

TOKENS = 96  # of each answer, none of which ends before
VOCABULARY = 150_000
FIELDS = 100
# Lists without end, of the parts that JSON has: keys that are forced, numbers, values of a choice and free text.
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "kind": {"enum": ["novel", "poem", "play"]},
        "read": {"type": "boolean"},
    },
    "required": ["name", "year", "kind", "read"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 50}
PROMPTS = ("Ten books as a JSON list:\n", "The plays of Shakespeare as JSON:\n", "A library's catalogue, as JSON:\n")


def ratios(llm: LLM, rounds: int, **how: Any) -> list[float]:
    """Seconds of a token without a grammar over those with one."""
    kinds = {
        "free": SamplingParams(max_tokens=TOKENS, ignore_eos=True, **how),
        "held": SamplingParams(max_tokens=TOKENS, json_schema=SCHEMA, **how),
    }
    found = []
    for turn in range(-1, rounds):  # the first is not counted
        prompt = PROMPTS[turn % len(PROMPTS)]
        order = list(kinds) if turn % 2 else list(reversed(kinds))
        seconds = {kind: _per_token(llm, prompt, kinds[kind]) for kind in order}
        if turn >= 0:
            found.append(seconds["free"] / seconds["held"])
    return found


def _per_token(llm: LLM, prompt: str, params: SamplingParams) -> float:
    result = llm.generate(prompt, params)
    assert result.finish_reason == "length", result
    return result.stats.writing_seconds / (len(result.token_ids) - 1)


def made_vocabulary(size: int = VOCABULARY) -> Vocabulary:
    """Bytes, and words of letters, with and without a space before, of the lengths that a tokenizer's have."""
    luck = random.Random(1)
    words = {bytes([byte]): None for byte in range(256)}
    words |= dict.fromkeys(
        mark.encode() for mark in ('{"', '":', '",', '"}', '": "', '", "', " {", "[{", "},", "\n", "  ")
    )
    letters = "etaoinshrdlucmfwypvbgkjqxzETAOINSHRDLUCMFWY0123456789_-.éü"
    weights = [1.0 / (1 + place) for place in range(len(letters))]
    while len(words) < size - 1:
        text = "".join(luck.choices(letters, weights, k=luck.choice((2, 3, 4, 5, 5, 6, 7, 8, 9, 12))))
        words[(" " + text if luck.random() < 0.5 else text).encode()] = None
    tokens = [*words, b"<end>"]
    ids = {word: id for id, word in enumerate(tokens)}
    return Vocabulary(tokens, [size - 1], [size - 1], lambda text: [ids[bytes([byte])] for byte in text.encode()])


def wide_schema(fields: int = FIELDS) -> str:
    kinds = ({"type": "string"}, {"type": "integer"}, {"enum": ["red", "blue"]}, {"type": ["boolean", "null"]})
    names = [f"field_{place}_{'abcdefghij'[place % 10] * 3}" for place in range(fields)]
    properties = {name: kinds[place % 4] for place, name in enumerate(names)}
    return json.dumps({"type": "object", "properties": properties, "required": names, "additionalProperties": False})


def masks(vocabulary: Vocabulary, schema: str, tokens: int = 600) -> list[float]:
    """Seconds of each mask along a text that a random choice among the allowed tokens writes."""
    luck = random.Random(2)
    matcher = Grammar(GrammarSpec("json_schema", schema), vocabulary).matcher([vocabulary.size - 1])
    seconds = []
    for _ in range(tokens):
        seconds.append(timed(matcher.mask))
        allowed = matcher.mask()
        assert allowed is not None
        choice = allowed.nonzero()[:, 0].tolist()
        quotes = [id for id in choice if b'"' in vocabulary.tokens[id]]  # or a text would never end
        token = luck.choice(quotes if quotes and luck.random() < 0.3 else choice)
        if token in matcher.ends:
            break
        matcher.commit(token)
    return seconds


def first_mask(vocabulary: Vocabulary, number: int) -> float:
    """Compiled anew each time, up to the mask of a sequence's first token."""
    schema = json.dumps({"title": str(number), **json.loads(wide_schema())})

    def first() -> Matcher:
        matcher = Grammar(GrammarSpec("json_schema", schema), vocabulary).matcher([vocabulary.size - 1])
        matcher.mask()
        return matcher

    return timed(first)


def timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--rounds", type=int, default=12)
    made.add_argument("--masks-only", action="store_true")
    given = made.parse_args()
    vocabulary = made_vocabulary()
    for name, schema in (("list", json.dumps(SCHEMA)), (f"{FIELDS} fields", wide_schema())):
        found = sorted(masks(vocabulary, schema))
        median, high = statistics.median(found), found[int(0.99 * len(found))]
        print(
            f"mask, {VOCABULARY:,} tokens, {name}: median {1e3 * median:.3f} ms, p99 {1e3 * high:.3f} ms, {len(found)}"
        )
    first = [first_mask(vocabulary, number) for number in range(11)][1:]
    print(
        f"first mask, {FIELDS} fields: median {1e3 * statistics.median(first):.2f} ms, most {1e3 * max(first):.2f} ms"
    )
    if given.masks_only:
        return 0
    with LLM(given.model, draft="none") as llm:
        for name, how in {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 1}}.items():
            found = ratios(llm, given.rounds, **how)
            print(f"constrained over unconstrained plain, {name}: {statistics.median(found):.4f} (n={len(found)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
