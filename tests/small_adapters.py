"""Small LoRA adapters in PEFT's folders, made without PEFT."""

import json

import safetensors.torch
import torch

MATRICES = ("self_attn.q_proj", "mlp.down_proj")


def write_adapter(folder, model, seed, rank=2, scale=0.6):
    """A PEFT folder with random values for two matrices of each layer, large enough to change the text."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in model.adapter_base.shapes.items():
        if name.endswith(MATRICES):
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * scale
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * scale
    folder.mkdir(parents=True)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
