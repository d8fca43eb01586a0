"""A LoRA adapter learned from conversations, with PEFT on transformers. Its files lie in --out, as PEFT saves them."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OutriderError, one_line
from outrider.models import sources, tokenizer as tokenizers
from outrider.models.adapters.paths import CONFIG, WEIGHTS
from outrider.models.export import as_folder
from outrider.train import chats
from outrider.train.atomic import write_bytes, write_tensors, write_text
from outrider.train.chats import Example
from outrider.train.lora_job import LoraJob

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INSTALL = "PEFT is not installed for this Python: pip install '.[lora]' in a checkout"
HELD = 20  # one of this many chats is held out, to measure with
MOST_HELD = 32  # the most that are: the loss of these takes seconds, of more minutes
SAVE_SECONDS = 30.0  # between two checkpoints: a killed run loses at most these
SHOW_SECONDS = 5.0  # between two lines of progress
WARM = 0.1  # share of the steps in which the rate grows to its peak
LEAST_RATE = 0.1  # of the peak: what the rate ends with
_CHECKPOINT, _JOB = "checkpoint.safetensors", "lora.json"
_FOLDER = "training"  # below --out


@dataclass(frozen=True, eq=False)
class LoraTask:
    """A job, where it is done, and what is called on the way."""

    job: LoraJob
    out: Path
    device: torch.device
    resume: bool = False
    note: Callable[[str], None] = lambda line: None
    show: Callable[[str, int, int | None], None] = lambda what, done, total: None
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class LoraResult:
    steps: int
    planned: int
    before: float | None  # loss of the held-out chats; None: there were too few chats to hold any out
    after: float | None
    interrupted: bool


def train(task: LoraTask) -> LoraResult:
    if importlib.util.find_spec("peft") is None:
        raise OutriderError(INSTALL)
    if not task.resume:
        _refuse_other(task.out)
    run = _LoraRun(task)
    if not task.resume:  # from now on there is a run that can be resumed
        job = {**asdict(task.job), "chats": str(task.job.chats.resolve())}
        write_text(task.out / _FOLDER / _JOB, json.dumps(job, indent=1) + "\n")
    return run.go()


def stored(out: Path) -> dict[str, Any]:
    """The job of the run that lies there."""
    path = out / _FOLDER / _JOB
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OutriderError(f"there is no run to go on with in {out}; begin it without --resume") from None
    except (OSError, ValueError) as error:
        raise OutriderError(f"{path} cannot be read ({one_line(error)}); begin the run anew") from error
    return {**found, "chats": Path(found["chats"])}


def _refuse_other(out: Path) -> None:
    """A run that is there is not written over."""
    if (out / _FOLDER / _JOB).exists() or (out / WEIGHTS).exists():
        raise OutriderError(f"{out} already holds an adapter; go on with --resume, or choose another --out")


class _LoraRun:
    def __init__(self, task: LoraTask) -> None:
        self._task, self._job = task, task.job
        read = chats.read(task.job.chats)
        task.show(f"loading {task.job.model}", 0, None)
        folder = as_folder(sources.resolve(task.job.model))
        self._learned, self._held = self._examples(folder, read)
        self._model = self._adapted(folder)
        self._weights = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        self._optimiser = torch.optim.AdamW(self._weights.values(), self._job.rate, weight_decay=0.0)
        self._planned = max(1, math.ceil(len(self._learned) * self._job.epochs / self._job.batch))
        self._step = 0
        self._before: float | None = None

    def go(self) -> LoraResult:
        task = self._task
        if task.resume:
            self._restore()
        if not self._step:
            self._before = self._held_loss()
            self._say("before", self._before)
        saved = shown = time.monotonic()
        losses: list[float] = []
        for batch in self._batches():
            if task.stop.is_set():
                break
            losses.append(self._learn(batch))
            now = time.monotonic()
            task.show("learning", self._step, self._planned)
            if now - shown >= SHOW_SECONDS:
                task.note(f"step {self._step} of {self._planned}: loss {sum(losses) / len(losses):.3f}")
                losses, shown = [], now
            if now - saved >= SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
        interrupted = self._step < self._planned
        after = None if interrupted else self._held_loss()
        self._save()
        self._write()
        self._say("after", after)
        return LoraResult(self._step, self._planned, self._before, after, interrupted)

    def _say(self, when: str, loss: float | None) -> None:
        if loss is not None:
            self._task.note(f"loss of {len(self._held)} held-out chats {when}: {loss:.3f}")

    def _examples(self, folder: Path, read: Sequence[chats.Chat]) -> tuple[list[Example], list[Example]]:
        tokenizer = tokenizers.from_folder(folder)
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise OutriderError(f"{self._job.model} has no chat template; train on a model that can chat")
        found = [chats.example(chat, tokenizer, self._job.longest) for chat in read]
        kept = [each for each in found if each is not None]
        if len(kept) < len(found):
            self._task.note(f"{len(found) - len(kept)} of {len(found)} chats have more than {self._job.longest} tokens")
        if not kept:
            raise OutriderError(f"no chat fits into {self._job.longest} tokens; raise --longest")
        held = kept[::HELD][:MOST_HELD] if len(kept) >= HELD else []
        return [each for each in kept if not any(each is other for other in held)], held

    def _adapted(self, folder: Path) -> Any:
        import peft
        from transformers import AutoModelForCausalLM

        torch.manual_seed(self._job.seed)
        dtype = torch.float32 if self._task.device.type == "cpu" else torch.bfloat16
        try:
            base = AutoModelForCausalLM.from_pretrained(
                folder.resolve(), dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
            ).to(self._task.device)
            there = {name.rpartition(".")[2] for name, _ in base.named_modules()}
            config = peft.LoraConfig(
                r=self._job.rank,
                lora_alpha=self._job.alpha,
                target_modules=[name for name in TARGETS if name in there],
                task_type="CAUSAL_LM",
            )
            model = peft.get_peft_model(base, config)
        except Exception as error:  # whatever transformers or PEFT raise for a model that they cannot run
            raise OutriderError(f"{self._job.model} cannot be trained: {one_line(error)}") from error
        model.peft_config["default"].base_model_name_or_path = self._job.model
        return model

    def _batches(self) -> Iterator[list[Example]]:
        """From the present step on: every epoch in an order of its own, which the seed decides."""
        size, count = self._job.batch, len(self._learned)
        orders: dict[int, list[int]] = {}
        while self._step < self._planned:
            places = range(self._step * size, (self._step + 1) * size)
            for epoch in {place // count for place in places} - orders.keys():
                orders[epoch] = list(range(count))
                random.Random(f"{self._job.seed} {epoch}").shuffle(orders[epoch])
            yield [self._learned[orders[place // count][place % count]] for place in places]

    def _learn(self, batch: Sequence[Example]) -> float:
        self._model.train()
        for group in self._optimiser.param_groups:
            group["lr"] = self._job.rate * _share_of_rate(self._step, self._planned)
        loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights.values(), 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()
        self._step += 1
        value = float(loss.detach())
        if not math.isfinite(value):
            raise OutriderError(f"the loss of step {self._step} is {value}; begin anew with a smaller --rate")
        return value

    def _loss(self, batch: Sequence[Example]) -> Tensor:
        """Cross entropy of the tokens that the assistant wrote, over all of them alike."""
        longest = max(len(each.tokens) for each in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, each in enumerate(batch):
            some = slice(0, len(each.tokens))
            ids[row, some], mask[row, some] = torch.tensor(each.tokens), 1
            labels[row, some] = torch.where(torch.tensor(each.learned), ids[row, some], -100)
        ids, mask, labels = (tensor.to(self._task.device) for tensor in (ids, mask, labels))
        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    @torch.no_grad()
    def _held_loss(self) -> float | None:
        if not self._held:
            return None
        self._model.eval()
        total = count = 0.0
        for begin in range(0, len(self._held), self._job.batch):
            some = self._held[begin : begin + self._job.batch]
            learned = sum(sum(each.learned) for each in some)
            total, count = total + learned * float(self._loss(some)), count + learned
        return total / count

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            tensors[f"weight.{name}"] = weight.detach()
            for key, value in self._optimiser.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value
        about = {"step": str(self._step), "before": json.dumps(self._before)}
        write_tensors(self._task.out / _FOLDER / _CHECKPOINT, tensors, about)

    def _restore(self) -> None:
        from safetensors import SafetensorError, safe_open

        path = self._task.out / _FOLDER / _CHECKPOINT
        if not path.exists():
            return
        try:
            with safe_open(str(path), framework="pt") as file, torch.no_grad():
                about = file.metadata()
                for name, weight in self._weights.items():
                    weight.copy_(file.get_tensor(f"weight.{name}"))
                    if int(about["step"]):
                        keys = ("step", "exp_avg", "exp_avg_sq")
                        self._optimiser.state[weight] = {key: file.get_tensor(f"{key}.{name}") for key in keys}
                self._step, self._before = int(about["step"]), json.loads(about["before"])
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise OutriderError(f"the checkpoint {path} is broken ({one_line(error)}); begin the run anew") from error

    def _write(self) -> None:
        """The adapter as PEFT saves it; each file as a whole."""
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT asks a hub about the base, which may be out of reach
            self._model.save_pretrained(scratch, save_embedding_layers=False)
            for name in (WEIGHTS, CONFIG):
                write_bytes(self._task.out / name, (Path(scratch) / name).read_bytes())


def _share_of_rate(step: int, planned: int) -> float:
    """Up in a line, then down along a cosine."""
    warm = max(1, int(WARM * planned))
    if step < warm:
        return (step + 1) / warm
    rest = (step - warm) / max(1, planned - warm)
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * rest))
