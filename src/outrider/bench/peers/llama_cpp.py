"""llama.cpp by the package xllamacpp, whose Server is llama.cpp's own. How it speculates is fixed when it is loaded."""

from __future__ import annotations

import re
from typing import Any

PACKAGES = ("xllamacpp",)
_TYPES = {"plain": "NONE", "draft-model": "DRAFT_SIMPLE"}


def load(config: dict[str, Any]) -> Any:
    import xllamacpp

    (mode,) = config["modes"]
    server = xllamacpp.Server(_params(xllamacpp, mode, config))

    def generate(mode: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        answer = server.handle_completions(
            {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "cache_prompt": False}
        )
        if "timings" not in answer:
            raise RuntimeError(str(answer))
        times = answer["timings"]
        return {
            "text": answer["choices"][0]["text"],
            "tokens": times["predicted_n"],
            "first": 1,
            "prefill_s": times["prompt_ms"] / 1000,
            "decode_s": times["predicted_ms"] / 1000,  # it counts from the first token on
            "timing": "engine",
            "stats": {"drafted": times.get("draft_n", 0), "accepted": times.get("draft_n_accepted", 0)},
        }

    generate.about = {"instructions": _instructions(xllamacpp)}  # type: ignore[attr-defined]
    return generate


def _instructions(xllamacpp: Any) -> str:
    """What it says that it uses: the wheel is built for any processor."""
    said = getattr(xllamacpp, "get_system_info", str)()
    return " ".join(re.findall(r"(\w+) = 1\b", str(said))) or "unknown"


def _params(xllamacpp: Any, mode: str, config: dict[str, Any]) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = config["model"]
    params.n_ctx = config["context"]
    params.n_parallel = 1
    params.verbosity = 0
    params.cache_ram_mib = 0  # no prompt is kept for a later request
    _set_threads(params, config["threads"])
    kind = _TYPES.get(mode) or mode.upper().replace("-", "_")
    params.speculative.types = [xllamacpp.common_speculative_type[f"COMMON_SPECULATIVE_TYPE_{kind}"]]
    if mode == "draft-model":
        params.speculative.draft.mparams.path = config["draft_model"]
        _set_threads(params.speculative.draft, config["threads"])
    return params


def _set_threads(params: Any, threads: int) -> None:
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
