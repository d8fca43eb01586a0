"""What a request may make the server open: known names, what the server was started with, and allowed folders."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider import drafters
from outrider.backends import speculation
from outrider.core.errors import OutriderError
from outrider.models import sources
from outrider.server.errors import Bad, Forbidden

MOST, LARGEST = 256, {"vocab": 1 << 20}  # a draft that is looked up or written far ahead holds up the whole batch


class Access:
    def __init__(
        self, folders: tuple[Path, ...] = (), names: Mapping[str, str] = MappingProxyType({}), hub: bool = False
    ) -> None:
        """`folders`: what lies in them may be opened. `names`: those of the registry. `hub`: whether hub ids may be."""
        self._folders = tuple(folder.expanduser().resolve() for folder in folders)
        self._names, self._hub = names, hub

    def on(self, backend: str) -> Access:
        """The same for models of that backend."""
        return OnVllm(self._folders, self._names, self._hub) if backend == "vllm" else self

    def expects(self, method: str) -> bool:
        """Whether a drafter reads what the caller expects."""
        return drafters.find(method).expects

    def source(self, name: str) -> str:
        """A model, head or adapter that a request names, as it may be opened; Forbidden says why it may not."""
        if name in self._names:
            return self._names[name]
        if name in sources.KNOWN:
            return name
        if _is_hub_id(name):
            if self._hub:
                return name
            raise Forbidden(f"{name!r} would come from the hub, which requests may not use here (serve --allow-hub)")
        return str(self.path(name))

    def path(self, name: str) -> Path:
        """A path inside an allowed folder, links followed. Nothing is said of what lies outside."""
        try:
            path = Path(name).resolve()
        except (OSError, ValueError, RuntimeError):
            path = None
        if path is None or "\0" in name or not any(path.is_relative_to(folder) for folder in self._folders):
            raise Forbidden(
                f"{name[:200]!r} is neither a known name nor in a folder that requests may use (serve --allow-folder)"
            )
        return path

    def draft(self, method: str, options: Mapping[str, Any], own: str = "") -> str:
        """A drafter and options that a request asks for, as a spec. `own`: the model's own spec is always allowed."""
        spec = method + _written(options)
        return spec if spec == own else self._spec(method, {}, options)

    def vary(self, own: str, options: Mapping[str, Any]) -> str:
        """The model's own drafter with some options changed; the others stay, and are allowed."""
        method, _, text = own.partition(":")
        return self._spec(method, dict(item.split("=", 1) for item in text.split(",") if item), options)

    def _spec(self, method: str, kept: Mapping[str, str], options: Mapping[str, Any]) -> str:
        kinds = self._kinds(method)
        asked = {key: self._option(key, kinds.get(key), value) for key, value in options.items()}
        spec = method + _written({**kept, **asked})
        self._check(spec)
        return spec

    def _kinds(self, method: str) -> dict[str, Any]:
        options = drafters.find(method).Options
        hints = typing.get_type_hints(options)
        return {field.name: hints[field.name] for field in dataclasses.fields(options)}

    def _check(self, spec: str) -> None:
        drafters.parse(spec)

    def _option(self, key: str, kind: Any, value: Any) -> Any:
        """An option that is free text names a model or a file. No request makes us unpickle one."""
        if key == "allow_pickle" and value is not False:
            raise Forbidden("pickles are never opened for a request; convert the head to safetensors")
        most = LARGEST.get(key, MOST)
        if isinstance(value, int | float) and not -MOST <= value <= most:
            raise Bad(f"speculative: {key} must be at most {most}, not {value}", param="speculative")
        free = str in (kind, *typing.get_args(kind))
        return self.source(value) if free and isinstance(value, str) and value else value


class OnVllm(Access):
    """vLLM's drafters have options of their own, and none reads a prediction: the engine will say so."""

    def expects(self, method: str) -> bool:
        return method == "prediction"

    def vary(self, own: str, options: Mapping[str, Any]) -> str:
        if own.startswith("{"):
            raise Bad(f"vLLM speculates as it was loaded ({own}), the same for all requests", param=next(iter(options)))
        return super().vary(own, options)

    def _kinds(self, method: str) -> dict[str, Any]:
        return {"model": str, "head": str}

    def _check(self, spec: str) -> None:
        if spec != "prediction":
            speculation.to_vllm(spec)


def _written(options: Mapping[str, Any]) -> str:
    """{"length": 4, "greedy": True} -> ":length=4,greedy=true" """
    return ":" + ",".join(f"{key}={_value(key, value)}" for key, value in options.items()) if options else ""


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise Bad(f"speculative: {key} must be text, a number, true or false", param="speculative")
    if isinstance(value, str) and ("," in value or "=" in value or value != value.strip()):
        raise OutriderError(f"speculative: {key} may not hold commas, equals signs or spaces at its ends")
    return str(value)


def _is_hub_id(name: str) -> bool:
    """Not if a folder here has that name: it would be opened instead."""
    return sources.HUB_ID.fullmatch(name) is not None and not Path(name).exists()
