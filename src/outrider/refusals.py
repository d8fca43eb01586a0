"""Settings that are refused before anything is loaded, and before torch is imported."""

from __future__ import annotations

import importlib.util
from typing import Any

from outrider import drafters
from outrider.backends import speculation
from outrider.core.errors import OutriderError
from outrider.drafters import DrafterSpec
from outrider.settings import Settings

_NOT_ON_VLLM = {
    "quantize": "name a quantised model, or write engine_args: {quantization: ...}",
    "rule": "it verifies drafts by rejection",
    "piece": "write engine_args: {max_num_batched_tokens: ...}",
    "kv": "write engine_args: {kv_cache_dtype: ...}",
    "activations": "name a model whose activations are quantised",
    "history": "its drafters keep none between requests",
    "history_tokens": "its drafters keep none between requests",
    "adapters": "load them on the backend local, or merge them first (outrider merge)",
    "adapter_memory": "load adapters on the backend local",
    "cache_file": "it keeps no prefixes across restarts",
    "cache_file_size": "it keeps no prefixes across restarts",
    "max_draft_batch": "write num_speculative_tokens_per_batch_size into speculative_config",
}


def check(settings: Settings) -> DrafterSpec | None:
    """Refuse what can be refused before anything is loaded. Returns the drafter of our own engine; None on vLLM."""
    if settings.backend == "local":
        return drafters.parse(settings.draft)
    for name, why in _NOT_ON_VLLM.items():
        if getattr(settings, name) != getattr(Settings(), name):
            raise OutriderError(f"{name} cannot be chosen on the backend vllm: {why}")
    config = speculation_of(settings) or {}
    from outrider.backends.vllm import INSTALL, INSTALL_SUFFIX

    if importlib.util.find_spec("vllm") is None:
        raise OutriderError(f"vLLM is not installed for this Python: {INSTALL}")
    if config.get("method") == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise OutriderError(
            f"vLLM's drafter suffix is in a package of its own, which is not installed: {INSTALL_SUFFIX}"
        )
    return None


def speculation_of(settings: Settings) -> dict[str, Any] | None:
    """How vLLM is to speculate, in its own words."""
    if settings.speculative_config is None:
        return speculation.to_vllm(settings.draft)
    return dict(settings.speculative_config)
