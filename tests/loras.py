"""LoRA adapters for tests: random ones that PEFT makes, runs and saves, and the same ones as Outrider runs them."""

import copy
import functools
import tempfile
import warnings
from pathlib import Path

import peft
import torch

from outrider.models.adapters import files

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ENDS = ["embed_tokens", "lm_head"]
# Three adapters of the ranks, for different matrices and with each way to scale.
THREE = {
    "one": dict(r=1, lora_alpha=2, target_modules=["q_proj", "v_proj"]),
    "eight": dict(r=8, lora_alpha=4, target_modules=[*ALL, *ENDS]),
    "many": dict(
        r=64,
        lora_alpha=8,
        target_modules=["k_proj", "o_proj", "gate_proj", "down_proj"],
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.o_proj": 3},
        alpha_pattern={"gate_proj": 5},
    ),
}


def with_adapters(model, configs, seed=7):
    """A copy of a transformers model with random adapters, by name; PEFT's own."""
    torch.manual_seed(seed)
    names = list(configs)
    made = {name: peft.LoraConfig(init_lora_weights=False, **configs[name]) for name in names}
    wrapped = peft.get_peft_model(copy.deepcopy(model), made[names[0]], names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, made[name])
    with torch.no_grad():
        for weight in (weight for name, weight in wrapped.named_parameters() if "lora_" in name):
            weight.copy_(torch.randn_like(weight) * (0.5 / weight.shape[0] ** 0.5 if weight.dim() == 2 else 1))
    return wrapped.eval()


def save(wrapped, folder):
    """Each adapter in a folder of its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT tells that it saves embeddings beside their adapters
        wrapped.save_pretrained(str(folder))
    return {name: Path(folder) / name for name in wrapped.peft_config}


def ready(own, wrapped):
    """PEFT's adapters as the model of ours runs them."""
    with tempfile.TemporaryDirectory() as folder:
        paths = save(wrapped, folder)
        return {name: own.adapt(files.read(path, own.adapter_base), name) for name, path in paths.items()}


def greedy_by_peft(wrapped, name, tokens, count):
    """What PEFT on transformers writes with this adapter; "": with none."""
    if name:
        wrapped.set_adapter(name)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        if name:
            found = wrapped.generate(input_ids=ids, max_new_tokens=count, do_sample=False)
        else:
            with wrapped.disable_adapter():
                found = wrapped.generate(input_ids=ids, max_new_tokens=count, do_sample=False)
    return found[0, len(tokens) :].tolist()


@functools.cache
def three(family, kind):
    """The three adapters on a family's target: PEFT's, and ours on the model that is tested."""
    target, own, _ = family(kind)
    wrapped = with_adapters(target, THREE)
    return wrapped, ready(own, wrapped)
