"""The compiled kernels, loaded with ctypes: a prebuilt library of the wheel that fits the processor, or one that is
built once per machine with its own C++ compiler and kept in the cache.

Nothing of torch's headers is needed, so a build takes seconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.core.errors import OutriderError, one_line
from outrider.models.native.compiler import SOURCE, NoCompiler, build, source_key
from outrider.models.native.levels import Level, by_name, fitting, runs
from outrider.models.sources import cache_dir

MACHINES = (("-march=native",), ())  # the first that compiles and loads is taken: a compiler may know no "native"
PREBUILT = SOURCE.with_name("prebuilt")  # the wheel's libraries, LEVEL-KEY.so; a checkout has none
NAMED = "OUTRIDER_KERNELS"  # the variable that names a level: for measurements and tests


class Kernels(ctypes.CDLL):
    origin = ""  # where they are from, in words


@functools.cache
def library() -> Kernels:
    if platform.system() == "Windows":
        raise NoCompiler("the kernels do not run on Windows; run outrider in WSL (Windows Subsystem for Linux)")
    named = os.environ.get(NAMED)
    if named and named not in by_name():
        raise OutriderError(f"{NAMED}={named}: no such level; known: {', '.join(by_name())}")
    if named and not runs(by_name()[named]):
        able = ", ".join(name for name, level in by_name().items() if runs(level))
        raise OutriderError(f"{NAMED}={named}: this processor does not have these instructions; it runs {able}")
    levels = [by_name()[named]] if named else fitting()
    for level in levels:
        if kernels := _prebuilt(level):
            kernels.origin = f"prebuilt for {level.name}"
            return kernels
    machines = [level.flags for level in levels] if named else MACHINES
    kernels = _built(machines)
    kernels.origin = f"built here, {named or ' '.join(machines[0])}"
    return kernels


def _prebuilt(level: Level) -> Kernels | None:
    """The wheel's own; its name says from which source, so that a changed source is never run by an old library."""
    path = PREBUILT / f"{level.name}-{source_key()}.so"
    if not path.is_file():
        return None
    try:
        return Kernels(str(path))
    except OSError:  # of another C library
        return None


def _built(machines: Sequence[Sequence[str]]) -> Kernels:
    key = _key(machines)
    try:
        folder = cache_dir() / "kernels"
    except OutriderError:  # no folder of this user's: others could write to a shared one, and its code is run
        with tempfile.TemporaryDirectory() as name:
            return _made(Path(name), key, machines)
    return _kept(folder, key) or _made(folder, key, machines)


def identity() -> str:
    """Where it is the same, kernels and torch compute the same bits: source, flags, and the processor, on which the
    kernels' bits do not depend, but torch's do (of rotations)."""
    return _key(())


def _key(machines: Sequence[Sequence[str]]) -> str:
    """Changes with the source, the flags, the compiler that was named, and the processor."""
    processor = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    flags = " ".join(flag for machine in machines for flag in machine)
    parts = (source_key(), flags, os.environ.get("CXX", ""), platform.machine(), processor)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _kept(folder: Path, key: str) -> Kernels | None:
    """An earlier build. Its name ends in a digest of the file: to load half a library can kill the process."""
    try:
        for path in folder.glob(f"{key}-*.so"):
            if path.stem == f"{key}-{_digest(path)}":
                return Kernels(str(path))
            path.unlink(missing_ok=True)
    except OSError:  # unreadable, or not for this machine: build another
        pass
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _made(folder: Path, key: str, machines: Sequence[Sequence[str]]) -> Kernels:
    """A new build, kept in the folder, or for this process alone where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder)
    except OSError:
        scratch = tempfile.TemporaryDirectory()
    with scratch as name:  # what is loaded stays loaded when its file is gone
        path = Path(name) / f"{key}.so"
        kernels = _first_that_loads(path, machines)
        if path.parent.parent == folder:
            path.replace(folder / f"{key}-{_digest(path)}.so")  # atomic: another process may be building the same
    return kernels


def _first_that_loads(path: Path, machines: Sequence[Sequence[str]]) -> Kernels:
    for flags in machines:
        try:
            build(SOURCE, path, flags)
            return Kernels(str(path))
        except OSError as error:
            problem = NoCompiler(f"the kernels were built but cannot be loaded ({one_line(error)})")
        except NoCompiler as error:
            problem = error
    raise problem
