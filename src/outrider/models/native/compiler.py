"""The kernels' source, and the C++ compiler that makes a library of it.

Nothing of outrider is imported here: the wheel's build reads this file too.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(
    SOURCE.with_name(name)
    for name in (
        *("amx.h", "asked.h", "attention.h", "bytes.h", "grow.h", "half_wide.h", "head.h", "kept.h"),
        *("lanes.h", "low_rank.h", "many.h", "model.h", "neon.h", "own.h", "peak.h", "pool.h", "rounding.h"),
        *("rows.h", "turned.h", "wide.h"),
    )
)
FLAGS = (
    *("-O3", "-ffp-contract=off", "-std=c++17", "-fPIC", "-pthread", "-Wall", "-Wextra"),
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),  # of the AVX-512 headers of GCC 12 (its bug 105593)
    "-fno-gcse",  # the same speed, and GCC takes half as long
    # GCC puts sums off until they are used, and what is to be added into memory: without it products take 1.5 times as
    # long with AVX2, and twice with AVX-512 alone
    "-fno-tree-ter",
)
PATIENCE = 300  # seconds for one run of the compiler: many times what it takes, for a machine that is busy


class NoCompiler(Exception):
    """Why the kernels cannot be had on this machine, in one line."""


def source_key() -> str:
    """Changes with the source and the flags."""
    parts = (*(path.read_text(encoding="utf-8") for path in (SOURCE, *HEADERS)), *FLAGS)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def build(
    source: Path, path: Path, flags: Sequence[str], compiler: Sequence[str] = (), link: Sequence[str] = ()
) -> None:
    """Compile and link one file into a library; a NoCompiler says why not."""
    compiler, out = compiler or own_compiler(), f"{path}.o"
    for command in (
        [*FLAGS, *flags, "-c", str(source), "-o", out],
        ["-shared", "-pthread", *link, out, "-o", str(path)],
    ):
        try:
            done = subprocess.run(
                [*compiler, *command], capture_output=True, text=True, errors="replace", timeout=PATIENCE
            )
        except OSError as error:
            raise NoCompiler(f"the C++ compiler {compiler[0]} cannot be run ({error.strerror})") from error
        except subprocess.TimeoutExpired as error:
            raise NoCompiler(f"the C++ compiler {compiler[0]} did not end within {PATIENCE} s") from error
        if done.returncode:
            raise NoCompiler(f"the C++ compiler {compiler[0]} could not build the kernels ({_reason(done)})")


def own_compiler() -> list[str]:
    """CXX if it is set, with its options; else what is on the path."""
    if named := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(named[0]) is None:
            raise NoCompiler(f"the C++ compiler {named[0]}, named by CXX, was not found")
        return named
    found = next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if found is None:
        raise NoCompiler("no C++ compiler was found (g++ or clang++)")
    return [found]


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The compiler's first complaint."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it gave no reason")
    return first[:200]
