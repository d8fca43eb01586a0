"""Packed weights for tests: random blocks as files hold them, and tiny models that run in the kernels."""

import functools
import tempfile

import gguf
import numpy as np
import tiny
import torch

from outrider.drafters.base import BuildContext
from outrider.models import quant
from outrider.models.gguf import GGUFTensor
from outrider.models.load import LoadOptions, load
from outrider.models.native.stack import NativeStack

VOCAB = 48  # tiny sizes that can be packed: outputs are multiples of 16, inputs of 32
SIZES = dict(vocab_size=VOCAB, intermediate_size=64)
HALVES = {"Q6_K": slice(208, 210), **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), slice(0, 2))}  # else two: slice(0, 4)


def per_block(kind):
    """Weights in a block of the file, and its bytes."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def blocks(kind, outputs, inputs, seed=0, halves=None):
    """A matrix of random blocks: any bytes, but finite scales, out of `halves` or else small and of both signs."""
    random = np.random.default_rng([seed, outputs, inputs])
    weights, size = per_block(kind)
    raw = random.integers(0, 256, (outputs, inputs // weights, size), dtype=np.uint8)
    place = HALVES.get(kind, slice(0, 4))
    shape = (*raw.shape[:2], (place.stop - place.start) // 2)
    scales = random.normal(0, 0.01, shape) if halves is None else random.choice(halves, shape)
    raw[..., place] = scales.astype(np.float16).view(np.uint8)
    return GGUFTensor(kind, (outputs, inputs), raw.reshape(outputs, -1))


def saved(model, where):
    """The transformers model, saved into a folder and loaded from there."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load(folder, where)


def packed(model, bits, **rounded):
    """The transformers model as the kernels run it. `rounded`: bits of keys and values, and of activations."""
    loaded = saved(model, LoadOptions(tiny.CPU.device, None, tiny.MEMORY, bits, **rounded))
    assert isinstance(loaded.model.weights.stack, NativeStack), loaded.notes
    return loaded.model


def rounded(model, bits):
    """The transformers model with the weights that packing rounds it to, as torch runs it in float32."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(quant.quantise(weight, bits).dense())
    return tiny.ours(model)


def reference(kind, seed=0, **changes):
    return tiny.reference(kind, seed, **SIZES | changes)


@functools.cache
def family(kind, bits, kv_bits=32, activations=16):
    """A packed target, and draft models for it by name, packed and dense."""
    target, rounded = reference(kind, seed=3), dict(kv_bits=kv_bits, activations=activations)
    models = {
        "itself": packed(target, bits, **rounded),
        "noisy": packed(tiny.noisy(target), bits),
        "stranger": tiny.ours(reference("llama", seed=14, num_hidden_layers=1)),
        "longer": packed(tiny.resized(tiny.noisy(target), VOCAB + 16), bits),
        "shorter": tiny.ours(tiny.resized(tiny.noisy(target), VOCAB - 8)),
    }
    return packed(target, bits, **rounded), models


@functools.cache
def family_heads(*kind):
    model, _ = family(*kind)
    return {name: tiny.taught(head, model) for name, head in tiny.new_heads(model)}


def parts(*kind):
    model, models = family(*kind)
    texts = tiny.histories(tiny.written(model))
    return BuildContext(model, lambda name, quantize: models[name], heads=family_heads(*kind), histories=texts)
