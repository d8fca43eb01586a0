"""A run as it stands: weights, the optimiser's memory, the step, what is planned. One file, replaced as a whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.core.errors import OutriderError
from outrider.train.atomic import write_tensors, write_text
from outrider.train.data.corpus import FOLDER
from outrider.train.optimiser import Optimiser

NAME = "checkpoint.safetensors"
_JOB = "job.json"


@dataclass
class TrainingState:
    """Where a run is."""

    step: int = 0  # steps done
    planned: int = 0  # steps in all; 0: not known yet
    warm: int = 0  # steps until the rate reaches its peak
    seconds: float = 0.0  # spent so far, in this process and in those before it
    best: float = 0.0  # tokens per pass on held-out texts, about, greedy and drawn, where they were most
    best_step: int = 0  # after which they were
    segments: list[list[int]] = field(default_factory=list)  # [step, waves]: from that step on, the texts of so many
    figures: dict[str, Any] = field(default_factory=dict)  # for the provenance: acceptance, speeds


def save(out: Path, state: TrainingState, student: nn.Module, optimiser: Optimiser, best: Mapping[str, Tensor]) -> None:
    """`best`: the weights that did best on held-out texts."""
    tensors: dict[str, Tensor] = {f"weight.{name}": weight for name, weight in student.state_dict().items()}
    tensors |= {f"best.{name}": weight for name, weight in best.items()}
    tensors |= {f"memory.{name}": value for name, value in optimiser.state().items()}
    write_tensors(out / FOLDER / NAME, tensors, {"state": json.dumps(vars(state))})


def begin(out: Path, resume: bool) -> TrainingState:
    """The state to go on from. A run that is there is not written over; a folder that cannot be is refused at once."""
    path = out / FOLDER / _JOB
    if resume:
        stored(out)
        return _state(out) if (out / FOLDER / NAME).exists() else TrainingState()
    if path.exists():
        raise OutriderError(f"{out} already holds a training run; go on with --resume, or choose another --out")
    made = [folder for folder in path.parents if not folder.exists()]
    write_text(path, "")
    path.unlink()
    with contextlib.suppress(OSError):  # somebody else has put something there
        for folder in made:  # a run that is refused before it has a job leaves nothing behind
            folder.rmdir()
    return TrainingState()


def record_job(out: Path, asked: dict[str, Any]) -> None:
    """From now on there is a run that can be resumed, and this is its job."""
    if not (out / FOLDER / _JOB).exists():
        write_text(out / FOLDER / _JOB, json.dumps(asked, indent=1) + "\n")


def stored(out: Path) -> dict[str, Any]:
    """What a run was asked for when it began."""
    path = out / FOLDER / _JOB
    try:
        asked: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise OutriderError(f"there is no run to go on with in {out}; begin it without --resume") from None
    except (OSError, ValueError) as error:
        raise OutriderError(f"{path} cannot be read ({error}); begin the run anew") from error
    return asked


def _state(out: Path) -> TrainingState:
    from safetensors import SafetensorError, safe_open

    path = out / FOLDER / NAME
    try:
        with safe_open(str(path), framework="pt") as file:
            return TrainingState(**json.loads((file.metadata() or {})["state"]))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise OutriderError(f"the checkpoint {path} cannot be read ({error}); begin the run anew") from error


def restore(out: Path, student: nn.Module, optimiser: Optimiser) -> dict[str, Tensor]:
    """Weights and the optimiser's memory; the best weights so far are returned."""
    from safetensors.torch import load_file

    tensors = load_file(out / FOLDER / NAME)
    student.load_state_dict(_under(tensors, "weight."))
    optimiser.restore(_under(tensors, "memory."))
    device = next(student.parameters()).device
    return {name: value.to(device) for name, value in _under(tensors, "best.").items()}


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
