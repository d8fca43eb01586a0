"""Outrider: speculative decoding that gives the target model's own output, exactly."""

from outrider.core.errors import OutriderError
from outrider.core.request import Chunk, Request, Result
from outrider.core.sampling import SamplingParams
from outrider.core.stats import Stats
from outrider.llm import LLM
from outrider.settings import Settings

__version__ = "0.1.0"

__all__ = ["LLM", "Chunk", "OutriderError", "Request", "Result", "SamplingParams", "Settings", "Stats"]
