"""transformers in float32 on the model's folder: plain, prompt lookup and assisted generation on one loaded model."""

from __future__ import annotations

import time
from typing import Any

PACKAGES = ("transformers", "torch")


class _TimingStreamer:
    """Notes when tokens come. The first thing that is put is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, tokens: Any) -> None:
        self.times.append(time.perf_counter())
        self.sizes.append(tokens.numel())

    def end(self) -> None:
        pass


def load(config: dict[str, Any]) -> Any:
    import torch

    torch.set_num_threads(config["threads"])
    model = _read(config["model"])
    draft = _read(config["draft_model"]) if "assisted" in config["modes"] else None
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt-lookup": {"prompt_lookup_num_tokens": 10},
        "assisted": {"assistant_model": draft},
    }

    def generate(mode: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        ends = config["ends"] or None
        return _timed(model, ids, max_new_tokens=max_tokens, eos_token_id=ends, **options[mode])

    return generate


def _read(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def _timed(model: Any, ids: list[int], **options: Any) -> dict[str, Any]:
    """An answer with its times."""
    import torch

    streamer, prompt = _TimingStreamer(), torch.tensor([ids])
    mask = torch.ones_like(prompt)
    begin = time.perf_counter()
    out = model.generate(prompt, attention_mask=mask, do_sample=False, pad_token_id=0, streamer=streamer, **options)
    end = time.perf_counter()
    written = out[0, len(ids) :].tolist()
    return {
        "ids": written,
        "tokens": len(written),
        "first": streamer.sizes[1],
        "prefill_s": streamer.times[1] - begin,
        "decode_s": end - streamer.times[1],
        "timing": "stream",
    }
