"""What all engines are given: the same weights, and the same prompts as token ids, rendered once by us."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.bench.peers import Peer
from outrider.bench.workloads import BenchPrompt
from outrider.core.errors import OutriderError
from outrider.models import sources, tokenizer as tokenizers


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk, in the forms that engines read."""

    path: Path  # a GGUF file or a folder
    scratch: Path  # where a GGUF file is written out as a folder

    def form(self, peer: Peer) -> Path | None:
        """What this engine reads; None when there is no such form."""
        if self.path.is_dir():
            return None if peer.reads == "gguf" else self.path
        return self._folder() if peer.reads == "folder" else self.path

    def _folder(self) -> Path:
        folder = self.scratch / self.path.stem
        from outrider.models.export import export

        if not (folder / "config.json").is_file():  # written last
            export(self.path, folder)
        return folder


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as token ids."""

    id: str
    kind: str
    ids: list[int]

    def turned(self, count: int) -> TokenizedPrompt:
        """The same tokens from another one on: no engine has read this beginning, so that it keeps nothing of it."""
        at = count % len(self.ids)
        return replace(self, ids=self.ids[at:] + self.ids[:at])


LONG_PROMPTS = 4  # how many prompts of one length are read: enough for an interval


def long_prompts(tasks: Sequence[TokenizedPrompt], tokens: int) -> list[TokenizedPrompt]:
    """Prompts of exactly that many tokens: the workload's own, one after the other, each beginning at another one."""
    if not tokens:
        return []
    starts = range(0, len(tasks), -(-len(tasks) // LONG_PROMPTS))
    return [TokenizedPrompt(f"prompt-{start}", "prompt", _joined(tasks, start, tokens)) for start in starts]


def _joined(tasks: Sequence[TokenizedPrompt], start: int, tokens: int) -> list[int]:
    ids: list[int] = []
    for task in itertools.cycle([*tasks[start:], *tasks[:start]]):
        ids += task.ids
        if len(ids) >= tokens:
            break
    return ids[:tokens]


@dataclass(frozen=True)
class PromptTokenizer:
    """The model's own tokenizer, and the tokens that end its answers."""

    tokenizer: Any
    ends: list[int]

    def render(self, prompts: Sequence[BenchPrompt]) -> list[TokenizedPrompt]:
        return [TokenizedPrompt(prompt.id, prompt.kind, self._ids(prompt.text)) for prompt in prompts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _ids(self, text: str) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            return list(self.tokenizer.encode(text))
        message = {"role": "user", "content": text}
        rendered = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(rendered, add_special_tokens=False))


def read_tokenizer(path: Path) -> PromptTokenizer:
    from outrider.models.gguf import GGUFFile

    metadata = GGUFFile(path).metadata if path.is_file() else None
    tokenizer: Any = tokenizers.from_folder(path) if metadata is None else tokenizers.from_gguf(metadata)
    if tokenizer is None:
        raise OutriderError(f"the model {path} has no tokenizer, which the benchmark's prompts need")
    return PromptTokenizer(tokenizer, sorted(tokenizers.end_ids(tokenizer, metadata)))


def has_chat_template(path: Path) -> bool:
    """Whether prompts are asked as conversations."""
    return bool(getattr(read_tokenizer(path).tokenizer, "chat_template", None))


def find(name: str, scratch: Path) -> ModelFiles:
    return ModelFiles(sources.resolve(name).resolve(), scratch)
