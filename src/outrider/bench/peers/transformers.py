"""transformers on the model's folder: plain, prompt lookup and assisted generation on one loaded model in float32; or
batches of texts."""

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


def load_batches(config: dict[str, Any]) -> Any:
    """As it comes: `generate` with padded prompts."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(config["threads"])
    device = torch.device(config["device"])
    dtype = config["dtype"] if config["dtype"] != "auto" else "float32" if device.type == "cpu" else "bfloat16"
    model = _read(config["model"], getattr(torch, dtype)).to(device)
    tokenizer = AutoTokenizer.from_pretrained(config["model"], local_files_only=True, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)

    def generate(mode: str, texts: list[str], max_tokens: int) -> dict[str, Any]:
        begin = time.perf_counter()
        if config["chat"]:
            chats = [[{"role": "user", "content": text}] for text in texts]
            texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not config["chat"]).to(device)
        exactly = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False}
        lookup = {"prompt_lookup_num_tokens": 10} if mode == "prompt-lookup" else {}
        mask, pad = given["attention_mask"], tokenizer.pad_token_id
        out = model.generate(given["input_ids"], attention_mask=mask, pad_token_id=pad, **exactly, **lookup)
        written = out[:, given["input_ids"].shape[1] :].tolist()
        tokenizer.batch_decode(written)
        return {"ids": written, "seconds": time.perf_counter() - begin}

    return generate


def _read(folder: str, dtype: Any = None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True).eval()


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
