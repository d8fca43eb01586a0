"""The instruction sets that the kernels are built for ahead of time, and which of them this processor has.

All of them compute the same bits. Nothing of outrider is imported here: the wheel's build reads this file too.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}


@dataclass(frozen=True)
class Level:
    """Flags of the compiler, and what a processor must have to run what comes out."""

    name: str
    machine: str  # as platform.machine() says it
    flags: tuple[str, ...]
    needs: frozenset[str]  # words of the processor's flags, as Linux names them
    vendor: str = ""  # the only vendor whose processors it is for; "": any


# The best one that fits is the first. Pairs (see kernels.cpp) are faster on AMD's processors and slower on Intel's.
LEVELS = (
    Level(
        "x86-64-v4-vnni-amd",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-DPAIRED=1"),
        _AVX512 | {"avx512_vnni"},
        "AuthenticAMD",
    ),
    Level(
        "x86-64-v4-amx",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
        _AVX512 | {"avx512_vnni", "amx_tile", "amx_bf16"},
    ),
    Level("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _AVX512),
    Level("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Level("x86-64", "x86_64", ("-march=x86-64",), frozenset()),
    Level("armv8.2-i8mm", "aarch64", ("-march=armv8.2-a+dotprod+i8mm",), frozenset({"asimddp", "i8mm"})),
    Level("armv8.2-dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),
    Level("armv8", "aarch64", ("-march=armv8-a",), frozenset()),
)


def by_name() -> dict[str, Level]:
    return {level.name: level for level in LEVELS}


def fitting() -> list[Level]:
    """The levels that this processor runs, the best one first; none where it does not tell what it has."""
    machine, (vendor, words) = platform.machine(), processor()
    return [
        level
        for level in LEVELS
        if words and level.machine == machine and level.needs <= words and level.vendor in ("", vendor)
    ]


def runs(level: Level) -> bool:
    """Whether this processor has what it needs, as far as it tells."""
    words = processor()[1]
    return level.machine == platform.machine() and (not words or level.needs <= words)


def processor() -> tuple[str, frozenset[str]]:
    """Its vendor, and the words of its flags, as Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "", frozenset()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return fields.get("vendor_id", ""), frozenset((fields.get("flags") or fields.get("Features") or "").split())
