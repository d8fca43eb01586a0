"""The texts of a run: written first, and more of them whenever that helps more than further steps on what is there."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.errors import OutriderError
from outrider.models.load import Loaded
from outrider.train.data import writer
from outrider.train.data.corpus import Corpus, CorpusFolder, CorpusInfo
from outrider.train.job import TimeBudget, TrainingJob

FIRST_SHARE = 0.2  # of the time for the first texts: enough to begin with, and to know how fast both parts are
# Times that a text is learned from where held-out texts say nothing else. With 3.7 (Qwen2.5-Coder-1.5B, docs/LOG.md)
# the loss fell by a fifth when texts were read again, that of held-out texts by a twentieth in the same steps.
REPEATS = 2.5
# What training gains more than held-out texts, as a share, where REPEATS is right: twice the gap, half the repeats.
# Half of the batches are of new texts, which are guessed no better than held-out ones.
USUAL_GAP = 0.06
# With 1.25 as the fewest Qwen2.5-Coder-1.5B wrote for 256 of 600 s, read each text 1.5 times and was worse than with
# 3.7 (docs/LOG.md, 2026-11-20, two leases of an H200).
FEWEST_REPEATS, MOST_REPEATS = 2.0, 3.0
LARGEST_SHARE = 0.6  # of the time that is left for further texts, at most: what is written has to be learned, too
LEAST_SECONDS, LEAST_SHARE = 2.0, 0.01  # of a run: less writing at a time is not worth stopping the steps
# Times that texts are written beside learning, evenly over the steps: nearly to the end half of the batches are new.
PARTS = 6


def writing_seconds(
    left: float, written: float, learned: float, tokens: float, steps_tokens: float, gap: float
) -> float:
    """Seconds of the time left that go into further texts, so that each is learned from as often as pays.

    `written`, `learned`: tokens per second of either; `tokens` that are there; `steps_tokens`: in all steps so far."""
    repeats = min(MOST_REPEATS, max(FEWEST_REPEATS, REPEATS * USUAL_GAP / gap)) if gap > 0.0 else REPEATS
    seconds = (steps_tokens + learned * left - repeats * tokens) / (repeats * written + learned)
    return min(max(0.0, seconds), LARGEST_SHARE * left)


class TextSource:
    """Where the texts come from and how many there are."""

    def __init__(
        self,
        loaded: Loaded,
        job: TrainingJob,
        name: str,
        adapter: str,
        folder: CorpusFolder,
        given: bool,
        prompts: Sequence[str],
        about: Sequence[str],
        budget: TimeBudget,
        show: writer.Show,
    ) -> None:
        """`given`: they are another run's. `name`: of the target. `adapter`: that it has, with its digest."""
        self._loaded, self._job, self._name, self._adapter = loaded, job, name, adapter
        self._folder, self._given = folder, given
        self._asked, self._budget, self._show = (prompts, about), budget, show
        self._writer: writer.CorpusWriter | None = None
        self.info = self._checked()

    def begin(self) -> None:
        """The first texts, unless they are there."""
        if self.info.complete:
            return
        if self._job.tokens:
            self.info = writer.write_corpus(self._make(), self._folder, self.info, self._job, self._budget, self._show)
        else:
            self.write(FIRST_SHARE * self._budget.limit - self._budget.spent, last=False)

    @property
    def grows(self) -> bool:
        """Whether more can be written."""
        return not self._job.tokens and not self._given and not self._job.epochs

    def write(self, seconds: float, last: bool) -> None:
        """`last`: the conversations that run at the end are cut; else they go on the next time."""
        end = self._budget.spent + max(seconds, 0.0)
        self.info = writer.write_until(self._make(), self._folder, self.info, end, self._budget, self._show, cut=last)

    def end(self) -> None:
        """No more is written: conversations that wait leave the cache."""
        if self._writer is not None:
            self._writer.rest()

    def wanted(self, left: float, step_seconds: float, steps: int, gap: float, parts: int) -> tuple[float, float]:
        """Seconds that should go into further texts now, and later, where `parts` are still to be written."""
        speed, learned = self.info.tokens / max(self.info.seconds, 1e-9), self._job.batch_tokens / step_seconds
        seconds = writing_seconds(left, speed, learned, self.info.tokens, steps * self._job.batch_tokens, gap)
        part = seconds / max(parts, 1)
        return (part, seconds - part) if part > max(LEAST_SECONDS, LEAST_SHARE * self._budget.limit) else (0.0, 0.0)

    def read(self, waves: int, first: int = 0) -> Corpus:
        return self._folder.read(waves, first)

    def _make(self) -> writer.CorpusWriter:
        if self._writer is None:
            device = self._loaded.model.device.type  # type: ignore[attr-defined]
            self._writer = writer.CorpusWriter(self._loaded, self._job, device, *self._asked)
        return self._writer

    def _checked(self) -> CorpusInfo:
        info, folder, vocab = self._folder.info(), self._folder.folder, self._loaded.model.vocab_size
        if info is None and self._given:
            raise OutriderError(f"{folder.parent} has no texts of a training run; give the --out of one")
        info = info or CorpusInfo(self._name, vocab, self._job.seed, adapter=self._adapter)
        if (info.model, info.vocab) != (self._name, vocab):
            raise OutriderError(
                f"the texts in {folder} were written by {info.model} ({info.vocab} tokens), not by {self._name} "
                f"({vocab} tokens); give texts of this model"
            )
        if info.adapter != self._adapter:
            raise OutriderError(
                f"the texts in {folder} were written with {_called(info.adapter)}, not with {_called(self._adapter)}; "
                "give texts of this adapter, or begin a new run"
            )
        if self._given and not info.complete:
            raise OutriderError(f"the texts in {folder} are not complete; finish that run with --resume first")
        return info


def _called(adapter: str) -> str:
    return f"the adapter {adapter}" if adapter else "no adapter"
