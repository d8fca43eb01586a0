"""A proof on real weights: texts under 2,000 different schemas are valid, and the same with every drafter.

    PYTHONPATH=src python scripts/schema_proof.py --begin 0 --end 250 --output part.json
    PYTHONPATH=src python scripts/schema_proof.py --summary part*.json

Each schema is decoded plainly under its grammar, in a batch of 16 with neighbours that have none, then with
drafters, one for each schema in turn (--always: one for every schema beside it), half of the schemas greedily and half
with a seed; some alone as well, with the drafters of --always too. A text that ends by itself must be valid for
jsonschema, and the tokens of all must be equal.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema

from outrider import LLM, OutriderError, Result, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from schemas import collection  # the collection is the tests' own

BATCH = 16  # sequences at once
FREE = 8  # one in this number of schemas has a neighbour without a grammar, unless it is said
ALONE = 15  # one in so many is also decoded by itself, by turns greedily and with a seed
AT_ONCE = 8 * BATCH  # sequences that are handed in together
DRAFTERS = ("auto", "ngram", "history", "layer_skip", "eagle", "medusa", "prediction", "grammar")  # each in its turn


@dataclass(frozen=True)
class Case:
    number: int
    prompt: str
    params: SamplingParams

    @property
    def schema(self) -> Any:
        return self.params.json_schema


def cases(begin: int, end: int, tokens: int, only: list[int], free: int = FREE) -> list[Case]:
    """`free`: one in this number of schemas has a neighbour, the same question without a grammar."""
    found = []
    for number, (thing, schema) in enumerate(collection()):
        if not begin <= number < end or (only and number not in only):
            continue
        how: dict[str, Any] = {} if number % 2 else {"temperature": 0.8, "seed": number}
        for constrained in (True, False) if number % free == free - 1 else (True,):
            prompt = f"An example of {thing} as JSON, on one line:\n"
            more = {"json_schema": schema} if constrained else {}
            found.append(Case(number, prompt, SamplingParams(max_tokens=tokens, **how, **more)))
    return found


FORMATS = jsonschema.FormatChecker()
FORMATS.checks("time", ValueError)(lambda text: dt.time.fromisoformat(text).tzinfo is not None)
FORMATS.checks("date-time", ValueError)(lambda text: dt.datetime.fromisoformat(known_year(text)).tzinfo is not None)
FORMATS.checks("date", ValueError)(lambda text: dt.date.fromisoformat(known_year(text)).isoformat()[4:] == text[4:])


def known_year(text: str) -> str:
    """RFC 3339 has a year 0, and Python has none; it would be a leap year."""
    return f"2000{text[4:]}" if text.startswith("0000-") else text


def invalid(text: str, schema: Any) -> str:
    """Why a text is not what the schema allows; "": it is. Numbers are compared as they are written: as a double,
    1000.0000000000000001 would be 1000. jsonschema's own check of times is that of draft 3, which had no offsets."""
    try:
        jsonschema.validate(json.loads(text, parse_float=Decimal), schema, format_checker=FORMATS)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


class Proof:
    def __init__(self, llm: LLM, drafters: tuple[str, ...], always: tuple[str, ...] = (), alone: int = ALONE) -> None:
        """`drafters` take turns; those of `always` draft for every schema, and for one in `alone` by itself."""
        self._llm, self._drafters, self._always, self._alone = llm, drafters, always, alone
        self.counts: Counter[str] = Counter()
        self.drafted: dict[str, Counter[str]] = {}
        self.failures: list[dict[str, Any]] = []

    def check(self, asked: list[Case]) -> None:
        usable = [case for case in asked if self._compiles(case)]
        plain = self._run(usable, "none")
        for case, result in zip(usable, plain, strict=True):
            self._validate(case, result)
        pairs = list(zip(usable, plain, strict=True))
        for drafter in self._always:
            self._compare(drafter, pairs)
        for place, drafter in enumerate(self._drafters):
            self._compare(drafter, [pair for pair in pairs if pair[0].number % len(self._drafters) == place])
        for pair in pairs:
            if pair[0].number % self._alone == 0:
                for drafter in ("none", *self._always):
                    self._compare(drafter, [pair], " alone")

    def _compiles(self, case: Case) -> bool:
        """What cannot be compiled is refused with the keyword, before anything is written."""
        self.counts["schemas" if case.schema is not None else "neighbours without one"] += 1
        if case.schema is None:
            return True
        try:
            self._llm.backend.matcher(case.params)
        except OutriderError as error:
            self.counts["refused"] += 1
            self.drafted.setdefault("refused", Counter())[str(error)] += 1
            return False
        return True

    def _run(self, asked: list[Case], drafter: str, expected: list[Any] | None = None) -> list[Result]:
        prompts, params = [case.prompt for case in asked], [case.params for case in asked]
        return self._llm.generate(prompts, params, draft=drafter, prediction=expected, progress=False) if asked else []

    def _validate(self, case: Case, result: Result) -> None:
        self.counts["tokens"] += len(result.token_ids)
        if case.schema is None:
            return
        self.counts[f"ended with {result.finish_reason}"] += 1
        if result.finish_reason == "stop":
            if reason := invalid(result.text, case.schema):
                self._fail(case, "invalid", text=result.text, reason=reason)
        elif result.finish_reason != "length":
            self._fail(case, result.finish_reason, text=result.text, reason=result.error)

    def _compare(self, drafter: str, pairs: list[tuple[Case, Result]], how: str = "") -> None:
        expected = None
        if drafter.startswith(
            ("prediction", "oracle")
        ):  # right at first and wrong later, so that both kinds of verdicts come
            expected = [result.text[:12] + "?" + result.text[12:] for _, result in pairs]
        found = self._run([case for case, _ in pairs], drafter, expected)
        counts = self.drafted.setdefault(drafter + how, Counter())
        for (case, plain), result in zip(pairs, found, strict=True):
            self._same(case, plain, result, drafter + how)
            more = {"texts": 1, "tokens": len(result.token_ids), "steps": result.stats.steps}
            counts.update(more | {"drafted": result.stats.drafted, "accepted": result.stats.accepted})

    def _same(self, case: Case, plain: Result, result: Result, how: str) -> None:
        if (plain.token_ids, plain.finish_reason) != (result.token_ids, result.finish_reason):
            self._fail(case, f"differs: {how}", text=plain.text, other=result.text)

    def _fail(self, case: Case, what: str, **more: Any) -> None:
        self.counts[what] += 1
        self.failures.append({"number": case.number, "what": what, "schema": case.schema, **more})

    def report(self) -> dict[str, Any]:
        drafted = {name: dict(counts) for name, counts in self.drafted.items()}
        return {"counts": dict(self.counts), "drafters": drafted, "failures": self.failures}


def summary(files: list[Path]) -> int:
    total: Counter[str] = Counter()
    drafted: dict[str, Counter[str]] = {}
    failures = []
    for file in files:
        part = json.loads(file.read_text())
        total.update(part["counts"])
        again = [each for each in part["failures"] if each["what"] == "invalid"]  # parts may be of an older judge
        valid = [each for each in again if not invalid(each["text"], each["schema"])]
        failures += [each for each in part["failures"] if each not in valid]
        total["invalid"] -= len(valid)
        for name, counts in part["drafters"].items():
            drafted.setdefault(name, Counter()).update(counts)
    for name, count in sorted(total.items()):
        print(f"| {name} | {count:,} |")
    for name, counts in drafted.items():
        print(f"| {name} |", *(f"{key} {count:,} |" for key, count in counts.items()))
    for failure in failures[:20]:
        print(json.dumps(failure, ensure_ascii=False))
    return 1 if failures else 0


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--begin", type=int, default=0)
    made.add_argument("--end", type=int, default=2000)
    made.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    made.add_argument("--seconds", type=float, default=0.0, help="begin no further batch after this long; 0: all")
    made.add_argument("--only", type=int, nargs="+", default=[], help="these schemas alone")
    made.add_argument("--drafters", default=",".join(DRAFTERS))
    made.add_argument("--always", nargs="+", default=[], help="drafters for every schema and every neighbour")
    made.add_argument("--neighbours", type=int, default=FREE, help="one in this number of schemas has one; 1: each")
    made.add_argument("--alone", type=int, default=ALONE, help="one in this number of schemas is also decoded alone")
    made.add_argument("--pace", action="store_true", help="the policy cuts drafts, by the time that passes take")
    made.add_argument("--output", type=Path)
    made.add_argument("--summary", type=Path, nargs="+")
    given = made.parse_args()
    if given.summary:
        return summary(given.summary)
    asked = cases(given.begin, given.end, given.tokens, given.only, given.neighbours)
    begun, done = time.monotonic(), given.begin
    with LLM(given.model, draft="none", pace=given.pace, max_batch=BATCH) as llm:
        proof = Proof(llm, tuple(filter(None, given.drafters.split(","))), tuple(given.always), given.alone)
        while asked and not (given.seconds and time.monotonic() - begun > given.seconds):
            part, asked = asked[:AT_ONCE], asked[AT_ONCE:]
            proof.check(part)
            done = part[-1].number + 1
            print(f"up to {done}: {dict(proof.counts)}", file=sys.stderr, flush=True)
            report = {"begin": given.begin, "end": done, **proof.report()}
            if given.output:  # what is done is kept if the next part is not
                given.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    report = {"begin": given.begin, "end": done, **proof.report()}
    print(json.dumps({**report, "failures": report["failures"][:3]}, ensure_ascii=False))
    return 1 if proof.failures else 0


if __name__ == "__main__":
    sys.exit(main())
