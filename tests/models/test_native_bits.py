"""Every instruction set computes the same bits: the kernels are built for each into a program, and what these print is
compared. ARM's run in qemu where this machine is another; AMX's instructions in amx_traps.cpp where it has none."""

import functools
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.models.native import levels
from outrider.models.native.compiler import FLAGS, SOURCE

pytestmark = pytest.mark.native

PROGRAM = Path(__file__).with_name("native_bits.cpp")
AMX_TRAPS = Path(__file__).with_name("amx_traps.cpp")
AMX = {"amx_tile", "amx_bf16"}
CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
AVX512 = levels.by_name()["x86-64-v4-vnni"].needs
# Beside the levels of the wheel: what a compiler makes for this very machine, and registers of 256 bits with the dot
# products that AVX-VNNI has under another code.
MORE = {
    "native": (platform.machine(), ("-march=native",), frozenset()),
    "256 bits with dot products": ("x86_64", ("-march=x86-64-v4", "-mavx512vnni", "-DNARROW=1"), AVX512),
}
BUILDS = {level.name: (level.machine, level.flags, level.needs) for level in levels.LEVELS} | MORE


def compiler(machine):
    """The compiler for a machine, and what runs its programs here."""
    if machine == platform.machine():
        return ["g++"], []
    if machine != "aarch64":
        pytest.skip(f"no programs for {machine} run here")
    for tool, package in ((CROSS, "g++-aarch64-linux-gnu"), (QEMU, "qemu-user")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt-get install {package})")
    return [CROSS, "-static"], [QEMU, "-cpu", "max"]


@functools.cache
def printed(name, folder):
    """What the program says, built for one instruction set; all of them with one seed."""
    machine, flags, needs = BUILDS[name]
    command, runner = compiler(machine)
    missing = set() if runner else needs - levels.processor()[1]
    traps = [str(AMX_TRAPS)] if missing and missing <= AMX else []
    if missing and not traps:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    path = folder / name.replace(" ", "-")
    fast = [flag for flag in FLAGS if flag not in ("-O3", "-Wall", "-Wextra")]
    subprocess.run(
        [*command, *fast, *flags, "-O1", f'-DKERNELS="{SOURCE}"', "-w", str(PROGRAM), *traps, "-o", str(path)],
        check=True,
    )
    return subprocess.run([*runner, str(path)], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bits")


@pytest.mark.parametrize("name", [name for name in BUILDS if name != "native"])
def test_the_same_bits_as_here(name, folder):
    here = printed("native", folder)
    assert len(here) == len(set(here)) == 368
    assert printed(name, folder) == here
