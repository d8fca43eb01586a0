"""The wheel's build: the kernels for every level whose compiler is here, so that a user needs none.

A level that cannot be built is left out, with a line that says why: then the library is built on first use, as in a
checkout. OUTRIDER_PREBUILT names the levels that must be there, with commas between them; "none" leaves out all.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "src/outrider/models/native"
CROSS = {"aarch64": "aarch64-linux-gnu-g++", "x86_64": "x86_64-linux-gnu-g++"}  # Debian's names
LINK = ("-static-libstdc++", "-static-libgcc", "-s")  # for systems with another C++ library; no symbols


class KernelsHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("OUTRIDER_PREBUILT", "")
        if version == "editable" or wanted == "none" or platform.system() != "Linux":
            return
        compiler, levels = _load("compiler"), _load("levels")
        chosen = [levels.by_name()[name] for name in wanted.split(",")] if wanted else levels.LEVELS
        self._folder = tempfile.mkdtemp(prefix="outrider-kernels-")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = list(pool.map(lambda level: self._made(compiler, level), chosen))
        problems = [problem for _, problem in made if problem]
        if wanted and problems:
            raise SystemExit("; ".join(problems))
        for problem in problems:
            self.app.display_warning(problem)
        for path, problem in made:
            if not problem:
                build_data["force_include"][str(path)] = f"outrider/models/native/prebuilt/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _made(self, compiler: ModuleType, level: Any) -> tuple[Path, str]:
        """A library, or why there is none."""
        path = Path(self._folder) / f"{level.name}-{compiler.source_key()}.so"
        try:
            compiler.build(compiler.SOURCE, path, level.flags, _compiler(compiler, level.machine), LINK)
        except compiler.NoCompiler as error:
            return path, f"the wheel has no kernels for {level.name}: {error}"
        return path, ""


def _compiler(compiler: ModuleType, machine: str) -> list[str]:
    if machine == platform.machine():
        return compiler.own_compiler()
    if shutil.which(CROSS[machine]) is None:
        raise compiler.NoCompiler(f"no compiler for {machine} was found ({CROSS[machine]})")
    return [CROSS[machine]]


def _load(name: str) -> ModuleType:
    """A file of the package by its path: importing the package would take what it depends on."""
    spec = importlib.util.spec_from_file_location(f"outrider_{name}", NATIVE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
