"""The composition root: settings -> model, drafter, engine, backend. Only it sees all settings."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from outrider import drafters
from outrider.backends import speculation
from outrider.backends.base import Backend
from outrider.backends.local import MOST_WITH_WEIGHTS, Local
from outrider.core.errors import OutriderError
from outrider.drafters import DrafterSpec
from outrider.drafters.base import BuildContext, Drafter, RetokenizedModel
from outrider.drafters.draft_model import READ_AT_ONCE
from outrider.drafters.heads.adapted import with_heads
from outrider.drafters.history.store import HistoryStore
from outrider.engine.cost import measured
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.models.adapters.store import AdapterStore
from outrider.models.base import Model, Paged
from outrider.models.export import as_folder
from outrider.models.llama import PackedLlama
from outrider.models.load import Loaded, fetch, load, read_tokenizer, words_of
from outrider.models.memory import available_memory
from outrider.models.native.packed import WORDS
from outrider.models.paged_cache import FLOATS
from outrider.models.prefix_file import PrefixFile
from outrider.models.sources import resolve
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import LoadOptions
from outrider.refusals import check, speculation_of
from outrider.settings import Settings

GIB = 1 << 30
BITS = {"none": 0, "int8": 8, "int4": 4}
# Of the memory for keys and values on a GPU: a draft model's own pages. One of a third of the target's bytes a token
# (a model a few times smaller) holds as many tokens in it as the target in the rest.
DRAFT_MODEL_SHARE = 1 / 4
_PARALLEL = ("tensor", "pipeline", "data")


def backend(settings: Settings, draft: DrafterSpec | None = None) -> Backend:
    """What answers requests under these settings. `draft`: what `check` has returned, if it was called before."""
    spec = draft or check(settings)
    return vllm(settings) if spec is None else local(settings, spec)


def vllm(settings: Settings) -> Backend:
    """vLLM for these settings. It reads folders, so a GGUF file is written out as one."""
    from outrider.backends.vllm import VLLM

    config = speculation_of(settings)
    folder = as_folder(resolve(settings.model))
    if config is not None and "model" in config:
        drafting = as_folder(resolve(config["model"]))
        config["model"] = str(drafting)
        if settings.speculative_config is None:
            config = speculation.for_head(config, drafting)
    args = {"dtype": settings.dtype, "max_num_seqs": settings.max_batch}
    args |= {f"{kind}_parallel_size": getattr(settings, f"{kind}_parallel_size") for kind in _PARALLEL}
    if settings.cache_memory:
        args["kv_cache_memory_bytes"] = int(settings.cache_memory * GIB)
    if settings.threads:
        cores = sorted(os.sched_getaffinity(0))[: settings.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return VLLM(
        str(folder), settings.drafter, settings.device, config, {**args, **settings.engine_args}, *words_of(folder)
    )


def local(settings: Settings, draft: DrafterSpec | None = None) -> Local:
    """Our own engine for these settings. `draft`: their drafter, if it was parsed before."""
    spec = draft or drafters.parse(settings.draft)  # a typing error shows before a model is loaded
    if settings.threads:
        torch.set_num_threads(settings.threads)
    where = load_options(settings)
    own_share = int(where.memory * _cache_share(spec, settings.model))
    beside, of_target = draft_model_memory(spec, where)
    loaded = load(settings.model, replace(where, memory=where.memory - own_share - of_target))
    draft_models = DraftModels(settings.model, loaded, replace(where, memory=beside))
    histories = open_histories(settings, loaded)

    def context(memory: int) -> BuildContext:
        parts = loaded.model, draft_models.load, settings.model
        made = BuildContext(*parts, histories=histories, fetch=draft_models.fetch)
        return replace(made, cache_bytes=memory) if memory else made

    def named(text: str) -> Callable[[], Drafter]:
        """What a request names: keys and values of all of these together take no more than one share. Files are read
        now, what this returns does the rest."""
        spec = drafters.parse(text)
        parts = context(int(where.memory * _cache_share(spec, settings.model) / MOST_WITH_WEIGHTS))
        drafters.fetch(spec, parts)
        return partial(drafters.build, spec, parts)

    with contextlib.ExitStack() as failed:
        failed.callback(histories.close)
        own = drafters.build(spec, context(own_share))
        prefixes = open_prefixes(settings, loaded, own)
        failed.pop_all()
    engine = Engine(
        loaded.model,
        own,
        Limits(settings.max_batch, settings.piece, drafting=settings.max_draft_batch),
        _policy(loaded.model) if settings.pace else None,
    )
    store = AdapterStore(loaded.model, int(settings.adapter_memory * GIB))
    for name, path in (settings.adapters or {}).items():
        store.register(name, path)
    if isinstance(loaded.model, Paged):
        loaded.model.prepare(own.layers, settings.piece + settings.max_batch, bool(settings.adapters))
    engine.drafters[settings.draft] = engine.drafters[""]  # a request that names it gets the same one
    notes = [*draft_models.notes, *_unused_history(settings, spec), *(prefixes.notes if prefixes else ())]
    rule: Any = settings.rule

    def near(text: str, adapter: str) -> str:
        """ "" stays "" where no head is there."""
        found = with_heads(text or settings.draft, adapter)
        return found if found != settings.draft else text

    return Local(engine, named, loaded.tokenizer, loaded.ends, rule, notes, histories, store, prefixes, near)


def _policy(model: Model) -> DraftingPolicy:
    """On a GPU rows are nearly free, and passes compile first: costs are learned there, not measured beforehand."""
    return DraftingPolicy(None if isinstance(model, Paged) else measured(model))


def open_histories(settings: Settings, loaded: Loaded) -> HistoryStore:
    """Empty ones, or what the settings' file holds."""
    if not settings.history:
        return HistoryStore(settings.history_tokens)
    size = loaded.model.vocab_size
    return HistoryStore.opened(Path(settings.history), vocabulary_digest(loaded), size, settings.history_tokens)


def open_prefixes(settings: Settings, loaded: Loaded, drafter: Drafter) -> PrefixFile | None:
    """The settings' file of shared prefixes, which the caches of target and drafter then have; None: there is none."""
    if not settings.cache_file:
        return None
    model = loaded.model
    if not isinstance(model, PackedLlama):
        raise OutriderError(
            "cache_file needs packed weights on a CPU: a quantised GGUF file, or --quantize; leave it out otherwise"
        )
    identity = model.identity()
    caches = {identity: model.pages}
    for member in drafter.members:
        caches |= member.prefix_caches(identity)
    return PrefixFile(Path(settings.cache_file), caches, int(settings.cache_file_size * GIB))


def vocabulary_digest(loaded: Loaded) -> str:
    """What the token ids mean: models of one tokenizer have the same, whatever they pad it to."""
    if loaded.tokenizer is None:
        return f"{loaded.model.vocab_size} tokens"
    words = sorted((id, word) for word, id in loaded.tokenizer.get_vocab().items())
    return hashlib.sha256(repr(words).encode("utf-8", "surrogatepass")).hexdigest()


def _cache_share(spec: DrafterSpec, target: str) -> float:
    """Of the memory for keys and values: what the drafters of a spec have for their own."""
    return sum(drafters.find(member.name).share(member.options, target) for member in spec.members)


def draft_model_memory(spec: DrafterSpec, where: LoadOptions) -> tuple[int, int]:
    """Bytes for the keys and values of a draft model, and how many of these the target goes without where the spec
    names one."""
    if where.device.type != "cuda":
        return where.memory, 0
    beside = int(where.memory * DRAFT_MODEL_SHARE)
    return beside, beside if drafters.names_model(spec) else 0


def _unused_history(settings: Settings, spec: DrafterSpec) -> list[str]:
    if not settings.history or drafters.find(drafters.HISTORY) in drafters.kinds(spec):
        return []
    return [f"the drafter is {spec.name}: only requests that name {drafters.HISTORY} use {settings.history}"]


class DraftModels:
    """Models that drafters draft with. One copy serves all drafters that name it: its cache goes by sequence."""

    def __init__(self, name: str, target: Loaded, where: LoadOptions) -> None:
        self._name, self._target, self._where = name, target, where
        self._models: WeakValueDictionary[tuple[str, str, str], Model] = (
            WeakValueDictionary()
        )  # while a drafter has them
        self._tokenizers: WeakKeyDictionary[Model, Tokenizer] = WeakKeyDictionary()  # of models with another vocabulary
        self.notes = list(target.notes)  # for the user

    def load(self, name: str, quantize: str, tokenizer: str = "") -> Model | RetokenizedModel:
        """`name`: as for a target. `tokenizer`: the folder of its tokenizer, if it has none of its own."""
        key = name, quantize, tokenizer
        if (there := self._models.get(key)) is not None:
            return self._fitted(there)
        return self._placed(key, load(name, self._options(quantize)), self._words(tokenizer))

    def fetch(self, name: str, quantize: str, tokenizer: str = "") -> Callable[[], Model | RetokenizedModel]:
        """As `load`, but only what takes no device; what it returns does the rest."""
        key = name, quantize, tokenizer
        if (there := self._models.get(key)) is not None:
            return partial(self._fitted, there)
        made, words = fetch(name, self._options(quantize)), self._words(tokenizer)
        return lambda: self._placed(key, made(), words)

    def _options(self, quantize: str) -> LoadOptions:
        return replace(self._where, bits=BITS[quantize], kv_bits=FLOATS, activations=WORDS)

    @staticmethod
    def _words(tokenizer: str) -> Tokenizer | None:
        return read_tokenizer(tokenizer) if tokenizer else None

    def _fitted(self, model: Model) -> Model | RetokenizedModel:
        """As a drafter takes it."""
        if model in self._tokenizers and self._target.tokenizer is not None:
            return RetokenizedModel(model, self._tokenizers[model], self._target.tokenizer)
        return model

    def _placed(
        self, key: tuple[str, str, str], other: Loaded, tokenizer: Tokenizer | None
    ) -> Model | RetokenizedModel:
        """Checked beside the target, and kept."""
        name, _, _ = key
        if tokenizer is not None:
            other = replace(other, tokenizer=tokenizer)
        if other.tokenizer is not None and differing(self._target, other):
            self._tokenizers[other.model] = other.tokenizer
            self.notes.append(f"{name} has another vocabulary than {self._name}: it guesses through text")
        else:
            check_vocabularies(self._target, other, name)
        if isinstance(other.model, Paged):
            other.model.prepare(rows=READ_AT_ONCE)
        self._models[key] = other.model
        return self._fitted(other.model)


def load_options(settings: Settings) -> LoadOptions:
    where = device(settings.device)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    kv_bits = 8 if settings.kv == "int8" else FLOATS
    activations = 8 if settings.activations == "int8" else WORDS
    return LoadOptions(where, dtype, _memory(settings, where), BITS[settings.quantize], kv_bits, activations)


def check_vocabularies(target: Loaded, draft: Loaded, name: str) -> None:
    """A draft model must mean the same by every token id; sizes may differ by padding."""
    differ = differing(target, draft)
    if differ:
        raise OutriderError(
            f"the draft model {name} has another vocabulary than the target ({differ} tokens differ); "
            "use a draft model of the target's own family"
        )
    if None not in (target.tokenizer, draft.tokenizer):
        return
    if target.model.vocab_size != draft.model.vocab_size:
        raise OutriderError(
            f"the draft model {name} has {draft.model.vocab_size} tokens and the target {target.model.vocab_size}, and "
            "without tokenizers they cannot be compared; save the tokenizer in both folders"
        )


def differing(target: Loaded, draft: Loaded) -> int:
    """How many of the target's tokens are others to the draft model; 0 where it cannot be told."""
    if target.tokenizer is None or draft.tokenizer is None:
        return 0
    others = draft.tokenizer.get_vocab()
    return sum(others.get(word) != id for word, id in target.tokenizer.get_vocab().items())


def device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise OutriderError("device cuda was asked for, but torch sees no GPU here; use device cpu or auto")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise OutriderError(f"unknown device {name!r}; write cpu, cuda or cuda:NUMBER") from error


def _memory(settings: Settings, device: torch.device) -> int:
    """Bytes for keys and values."""
    if settings.cache_memory:
        return int(settings.cache_memory * GIB)
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return free // 4
