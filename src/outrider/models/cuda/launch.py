"""How the kernels of a pass follow each other: each is set up while the one before it ends."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_after(SOON: tl.constexpr):
    """Wait until the kernel before has written all that it writes."""
    if SOON:
        gdc_wait()


@triton.jit
def nearly_done(SOON: tl.constexpr):
    """Let the next kernel be set up."""
    if SOON:
        gdc_launch_dependents()


@triton.jit
def nothing_to_do(SOON: tl.constexpr):
    """Of a program that ends at once. The first one waits all the same: the next kernel waits for this one alone, so a
    launch in which nobody waits would let it run beside the kernel before, whose memory may be given away by then."""
    if SOON:  # noqa: SIM102, one is known to the compiler, the other to the program
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
            gdc_wait()


@triton.jit
def fetch(place_ptr):
    """What lies there, lines of 128 bytes, on its way to the cache that all processors share. Not interpreted."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place_ptr], tl.int32, False, 1)


@functools.cache
def early(device: torch.device) -> bool:
    """Whether a kernel may be set up while the one before ends, and tiles be copied by an engine: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
