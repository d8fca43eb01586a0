"""How a run is doing: the line that is shown, the best weights so far, a warning when the student only learns by heart,
and what would help most at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outrider.train.checkpoint import TrainingState
from outrider.train.held_out import HeldOut, tokens_per_pass
from outrider.train.loop import LossLog

LOOKS_AT_HELD_OUT = 25  # times in a run: each takes a second or so on a GPU, a twentieth of ten minutes in all
BEFORE_PLANNED = 100  # steps between two looks while the number of steps is not known yet
FEWEST_STEPS = 5  # between two looks: one takes as long as a step or two
# Share by which training may gain more than held-out texts before that is said: half of the gap of a head that had
# learned 640,000 tokens by heart (docs/LOG.md); heads that generalise stay below a tenth.
PARTED = 0.25
AGREEING = 3  # looks that must say the same: one alone may be by chance
NEWEST = 10  # steps whose mean a look is compared with
RISING = 0.01  # of what the head gains: growth over the last fifth of a run from which on more steps would help
HISTORY = "held_out"  # of a state's figures: [step, loss, tokens per pass of training, of held-out texts, seconds]


class Progress:
    """Looks at held-out texts from time to time, at steps that the plan decides alone: resumed runs do the same."""

    def __init__(self, state: TrainingState, held_out: HeldOut, dtype: torch.dtype) -> None:
        """`dtype`: in which the best weights are kept, that of the file."""
        self._state, self._held_out, self._dtype = state, held_out, dtype
        self.best: dict[str, Tensor] = {}  # of the student, where it did best on held-out texts; {}: as it is now
        self._warned = False

    def due(self) -> bool:
        state = self._state
        every = max(FEWEST_STEPS, state.planned // LOOKS_AT_HELD_OUT) if state.planned else BEFORE_PLANNED
        return state.step % every == 0

    def look(self, student: nn.Module, log: LossLog, seconds: float) -> None:
        """Measure, remember the weights if they are the best so far, and write it beside the step's own figures."""
        found = self._held_out.measure(student)
        log.held_out(self._state.step - 1, found)
        log.flush()
        if not found:
            return
        now, learned = tokens_per_pass(found), tokens_per_pass(log.recent(NEWEST))
        entry = [self._state.step, round(found["loss"], 4), round(learned, 3), round(now, 3), round(seconds, 1)]
        history = self._state.figures.setdefault(HISTORY, [])
        if not history or history[-1][0] != self._state.step:
            history.append(entry)
        score = (now + tokens_per_pass(found, "keep")) / 2  # hits alone jump from look to look
        if score >= self._state.best:
            self._state.best, self._state.best_step = score, self._state.step
            self.best = {name: value.detach().to(self._dtype, copy=True) for name, value in _floats(student).items()}

    @contextmanager
    def best_weights(self, student: nn.Module) -> Iterator[None]:
        """The student with its best weights, for as long as it is written out."""
        current = {name: value.detach().clone() for name, value in _floats(student).items()} if self.best else {}
        _copy(student, self.best)
        try:
            yield
        finally:
            _copy(student, current)

    def warning(self) -> str:
        """Once: training and held-out texts have parted."""
        gap = self.gap()
        if self._warned or gap < PARTED:
            return ""
        self._warned = True
        _, _, learned, held, _ = self._state.figures[HISTORY][-1]
        return (
            f"the head has {learned:.2f} tokens per pass on texts that it learned from and {held:.2f} on others: it "
            "learns by heart; more text would help (more --minutes or --tokens), or fewer --epochs"
        )

    def gap(self) -> float:
        """By what share training gains more than held-out texts, the least of the last looks; 0: nothing is known."""
        history = self._state.figures.get(HISTORY, [])[-AGREEING:]
        if len(history) < AGREEING:
            return 0.0
        return max(0.0, min((learned - 1.0) / max(held - 1.0, 1e-6) for _, _, learned, held, _ in history) - 1.0)

    def line(self, log: LossLog) -> str:
        state, recent = self._state, log.recent()
        parts = [f"step {state.step}/{state.planned or '?'}: loss {recent.get('loss', 0.0):.3f}, hits {_hits(recent)}"]
        history, found = state.figures.get(HISTORY), log.last_held_out
        if history and found:
            parts += [
                f"held out {_hits(found)}",
                f"about {history[-1][2]:.2f} and {history[-1][3]:.2f} tokens per pass",
            ]
        live = state.figures.get("live")
        if live:
            parts.append(f"measured {live[-1][1]:.2f}")
        return ", ".join(parts)


def advice(figures: dict[str, Any], epochs: float) -> str:
    """What would help most, from how training and held-out texts went."""
    history = figures.get(HISTORY)
    if not history:
        return (
            "nothing was held out, as there are too few texts to say what would help: give more --minutes or --tokens"
        )
    _, _, learned, held, _ = history[-1]
    best = max(entry[3] for entry in history)
    if (learned - 1.0) > (1.0 + PARTED) * max(best - 1.0, 1e-6):
        return f"more text would help most: each was learned {epochs:.1f} times, and others are guessed less well"
    before = history[max(0, len(history) - 1 - len(history) // 5)][3]
    if held - before > RISING * max(held - 1.0, 1e-6) or len(history) < 5:
        return "more steps would help most: held-out texts were still guessed better and better (more --minutes)"
    return "a larger head would help most (--layers): neither more steps nor more text changed much at the end"


def _hits(figures: dict[str, float]) -> str:
    return " ".join(f"{value:.2f}" for name, value in figures.items() if name.startswith("hit"))


def _floats(student: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in student.state_dict().items() if value.is_floating_point()}


@torch.no_grad()
def _copy(student: nn.Module, weights: dict[str, Tensor]) -> None:
    """In place: a graph reads the weights where they are."""
    places = student.state_dict()
    for name, value in weights.items():
        places[name].copy_(value)
