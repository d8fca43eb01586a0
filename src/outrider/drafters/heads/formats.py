"""The public file formats of heads: configs as vLLM names things, and heads built from configs and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.drafters.block.head import BlockConfig, BlockHead
from outrider.drafters.eagle.head import EagleConfig, EagleHead
from outrider.drafters.heads.kinds import OWN_BLOCK, PUBLIC_BLOCK
from outrider.drafters.medusa.head import MedusaConfig, MedusaHead, Paths
from outrider.models.base import Readable

Head = EagleHead | MedusaHead | BlockHead
H = TypeVar("H", EagleHead, MedusaHead, BlockHead)
Tensors = dict[str, Tensor]

# Bounds of what a config may ask for, far above any published head: a module is made for each layer, without memory for
# its weights, before its shapes are compared with the file's.
LARGEST = 1 << 20  # rows of a matrix, tokens, attention heads
LAYERS = 128  # decoder layers of an EAGLE or block head, tokens of a block; heads of Medusa and blocks of each


def eagle_config(head: EagleHead, name: str, target: Readable) -> dict[str, Any]:
    config = head.config
    layer = {**_decoder_layer(config, target), "mlp_bias": False}
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


def _decoder_layer(config: EagleConfig | BlockConfig, target: Readable) -> dict[str, Any]:
    """The head's decoder layers in Hugging Face's words."""
    normed = isinstance(config, BlockConfig) and config.qk_norm
    return {
        "model_type": "qwen3" if normed else "llama",
        "architectures": ["Qwen3ForCausalLM" if normed else "LlamaForCausalLM"],
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
        "tie_word_embeddings": False,
    }


def block_config(head: BlockHead, name: str, target: Readable) -> dict[str, Any]:
    """In the form of `speculators` (DSpark); what that has no word for makes it a form of our own, under the same
    names otherwise."""
    config = head.config
    public = not config.starts
    kind = PUBLIC_BLOCK if public else OWN_BLOCK
    return {
        "architectures": ["DSparkSpeculator" if public else "OutriderBlock"],
        "speculators_model_type": kind,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],  # counted from the embedding
        "mask_token_id": config.mask_token,
        "sample_from_anchor": True,
        "markov_rank": config.rank,
        "markov_head_type": config.sequential,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": bool(config.rank),
        "causal": config.causal,
        "tie_word_embeddings": False,
        "transformer_layer_config": _decoder_layer(config, target),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block}],
            "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
        },
    }


@torch.no_grad()
def block_tensors(head: BlockHead, target: Readable) -> Tensors:
    """As the form has them: in the public one the sequential part's matrices go over the whole vocabulary."""
    tensors: Tensors = dict(head.state_dict())
    if head.config.starts or head.config.own_sequential or not head.config.rank:
        return tensors
    part = head.markov_head
    every = torch.arange(target.vocab_size, device=target.device)
    rows = target.output_rows(head.draft_ids.to(target.device)).float()
    for name in ("reduce", "lift"):
        del tensors[f"markov_head.{name}.weight"]
    place = part.lift.weight.device
    tensors["markov_head.markov_w1.weight"] = part.reduced(target.embed(every).to(place, part.reduce.weight.dtype))
    tensors["markov_head.markov_w2.weight"] = rows.to(place) @ part.lift.weight.float()
    return tensors


def block(folder: Path, fields: Mapping[str, Any], tensors: Tensors, target: Readable) -> BlockHead:
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise _wrong(folder, "transformer_layer_config", "an object")
    hidden, vocab = _number(folder, layer, "hidden_size"), _number(folder, layer, "vocab_size")
    same(folder, "hidden numbers", hidden, target.anatomy.hidden_size)
    same(folder, "tokens", vocab, target.vocab_size)
    _check_block(folder, fields)
    heads, kv_heads, head_dim = _attention_sizes(folder, layer, hidden)
    ids = _draft_ids(folder, tensors, vocab)
    shared = _shared(tensors, target, ids)
    own = "starts" if "slots" in tensors else ""
    config = BlockConfig(
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
        layers=_read_layers(folder, fields, "aux_hidden_state_layer_ids", tensors, hidden, target.num_layers),
        block=_number(folder, fields, "block_size", LAYERS),
        depth=_number(folder, layer, "num_hidden_layers", LAYERS),
        context=target.context,
        rank=fields.get("markov_rank", 256),
        sequential=fields.get("markov_head_type", "vanilla"),
        starts=bool(own),
        causal=bool(fields.get("causal", False)),
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        mask_token=fields.get("mask_token_id") or 0,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        confidence="confidence_head.proj.weight" in tensors,
        own_sequential="markov_head.markov_w1.weight" in tensors,
        own_output="lm_head.weight" in tensors and "lm_head.weight" not in shared,
        own_embedding="embed_tokens.weight" in tensors and "embed_tokens.weight" not in shared,
    )
    ignored = shared | {"d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
    return _filled(folder, lambda: BlockHead(config, ids), tensors, ignored)


def _check_block(folder: Path, fields: Mapping[str, Any]) -> None:
    """What the form allows and a head of ours cannot be."""
    rank, mask = fields.get("markov_rank", 256), fields.get("mask_token_id") or 0
    if not isinstance(rank, int) or not 0 <= rank <= LARGEST:
        raise _wrong(folder, "markov_rank", f"a whole number between 0 and {LARGEST}")
    if fields.get("markov_head_type", "vanilla") not in ("vanilla", "gated", "rnn"):
        raise _wrong(folder, "markov_head_type", "vanilla, gated or rnn")
    if not isinstance(mask, int) or not 0 <= mask < LARGEST:
        raise _wrong(folder, "mask_token_id", "a token")
    if not fields.get("sample_from_anchor", True):
        raise OutriderError(
            f"the head in {folder} guesses nothing at its first slot (sample_from_anchor is false), and Outrider does "
            "not run that; use a DSpark head"
        )
    if fields.get("sliding_window_non_causal") or "sliding_attention" in _layer_types(fields):
        raise OutriderError(f"the head in {folder} has sliding windows, which Outrider does not run; use one without")


def _layer_types(fields: Mapping[str, Any]) -> list[Any]:
    return list((fields.get("transformer_layer_config") or {}).get("layer_types") or ())


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
    """The target's blocks that an EAGLE head reads, counted from 0; (): it is of the first form."""
    if "layers.0.hidden_norm.weight" not in tensors:
        return ()
    return _read_layers(folder, fields, "eagle_aux_hidden_state_layer_ids", tensors, hidden, total)


def _read_layers(
    folder: Path, fields: Mapping[str, Any], key: str, tensors: Tensors, hidden: int, total: int
) -> tuple[int, ...]:
    """The target's blocks that the head reads, counted from 0; the file counts from the embedding."""
    ids = _eagle_option(fields, key, None) or (2, total // 2, total - 3)
    if not isinstance(ids, list | tuple) or not all(isinstance(id, int) for id in ids):
        raise _wrong(folder, key, "a list of whole numbers")
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
