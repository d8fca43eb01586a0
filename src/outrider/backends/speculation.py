"""Our drafter specs as vLLM's `speculative_config` and back, and the options of old vLLM versions as those of today."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import drafters
from outrider.core.errors import OutriderError, quoted

Config = dict[str, Any]  # as vLLM has it


@dataclass(frozen=True)
class VllmNgramOptions:
    length: int = 5
    max_n: int = 4
    min_n: int = 2


@dataclass(frozen=True)
class VllmSuffixOptions:
    length: int | None = None  # None: as vLLM decides


@dataclass(frozen=True)
class VllmModelOptions:
    model: str  # name, folder, hub id or GGUF file
    length: int = 5


@dataclass(frozen=True)
class VllmHeadOptions:
    head: str  # folder or hub id
    length: int = 5


# Drafters that vLLM has, by our names for them, and their options there.
WORDS: dict[str, type] = {
    "ngram": VllmNgramOptions,
    "suffix": VllmSuffixOptions,
    "draft_model": VllmModelOptions,
    "medusa": VllmHeadOptions,
    "eagle": VllmHeadOptions,
    "eagle3": VllmHeadOptions,
}
# Our names of options -> vLLM's keys.
KEYS = {
    "length": "num_speculative_tokens",
    "max_n": "prompt_lookup_max",
    "min_n": "prompt_lookup_min",
    "model": "model",
    "head": "model",
}
# What vLLM's engine took before it had `speculative_config`, and the key in there.
OLD = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
GONE = {
    "speculative_disable_by_batch_size": "write speculative_config.num_speculative_tokens_per_batch_size instead",
    "spec_decoding_acceptance_method": "vLLM accepts by exact rejection alone; leave it out",
    "typical_acceptance_sampler_posterior_threshold": "vLLM accepts by exact rejection alone; leave it out",
    "typical_acceptance_sampler_posterior_alpha": "vLLM accepts by exact rejection alone; leave it out",
    "speculative_disable_mqa_scorer": "leave it out",
    "disable_logprobs_during_spec_decoding": "leave it out",
}


def to_vllm(draft: str) -> Config | None:
    """ "ngram:length=8" -> what vLLM calls it; None: plain decoding."""
    name, options = spec_from_text(draft)
    if name not in WORDS:
        return None
    values = {KEYS[key]: value for key, value in vars(options).items() if value is not None}
    return {"method": name, **values}


def spec_from_text(draft: str) -> drafters.DrafterSpec:
    """ "ngram:length=8" with vLLM's options."""
    if len(drafters.split_members(draft)) > 1:
        raise OutriderError(f"vLLM runs one drafter at a time, not {quoted(draft)}; name one of them")
    name, values = drafters.split(draft)
    return _spec(name, values, convert=True)


def spec_from_values(name: str, values: Mapping[str, Any]) -> drafters.DrafterSpec:
    """The same from options as JSON has them."""
    return _spec(name, values)


def _spec(name: str, values: Mapping[str, Any], convert: bool = False) -> drafters.DrafterSpec:
    if name == drafters.PLAIN:
        if values:
            raise OutriderError("the drafter none has no options; leave them out")
        return drafters.from_values(name, {})
    if name == drafters.AUTO and not values:
        name = drafters.LOOKUP  # of vLLM's drafters the one that needs nothing else
    if name not in WORDS:
        known = ", ".join((drafters.PLAIN, *WORDS))
        raise OutriderError(f"vLLM has no drafter {quoted(name)}; on this backend there are: {known}")
    options = drafters.read_options(name, WORDS[name], values, convert)
    for key, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            raise OutriderError(f"{name}:{key} must be a whole number of at least 1, not {quoted(value)}")
    return drafters.DrafterSpec(name, options)


def for_head(config: Config, folder: Path) -> Config:
    """Our word `eagle` is for both kinds of heads; vLLM wants to be told which, or it drafts badly without a word."""
    if config["method"] not in ("eagle", "eagle3"):
        return config
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutriderError(f"the head in {folder} has no config.json that can be read: {error}") from error
    third = "eagle3" in f"{fields.get('speculators_model_type')} {fields.get('architectures')}".lower()
    if config["method"] == "eagle3" and not third:
        raise OutriderError(f"the head in {folder} is no EAGLE-3 head; write eagle:head={folder}")
    return {**config, "method": "eagle3" if third else "eagle"}


def to_draft(config: Mapping[str, Any]) -> str:
    """vLLM's configuration as a drafter of our own engine."""
    method = _method(config)
    if method not in WORDS or not _ours(method):
        known = [name for name in WORDS if _ours(name)]
        raise OutriderError(f"our engine has no speculative method {method!r}; it has: {', '.join(known)}")
    options = {KEYS[each.name]: each.name for each in dataclasses.fields(WORDS[method])}
    given = {key: value for key, value in config.items() if key != "method" and (key, value) != ("model", "[ngram]")}
    unknown = [key for key in given if key not in options]
    if unknown:
        raise OutriderError(
            f"speculative_config: our engine does not know {unknown[0]!r} with method {method}; "
            f"it knows: method, {', '.join(options)}"
        )
    text = ",".join(f"{options[key]}={_plain(key, value)}" for key, value in given.items())
    return f"{method}:{text}" if text else method


def parse(value: Mapping[str, Any] | str) -> Config:
    """A speculative_config, or its JSON."""
    if not isinstance(value, str):
        return dict(value)
    try:
        config = json.loads(value)
    except ValueError as error:
        raise OutriderError(f"speculative_config is not JSON ({error}); write {_EXAMPLE}") from error
    if not isinstance(config, dict):
        raise OutriderError(f"speculative_config must be a JSON object such as {_EXAMPLE}")
    return config


def modernise(args: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """vLLM's engine arguments with the dead ones in their new place, and a note for each."""
    for key, why in GONE.items():
        if key in args:
            raise OutriderError(f"{key} is gone from vLLM: {why}")
    modern = {key: value for key, value in args.items() if key not in OLD and key != "use_v2_block_manager"}
    notes = [f"{key} is dead in vLLM; written as speculative_config.{OLD[key]}" for key in args if key in OLD]
    if "use_v2_block_manager" in args:
        notes.append("use_v2_block_manager is dead in vLLM (it always does); left out")
    old = {OLD[key]: value for key, value in args.items() if key in OLD}
    if old:
        if args.get("speculative_config"):
            raise OutriderError("give speculative_config or the old speculative keys of vLLM, not both")
        method = _method(old)
        if old.get("model") == "[ngram]":
            del old["model"]
        modern["speculative_config"] = {"method": method, **old}
    return modern, notes


def _method(config: Mapping[str, Any]) -> str:
    if "method" in config:
        return str(config["method"])
    if "model" not in config:
        raise OutriderError(f"speculative_config names neither a method nor a model; write {_EXAMPLE}")
    return "ngram" if config["model"] in ("[ngram]", "ngram") else "draft_model"


def _ours(name: str) -> bool:
    return name in drafters.names()


def _plain(key: str, value: Any) -> str:
    if "," in str(value):
        raise OutriderError(f"{key} cannot hold a comma here: {value}")
    return str(value)


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
