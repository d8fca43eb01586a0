"""Our own engine. Plain and speculative decoding run alternately on one loaded model; a mode is a drafter."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

PACKAGES = ("outrider", "torch")


def load(config: dict[str, Any]) -> Any:
    if config["kernels"]:
        os.environ["OUTRIDER_KERNELS"] = config["kernels"]
    from outrider import build
    from outrider.core.errors import OutriderError
    from outrider.core.params import SamplingParams
    from outrider.core.request import Request
    from outrider.settings import Settings

    settings = Settings(config["model"], draft="none", device="cpu", threads=config["threads"], **config["own"])
    backend = build.local(settings)

    def generate(mode: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        request = Request(prompt=ids, params=SamplingParams(max_tokens=max_tokens), draft=mode, stream=True)
        backend.forget_texts()
        begin = time.perf_counter()
        stream = backend.submit(request)
        first, came = 0, begin
        for chunk in stream:
            if not first:
                first, came = len(chunk.tokens), time.perf_counter()
        end = time.perf_counter()
        result = stream.result()
        if result.error:
            raise OutriderError(result.error)
        return {
            "ids": result.token_ids,
            "tokens": len(result.token_ids),
            "first": first,
            "prefill_s": came - begin,
            "decode_s": end - came,
            "timing": "stream",
            "stats": result.stats.as_dict(),
        }

    generate.about = {"instructions": _kernels(backend)}  # type: ignore[attr-defined]
    return generate


def load_batches(config: dict[str, Any]) -> Any:
    """The one drafter of `modes`, loaded as a server would load it."""
    from outrider import build
    from outrider.core.errors import OutriderError
    from outrider.core.params import SamplingParams
    from outrider.core.request import Request
    from outrider.settings import Settings

    (draft,) = config["modes"]
    where = {"device": config["device"], "threads": config["threads"], "max_batch": config["batch"]}
    backend = build.local(Settings(config["model"], draft=draft, **where, **config["own"]))
    calls = itertools.count()

    def generate(mode: str, texts: list[str], max_tokens: int) -> dict[str, Any]:
        more: dict[str, Any] = {"params": SamplingParams(max_tokens=max_tokens, ignore_eos=True)}
        if not config.get("cached"):  # tenants share neither prefixes nor histories: no prompt is known before its call
            more["tenant"] = f"call {next(calls)}"
        backend.forget_texts()
        begin = time.perf_counter()
        asked = [
            Request(messages=[{"role": "user", "content": text}], **more)
            if config["chat"]
            else Request(prompt=text, **more)
            for text in texts
        ]
        results = [stream.result() for stream in backend.submit_all(asked)]
        seconds = time.perf_counter() - begin
        _settle(config["device"])
        for result in results:
            if result.error:
                raise OutriderError(result.error)
        stats = sum((result.stats for result in results[1:]), results[0].stats)
        return {
            "ids": [result.token_ids for result in results],
            "seconds": seconds,
            "writing_s": max(result.stats.writing_seconds for result in results),
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
        }

    return generate


def _settle(device: str) -> None:
    """Let a GPU end what it was given ahead and nobody needs: the next call is another process's."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _kernels(backend: Any) -> str:
    """Which kernels run packed weights; dense ones run in torch."""
    from outrider.models.native.library import library

    return str(library().origin) if backend.engine.model.packed else "torch"
