"""Outrider: speculative decoding that gives the target model's own output, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.compat.client import Client
    from outrider.core.adapter import AdapterMix
    from outrider.core.errors import OutriderError
    from outrider.core.params import SamplingParams
    from outrider.core.request import Chunk, Request, Result
    from outrider.core.stats import Stats
    from outrider.llm import LLM
    from outrider.settings import Settings

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AdapterMix",
    "Chunk",
    "Client",
    "OutriderError",
    "Request",
    "Result",
    "SamplingParams",
    "Settings",
    "Stats",
]

# Imported when it is asked for: torch takes seconds, and the command line must understand Ctrl-C before that.
_HOMES = {
    "LLM": "llm",
    "AdapterMix": "core.adapter",
    "Chunk": "core.request",
    "Client": "compat.client",
    "OutriderError": "core.errors",
    "Request": "core.request",
    "Result": "core.request",
    "SamplingParams": "core.params",
    "Settings": "settings",
    "Stats": "core.stats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"outrider.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
