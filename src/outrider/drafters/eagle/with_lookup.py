"""Prompt lookup beside a head: copied tokens alone where they are all but certain, and beside the head's elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.core.draft import EMPTY, ROOT, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Step
from outrider.drafters.confidence import LONGEST, StatedCalibration
from outrider.drafters.ngram import Ngram

_FADE = 0.97  # weight of an old draft of the head after each new one: about the last 30 count
LEAST = 0.1  # probability to be reached: a copied node below it is not worth its row in the pass
# Time of a draft of the head, in tokens that would be written meanwhile, until it is measured: a cautious guess.
_DRAFT = 0.15
_KNOWN = 8  # tokens of a sequence after which its measured speed is believed; the first ones are uneven


class Lookup:
    def __init__(self, least: int, context: BuildContext) -> None:
        """`least`: how many tokens have to match."""
        if least > LONGEST:
            raise OutriderError(f"eagle:lookup must be at most {LONGEST}, not {least}")
        self._ngram = Ngram(Ngram.Options(max_n=min(least + 2, LONGEST), min_n=least), context)
        self._tries, self._kept = 1.0, 1.0  # drafts that the head was asked for, and their tokens that were kept
        self._seconds = 0.0  # of a draft of the head
        self._calibration = StatedCalibration()  # of copied tokens where the head says something else
        self._parted: dict[int, _Parting] = {}  # by sequence, in its last draft

    def propose(self, seq: Sequence, budget: int) -> Draft:
        """A copy of what followed, if enough tokens match; the choice looks at nothing but the past."""
        draft = self._ngram.propose([seq], [budget])[0] if budget > 0 else EMPTY
        return replace(draft, sources=(Ngram.name,) * len(draft)) if draft else EMPTY

    def enough(self, seq: Sequence, copy: Draft) -> bool:
        """Whether the head, which would help where the copy is wrong at once, is not worth its time."""
        return bool(copy) and (1.0 - copy.acceptance[0]) * self._kept / self._tries < self._price(seq)

    def spend(self, seconds: float) -> None:
        """Learn how many seconds a draft of the head took."""
        more = seconds - self._seconds
        self._seconds += 0.1 * min(more, self._seconds) if self._seconds else more

    def _price(self, seq: Sequence) -> float:
        """Tokens that are written in the time of the head's draft: many where the text goes fast."""
        stats = seq.stats
        seconds = sum(stats.seconds.values()) - stats.first_seconds
        if stats.tokens < _KNOWN or seconds <= 0.0 or not self._seconds:
            return _DRAFT
        return self._seconds * (stats.tokens - 1) / seconds

    def merge(self, seq: Sequence, draft: Draft, copy: Draft) -> Draft:
        """Both as one tree: what they agree on stands there once, where they part the copy is a branch of its own."""
        tree, parting = _merged(draft, copy, self._calibration.probability)
        if parting is not None:
            self._parted[seq.id] = replace(parting, begin=len(seq.tokens))
        return tree

    def observe(self, step: Step) -> None:
        self._ngram.observe(step)
        parting = self._parted.pop(step.seq.id, None)
        if parting is not None:
            *before, last = parting.tokens
            written = step.seq.tokens[parting.begin :][: len(parting.tokens)]
            if written[: len(before)] == before and len(written) > len(before):
                self._calibration.learn(parting.stated, written[-1] == last)
        if step.verdict is not None and step.draft and not step.draft.borrowed:
            kept = sum(not step.draft.sources or not step.draft.sources[node] for node in step.verdict.path)
            self._tries, self._kept = _FADE * self._tries + 1.0, _FADE * self._kept + kept

    def forget(self, id: int) -> None:
        self._ngram.forget(id)
        self._parted.pop(id, None)


@dataclass(frozen=True)
class _Parting:
    """Where a copy says something else than the head."""

    tokens: tuple[int, ...]  # copied, up to the first that the head does not have
    stated: float  # the probability of that one
    begin: int = 0  # tokens that were committed


def _merged(draft: Draft, copy: Draft, calibrated: Callable[[float], float]) -> tuple[Draft, _Parting | None]:
    parting = None
    tokens, parents, acceptance = list(draft.tokens), list(draft.parents), list(draft.acceptance)
    sources = list(draft.sources or ("",) * len(draft))
    node, reach = ROOT, 1.0
    for depth, (token, probability, source) in enumerate(zip(copy.tokens, copy.acceptance, copy.sources, strict=True)):
        below = [child for child, parent in enumerate(parents) if parent == node]
        same = next((child for child in below if tokens[child] == token), None)
        if same is None:
            if below:
                stated = probability * max(0.0, 1.0 - sum(acceptance[child] for child in below))
                parting = _Parting(copy.tokens[: depth + 1], stated)
                probability = calibrated(stated)
            if reach * probability < LEAST:
                break
            same = len(tokens)
            tokens.append(token)
            parents.append(node)
            acceptance.append(probability)
            sources.append(source)
        else:
            acceptance[same] = max(acceptance[same], probability)
        node, reach = same, reach * acceptance[same]
    tree = Draft(tuple(tokens), tuple(parents), None, tuple(sources) if any(sources) else (), tuple(acceptance))
    return tree, parting
