"""Prompt lookup beside a head: copied tokens alone where they are all but certain, and beside the head's elsewhere."""

from __future__ import annotations

from dataclasses import replace

from outrider.core.draft import EMPTY, ROOT, Draft
from outrider.core.sequence import Sequence
from outrider.drafters.base import Parts, Step
from outrider.drafters.ngram import Ngram

_FADE = 0.97  # what an old draft of the head weighs after each new one
LEAST = 0.1  # chance of a node that can be worth its row
_DRAFT = 0.15  # what a draft of the head takes, in tokens that would be written meanwhile


class Lookup:
    def __init__(self, least: int, parts: Parts) -> None:
        """`least`: how many tokens have to match."""
        self._ngram = Ngram(Ngram.Options(max_n=least + 2, min_n=least), parts)
        self._tries, self._kept = 1.0, 1.0  # drafts that the head was asked for, and their tokens that were kept

    def propose(self, seq: Sequence, room: int) -> Draft:
        """A copy of what followed, if so many tokens match; the choice looks at nothing but the past."""
        draft = self._ngram.propose([seq], [room])[0] if room > 0 else EMPTY
        return replace(draft, sources=(Ngram.name,) * len(draft)) if draft else EMPTY

    def enough(self, copy: Draft) -> bool:
        """Whether the head, which would help where the copy is wrong at once, is not worth its time."""
        return bool(copy) and (1.0 - copy.chances[0]) * self._kept / self._tries < _DRAFT

    def observe(self, step: Step) -> None:
        self._ngram.observe(step)
        if step.verdict is not None and step.draft and not step.draft.borrowed:
            kept = sum(not step.draft.sources or not step.draft.sources[node] for node in step.verdict.path)
            self._tries, self._kept = _FADE * self._tries + 1.0, _FADE * self._kept + kept

    def forget(self, id: int) -> None:
        self._ngram.forget(id)


def merged(draft: Draft, copy: Draft) -> Draft:
    """Both as one tree: what they agree on stands there once, where they part the copy is a branch of its own."""
    tokens, parents, chances = list(draft.tokens), list(draft.parents), list(draft.chances)
    sources = list(draft.sources or ("",) * len(draft))
    node, reach = ROOT, 1.0
    for token, chance, source in zip(copy.tokens, copy.chances, copy.sources, strict=True):
        below = [child for child, parent in enumerate(parents) if parent == node]
        same = next((child for child in below if tokens[child] == token), None)
        if same is None:
            chance *= max(0.0, 1.0 - sum(chances[child] for child in below))
            if reach * chance < LEAST:
                break
            same = len(tokens)
            tokens.append(token)
            parents.append(node)
            chances.append(chance)
            sources.append(source)
        else:
            chances[same] = max(chances[same], chance)
        node, reach = same, reach * chances[same]
    return Draft(tuple(tokens), tuple(parents), None, tuple(sources) if any(sources) else (), tuple(chances))
