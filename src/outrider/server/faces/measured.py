"""What an answer says of its drafts and its time: in our own words, and in those of vLLM and llama.cpp."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from outrider.core.request import Result
from outrider.core.stats import Stats
from outrider.server.fleet.supervisor import ServerStream

Json = dict[str, Any]


def measured(results: Sequence[Result], stream: ServerStream, timings: bool) -> Json:
    """`metrics`, and where they are wanted, `timings`: these are of one sample, as vLLM has it too."""
    samples = [sample for result in results for sample in result.samples]
    stats = sum((sample.stats for sample in samples), Stats())
    found = {"metrics": metrics(stats, stream.estimated_speedup(samples))}
    if not timings or len(samples) != 1:
        return found
    if stats.drafts:
        found["metrics"]["speculative_decoding"] = speculative_decoding(stats)
    if stats.writing_seconds:  # vLLM does not tell
        found["timings"] = llama_timings(stats, len(samples[0].prompt_token_ids))
    return found


def metrics(stats: Stats, speedup: float | None) -> Json:
    """What became of the drafts of a request."""
    return {
        "drafts": stats.drafts,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "mean_accepted_length": round(1 + stats.accepted / stats.drafts, 4) if stats.drafts else 1.0,
        "tokens": stats.tokens,
        "steps": stats.steps,
        "tokens_per_step": round(stats.tokens_per_step, 4),
        "estimated_speedup": speedup,
        "by_depth": {str(depth): counts for depth, counts in stats.by_depth.items()},
        "by_drafter": stats.by_drafter,
        "asked": stats.asked,
        "seconds": {phase: round(seconds, 6) for phase, seconds in stats.seconds.items()},
    }


def speculative_decoding(stats: Stats) -> Json:
    """vLLM's `metrics.speculative_decoding`, as --per-request-spec-decode-metrics summary has it. The histogram counts
    the steps that kept 0, 1, 2, ... drafted tokens; `num_spec_tokens` is the depth of the deepest draft: none is fixed.
    """
    deepest = max(stats.drafted_by_depth)
    reached = [stats.drafts, *(stats.accepted_by_depth[depth] for depth in range(1, deepest + 1)), 0]
    return {
        "mean_acceptance_length": 1.0 + stats.accepted / stats.drafts,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [here - beyond for here, beyond in itertools.pairwise(reached)],
        "num_spec_steps": stats.drafts,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": deepest,
    }


def llama_timings(stats: Stats, prompt: int) -> Json:
    """llama.cpp's `timings`. The prompt's time is what the engine has spent on it; the answer's is that which passed
    between its first token and its last."""
    found = {"cache_n": stats.cached}
    found |= _pace("prompt", prompt - stats.cached, stats.first_seconds)
    found |= _pace("predicted", stats.tokens, stats.writing_seconds)
    return found | ({"draft_n": stats.drafted, "draft_n_accepted": stats.accepted} if stats.drafted else {})


def _pace(name: str, count: int, seconds: float) -> Json:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
