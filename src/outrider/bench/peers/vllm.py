"""vLLM in bfloat16 on the model's folder. How it speculates is fixed when it is loaded."""

from __future__ import annotations

import os
import time
from typing import Any

PACKAGES = ("vllm",)
_GUESSES = 5  # tokens of a draft of lookup and draft models
_EAGLE_GUESSES = 4
DEVICE_SHARE = 0.2  # of a GPU's memory, for each of its modes: all of them are loaded at the same time


def load(config: dict[str, Any]) -> Any:
    # By default it keeps a core free; here every engine has the same ones.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: config["threads"]]))
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND=cores, VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM, SamplingParams, TokensPrompt

    (mode,) = config["modes"]
    llm = LLM(
        config["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=config["context"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,  # else it keeps no times
        speculative_config=_speculation(mode, config),
    )

    def generate(mode: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=config["ends"], detokenize=False)
        (result,) = llm.generate(TokensPrompt(prompt_token_ids=ids), params, use_tqdm=False)
        written, times = list(result.outputs[0].token_ids), result.metrics
        return {
            "ids": written,
            "tokens": len(written),
            "first": 1,
            "prefill_s": times.first_token_ts - times.scheduled_ts,
            "decode_s": times.last_token_ts - times.first_token_ts,
            "timing": "engine",
        }

    return generate


def load_batches(config: dict[str, Any]) -> Any:
    """Prompts are read anew in every call, as by the other engines."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams

    (mode,) = config["modes"]
    speculative = _speculation(mode, {**config, "speculation": {}})
    size = {"max_num_seqs": config["batch"], "max_model_len": 4096, "gpu_memory_utilization": DEVICE_SHARE}
    llm = LLM(
        config["model"],
        dtype="bfloat16" if config["dtype"] == "auto" else config["dtype"],
        enable_prefix_caching=False,
        speculative_config=speculative,
        **size,
    )

    def generate(mode: str, texts: list[str], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        begin = time.perf_counter()
        if config["chat"]:
            results = llm.chat([[{"role": "user", "content": text}] for text in texts], params, use_tqdm=False)
        else:
            results = llm.generate(texts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return {"ids": [list(result.outputs[0].token_ids) for result in results], "seconds": seconds}

    return generate


def _speculation(mode: str, config: dict[str, Any]) -> dict[str, Any] | None:
    if mode in config["speculation"]:
        return dict(config["speculation"][mode])
    if mode == "ngram":
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return {"method": "ngram", "num_speculative_tokens": _GUESSES, **lookup}
    if mode == "eagle3":
        return {"method": "eagle3", "model": config["head"], "num_speculative_tokens": _EAGLE_GUESSES}
    if mode == "draft-model":
        return {"method": "draft_model", "model": config["draft_model"], "num_speculative_tokens": _GUESSES}
    return None
