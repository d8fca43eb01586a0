"""Settings: what a user can choose. Frozen; unknown keys are refused with the known ones listed."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.backends import speculation
from outrider.core.errors import OutriderError, one_line
from outrider.core.option import option
from outrider.core.params import SamplingParams
from outrider.drafters.history import CAPACITY, LEAST

BACKENDS = ("local", "vllm")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZE = ("none", "int8", "int4")
KV = ("auto", "int8")
ACTIVATIONS = ("auto", "int8")
RULES = ("rejection", "coupled")
LIKE = 0.75  # how alike (difflib's ratio) an unknown key and a known one are that was probably meant: modle and model


def adapter_paths(given: Sequence[str]) -> dict[str, str]:
    """Adapters as the command line names them: NAME=PATH, or a PATH, whose last part is then the name."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        name, path = (name, path) if equals else (Path(text).stem, text)
        if not name or not path:
            raise OutriderError(f"{text!r} is no adapter; write NAME=PATH")
        if name in found:
            raise OutriderError(f"two adapters are called {name!r}; give each a name of its own")
        found[name] = path
    return found


@dataclass(frozen=True)
class Settings:
    model: str = option("smollm2-135m", "Known name, folder, hub id or GGUF file.", flags=("--model", "-m"))
    draft: str = option(
        "auto",
        "The drafter: auto (all that fit the model), NAME:key=value,..., several joined with +, or none.",
        flags=("--draft", "-d"),
    )
    backend: str = option("local", f"The engine: {' or '.join(BACKENDS)} (our own, or vLLM with its own speculation).")
    device: str = option("auto", f"One of {', '.join(DEVICES)}.")
    # auto: on a CPU a file's own 4, 6 or 8 bits, or float32; on a GPU bfloat16
    dtype: str = option("auto", f"One of {', '.join(DTYPES)}.")
    quantize: str = option("none", f"Round dense weights on loading: {', '.join(QUANTIZE)}.")
    # auto: as they are computed
    kv: str = option("auto", f"Keys and values: {' or '.join(KV)} (packed weights on a CPU; long contexts run faster).")
    # auto: 16 bits for packed weights
    activations: str = option(
        "auto", f"Inputs of products: {' or '.join(ACTIVATIONS)} (packed weights on a CPU; faster, less precise)."
    )
    rule: str = "rejection"  # how drafts are verified when a request samples without a seed
    pace: bool = True  # draft as much as pays here and now; False: always as much as the drafter can
    max_batch: int = option(64, "Sequences that run at once.")
    max_draft_batch: int = option(
        0,
        "Draft only while at most this many sequences run; 0: as long as it pays.",
        flags=("--speculation-max-batch-size",),
    )
    piece: int = 512  # prompt tokens that one step takes in
    cache_memory: float = option(
        0.0, "GiB for keys and values, an EAGLE head's included; 0: a quarter of the free memory."
    )
    threads: int = option(0, "CPU threads; 0: one per core.")
    adapters: Mapping[str, str] | None = option(
        None,
        "A LoRA adapter, NAME=PATH (a PEFT folder or a GGUF file); may be given several times.",
        flags=("--adapter",),
        shown=False,
        repeated=True,
        parse=adapter_paths,
    )
    adapter_memory: float = option(1.0, "GiB of memory for adapters; the least recently used ones are evicted.")
    history: str = option("", "A file that keeps what the drafter history has learned.", shown=False)
    history_tokens: int = option(CAPACITY, "Tokens that a history holds, 36 to 52 bytes each; the oldest are dropped.")
    cache_file: str = option("", "A file that keeps shared prefixes of prompts across restarts.", shown=False)
    cache_file_size: float = option(
        1.0, "GiB that the cache file may take; the least recently used prefixes are left out."
    )
    # Only for vLLM:
    speculative_config: Mapping[str, Any] | None = option(None, "vLLM's own JSON in place of --draft.", shown=False)
    tensor_parallel_size: int = option(1, "With vllm: devices a layer is spread over.")
    pipeline_parallel_size: int = option(1, "With vllm: stages the layers are spread over.")
    data_parallel_size: int = option(1, "With vllm: copies of the model.")
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # handed to its engine as they are

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            _one_of(name, getattr(self, name), known)
        for each in dataclasses.fields(self):
            _check_type(each.name, getattr(self, each.name), each.type)
        if self.quantize != "none" and self.dtype not in ("auto", "float32"):
            raise OutriderError(
                f"quantised weights are computed in float32, not {self.dtype}; leave out dtype or quantize"
            )
        if self.device.partition(":")[0] not in DEVICES:
            raise OutriderError(f"unknown device {self.device!r}; known: {', '.join(DEVICES)}")
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise OutriderError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise OutriderError(f"{name} must be at most {most}, not {getattr(self, name)}")
        for name, path in (self.adapters or {}).items():
            if not isinstance(name, str) or not isinstance(path, str):
                raise OutriderError(f"adapters must hold names and paths, not {name!r}: {path!r}")
        if self.backend == "local":
            self._refuse_what_is_vllms()

    @property
    def rounded(self) -> list[str]:
        """What is rounded to fewer bits than by default: it may change texts, which a drafter never does."""
        return [f"{name} {getattr(self, name)}" for name in ("kv", "activations") if getattr(self, name) != "auto"]

    @property
    def numbers(self) -> str:
        """In which numbers the model is computed, as it was asked for."""
        return ", ".join([self.dtype, *self.rounded])

    @property
    def keeps_files(self) -> bool:
        """Whether something is written down when the model is closed."""
        return bool(self.history or self.cache_file)

    @property
    def drafter(self) -> str:
        """The drafter, as the user would write it."""
        return self.draft if self.speculative_config is None else json.dumps(dict(self.speculative_config))

    def _refuse_what_is_vllms(self) -> None:
        foreign = {"speculative_config": self.speculative_config, "engine_args": self.engine_args}
        foreign |= {name: getattr(self, name) != 1 for name in _PARALLEL}
        for name, given in foreign.items():
            if given:
                raise OutriderError(f"{name} is for the backend vllm; add backend vllm or leave it out")


@dataclass(frozen=True)
class Config:
    """What a config file asks for: --config FILE."""

    settings: Settings
    params: SamplingParams = SamplingParams()
    query_prefix: str = ""  # written before each query
    notes: tuple[str, ...] = ()  # how keys were understood that now go by another name


def from_mapping(values: Mapping[str, Any]) -> Settings:
    _refuse_unknown("setting", values, Settings)
    chosen = dict(values)
    if chosen.get("speculative_config") is not None:
        if "draft" in chosen:
            raise OutriderError("draft and speculative_config say the same thing; leave out one of them")
        chosen["speculative_config"] = speculation.parse(chosen["speculative_config"])
        if chosen.get("backend", "local") == "local":
            chosen["draft"] = speculation.to_draft(chosen.pop("speculative_config"))
    return Settings(**chosen)


def config_from(values: Mapping[str, Any]) -> Config:
    """Our own config file: settings, and `sampling` and `query_prefix` beside them."""
    rest = dict(values)
    sampling, prefix = rest.pop("sampling", None) or {}, rest.pop("query_prefix", "")
    if not isinstance(sampling, Mapping):
        raise OutriderError(f"sampling must hold keys and values, not {sampling!r}")
    if not isinstance(prefix, str):
        raise OutriderError(f"query_prefix must be text, not {prefix!r}")
    _refuse_unknown("setting", rest, Settings, "sampling", "query_prefix")
    _refuse_unknown("sampling option", sampling, SamplingParams, without="processors")
    return Config(from_mapping(rest), SamplingParams(**sampling), prefix)


def read_file(path: str | Path) -> dict[str, Any]:
    """The keys and values of a YAML or JSON file."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OutriderError(f"cannot read the config file {path}: {reason}") from error
    except yaml.YAMLError as error:
        raise OutriderError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise OutriderError(f"{path} must hold keys and values, such as `model: smollm2-135m`")
    return values


def _refuse_unknown(what: str, values: Mapping[str, Any], kind: type, *more: str, without: str = "") -> None:
    known = [*(each.name for each in dataclasses.fields(kind) if each.name != without), *more]
    unknown = [key for key in values if key not in known]
    if unknown:
        hint = _hint(unknown[0], known)
        raise OutriderError(f"unknown {what} {unknown[0]!r}; {hint}known: {', '.join(known)}")


def _hint(key: str, known: Sequence[str]) -> str:
    """What was probably meant by a key that is not known."""
    if "sampling" in known and key in (each.name for each in dataclasses.fields(SamplingParams)):
        return f"write it below sampling, as `sampling: {{{key}: ...}}`; "
    close = difflib.get_close_matches(key, known, n=1, cutoff=LIKE)
    return f"did you mean {close[0]!r}? " if close else ""


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OutriderError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def _check_type(name: str, value: Any, kind: Any) -> None:
    """A file may hold anything. The annotations are text here."""
    wanted, words = _TYPES[str(kind).partition("[")[0]]
    right = isinstance(value, wanted) and (kind == "bool" or not isinstance(value, bool))
    if not right and not (value is None and "None" in str(kind)):
        raise OutriderError(f"{name} must be {words}, not {value!r}")


_CHOICES = {
    "backend": BACKENDS,
    "dtype": DTYPES,
    "quantize": QUANTIZE,
    "kv": KV,
    "activations": ACTIVATIONS,
    "rule": RULES,
}
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
VLLM_DEFAULTS = ("dtype", *_PARALLEL, "engine_args")  # how vLLM runs, whatever the model
MOST_BATCH = 2048  # sequences at once: each has its state in memory, and a pass of more pays nowhere
_LEAST = {
    "max_batch": 1,
    "max_draft_batch": 0,
    "piece": 2,
    "cache_memory": 0,
    "adapter_memory": 0,
    "cache_file_size": 0,
    "threads": 0,
    "history_tokens": LEAST,
    **dict.fromkeys(_PARALLEL, 1),
}
LARGEST_MEMORY = 1 << 16  # GiB for keys and values: more than any machine has, and few enough for a count of bytes
_MOST = {
    "max_batch": MOST_BATCH,
    "threads": 1024,
    "history_tokens": 1 << 30,
    "cache_memory": LARGEST_MEMORY,
    "adapter_memory": LARGEST_MEMORY,
    "cache_file_size": LARGEST_MEMORY,
}
_TYPES: dict[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (int | float, "a number"),
    "Mapping": (Mapping, "keys and values"),
}
