"""From runs to numbers: decode speed, speed-up with its confidence interval, and which speed-ups are void."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

SHORTEST = 8  # decoded tokens: a shorter run says nothing about speed
RESAMPLES = 4000  # draws of the bootstrap; some thousand are usual for a 95 % interval
ALL = "all"
Run = Mapping[str, Any]  # a measurement as the report holds it
Key = tuple[str, int]  # prompt, round


def rate(run: Run) -> float | None:
    """Tokens per second after the first chunk; None for a run that failed or was too short."""
    decoded = run["tokens"] - run["first"]
    if run["error"] or decoded < SHORTEST or run["decode_s"] <= 0:
        return None
    return float(decoded / run["decode_s"])


def interval(by_prompt: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float] | None:
    """95 % bootstrap interval of the mean over prompts of the mean over rounds; None for a single prompt.

    Prompts are drawn anew, and the rounds of each drawn prompt too. The rounds of one prompt alone would only show how
    steady the clock is, and look far more certain than anything is.
    """
    count = len(by_prompt)
    if count < 2:
        return None
    random = np.random.default_rng(seed)
    drawn = random.integers(count, size=(RESAMPLES, count))
    means = np.empty(drawn.shape)
    for prompt, values in enumerate(by_prompt):
        at = drawn == prompt
        rounds = random.integers(len(values), size=(int(at.sum()), len(values)))
        means[at] = np.asarray(values)[rounds].mean(axis=1)
    low, high = np.quantile(means.mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def prompt_rate(run: Run) -> float | None:
    """Tokens per second of the prompt; None for a run that failed."""
    return None if run["error"] or run["prefill_s"] <= 0 else float(run["prompt_tokens"] / run["prefill_s"])


def ratio(
    runs: Sequence[Run], base: Sequence[Run], rate: Callable[[Run], float | None] = rate
) -> dict[str, Any] | None:
    """How many times faster than `base`: geometric mean over prompts, runs of the same prompt and round paired."""
    slow = {_key(run): rate(run) for run in base}
    logs: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        mine, other = rate(run), slow.get(_key(run))
        if mine is not None and other is not None:
            logs[run["prompt"]].append(math.log(mine / other))
    if not logs:
        return None
    value = math.exp(np.mean([np.mean(values) for values in logs.values()]))
    bounds = interval(list(logs.values()))
    low, high = (None, None) if bounds is None else map(math.exp, bounds)
    return {"value": value, "low": low, "high": high, "prompts": len(logs)}


def differing(runs: Sequence[Run], base: Sequence[Run]) -> tuple[int, int]:
    """How many prompts have an output that is not the base's in the same round, and how many were compared."""
    plain = {_key(run): _output(run) for run in base if not run["error"]}
    same: dict[str, bool] = {}
    for run in runs:
        if not run["error"] and _key(run) in plain:
            same[run["prompt"]] = same.get(run["prompt"], True) and _output(run) == plain[_key(run)]
    return sum(not equal for equal in same.values()), len(same)


def summarise(runs: Sequence[Run], engines: Mapping[str, Mapping[str, Any]], ours: str) -> dict[str, Any]:
    """`engines`: name -> its plain mode and its other modes."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run["engine"], run["mode"]].append(run)
    kinds = [*dict.fromkeys(run["kind"] for run in runs), ALL]
    modes = []
    for engine, about in engines.items():
        plain = groups[engine, about["plain"]]
        for mode in (about["plain"], *about["modes"]):
            own = groups[engine, mode]
            modes += [_row(engine, mode, kind, _of(own, kind), _of(plain, kind)) for kind in kinds if _of(own, kind)]
    own = groups[ours, engines[ours]["plain"]] if ours in engines else []
    peers = {name: groups[name, about["plain"]] for name, about in engines.items() if name != ours}
    pairs = [(name, kind, plain) for name, plain in peers.items() for kind in kinds]
    against = [_against(name, kind, _of(own, kind), _of(plain, kind)) for name, kind, plain in pairs]
    return {
        "modes": modes,
        "against": [row for row in against if row["ratio"] is not None],
        "best": [row for name in peers if (row := _best(groups, modes, ours, name))],
    }


def prompt_speeds(runs: Sequence[Run], ours: str, also: Sequence[str] = ()) -> list[dict[str, Any]]:
    """How fast each engine reads prompts, and how many times faster ours does; `also`: more engines of ours."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run["engine"]].append(run)
    rows = []
    for name, own in groups.items():
        rates = [value for value in map(prompt_rate, own) if value is not None]
        if rates:
            first, *others = (
                ratio(groups[each], own, prompt_rate) if each in groups and each != name else None
                for each in (ours, *also)
            )
            row = {"engine": name, "tokens_per_second": math.exp(np.mean(np.log(rates))), "ratio": first}
            rows.append(row | {"also": dict(zip(also, others, strict=True))})
    return rows


def _best(
    groups: Mapping[tuple[str, str], list[Run]], rows: Sequence[Mapping[str, Any]], ours: str, peer: str
) -> dict[str, Any] | None:
    """Our fastest mode against a peer's fastest. A mode of ours whose text differs is none; of a peer's it counts."""
    overall = [row for row in rows if row["kind"] == ALL and row["tokens_per_second"]]
    own = [row for row in overall if row["engine"] == ours and not row["void"]]
    other = [row for row in overall if row["engine"] == peer]
    if not own or not other:
        return None
    mine, its = (max(some, key=lambda row: row["tokens_per_second"])["mode"] for some in (own, other))
    return {"peer": peer, "mode": mine, "its_mode": its, "ratio": ratio(groups[ours, mine], groups[peer, its])}


def _row(engine: str, mode: str, kind: str, runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    is_plain = bool(plain) and runs[0]["mode"] == plain[0]["mode"]
    differ, compared = (0, 0) if is_plain else differing(runs, plain)
    rates = [value for value in map(rate, runs) if value is not None]
    return {
        "engine": engine,
        "mode": mode,
        "kind": kind,
        "plain": is_plain,
        "tokens_per_second": math.exp(np.mean(np.log(rates))) if rates else None,
        "ratio": None if is_plain else ratio(runs, plain),
        "differ": differ,
        "compared": compared,
        "void": differ > 0,
        "too_short": sum(not run["error"] and rate(run) is None for run in runs),
        "errors": sum(bool(run["error"]) for run in runs),
        "acceptance_rate": _share(runs, "accepted", "drafted"),
        "tokens_per_step": _share(runs, "tokens", "steps"),
    }


def _against(peer: str, kind: str, own: list[Run], plain: list[Run]) -> dict[str, Any]:
    """Our plain decoding against a peer's. Engines round differently, so that texts may part is no fault of either."""
    other = {_key(run): run["text"] for run in plain if not run["error"]}
    pairs = {run["prompt"]: run["text"] == other[_key(run)] for run in own if not run["error"] and _key(run) in other}
    return {
        "peer": peer,
        "kind": kind,
        "ratio": ratio(own, plain),
        "same_text": sum(pairs.values()),
        "compared": len(pairs),
    }


def _of(runs: list[Run], kind: str) -> list[Run]:
    return runs if kind == ALL else [run for run in runs if run["kind"] == kind]


def _share(runs: Sequence[Run], part: str, whole: str) -> float | None:
    total = sum(run["stats"].get(whole, 0) for run in runs)
    return sum(run["stats"].get(part, 0) for run in runs) / total if total else None


def _key(run: Run) -> Key:
    return run["prompt"], run["round"]


def _output(run: Run) -> Any:
    return run["text"] if run["ids"] is None else run["ids"]
