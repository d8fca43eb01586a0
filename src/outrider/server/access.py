"""What a request may make the server open: known names, what the server was started with, and allowed folders."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider import drafters
from outrider.backends import speculation
from outrider.core.errors import OutriderError, quoted
from outrider.drafters import DrafterSpec
from outrider.models import sources
from outrider.server.errors import Bad, Forbidden, ServerError

# How large a number among the options of a drafter may be in a request. A draft that is looked up or written far ahead
# holds up the whole batch; a drafter's own numbers are at most 64 today.
LARGEST_OPTION = 256
# The exceptions: `vocab` counts tokens of a vocabulary, and today's have up to 262,144.
LARGEST_OPTIONS = {"vocab": 1 << 20}
PICKLE = "allow_pickle"  # the option that has a head unpickled
_EXAMPLE = f"{drafters.LOOKUP}:length=5+{drafters.HISTORY}:width=1"
NO_PICKLES = "pickles are never opened for a request; convert the head to safetensors"


class Access:
    def __init__(
        self, folders: tuple[Path, ...] = (), names: Mapping[str, str] = MappingProxyType({}), hub: bool = False
    ) -> None:
        """`folders`: whose files may be opened. `names`: of the registry. `hub`: whether hub ids may be opened."""
        self._folders = tuple(folder.expanduser().resolve() for folder in folders)
        self._names, self._hub = names, hub

    def on(self, backend: str) -> Access:
        """The same for models of that backend."""
        return VllmAccess(self._folders, self._names, self._hub) if backend == "vllm" else self

    def expects(self, method: str) -> bool:
        """Whether a drafter, or any of several, reads what the caller expects."""
        return drafters.reads_prediction(method)

    def needs(self, method: str) -> bool:
        """Whether it drafts nothing where the caller says nothing of the kind."""
        return self.expects(method) and drafters.needs_prediction(method)

    def source(self, name: str) -> str:
        """A model, head or adapter that a request names, as it may be opened; Forbidden says why it may not."""
        if name in self._names:
            return self._names[name]
        if name in sources.KNOWN:
            return name
        path = _resolved(name)
        here = path is not None and self._allows(path) and os.path.exists(path)  # False where the name is too long
        return self._hub_id(name) if sources.HUB_ID.fullmatch(name) and not here else str(self.path(name))

    def knows(self, name: str) -> bool:
        """Whether it is a name of the registry."""
        return name in self._names

    def path(self, name: str) -> Path:
        """A path inside an allowed folder, links followed. An error tells nothing of what lies outside."""
        path = _resolved(name)
        if path is None or not self._allows(path):
            raise Forbidden(
                f"{quoted(name)} is neither a known name nor in a folder that requests may use (serve --allow-folder)"
            )
        return path

    def check_files(self, folder: Path, names: Iterable[str]) -> None:
        """The files of a folder in an allowed one lie in an allowed one, too, links followed."""
        for name in names if self._allows(folder) else ():
            self.path(str(folder / name))

    def draft(self, method: str, options: Mapping[str, Any], own: str = "") -> str:
        """The drafter and options that a request asks for, as the text of a spec. `own`: that of the model, which is
        allowed with the values it has."""
        return self._allowed(lambda: self._from_values(method, self._scalars(options, own)), own)

    def vary(self, own: str, options: Mapping[str, Any]) -> str:
        """The model's own drafter with some options changed."""

        def varied() -> DrafterSpec:
            kept, values = self._from_text(own), self._scalars(options, own)
            if len(kept.members) > 1:
                return drafters.varied(kept, values)
            return self._from_values(kept.name, vars(kept.options) | values)

        return self._allowed(varied, own)

    def draft_of_text(self, text: str) -> str:
        """A spec that a request has written out."""
        return self._allowed(lambda: self._from_text(text))

    def _from_text(self, text: str) -> DrafterSpec:
        return drafters.parse(text)

    def _from_values(self, method: str, values: Mapping[str, Any]) -> DrafterSpec:
        if len(drafters.split_members(method)) == 1:
            return drafters.from_values(method, values)
        if values:
            raise OutriderError(f"options of several drafters stand in the method: {_EXAMPLE}")
        return drafters.parse(method)

    def _allowed(self, read: Callable[[], DrafterSpec], own: str = "") -> str:
        """The text of the spec that `read` gives, made from the very values that were checked."""
        try:
            spec = read()
            kept = self._own(own)
            return own if spec == kept else self._checked(spec, kept).text()
        except ServerError:
            raise
        except OutriderError as error:
            raise Bad(str(error), param="speculative") from error

    def _own(self, own: str) -> DrafterSpec | None:
        return self._from_text(own) if own and not own.startswith("{") else None  # JSON: vLLM's own words

    def _scalars(self, options: Mapping[str, Any], own: str) -> dict[str, Any]:
        """Options that a request may have at all, whatever the drafter is: single values, and no huge number that the
        model's own drafter does not have."""
        kept = self._own(own)
        for key, value in options.items():
            if not isinstance(value, str | int | float):
                raise Bad(f"speculative: {quoted(key)} must be text, a number, true or false", param="speculative")
            known = () if kept is None else [getattr(member.options, key, None) for member in kept.members]
            if value not in known:
                _check_size(key, value)
        return dict(options)

    def _checked(self, spec: DrafterSpec, own: DrafterSpec | None) -> DrafterSpec:
        """The spec with its models and files as they may be opened; a value that `own` has too is allowed."""
        kept = {} if own is None else {member.name: vars(member.options) for member in own.members}
        return drafters.combine([self._checked_member(each, kept.get(each.name, {})) for each in spec.members])

    def _checked_member(self, spec: DrafterSpec, kept: Mapping[str, Any]) -> DrafterSpec:
        asked = {key: value for key, value in vars(spec.options).items() if key not in kept or kept[key] != value}
        files = drafters.free_text(type(spec.options))
        if getattr(spec.options, PICKLE, False) and (PICKLE in asked or files & asked.keys()):
            raise Forbidden(NO_PICKLES)
        for key, value in asked.items():
            _check_size(key, value)
        opened = {key: self.source(value) for key, value in asked.items() if key in files and value}
        return DrafterSpec(spec.name, dataclasses.replace(spec.options, **opened))

    def _hub_id(self, name: str) -> str:
        """The id as it is always taken from the hub: a folder of that name is not even looked for."""
        if not self._hub:
            raise Forbidden(
                f"{quoted(name)} would come from the hub, which requests may not use here (serve --allow-hub)"
            )
        return sources.HUB + name

    def _allows(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)


class VllmAccess(Access):
    """vLLM's drafters have options of their own, and none reads a prediction: the engine will say so."""

    def expects(self, method: str) -> bool:
        return method in drafters.names() and method != drafters.AUTO and super().expects(method)

    def vary(self, own: str, options: Mapping[str, Any]) -> str:
        self._scalars(options, own)
        if own.startswith("{"):
            raise Bad(f"vLLM speculates as it was loaded ({own}), the same for all requests", param=next(iter(options)))
        return super().vary(own, options)

    def _from_text(self, text: str) -> DrafterSpec:
        return speculation.spec_from_text(text)

    def _from_values(self, method: str, values: Mapping[str, Any]) -> DrafterSpec:
        if values.get(PICKLE):  # not among vLLM's options, but the reason is the same
            raise Forbidden(NO_PICKLES)
        if self.expects(method):
            return super()._from_values(method, values)
        return speculation.spec_from_values(method, values)


def _check_size(key: str, value: Any) -> None:
    most = LARGEST_OPTIONS.get(key, LARGEST_OPTION)
    if isinstance(value, int | float) and not -LARGEST_OPTION <= value <= most:
        bound = f"at most {most}" if value > 0 else f"at least {-LARGEST_OPTION}"
        raise Bad(f"speculative: {quoted(key)} must be {bound}, not {quoted(value)}", param="speculative")


def _resolved(name: str) -> Path | None:
    """The path that a name means, links followed; None where it cannot be one."""
    try:
        return None if "\0" in name else Path(name).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
