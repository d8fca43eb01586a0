"""How much faster than plain decoding a request was, as far as its own figures tell."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.stats import Stats


def estimated_speedup(samples: Sequence[Stats], row_seconds: float) -> float | None:
    """Tokens per step, times the share of the time that the same steps would have taken without drafts.

    Time after the first step counts: drafting goes off, and what the drafted rows added to the passes (`row_seconds`
    each, as the pace has measured it). None where nothing came after the first step, and where nobody says
    what drafting cost (vLLM).
    """
    total = sum(samples, Stats())
    decode = sum(total.seconds.values()) - total.first_seconds
    if total.steps <= len(samples) or decode <= 0 or (total.drafted and "draft" not in total.seconds):
        return None
    drafting = total.seconds.get("draft", 0.0) + row_seconds * total.drafted
    return round(total.tokens_per_step * max(0.0, 1.0 - drafting / decode), 3)
