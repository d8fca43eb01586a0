"""From the turns of drafters x batches to figures: tokens a second, ratios with their spread, equality of texts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from outrider.bench.batches import Line
from outrider.bench.peers import OURS
from outrider.bench.report import Report
from outrider.drafters import PLAIN

SLOWER = 0.98  # a prompt below this ratio is counted


def assemble(lines: Sequence[Line], command: str, parts: Report | None = None) -> Report:
    """From the lines so far, the first of them the header. `parts`: what else was measured on the device."""
    turns = [line for line in lines if line["what"] == "turn"]
    batches = list(dict.fromkeys(turn["batch"] for turn in turns))
    settings = lines[0]
    modes = _modes(lines)
    alone = _alone(turns)
    rows = [row for batch in batches for mode in modes if (row := _row(turns, batch, mode, alone)) is not None]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": settings["machine"],
        "settings": {key: value for key, value in settings.items() if key not in ("what", "machine")},
        "loaded": [line for line in lines if line["what"] == "loaded"],
        "lost": [line for line in lines if line["what"] in ("lost", "failed")],
        "notes": [line["text"] for line in lines if line["what"] == "note"],
        "warm_up": _warm_up(lines),
        "rows": rows,
        "parts": parts or {},
        "turns": turns,
    }


def _modes(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Those that have loaded, in the order in which they were asked for."""
    loaded = [(line["engine"], line["mode"]) for line in lines if line["what"] == "loaded"]
    asked = lines[0]["modes"]
    return sorted(loaded, key=lambda mode: asked.index(" ".join(mode)))


def _alone(turns: Sequence[Line]) -> dict[tuple[str, str], str]:
    """By engine and prompt: its first plain text, with as few others beside it as there were."""
    found: dict[tuple[str, str], str] = {}
    for turn in sorted(turns, key=lambda turn: (turn["batch"], turn["round"])):
        if is_plain(turn):
            for prompt, text in zip(turn["prompts"], turn["texts"], strict=True):
                found.setdefault((turn["engine"], prompt), text)
    return found


def is_plain(turn: Line) -> bool:
    return bool(turn["mode"] == (PLAIN if turn["engine"] == OURS else "plain"))


def _row(turns: Sequence[Line], batch: int, mode: tuple[str, str], alone: dict[tuple[str, str], str]) -> Report | None:
    here = [turn for turn in turns if turn["batch"] == batch]
    own = [turn for turn in here if (turn["engine"], turn["mode"]) == mode]
    if not own:
        return None
    ours = {_key(turn): turn for turn in here if (turn["engine"], turn["mode"]) == (OURS, PLAIN)}
    base = {_key(turn): turn for turn in here if turn["engine"] == mode[0] and is_plain(turn)}
    pairs = [(turn, ours[_key(turn)]) for turn in own if _key(turn) in ours]
    equal, compared = _equal(own, base)
    as_alone = [
        text == alone[turn["engine"], prompt]
        for turn in own
        for prompt, text in zip(turn["prompts"], turn["texts"], strict=True)
        if (turn["engine"], prompt) in alone
    ]
    return {
        "batch": batch,
        "engine": mode[0],
        "mode": mode[1],
        "tokens_per_second": statistics.median(_by_round(own)),
        "ratio": _spread(pairs, "seconds"),
        "writing_tokens_per_second": _writing(own),
        "reading_ms": _reading(own),
        "writing_ratio": _spread([pair for pair in pairs if "writing_s" in pair[0]], "writing_s"),
        **_least(pairs),
        "one_at_a_time": _one_at_a_time(pairs) if batch == 1 else None,
        "tokens_per_step": _share(own, "tokens", "steps"),
        "acceptance_rate": _share(own, "accepted", "drafted"),
        "equal": equal,
        "compared": compared,
        "as_alone": sum(as_alone),
        "known_alone": len(as_alone),
        "rounds": len({turn["round"] for turn in own}),
        "cold": sum(turn["cold"] for turn in own),
    }


def _key(turn: Line) -> tuple[int, int]:
    return turn["group"], turn["round"]


def _by_round(turns: Sequence[Line], seconds: str = "seconds") -> list[float]:
    rounds = [[turn for turn in turns if turn["round"] == number] for number in sorted({t["round"] for t in turns})]
    return [sum(turn["tokens"] for turn in own) / sum(turn[seconds] for turn in own) for own in rounds]


def _writing(turns: Sequence[Line]) -> float | None:
    """Tokens a second from the first token to the last."""
    known = [turn for turn in turns if turn.get("writing_s")]
    return statistics.median(_by_round(known, "writing_s")) if known else None


def _reading(turns: Sequence[Line]) -> float | None:
    """Milliseconds of a call beside its writing: its texts become tokens, and all its prompts are read."""
    known = [1e3 * (turn["seconds"] - turn["writing_s"]) for turn in turns if turn.get("writing_s")]
    return statistics.median(known) if known else None


def _spread(pairs: Sequence[tuple[Line, Line]], seconds: str) -> Report | None:
    """How many times faster than our plain decoding in the same turns: the median round, the least and the most."""
    rounds = sorted({mine["round"] for mine, _ in pairs})
    ratios = []
    for number in rounds:
        both = [pair for pair in pairs if pair[0]["round"] == number and pair[0][seconds] > 0 and pair[1][seconds] > 0]
        if both:
            mine = sum(one["tokens"] for one, _ in both) / sum(one[seconds] for one, _ in both)
            plain = sum(one["tokens"] for _, one in both) / sum(one[seconds] for _, one in both)
            ratios.append(mine / plain)
    return {"value": statistics.median(ratios), "least": min(ratios), "most": max(ratios)} if ratios else None


def _least(pairs: Sequence[tuple[Line, Line]]) -> Report:
    """The slowest call against plain, by the medians of its rounds, and how many calls are slower than it."""
    ratios = []
    for group in {mine["group"] for mine, _ in pairs}:
        own = [(one["seconds"], plain["seconds"]) for one, plain in pairs if one["group"] == group]
        ratios.append(statistics.median(plain for _, plain in own) / statistics.median(mine for mine, _ in own))
    slower = sum(ratio < SLOWER for ratio in ratios)
    return {"least_call": min(ratios, default=None), "slower_calls": slower, "calls": len(ratios)}


def _one_at_a_time(pairs: Sequence[tuple[Line, Line]]) -> Report | None:
    """Prompts alone, from the first request after loading on: nothing was warmed up before."""
    if not pairs:
        return None
    requests = [(plain["seconds"] / mine["seconds"], mine["prompts"][0], mine["round"]) for mine, plain in pairs]
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for mine, plain in pairs:
        by_prompt.setdefault(mine["prompts"][0], []).append((mine["seconds"], plain["seconds"]))
    prompts = [
        (statistics.median(plain for _, plain in own) / statistics.median(mine for mine, _ in own), name)
        for name, own in by_prompt.items()
    ]
    (least, name), (lowest, whose, number) = min(prompts), min(requests)
    first, plain = pairs[0]
    return {
        "prompts": len(prompts),
        "least_prompt": {"ratio": least, "prompt": name},
        "slower_prompts": sum(ratio < SLOWER for ratio, _ in prompts),
        "least_request": {"ratio": lowest, "prompt": whose, "round": number},
        "slower_requests": sum(ratio < SLOWER for ratio, _, _ in requests),
        "requests": len(requests),
        "first_request": {"seconds": first["seconds"], "plain_seconds": plain["seconds"], "ratio": requests[0][0]},
    }


def _equal(own: Sequence[Line], base: dict[tuple[int, int], Line]) -> tuple[int, int]:
    """How many texts are those of the same engine's plain decoding in the same turn, and how many were compared."""
    both = [
        pair
        for turn in own
        if _key(turn) in base
        for pair in zip(turn["texts"], base[_key(turn)]["texts"], strict=True)
    ]
    return sum(mine == plain for mine, plain in both), len(both)


def _share(turns: Sequence[Line], part: str, whole: str) -> float | None:
    total = sum(turn.get(whole, 0) for turn in turns)
    return sum(turn.get(part, 0) for turn in turns) / total if total else None


def _warm_up(lines: Sequence[Line]) -> list[Report]:
    """By mode: the seconds of loading, of its own first call, and of its warm-up calls."""
    found: dict[tuple[str, str], Report] = {}
    for line in lines:
        if line["what"] == "loaded":
            found[line["engine"], line["mode"]] = {
                "engine": line["engine"], "mode": line["mode"], "load_s": line["seconds"], "calls_s": 0.0, "calls": 0,
            }  # fmt: skip
        elif line["what"] in ("turn", "warm-up"):
            own = found[line["engine"], line["mode"]]
            own.setdefault("first_call_s", line["seconds"])
            own.setdefault("first_batch", line["batch"])
            own["calls_s"] += line["seconds"] * (line["what"] == "warm-up")
            own["calls"] += line["what"] == "warm-up"
    return [found[mode] for mode in _modes(lines)]
