"""A Llama's config.json, read without transformers, whose own reader takes 1.4 s to import.

Only files are read here that transformers would read unchanged, without refusing a value or filling one in. All other
files are left to transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

Check = Callable[[Any], bool]


def _is(*kinds: type) -> Check:
    return lambda value: type(value) in kinds  # True is no number


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_default_rope(value: Any) -> bool:
    return (
        type(value) is dict
        and value.keys() == {"rope_theta", "rope_type"}
        and value["rope_type"] == "default"
        and _is_positive(value["rope_theta"])
    )


_NONE = type(None)
# What our forward reads.
_NEEDED: dict[str, Check] = {
    "model_type": lambda value: value == "llama",
    "hidden_act": lambda value: value == "silu",
    "rope_parameters": _is_default_rope,
    "mlp_bias": lambda value: value is False,
    "tie_word_embeddings": _is(bool),
    "rms_norm_eps": _is_positive,
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim"), _is_size),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), _is_size),
    "max_position_embeddings": _is_size,
}
# What else transformers writes, and what it accepts there.
_OTHERS: dict[str, Check] = {
    "architectures": lambda value: value == ["LlamaForCausalLM"],
    "attention_bias": _is(bool),
    "attention_dropout": _is(int, float),
    "bos_token_id": _is(int, _NONE),
    "dtype": lambda value: value in ("float32", "bfloat16", "float16"),
    "eos_token_id": _is(int, _NONE),
    "initializer_range": lambda value: type(value) is float and 0 <= value <= 1,
    "pad_token_id": _is(int, _NONE),
    "pretraining_tp": _is(int),
    "transformers_version": _is(str),
    "use_cache": _is(bool),
}


def plain_llama(fields: Mapping[str, Any]) -> Any | None:
    """What transformers' LlamaConfig would tell of a config.json; None where that is to be asked."""
    checks = _NEEDED | _OTHERS
    if not _NEEDED.keys() <= fields.keys() <= checks.keys() or not all(checks[key](fields[key]) for key in fields):
        return None
    return SimpleNamespace(**fields) if fields["hidden_size"] % fields["num_attention_heads"] == 0 else None
