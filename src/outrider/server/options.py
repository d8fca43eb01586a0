"""The options of `outrider serve` that concern requests, with their help texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError
from outrider.core.option import option

LIMITS, ACCESS = "Limits", "Access"  # headings of --help
# How the server was started, which launches over REST take over; VLLM_DEFAULTS where they run on vLLM.
LAUNCH_DEFAULTS: tuple[str, ...] = ("backend", "device", "threads", "cache_memory", "max_batch", "max_draft_batch")
LAUNCH_DEFAULTS += ("kv", "activations", "rule", "pace", "piece", "adapter_memory")


# As a browser writes the Origin of a page; a host in other letters comes as punycode.
ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://([a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(:(?P<port>[1-9][0-9]{0,4}))?"
)


def _key(given: str) -> str:
    if not given:  # of a variable that is not set, say: everybody would get in
        raise OutriderError("--api-key is empty; give a key, or leave it out to serve without one")
    return given


def _folders(given: list[str]) -> tuple[Path, ...]:
    if not all(given):  # of a variable that is not set, say: it would mean the folder we are in
        raise OutriderError("--allow-folder is empty; give a folder, or leave it out")
    try:
        return tuple(Path(each).expanduser() for each in given)
    except RuntimeError as error:  # ~nobody
        raise OutriderError(f"--allow-folder: {error}") from error


def _check_origin(origin: str) -> None:
    """Browsers send an origin in one form only, and it is compared as text: any other form would allow nobody."""
    match = ORIGIN.fullmatch(origin)
    if origin in ("*", "null") or (match and f"{match['scheme']}:{match['port']}" not in ("http:80", "https:443")):
        return
    form = "SCHEME://HOST or SCHEME://HOST:PORT in lower case, without the usual port, a path or a / at the end"
    raise OutriderError(f"--cors takes an origin as browsers send it ({form}), not {origin!r}")


@dataclass(frozen=True)
class ServerOptions:
    api_key: str = option("", "Key that requests must send.", env="OUTRIDER_API_KEY", parse=_key, panel=ACCESS)
    tenant_keys: tuple[str, ...] = option(
        (),
        "The key of another tenant; the texts of one tenant are never drafts for another. Repeatable.",
        flags=("--tenant-key",),
        env="OUTRIDER_TENANT_KEYS",
        panel=ACCESS,
    )
    max_body: int = option(4 << 20, "Largest request body, in bytes.", least=1, panel=LIMITS)
    timeout: float = option(600.0, "Seconds that a request may take.", least=0.001, panel=LIMITS)
    cors: tuple[str, ...] = option(
        (), "Origin whose web pages may send requests, as https://example.org; *: any. Repeatable.", panel=ACCESS
    )
    folders: tuple[Path, ...] = option(
        (),
        "Requests may open models, heads and adapters in this folder. Repeatable.",
        flags=("--allow-folder",),
        panel=ACCESS,
        parse=_folders,
        repeated=True,
    )
    hub: bool = option(False, "Requests may name hub ids.", flags=("--allow-hub",), panel=ACCESS)
    no_launch: bool = option(False, "Requests may not launch or stop models, or load adapters.", panel=ACCESS)
    max_models: int = option(16, "Models that may be launched at once.", least=1, panel=LIMITS)
    timings: bool = option(
        False, "Answers also have vLLM's metrics.speculative_decoding and llama.cpp's timings.", flags=("--timings",)
    )
    hosts: tuple[str, ...] = ()  # what requests may call the server in their Host header; (): anything
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of launches over REST: device, max_batch, ...

    def __post_init__(self) -> None:
        if not all(self.tenant_keys):  # of a variable that is not set, say: its tenant would not get in
            raise OutriderError("--tenant-key is empty; give the tenant's key, or leave it out")
        for origin in self.cors:
            _check_origin(origin)

    def check_folders(self) -> None:
        """Refuse folders that are not on this machine."""
        for folder in self.folders:
            if not folder.is_dir():
                what = "is a file" if folder.is_file() else "does not exist"
                raise OutriderError(f"--allow-folder takes a folder, and {folder} {what}; check the path")

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that a request may bring; (): none is needed."""
        return tuple(filter(None, (self.api_key, *self.tenant_keys)))
