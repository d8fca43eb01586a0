"""What the numbers depend on: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_CPUS = Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Cores that this process may use; two threads of one core count once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in usable:
        try:
            siblings.add((_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return len(usable)
    return len(siblings)


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": physical_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "outrider": _version(),
        "commit": _commit(),
    }


def gpu(device: str) -> str | None:
    """The name of the GPU that a model on this device runs on; None: it runs on the CPU."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(None if device == "auto" else device)


def _version() -> str | None:
    """None where it runs out of a folder and is not installed."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    name = next((value.strip() for key, value in fields.items() if key.strip() == "model name"), platform.processor())
    flags = next((value.split() for key, value in fields.items() if key.strip() == "flags"), [])
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile") if flag in flags]
    return f"{name} ({', '.join(known)})" if known else name


def _commit() -> str | None:
    """The commit of the checkout this file lies in, marked when files were changed since; None outside of one."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
