"""The texts that the target wrote, as compact arrays; in a run's folder they lie in shards, one per wave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.train.atomic import write_tensors, write_text
from outrider.train.data.conversations import WrittenText

FOLDER = "training"  # below --out: the files that only --resume needs
_INFO = "data.json"
_ARRAYS = ("tokens", "lengths", "answers", "talks")


@dataclass(frozen=True, eq=False)
class Corpus:
    tokens: Tensor  # [all] int32
    lengths: Tensor  # [texts] int32
    answers: Tensor  # [texts] int32: where the answer begins
    talks: Tensor  # [texts] int32: the conversation that each is of; texts of one share their words

    @classmethod
    def of(cls, texts: Sequence[WrittenText]) -> Corpus:
        return cls(
            torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
            torch.tensor([text.answer for text in texts], dtype=torch.int32),
            torch.tensor([text.talk for text in texts], dtype=torch.int32),
        )

    @classmethod
    def join(cls, parts: Sequence[Corpus]) -> Corpus:
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in _ARRAYS))

    def pick(self, texts: Tensor) -> Corpus:
        """Some of the texts, by their places."""
        lengths = self.lengths[texts]
        firsts = self.starts[texts] - (torch.cumsum(lengths.long(), 0) - lengths)
        places = torch.arange(int(lengths.sum())) + firsts.repeat_interleave(lengths)
        return Corpus(self.tokens[places], lengths, self.answers[texts], self.talks[texts])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Tensor:
        return torch.cumsum(self.lengths.long(), 0) - self.lengths

    def frequent(self, count: int, vocab: int, always: Sequence[int]) -> Tensor:
        """The `count` token ids that answers use most, by falling frequency; `always` before all others."""
        place = torch.arange(len(self.tokens)) - torch.repeat_interleave(self.starts, self.lengths)
        written = self.tokens[place >= torch.repeat_interleave(self.answers, self.lengths)]
        seen = torch.bincount(self.tokens, minlength=vocab) > 0  # in a question at least
        counts = torch.bincount(written, minlength=vocab) * 2 + seen
        counts[list(always)] = counts.max() + 1
        order = torch.sort(counts, descending=True, stable=True).indices
        return order[:count]


@dataclass(frozen=True)
class CorpusInfo:
    """Where the texts come from; stored beside them."""

    model: str
    vocab: int
    seed: int
    waves: int = 0
    talks: int = 0  # conversations
    tokens: int = 0
    seconds: float = 0.0
    complete: bool = False
    adapter: str = ""  # the one that the model had, with its digest; "": none


class CorpusFolder:
    """The shards of one run."""

    def __init__(self, out: Path) -> None:
        self.folder = out / FOLDER

    def info(self) -> CorpusInfo | None:
        try:
            stored: dict[str, Any] = json.loads((self.folder / _INFO).read_text(encoding="utf-8"))
            return CorpusInfo(**stored)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OSError) as error:
            raise OutriderError(
                f"{self.folder / _INFO} cannot be read ({error}); delete the folder and begin anew"
            ) from error

    def add(self, corpus: Corpus, info: CorpusInfo) -> None:
        """A wave, then the info that counts it; a kill in between leaves a shard that the next run writes again."""
        small = torch.uint16 if info.vocab <= 1 << 16 else torch.int32
        tensors = {name: getattr(corpus, name) for name in _ARRAYS} | {"tokens": corpus.tokens.to(small)}
        write_tensors(self._shard(info.waves - 1), tensors)
        self.write_info(info)

    def write_info(self, info: CorpusInfo) -> None:
        write_text(self.folder / _INFO, json.dumps(vars(info), indent=1) + "\n")

    def read(self, waves: int, first: int = 0) -> Corpus:
        """The texts of the waves from `first` on, up to that number of them."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            shards = [load_file(self._shard(wave)) for wave in range(first, waves)]
        except (OSError, SafetensorError) as error:
            raise OutriderError(f"the texts in {self.folder} cannot be read ({error}); write them anew") from error
        return Corpus.join([_corpus(shard) for shard in shards]) if shards else Corpus.of([])

    def _shard(self, wave: int) -> Path:
        return self.folder / f"data-{wave:04d}.safetensors"


def _corpus(shard: dict[str, Tensor]) -> Corpus:
    """Shards of earlier versions do not say which conversation a text is of: each counts as its own."""
    lengths = shard["lengths"]
    talks = shard.get("talks", torch.arange(len(lengths), dtype=torch.int32))
    return Corpus(shard["tokens"].to(torch.int32), lengths, shard["answers"], talks)
