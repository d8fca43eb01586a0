"""The generator block of AutoGluon-RAG's config file: the platforms huggingface (our engine) and vllm.

Every key is honoured, or refused with the reason. Where the file is silent our own defaults hold (greedy, 256 tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outrider import drafters
from outrider.backends import speculation
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.settings import Config, from_mapping

Values = Mapping[str, Any]

BLOCK = "generator"
KEYS = (
    "generator_model_name",
    "generator_model_platform",
    "generator_model_platform_args",
    "num_gpus",
    "generator_query_prefix",
)
# Names of earlier versions -> where the same thing is said now: a key of ours, or one of the platform's arguments.
OLD_KEYS = {
    "model_name": "generator_model_name",
    "model_platform": "generator_model_platform",
    "model_platform_args": "generator_model_platform_args",
    "generator_num_gpus": "num_gpus",
}
OLD_ARGS = {
    "generator_hf_model_params": "hf_model_params",
    "generator_hf_tokenizer_init_params": "hf_tokenizer_init_params",
    "generator_hf_tokenizer_params": "hf_tokenizer_params",
    "generator_hf_forward_params": "hf_forward_params",
    "generator_hf_generate_params": "hf_generate_params",
    "local_model_path": "hf_local_model_path",
    "generator_local_model_path": "hf_local_model_path",
    "vllm_init_params": "vllm_init_params",
    "vllm_sampling_params": "vllm_sampling_params",
}
SERVICES = ("openai", "bedrock")
OLD_SERVICE_KEYS = ("use_bedrock", "bedrock_generate_params", "gpt_generate_params", "openai_key_file")
OTHER_BLOCKS = ("data", "embedding", "vector_db", "retriever", "shared", "chunking", "reranker")


def recognises(values: Values) -> bool:
    """Whether a file is written in these words."""
    return BLOCK in values or any(key in values for key in (*KEYS[:3], *OLD_KEYS, *OLD_ARGS, "use_vllm"))


def parse(values: Values) -> Config:
    """A config file of AutoGluon-RAG, in full or only what stands under `generator`."""
    notes: list[str] = []
    block = _modern(_block(values), notes)
    platform = str(block.get("generator_model_platform") or "huggingface").lower()
    if platform in SERVICES:
        raise OutriderError(
            f"the platform {platform} is a remote service, and what runs there cannot be sped up from here; "
            f"choose one of {', '.join(PLATFORMS)}"
        )
    if platform not in PLATFORMS:
        raise OutriderError(f"unknown platform {platform!r}; known: {', '.join(PLATFORMS)}")
    args = _mapping("generator_model_platform_args", block.get("generator_model_platform_args"))
    name, gpus, prefix = block.get("generator_model_name"), block.get("num_gpus"), block.get("generator_query_prefix")
    if not (name is None or isinstance(name, str)) or not isinstance(prefix or "", str):
        raise OutriderError("generator_model_name and generator_query_prefix must be text")
    if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 0):
        raise OutriderError(f"num_gpus must be a whole number, not {gpus!r}")
    chosen = PLATFORMS[platform](args, gpus, notes)
    if name is None and "model" not in chosen.settings:
        raise OutriderError("generator_model_name is missing; it names the model: a known name, folder, hub id or GGUF")
    settings = from_mapping({"model": name, **chosen.settings})
    return Config(settings, SamplingParams(**chosen.sampling), prefix or "", tuple(notes))


@dataclass
class _Chosen:
    """What the platform's arguments come to in our own words."""

    settings: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


def _block(values: Values) -> Values:
    if BLOCK not in values:
        return values
    others = [key for key in values if key != BLOCK]
    for key in others:
        if key not in OTHER_BLOCKS:
            raise OutriderError(f"unknown block {key!r}; known: {BLOCK}")
    if others:
        raise OutriderError(
            f"the block {others[0]!r} is about retrieval, which is not done here; keep {BLOCK} alone and give what "
            "was found as `retrieved` with each query"
        )
    return _mapping(BLOCK, values[BLOCK])


def _modern(block: Values, notes: list[str]) -> dict[str, Any]:
    """The block with today's keys; a note for each that has another name now."""
    modern = {key: value for key, value in block.items() if key in KEYS}
    args = dict(_mapping("generator_model_platform_args", modern.get("generator_model_platform_args")))
    for key, value in block.items():
        if key in KEYS:
            continue
        if key in OLD_KEYS:
            _put(modern, OLD_KEYS[key], value, key)
            notes.append(f"{key} is now {OLD_KEYS[key]}")
        elif key in OLD_ARGS:
            _put(args, OLD_ARGS[key], value, key)
            notes.append(f"{key} is now generator_model_platform_args.{OLD_ARGS[key]}")
        elif key == "use_vllm":
            if value:
                _put(modern, "generator_model_platform", "vllm", key)
            notes.append("use_vllm is now generator_model_platform: vllm")
        elif key in OLD_SERVICE_KEYS:
            if value:
                raise OutriderError(f"{key} asks for a remote service; choose one of {', '.join(PLATFORMS)}")
        else:
            raise OutriderError(f"unknown key {key!r}; known: {', '.join(KEYS)}")
    return {**modern, "generator_model_platform_args": args}


def _put(place: dict[str, Any], key: str, value: Any, old: str) -> None:
    if place.get(key) is not None:
        raise OutriderError(f"{old} and {key} say the same thing; leave out {old}")
    place[key] = value


def _huggingface(args: Values, gpus: int | None, notes: list[str]) -> _Chosen:
    _refuse_unknown("generator_model_platform_args", args, HF_ARGS)
    chosen = _Chosen()
    if gpus is not None:
        if gpus > 1:
            raise OutriderError(
                f"num_gpus: {gpus}, but our engine runs on one device; with platform vllm a model spans several"
            )
        chosen.settings["device"] = "cuda" if gpus else "cpu"
    if args.get("hf_local_model_path"):
        chosen.settings["model"] = str(args["hf_local_model_path"])
    for name, table in HF_TABLES.items():
        given = _mapping(name, args.get(name))
        _refuse_unknown(name, given, table)
        for key, value in given.items():
            table[key](_Key(f"{name}.{key}", value, given, chosen, notes))
    _settle_sampling(_mapping("hf_generate_params", args.get("hf_generate_params")), chosen, notes)
    return chosen


@dataclass
class _Key:
    """One key of a table with all that its meaning may depend on."""

    where: str
    value: Any
    given: Values  # its neighbours
    chosen: _Chosen
    notes: list[str]


_Means = Callable[[_Key], None]


def _setting(name: str, names: Mapping[Any, str] | None = None) -> _Means:
    def means(key: _Key) -> None:
        value = str(key.value).removeprefix("torch.")
        if names is not None and value not in names:
            raise OutriderError(f"{key.where} must be one of {', '.join(map(str, names))}, not {key.value!r}")
        key.chosen.settings[name] = value if names is None else names[value]

    return means


def _sampling(name: str, change: Callable[[Any], Any] = lambda value: value) -> _Means:
    def means(key: _Key) -> None:
        if key.value is not None:
            key.chosen.sampling[name] = change(key.value)

    return means


def _only(*values: Any, why: str) -> _Means:
    """Takes the values that change nothing, and refuses the others."""

    def means(key: _Key) -> None:
        if key.value not in values and key.value is not None:
            raise OutriderError(f"{key.where}: {key.value!r} cannot be honoured: {why}")

    return means


def _never(why: str) -> _Means:
    return _only(why=why)


def _nothing(key: _Key) -> None:
    """Makes no difference to the text here."""


def _noted(why: str) -> _Means:
    def means(key: _Key) -> None:
        key.notes.append(f"{key.where}: {why}")

    return means


def _bits(quantize: str) -> _Means:
    def means(key: _Key) -> None:
        if key.value:
            key.chosen.settings["quantize"] = quantize
            key.notes.append(f"{key.where}: weights are rounded to {quantize} on loading, in our own way")

    return means


def _drafter(make: Callable[[Values], str]) -> _Means:
    def means(key: _Key) -> None:
        if key.value is None or key.value is False:
            return
        if "draft" in key.chosen.settings:
            raise OutriderError(f"{key.where}: two ways to speculate are asked for; leave out one of them")
        if "," in str(key.value):
            raise OutriderError(f"{key.where} cannot hold a comma: {key.value}")
        key.chosen.settings["draft"] = make(key.given)

    return means


def _assistant(given: Values) -> str:
    model, length, tokenizer = (given.get(key) for key in (_ASSISTANT, "num_assistant_tokens", "assistant_tokenizer"))
    words = "" if tokenizer in (None, model) else f",tokenizer={tokenizer}"
    return f"draft_model:model={model}" + ("" if length is None else f",length={length}") + words


def _lookup(given: Values) -> str:
    most = given.get("max_matching_ngram_size")
    sizes = "" if most is None else f",max_n={most},min_n={min(2, int(most))}"
    return f"ngram:length={given['prompt_lookup_num_tokens']}{sizes}"


def _early_exit(given: Values) -> str:
    length = given.get("num_assistant_tokens")
    return f"layer_skip:layers={given['assistant_early_exit']}" + ("" if length is None else f",length={length}")


def _its_tokenizer(key: _Key) -> None:
    """Read with assistant_model, which has its own if nothing is said."""
    _with(_ASSISTANT)(key)
    if "," in str(key.value):
        raise OutriderError(f"{key.where} cannot hold a comma: {key.value}")


def _schedule(key: _Key) -> None:
    if key.value not in (None, "constant", "heuristic", "heuristic_transient"):
        raise OutriderError(f"{key.where} must be constant, heuristic or heuristic_transient, not {key.value!r}")
    if key.value == "constant":
        key.chosen.settings["pace"] = False
    else:
        key.notes.append(f"{key.where}: how far to draft is decided from what it costs and what is kept")


def _with(*others: str) -> _Means:
    """Read together with one of the others."""

    def means(key: _Key) -> None:
        if key.value is not None and not any(key.given.get(other) for other in others):
            raise OutriderError(f"{key.where} is for {' or '.join(others)}, which is not given; leave it out")

    return means


def _settle_sampling(given: Values, chosen: _Chosen, notes: list[str]) -> None:
    """As in transformers: without do_sample the likeliest token is taken, whatever else is said."""
    ignored = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    if given.get("do_sample"):
        chosen.sampling = {"temperature": 1.0, "top_k": 50, **chosen.sampling}
        return
    for key in ignored:
        if chosen.sampling.pop(key, None) is not None:
            notes.append(f"hf_generate_params.{key} is not used without do_sample: true (as in transformers)")


def _as_list(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


_ASSISTANT = "assistant_model"
_OUR_ATTENTION = "our engine has its own attention and cache; leave it out"
_DTYPES = {name: name for name in ("auto", "float32", "bfloat16", "float16")}
_DEVICES = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "cuda:0": "cuda:0"}
_FROM_ENVIRONMENT = "set the environment variable HF_TOKEN or HF_HOME instead"

HF_MODEL: dict[str, _Means] = {
    "torch_dtype": _setting("dtype", _DTYPES),
    "dtype": _setting("dtype", _DTYPES),
    "device_map": _setting("device", _DEVICES),
    "load_in_8bit": _bits("int8"),
    "load_in_4bit": _bits("int4"),
    "trust_remote_code": _only(False, why="a model's own code is never run"),
    "use_safetensors": _only(True, why="pickled weights are not loaded"),
    "low_cpu_mem_usage": _nothing,
    "attn_implementation": _never(_OUR_ATTENTION),
    "use_cache": _only(True, why=_OUR_ATTENTION),
    "revision": _only("main", why="give the snapshot's folder as hf_local_model_path"),
    "token": _never(_FROM_ENVIRONMENT),
    "cache_dir": _never(_FROM_ENVIRONMENT),
}
HF_TOKENIZER_INIT: dict[str, _Means] = {
    "use_fast": _only(True, why="only fast tokenizers are read"),
    "trust_remote_code": _only(False, why="a model's own code is never run"),
    "padding_side": _nothing,  # nothing is padded here
    "revision": _only("main", why="give the snapshot's folder as hf_local_model_path"),
    "token": _never(_FROM_ENVIRONMENT),
}
HF_TOKENIZER: dict[str, _Means] = {
    "padding": _nothing,
    "return_tensors": _nothing,
    "return_attention_mask": _nothing,
    "add_special_tokens": _only(True, why="prompts begin as the model expects; leave it out"),
    "truncation": _noted("a prompt that is too long is refused, not cut"),
    "max_length": _never("a prompt that is too long is refused, not cut; leave it out"),
}
HF_GENERATE: dict[str, _Means] = {
    "assistant_model": _drafter(_assistant),
    "assistant_tokenizer": _its_tokenizer,
    "tokenizer": _nothing,  # transformers wants it beside assistant_tokenizer; the target brings its own
    "prompt_lookup_num_tokens": _drafter(_lookup),
    "max_matching_ngram_size": _with("prompt_lookup_num_tokens"),
    "assistant_early_exit": _drafter(_early_exit),
    "num_assistant_tokens": _with("assistant_model", "assistant_early_exit"),
    "num_assistant_tokens_schedule": _schedule,
    "assistant_confidence_threshold": _noted("how far to draft is decided from what it costs and what is kept"),
    "max_new_tokens": _sampling("max_tokens"),
    "min_new_tokens": _sampling("min_tokens"),
    "do_sample": _nothing,  # settled in the end, with all the others known
    "temperature": _sampling("temperature"),
    "top_k": _sampling("top_k"),
    "top_p": _sampling("top_p"),
    "min_p": _sampling("min_p"),
    "typical_p": _sampling("typical_p"),
    "repetition_penalty": _sampling("repetition_penalty"),
    "num_return_sequences": _sampling("n"),
    "stop_strings": _sampling("stop", _as_list),
    "eos_token_id": _sampling("stop_token_ids", _as_list),
    "bad_words_ids": _sampling("bad_words", lambda words: tuple(tuple(word) for word in words)),
    "num_beams": _only(1, why="beams are not drafted for; use num_return_sequences with do_sample"),
    "no_repeat_ngram_size": _only(0, why="use repetition_penalty or bad_words_ids"),
    "max_length": _never("it counts the prompt too; use max_new_tokens"),
    "use_cache": _only(True, why=_OUR_ATTENTION),
    "pad_token_id": _nothing,
}
HF_TABLES = {
    "hf_model_params": HF_MODEL,
    "hf_tokenizer_init_params": HF_TOKENIZER_INIT,
    "hf_tokenizer_params": HF_TOKENIZER,
    "hf_forward_params": {},
    "hf_generate_params": HF_GENERATE,
}
HF_ARGS = (*HF_TABLES, "hf_local_model_path")
VLLM_ARGS = ("vllm_init_params", "vllm_sampling_params")
# Names of sampling parameters that vLLM and we have. It has no typical_p, and a file holds no functions.
VLLM_SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name not in ("typical_p", "processors"))
_SETTINGS_OF_VLLM = ("dtype", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _vllm(args: Values, gpus: int | None, notes: list[str]) -> _Chosen:
    _refuse_unknown("generator_model_platform_args", args, VLLM_ARGS)
    init, renamed = speculation.modernise(_mapping("vllm_init_params", args.get("vllm_init_params")))
    notes += renamed
    sampling = dict(_mapping("vllm_sampling_params", args.get("vllm_sampling_params")))
    _refuse_unknown("vllm_sampling_params", sampling, VLLM_SAMPLING)
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0  # both mean: all of them
    settings: dict[str, Any] = {"backend": "vllm"}
    if "model" in init:
        raise OutriderError("vllm_init_params.model: the model is named by generator_model_name; leave it out")
    if gpus is not None and gpus > 1:
        init.setdefault("tensor_parallel_size", gpus)
        notes.append(f"num_gpus: {gpus} is vLLM's tensor_parallel_size")
    config = init.pop("speculative_config", None)
    settings |= {"speculative_config": config} if config else {"draft": drafters.PLAIN}
    settings |= {key: init.pop(key) for key in _SETTINGS_OF_VLLM if key in init}
    return _Chosen({**settings, "engine_args": init}, sampling)


def _mapping(name: str, value: Any) -> Values:
    if value is not None and not isinstance(value, Mapping):
        raise OutriderError(f"{name} must hold keys and values, not {value!r}")
    return value or {}


def _refuse_unknown(where: str, given: Values, known: Iterable[str]) -> None:
    unknown = [key for key in given if key not in set(known)]
    if unknown:
        raise OutriderError(f"unknown key {unknown[0]!r} in {where}; known: {', '.join(known) or 'none'}")


PLATFORMS = {"huggingface": _huggingface, "vllm": _vllm}
