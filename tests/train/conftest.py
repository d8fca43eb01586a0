"""A tiny target that a head can learn: its layers say little, so the next token hangs mostly on the last one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def calm_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("models") / "calm")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".layers." in name and weight.dim() == 2:
                weight.mul_(0.25)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("red", "blue", "green", "fox", "sea", "star", "river", "count")
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"the {a} and the {b}\n" for a in words[:5] for b in words[:8]))
    return path
