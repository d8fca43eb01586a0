"""transformers in float32 on the model's folder: plain, prompt lookup and assisted generation on one loaded model."""

from __future__ import annotations

import time
from typing import Any

PACKAGES = ("transformers", "torch")


class _Clock:
    """A streamer: notes when tokens come. The first thing that is put is the prompt."""

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
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(config["threads"])

    def read(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()

    model = read(config["model"])
    draft = read(config["draft_model"]) if "assisted" in config["modes"] else None
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt-lookup": {"prompt_lookup_num_tokens": 10},
        "assisted": {"assistant_model": draft},
    }

    def generate(mode: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        clock, prompt = _Clock(), torch.tensor([ids])
        begin = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=config["ends"] or None,
            pad_token_id=0,
            streamer=clock,
            **ways[mode],
        )
        end = time.perf_counter()
        written = out[0, len(ids) :].tolist()
        return {
            "ids": written,
            "tokens": len(written),
            "first": clock.sizes[1],
            "prefill_s": clock.times[1] - begin,
            "decode_s": end - clock.times[1],
            "timing": "stream",
        }

    return generate
