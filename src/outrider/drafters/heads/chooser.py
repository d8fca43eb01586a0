"""How one sequence chooses the tokens of a draft that a head writes for it, under the request's own rules."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Sequence
from outrider.drafters.confidence import StatedCalibration

# Under shared noise: how far, in log-probability, the head is expected to be from the target. It sets how sure the head
# is that the target takes the token with the highest score; the calibration corrects what is left.
BLUR = 0.5


class Chooser:
    """The draft of one sequence as it grows."""

    def __init__(self, seq: Sequence, length: int, greedy: bool) -> None:
        """`greedy`: guess the likeliest token even where the request samples."""
        self.seq, self.length = seq, length
        guesses = greedy or seq.params.greedy
        # the likeliest token it is, whatever came before; what a grammar forbids is cut off afterwards, in less time
        self.plain = guesses and not seq.params.penalises
        self.draws = not guesses and seq.rule == "rejection"  # from the head's law, which verification needs to know
        self._shares = not guesses and not self.draws  # the target's own noise
        self.temperature = 0.0 if guesses else seq.params.temperature
        self.by_rows = not self.draws and not seq.params.adjusts  # needs nothing but a row of logits and the noise
        self.shares_noise = self.by_rows and self._shares and not seq.params.cuts
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.stated: list[float] = []  # the probability that the head itself states for each
        self.laws: list[Tensor] = []
        self.reach = 1.0

    def put(self, token: int, stated: float) -> bool:
        """One more token of a chain; False: there is none, since the head's numbers overflowed, and the chain ends."""
        if not math.isfinite(stated):
            self.length = len(self.tokens)
            return False
        self.parents.append(len(self.tokens) - 1)
        self.tokens.append(token)
        self.stated.append(stated)
        self.reach *= stated
        return True

    def write(self, logits: Tensor) -> None:
        """Choose one more token of a chain; logits [vocab]."""
        try:
            if self.draws:
                self._draw(self.seq.law(logits, self.tokens))
                return
            tokens, logarithms = self.offers(logits, self.tokens, 1)
        except Exception:  # of a processor, or no token is left that the head may write: the target will judge
            self.length = len(self.tokens)
            return
        self.put(int(tokens[0]), float(logarithms[0].exp()))

    def _draw(self, law: Tensor) -> None:
        # what the head states must not depend on the token that is drawn: nodes are dropped by it (see core/draft.py)
        stated = float(law.max())
        drawn = self.seq.draw(law, len(self.tokens)) if math.isfinite(stated) else 0
        if self.put(drawn, stated):
            self.laws.append(law)

    def offers(self, logits: Tensor, path: Seq[int], count: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after `path`, and the logarithms of their probabilities; at most `count`. Logits that
        overflowed give NaN."""
        if self._shares:
            law = self.seq.law(logits, path)
            support = law.nonzero().squeeze(1)
            noise = self.seq.dice.noise(len(self.seq.tokens) + len(path), support)
            scores = (law[support].double().log() - noise.log()).float() / BLUR  # the target takes about the highest
            best = scores.log_softmax(0).topk(min(count, len(support)))
            return support[best.indices], best.values
        adjusted = self.seq.adjusted(logits, path)
        best = adjusted.float().log_softmax(0).topk(min(count, len(adjusted)))
        return best.indices, best.values

    def draft(self, calibration: StatedCalibration) -> Draft:
        if not self.tokens:
            return EMPTY
        probs = torch.stack(self.laws) if self.laws else None
        acceptance = tuple(map(calibration.probability, self.stated))
        return Draft(tuple(self.tokens), tuple(self.parents), probs, acceptance=acceptance)


def offers_with_noise(
    choosers: Seq[Chooser], logits: Tensor, ids: Tensor, depth: int, count: int
) -> tuple[Tensor, Tensor]:
    """`offers` for many rows at once, of choosers that share the target's noise; each has the same number of rows.
    logits [rows, ids] of the tokens `ids`, at that depth -> [rows, count] twice."""
    each, device = len(logits) // len(choosers), logits.device
    heat = torch.tensor([chooser.temperature for chooser in choosers], device=device, dtype=torch.float64)
    noise = torch.stack([w.seq.dice.noise(len(w.seq.tokens) + depth, ids) for w in choosers]).log()
    laws = torch.log_softmax(logits.double() / heat.repeat_interleave(each).unsqueeze(1), -1)
    scores = (laws - noise.repeat_interleave(each, 0)).float() / BLUR
    best = scores.log_softmax(-1).topk(min(count, len(ids)))
    return ids[best.indices], best.values
