"""Outrider: speculative decoding that gives the target model's own output, exactly."""

from typing import TYPE_CHECKING, Any

from outrider.core.errors import OutriderError
from outrider.core.request import Chunk, Request, Result
from outrider.core.sampling import SamplingParams
from outrider.core.stats import Stats
from outrider.llm import LLM
from outrider.settings import Settings

if TYPE_CHECKING:
    from outrider.compat.client import Client

__version__ = "0.1.0"

__all__ = ["LLM", "Chunk", "Client", "OutriderError", "Request", "Result", "SamplingParams", "Settings", "Stats"]


def __getattr__(name: str) -> Any:
    if name == "Client":  # brings an HTTP client with it, so it comes when it is asked for
        from outrider.compat.client import Client

        return Client
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
