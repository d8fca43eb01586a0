"""Llama 3: the whole answer is one call, `{"name": "...", "parameters": {...}}`."""

from __future__ import annotations

from outrider.server.tools.base import ToolFormat, literal


class LlamaFormat(ToolFormat):
    def fits(self, template: str) -> bool:
        return "ipython" in template and '"parameters"' in template

    def rules(self, several: bool) -> list[str]:
        """Its template takes one call at a time, so several are never written."""
        return [f"calls: pick {literal('}')}"]


LLAMA = LlamaFormat("llama", '{"name": "', key="parameters", only_first=True)
