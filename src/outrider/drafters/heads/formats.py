"""The public file formats of heads: configs as vLLM names things, and heads built from configs and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.drafters.eagle.head import EagleConfig, EagleHead
from outrider.drafters.medusa.head import MedusaConfig, MedusaHead, Paths
from outrider.models.base import Readable

Head = EagleHead | MedusaHead
H = TypeVar("H", EagleHead, MedusaHead)
Tensors = dict[str, Tensor]

# Bounds of what a config may ask for, far above any published head: a module is made for each layer, without memory for
# its weights, before its shapes are compared with the file's.
LARGEST = 1 << 20  # rows of a matrix, tokens, attention heads
LAYERS = 128  # decoder layers of an EAGLE head; heads of Medusa and blocks of each


def eagle_config(head: EagleHead, name: str, target: Readable) -> dict[str, Any]:
    config = head.config
    layer: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.inner_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.depth,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": target.context,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if config.first:
        return {**layer, "bias": config.fc_bias, "draft_vocab_size": config.draft_vocab_size}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_residual,
        "norm_before_fc": config.norm_joined,
        "fc_norm": config.norm_inputs,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],  # counted from the embedding
        "tie_word_embeddings": False,
        "transformer_layer_config": {**layer, "num_aux_hidden_states": len(config.layers)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
        },
    }


def medusa_config(head: MedusaHead) -> dict[str, Any]:
    config = head.config
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.depth,
        "medusa_fc_bias": config.bias,
        "original_lm_head": not config.own_output,
        "medusa_choices": head.tree,
    }


def same(folder: Path, what: str, head: Any, target: int) -> None:
    if head != target:
        raise OutriderError(f"the head in {folder} has {head} {what} and the target {target}; use a head made for it")


def eagle(folder: Path, fields: Mapping[str, Any], tensors: Tensors, target: Readable) -> EagleHead:
    tensors = {_eagle_name(name): value for name, value in tensors.items()}
    layer = fields.get("transformer_layer_config", fields)
    hidden, vocab = _number(folder, layer, "hidden_size"), _number(folder, layer, "vocab_size")
    same(folder, "hidden numbers", hidden, target.anatomy.hidden_size)
    same(folder, "tokens", vocab, target.vocab_size)
    heads, kv_heads, head_dim = _attention_sizes(folder, layer, hidden)
    ids = _draft_ids(folder, tensors, vocab)
    shared = _shared(tensors, target, ids)
    config = EagleConfig(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        inner_size=_number(folder, layer, "intermediate_size"),
        norm_eps=_norm_eps(folder, layer),
        rope_theta=_rope(folder, layer)[0],
        rope_scaling=_rope(folder, layer)[1],
        vocab_size=vocab,
        draft_vocab_size=vocab if ids is None else len(ids),
        layers=_layers(folder, fields, tensors, hidden, target.num_layers),
        depth=_number(folder, layer, "num_hidden_layers", LAYERS),
        context=target.context,
        norm_inputs=bool(fields.get("fc_norm", False)),
        norm_joined=bool(_eagle_option(fields, "norm_before_fc", False)),
        norm_residual=bool(fields.get("norm_before_residual", "speculators_model_type" in fields)),
        norm_output=bool(fields.get("norm_output", False)),
        fc_bias="fc.bias" in tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        own_output="lm_head.weight" in tensors and "lm_head.weight" not in shared,
        own_embedding="embed_tokens.weight" in tensors and "embed_tokens.weight" not in shared,
    )
    ignored = shared | {"d2t", "t2d", "layers.0.input_layernorm.weight"}
    return _filled(folder, lambda: EagleHead(config, ids), tensors, ignored)


def _attention_sizes(folder: Path, layer: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, numbers of each; the kernels rely on how they divide."""
    heads = _number(folder, layer, "num_attention_heads")
    fields = {"num_key_value_heads": heads, "head_dim": hidden // heads, **_given(layer)}
    kv_heads, head_dim = (_number(folder, fields, key) for key in ("num_key_value_heads", "head_dim"))
    if heads % kv_heads or head_dim % 2:
        raise OutriderError(
            f"{folder / 'config.json'} is broken: {heads} heads of {head_dim} numbers cannot share {kv_heads} heads of "
            "keys and values; get the head again"
        )
    return heads, kv_heads, head_dim


def _norm_eps(folder: Path, layer: Mapping[str, Any]) -> float:
    value = layer.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise _wrong(folder, "rms_norm_eps", "a number between 0 and 1")
    return float(value)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is not null, 0 or empty: those stand for the default."""
    return {key: value for key, value in fields.items() if value}


def _eagle_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _eagle_option(fields: Mapping[str, Any], key: str, default: Any) -> Any:
    """Some files keep options in an inner `eagle_config`."""
    inner = fields.get("eagle_config")
    return (inner if isinstance(inner, dict) else {}).get(key, fields.get(key, default))


def _rope(folder: Path, layer: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """theta, and the scaling if there is one."""
    fields = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(fields, dict):
        raise _wrong(folder, "rope_scaling", "an object or null")
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = fields.get("rope_theta") or layer.get("rope_theta") or 10_000.0
    return float(theta), None if kind == "default" else {**fields, "rope_type": kind}


def _layers(folder: Path, fields: Mapping[str, Any], tensors: Tensors, hidden: int, total: int) -> tuple[int, ...]:
    """The target's blocks that the head reads, counted from 0; vLLM counts from the embedding."""
    if "layers.0.hidden_norm.weight" not in tensors:
        return ()
    ids = _eagle_option(fields, "eagle_aux_hidden_state_layer_ids", None) or (2, total // 2, total - 3)
    if not isinstance(ids, list | tuple) or not all(isinstance(id, int) for id in ids):
        raise _wrong(folder, "eagle_aux_hidden_state_layer_ids", "a list of whole numbers")
    layers = tuple(sorted({id - 1 for id in ids}))
    if not all(0 <= layer < total for layer in layers):
        raise OutriderError(
            f"the head in {folder} reads the target after {', '.join(map(str, ids))} blocks, but the target has {total}"
        )
    inputs = tensors["fc.weight"].shape[-1]
    if inputs != len(layers) * hidden:
        raise OutriderError(
            f"the head in {folder} reads {len(layers)} blocks of {hidden} numbers but its fc.weight has {inputs} inputs"
        )
    return layers


def _draft_ids(folder: Path, tensors: Tensors, vocab: int) -> Tensor | None:
    """d2t says how far each token that the head can write lies from the target's."""
    if "d2t" not in tensors:
        return None
    ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise OutriderError(f"the head in {folder} writes token {int(ids.max())}, but the target has {vocab} tokens")
    return None if len(ids) == vocab else ids


def _shared(tensors: Tensors, target: Readable, ids: Tensor | None) -> set[str]:
    """Matrices in the file that are the target's own: not kept twice."""
    out = set()
    every = torch.arange(target.vocab_size) if ids is None else ids
    for name, rows, those in (
        ("lm_head.weight", target.output_rows, every),
        ("embed_tokens.weight", target.embed, torch.arange(target.vocab_size)),
    ):
        given = tensors.get(name)
        if given is not None and given.shape == (len(those), target.anatomy.hidden_size):
            some = torch.linspace(0, len(those) - 1, 64).long()
            theirs = rows(those[some].to(target.device)).float().cpu()
            if float(torch.cosine_similarity(given[some].float().flatten(), theirs.flatten(), 0)) > 0.99:
                out.add(name)
    return out


def medusa(folder: Path, fields: Mapping[str, Any], tensors: Tensors, target: Readable) -> MedusaHead:
    tensors = {_medusa_name(name): value for name, value in tensors.items()}
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    known = {
        "num_heads": fields.get("medusa_num_heads", len(blocks)),
        "num_hidden_layers": fields.get("medusa_num_layers", 1),
    }
    heads, depth = (_number(folder, {**known, **fields}, key, LAYERS) for key in known)
    first = tensors.get("blocks.0.layers.0.weight")
    if first is None:
        raise OutriderError(f"the head in {folder} lacks the tensor blocks.0.layers.0.weight; get it again")
    same(folder, "hidden numbers", fields.get("hidden_size", first.shape[0]), target.anatomy.hidden_size)
    ids = _token_map(folder, tensors.pop("token_map", None), target.vocab_size)
    outputs = [tensors.get(f"lm_heads.{index}.weight") for index in range(heads)]
    own = any(output is not None for output in outputs) and not fields.get("original_lm_head", False)
    if not own:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("lm_head")}
    rows = [] if not own or outputs[0] is None else [outputs[0].shape[0]]
    vocab = fields.get("vocab_size", rows[0] if rows and ids is None else target.vocab_size)
    same(folder, "tokens", vocab, target.vocab_size)
    config = MedusaConfig(
        target.anatomy.hidden_size,
        vocab,
        vocab if ids is None else len(ids),
        heads,
        depth,
        "blocks.0.layers.0.bias" in tensors,
        own,
    )
    tree = _tree(folder, fields.get("medusa_choices", ()))
    head = _filled(folder, lambda: MedusaHead(config, ids), tensors)
    head.tree = tree
    return head


def _token_map(folder: Path, ids: Tensor | None, vocab: int) -> Tensor | None:
    """The tokens that the heads can write; None: all."""
    if ids is None:
        return None
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
        raise OutriderError(f"token_map of the head in {folder} is not a list of tokens; get it again")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise OutriderError(f"the head in {folder} writes token {int(ids.max())}, but the target has {vocab} tokens")
    return ids.long()


def _tree(folder: Path, fields: Any) -> Paths:
    """Nodes by their ranks from the root down; the parent of each is there, before it."""
    try:
        paths = tuple(tuple(int(rank) for rank in path) for path in fields)
    except (TypeError, ValueError):
        paths = ((),)
    if not all(path and min(path) >= 0 and path[:-1] in ((), *paths[:place]) for place, path in enumerate(paths)):
        raise OutriderError(
            f"medusa_choices in {folder / 'config.json'} is not a tree: a node's parent must precede it"
        )
    return paths


def _medusa_name(name: str) -> str:
    """`0.1.linear.weight` is block 1 of head 0, `0.2.weight` its output matrix; both may stand under medusa_head."""
    for prefix in ("medusa_heads.", "medusa_head."):
        name = name.removeprefix(prefix)
    parts = name.split(".")
    if not (len(parts) >= 3 and parts[0].isdigit() and parts[1].isdigit()):
        return name
    if "linear" in parts:
        return f"blocks.{parts[0]}.layers.{parts[1]}.{parts[-1]}"
    return f"lm_heads.{parts[0]}.{parts[-1]}"


def _filled(folder: Path, make: Callable[[], H], tensors: Tensors, ignored: Set[str] = frozenset()) -> H:
    """The head with the tensors in their places. A first one without memory says which tensors it needs."""
    with torch.device("meta"):
        _check_tensors(folder, dict(make().named_parameters()), tensors, ignored)
    head = make()
    for name, place in head.named_parameters():
        place.copy_(tensors[name])
    return head


def _check_tensors(folder: Path, places: Mapping[str, Tensor], tensors: Tensors, ignored: Set[str]) -> None:
    """Every tensor of the head must be there and have its shape, and there must be no others."""
    for name, place in places.items():
        given = tensors.get(name)
        if given is None:
            raise OutriderError(f"the head in {folder} lacks the tensor {name}; get it again")
        if given.shape != place.shape:
            raise OutriderError(
                f"the tensor {name} of the head in {folder} has shape {tuple(given.shape)}, but its config says "
                f"{tuple(place.shape)}; get it again"
            )
    extra = sorted(set(tensors) - set(places) - ignored)
    if extra:
        raise OutriderError(f"the head in {folder} has a tensor {extra[0]} that its config does not speak of")


def _number(folder: Path, fields: Mapping[str, Any], key: str, most: int = LARGEST) -> int:
    value = fields.get(key)
    if value is None:
        raise OutriderError(f"{folder / 'config.json'} does not say {key}, which a head needs")
    if not isinstance(value, int) or not 1 <= value <= most:
        raise _wrong(folder, key, f"a whole number between 1 and {most}")
    return value


def _wrong(folder: Path, key: str, kind: str) -> OutriderError:
    return OutriderError(f"{key} in {folder / 'config.json'} is not {kind}; get the head again")
