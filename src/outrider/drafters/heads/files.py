"""Heads in files. Written in the form that vLLM loads (its `speculators` form); read in that and the older public ones.

Read: `speculators` EAGLE-3 and DSpark, EAGLE-3 and EAGLE-1/2 as their authors save them, Medusa v1/v2. Pickles only if
allowed. Block heads that go beyond DSpark are written in a form of our own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import OutriderError, one_line
from outrider.drafters.block.head import BlockHead
from outrider.drafters.heads.formats import (
    Head,
    Tensors,
    block,
    block_config,
    block_tensors,
    eagle,
    eagle_config,
    medusa,
    medusa_config,
    same,
)
from outrider.drafters.heads.kinds import BLOCK, EAGLE, MEDUSA, OWN_BLOCK, PUBLIC_BLOCK, SHIPPED, kind_of
from outrider.drafters.medusa.head import MedusaHead
from outrider.models.base import Readable

_SAMPLE = (8, 16)  # tokens and numbers of the target's embedding that a file remembers it by
_ALIKE = 0.9  # what their cosine must be; the same weights in 4 bits have 0.99


def other_kind(head: Head, name: str) -> OutriderError:
    """`name` holds this head, which is not of the kind that was asked for."""
    kinds = ((MEDUSA, MedusaHead, "a Medusa head"), (BLOCK, BlockHead, "a block head"))
    kind, said = next(((kind, said) for kind, made, said in kinds if isinstance(head, made)), (EAGLE, "an EAGLE head"))
    return OutriderError(f"{name} holds {said}; write {kind}:head={name}")


def find(kind: str, name: str, target: Readable, target_name: str, allow_pickle: bool = False) -> Head:
    """The head in the folder `name`; else the head that lies beside the target, or that is shipped for it."""
    if name:
        if not os.path.isdir(name):  # also False where the name is too long for a path
            raise OutriderError(f"there is no folder {name} with a head for {kind}")
        return read(name, target, allow_pickle)
    near = beside(kind, target_name)
    if near is not None:
        return read(near, target)
    named = shipped(kind, target_name)
    if named is not None:
        return read(named, target)
    for folder in sorted(SHIPPED.glob(f"*/{kind}")):  # the same model under another name
        with contextlib.suppress(OutriderError):
            return read(folder, target)
    raise OutriderError(
        f"no head for {kind} is shipped for {target_name or 'this target'}; "
        f"train one (outrider train {kind} --model {target_name or 'M'} --out DIR) and write {kind}:head=DIR"
    )


def beside(kind: str, target_name: str) -> Path | None:
    """The folder of a head of that kind next to the target's file or folder: NAME.outrider-head, with a head in it or
    with one in a folder for each kind; or a folder of that kind in `heads`."""
    path = Path(target_name)
    if not target_name or not os.path.exists(path):
        return None
    own = path if path.is_dir() else path.parent
    named = [path.with_name(f"{name}.outrider-head") for name in dict.fromkeys((path.name, path.stem))]
    for folder in [*named, *(each / kind for each in named), own / "heads" / kind]:
        if _holds(folder, kind):
            return folder
    return None


def kind_in(folder: str, head: object = None) -> str:
    """BLOCK or EAGLE, as far as the folder says; of a head in memory its own kind."""
    if head is not None:
        return BLOCK if isinstance(head, BlockHead) else EAGLE
    return BLOCK if os.path.isdir(folder) and _holds(Path(folder), BLOCK) else EAGLE


def _holds(folder: Path, kind: str) -> bool:
    """Whether it says that it has a head of that kind; what is wrong with it is said when it is read."""
    if not (folder / "config.json").is_file():
        return False
    try:
        return kind_of(_config(folder)) == kind
    except OutriderError:
        return True


def shipped(kind: str, target_name: str) -> Path | None:
    """The folder of the head that is shipped for a target of that name."""
    folder = SHIPPED / Path(target_name).name / kind
    return folder if target_name and os.path.isdir(folder) else None  # False where the name is too long


def read(folder: str | Path, target: Readable, allow_pickle: bool = False) -> Head:
    """The head in a folder, checked against the target; an OutriderError names what does not fit."""
    folder = Path(folder)
    fields, tensors = _config(folder), _tensors(folder, allow_pickle)
    kind = _kind(folder, fields, tensors)
    _check_target(folder, fields, target)
    try:
        with torch.no_grad():
            head = _READERS[kind](folder, fields, tensors, target)
    except OutriderError:
        raise
    except Exception as error:  # any error that Python or torch raises for values of an unexpected type or shape
        raise OutriderError(f"the head in {folder} cannot be built from its files: {one_line(error)}") from error
    return head.eval().requires_grad_(False)


def write(
    head: Head,
    folder: str | Path,
    target: Readable,
    name: str = "",
    whole: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """The head as vLLM loads it. `name`: the target's. Without `whole` the rows of the target's output matrix are left
    out: smaller, and still ours to read, but vLLM needs them where the draft vocabulary is cut."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = _fields(head, name, target)
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    sizes = {"num_layers": target.num_layers, "vocab_size": target.vocab_size}
    fields["outrider"] = {**sizes, "embedding": _sample(target)}
    weights = block_tensors(head, target) if isinstance(head, BlockHead) else head.state_dict()
    tensors = {key: value.detach().to("cpu", dtype).contiguous() for key, value in weights.items()}
    tensors |= _vocabulary(head, target, whole and _loads_elsewhere(head), dtype)
    _save(folder, fields, tensors)


def _fields(head: Head, name: str, target: Readable) -> dict[str, Any]:
    if isinstance(head, BlockHead):
        return block_config(head, name, target)
    return medusa_config(head) if isinstance(head, MedusaHead) else eagle_config(head, name, target)


def _loads_elsewhere(head: Head) -> bool:
    """A block head of our own form is read by Outrider alone, so it needs none of the target's rows."""
    return not isinstance(head, BlockHead) or not head.config.starts


def _save(folder: Path, fields: Mapping[str, Any], tensors: Tensors) -> None:
    """Each file under another name first: what stood there before survives a full disk."""
    from safetensors.torch import save_file

    weights, config = folder / "model.safetensors.part", folder / "config.json.part"
    try:
        save_file(tensors, weights, {"format": "pt"})
        weights.chmod(0o644)  # it is made for its owner alone
        config.write_text(json.dumps(fields, indent=2) + "\n")
    except Exception as error:
        weights.unlink(missing_ok=True)
        config.unlink(missing_ok=True)
        raise OutriderError(f"the head cannot be written to {folder}: {error}") from error
    for path in (weights, config):
        os.replace(path, path.with_suffix(""))


def _vocabulary(head: Head, target: Readable, whole: bool, dtype: torch.dtype) -> Tensors:
    """Which tokens the head can write, and its output matrix where vLLM needs one."""
    config, ids = head.config, head.draft_ids.cpu()
    cut = config.draft_vocab_size < config.vocab_size
    medusa = isinstance(head, MedusaHead)
    out: Tensors = {}
    if cut and medusa:
        out["token_map"] = ids
    elif cut:
        out["d2t"] = ids - torch.arange(len(ids))
        out["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if whole and not config.own_output and (cut or medusa):
        rows = target.output_rows(head.draft_ids.to(target.device))
        out["lm_heads.0.weight" if medusa else "lm_head.weight"] = rows.to("cpu", dtype).contiguous()
    return out


def _sample(target: Readable) -> list[list[float]]:
    """Some of the target's embedding: by it a head knows the model that it was made for."""
    tokens, numbers = _SAMPLE
    ids = torch.arange(tokens, device=target.device) * (target.vocab_size - 1) // (tokens - 1)
    return [[round(x, 5) for x in row] for row in target.embed(ids)[:, :numbers].float().tolist()]


# Reading.

_READERS: dict[str, Callable[[Path, Mapping[str, Any], Tensors, Readable], Head]] = {
    EAGLE: eagle,
    BLOCK: block,
    MEDUSA: medusa,
}


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise OutriderError(f"{folder} has no config.json, so it is not the folder of a head")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise OutriderError(f"{path} is not valid JSON ({error}); get it again") from error
    if not isinstance(fields, dict):
        raise OutriderError(f"{path} is not a JSON object; get it again")
    return fields


def _tensors(folder: Path, allow_pickle: bool) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    out: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            out |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise OutriderError(f"{path} cannot be read ({error}); get it again") from error
    return out or _unpickled(folder, allow_pickle)


def _unpickled(folder: Path, allowed: bool) -> Tensors:
    paths = sorted([*folder.glob("*.pt"), *folder.glob("*.bin"), *folder.glob("*.pth")])
    if not paths:
        raise OutriderError(f"{folder} has no .safetensors weights, so it is not the folder of a head")
    if not allowed:
        raise OutriderError(
            f"{paths[0]} is a pickle, which can run code when it is opened; convert it to safetensors, or allow it "
            "(allow_pickle) if you trust where it comes from"
        )
    out: Tensors = {}
    for path in paths:
        try:
            out |= torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # any error that torch raises for a broken pickle
            raise OutriderError(f"{path} cannot be read: {one_line(error)}") from error
    return out


def _kind(folder: Path, fields: Mapping[str, Any], tensors: Tensors) -> str:
    kind = fields.get("speculators_model_type")
    if kind not in (None, "eagle3", PUBLIC_BLOCK, OWN_BLOCK):
        raise OutriderError(f"{folder} is a speculators head of type {kind!r}; Outrider runs eagle3 and dspark")
    if kind_of(fields) == BLOCK:
        return BLOCK
    if kind is None and kind_of(fields) == MEDUSA:
        return MEDUSA
    if any(name.removeprefix("model.") == "fc.weight" for name in tensors):
        return EAGLE
    raise OutriderError(f"{folder} holds no head that Outrider knows: EAGLE, EAGLE-3, Medusa or speculators eagle3")


def _check_target(folder: Path, fields: Mapping[str, Any], target: Readable) -> None:
    """What a file of our own says of the model that it was made for."""
    made_for = fields.get("outrider")
    if not isinstance(made_for, dict):
        return
    same(folder, "layers of its target", made_for.get("num_layers"), target.num_layers)
    same(folder, "tokens", made_for.get("vocab_size"), target.vocab_size)
    try:
        theirs = torch.tensor(made_for.get("embedding"), dtype=torch.float32).flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise OutriderError(
            f"outrider.embedding in {folder / 'config.json'} is not rows of numbers; get the head again"
        ) from None
    ours = torch.tensor(_sample(target)).flatten()
    alike = float(torch.cosine_similarity(theirs, ours, 0)) if theirs.shape == ours.shape else 0.0
    if alike < _ALIKE:
        raise OutriderError(
            f"the head in {folder} was made for another model: its target's embedding and this one's have a cosine of "
            f"{alike:.2f}, not above {_ALIKE}; use a head that was trained for this target"
        )
