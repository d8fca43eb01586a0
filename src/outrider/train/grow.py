"""A trained EAGLE head with more inside: it begins as good as it was, for all that is new adds nothing at first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.drafters.eagle.head import EagleHead

NEW_WEIGHTS = 0.02  # standard deviation of new rows that read a state, as models of this kind begin with


def grown(head: EagleHead, inner: int, reads: Seq[int], blocks: int) -> EagleHead:
    """With an MLP of the width `inner` and reading the blocks `reads` of the target's `blocks`; 0 and (): as it is."""
    config = head.config
    inner, reads = inner or config.inner_size, tuple(sorted(set(reads))) or config.layers
    if inner < config.inner_size:
        raise OutriderError(f"--inner {inner} is less than the {config.inner_size} of the head that --begin names")
    missing = [block for block in config.layers if block not in reads]
    if missing or (config.first and reads):
        raise OutriderError(f"--reads must name all blocks that the head of --begin reads: {config.layers}")
    if config.norm_joined and reads != config.layers:  # another root mean square: it would not begin as good as it was
        raise OutriderError("--reads cannot add to a head that norms all its states together (norm_before_fc)")
    if not all(0 <= block < blocks for block in reads):
        raise OutriderError(f"a head cannot read blocks {reads}: the target has {blocks} blocks")
    ids = None if head.writes_all else head.draft_ids
    larger = EagleHead(replace(config, inner_size=inner, layers=reads), ids)
    before = dict(head.named_parameters())
    with torch.no_grad():
        for name, weight in larger.named_parameters():
            _fill(weight, name, before, config.layers, reads)
    return larger


def _fill(weight: Tensor, name: str, before: Mapping[str, Tensor], old: Seq[int], new: Seq[int]) -> None:
    if name.startswith("fc_norm."):
        block = new[int(name.split(".")[1])]
        if block in old:
            weight.copy_(before[f"fc_norm.{old.index(block)}.weight"])
    elif name == "fc.weight" and old:
        size = weight.shape[0]
        weight.zero_()
        for place, block in enumerate(old):
            at = new.index(block)
            weight[:, at * size : (at + 1) * size] = before[name][:, place * size : (place + 1) * size]
    elif name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
        weight.normal_(std=NEW_WEIGHTS)
        weight[: len(before[name])] = before[name]
    elif name.endswith("mlp.down_proj.weight"):
        weight.zero_()
        weight[:, : before[name].shape[1]] = before[name]
    else:
        weight.copy_(before[name])
