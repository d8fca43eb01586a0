"""The compiled kernels: built once per machine with its own C++ compiler, kept in the cache, loaded with ctypes.

Nothing of torch's headers is needed, so a build takes seconds. OpenMP is left unlinked on purpose: torch has loaded its
own runtime for all to see, and a second one would fight it for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  loads the OpenMP runtime that the library uses

from outrider.models.sources import cache_dir

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared", "-w")


class NoCompiler(Exception):
    """Why the kernels cannot be had on this machine."""


@functools.cache
def library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        raise NoCompiler("no C++ compiler was found (g++ or clang++)")
    path = cache_dir() / "kernels" / f"outrider-{_key(compiler)}.so"
    if not path.exists():
        _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoCompiler(f"the kernels were built but cannot be loaded: {error}") from error


def _key(compiler: str) -> str:
    """Changes with the source, the flags, the compiler and the processor."""
    processor = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    said = (SOURCE.read_text(), *FLAGS, compiler, platform.machine(), processor)
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def _build(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        for openmp in (["-fopenmp"], []):  # a compiler without OpenMP still gives a working, single-threaded library
            command = [compiler, *FLAGS, *openmp, "-c", str(SOURCE), "-o", f"{out}.o"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                break
        else:
            raise NoCompiler(f"{compiler} could not build the kernels: {done.stderr.strip()[-300:]}")
        link = [compiler, "-shared", f"{out}.o", "-o", str(out)]
        done = subprocess.run(link, capture_output=True, text=True)
        if done.returncode:
            raise NoCompiler(f"{compiler} could not link the kernels: {done.stderr.strip()[-300:]}")
        out.replace(path)  # atomic: another process may be building the same
