"""The compiled kernels: built once per machine with its own C++ compiler, kept in the cache, loaded with ctypes.

Nothing of torch's headers is needed, so a build takes seconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.core.errors import OutriderError, one_line
from outrider.models.sources import cache_dir

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADER = SOURCE.with_name("pool.h")
FLAGS = (
    *("-O3", "-ffp-contract=off", "-std=c++17", "-fPIC", "-pthread", "-Wall", "-Wextra"),
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),  # of the AVX-512 headers of GCC 12 (its bug 105593)
    "-fno-gcse",  # the same speed, and GCC takes half as long
)
MACHINES = (("-march=native",), ())  # the first that compiles and loads is taken: a compiler may know no "native"
PATIENCE = 300  # seconds for one run of the compiler: many times what it takes, for a machine that is busy


class NoCompiler(Exception):
    """Why the kernels cannot be had on this machine, in one line."""


@functools.cache
def library() -> ctypes.CDLL:
    key = _key()
    try:
        folder = cache_dir() / "kernels"
    except OutriderError:  # no folder of this user's: others could write to a shared one, and its code is run
        with tempfile.TemporaryDirectory() as name:
            return _made(Path(name), key)
    return _kept(folder, key) or _made(folder, key)


def identity() -> str:
    """Kernels of the same one compute the same bits: their source, flags, compiler and processor."""
    return _key()


def build(source: Path, path: Path, flags: Sequence[str]) -> None:
    """Compile and link one file into a library; a NoCompiler says why not."""
    compiler, out = _compiler(), f"{path}.o"
    for command in ([*FLAGS, *flags, "-c", str(source), "-o", out], ["-shared", "-pthread", out, "-o", str(path)]):
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


def _compiler() -> list[str]:
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


def _key() -> str:
    """Changes with the source, the flags, the compiler that was named, and the processor."""
    processor = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    flags = " ".join([*FLAGS, *(flag for machine in MACHINES for flag in machine)])
    parts = (SOURCE.read_text(), HEADER.read_text(), flags, os.environ.get("CXX", ""), platform.machine(), processor)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _kept(folder: Path, key: str) -> ctypes.CDLL | None:
    """An earlier build. Its name ends in a digest of the file: to load half a library can kill the process."""
    try:
        for path in folder.glob(f"{key}-*.so"):
            if path.stem == f"{key}-{_digest(path)}":
                return ctypes.CDLL(str(path))
            path.unlink(missing_ok=True)
    except OSError:  # unreadable, or not for this machine: build another
        pass
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _made(folder: Path, key: str) -> ctypes.CDLL:
    """A new build, kept in the folder, or for this process alone where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder)
    except OSError:
        scratch = tempfile.TemporaryDirectory()
    with scratch as name:  # what is loaded stays loaded when its file is gone
        path = Path(name) / f"{key}.so"
        kernels = _first_that_loads(path)
        if path.parent.parent == folder:
            path.replace(folder / f"{key}-{_digest(path)}.so")  # atomic: another process may be building the same
    return kernels


def _first_that_loads(path: Path) -> ctypes.CDLL:
    for flags in MACHINES:
        try:
            build(SOURCE, path, flags)
            return ctypes.CDLL(str(path))
        except OSError as error:
            problem = NoCompiler(f"the kernels were built but cannot be loaded ({one_line(error)})")
        except NoCompiler as error:
            problem = error
    raise problem
