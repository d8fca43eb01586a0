"""What to launch, as a value that can be written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import OutriderError
from outrider.settings import Settings, from_mapping


def settings_as_dict(settings: Settings) -> dict[str, Any]:
    """The settings that are not at their defaults; `from_mapping` reads them back."""
    plain = Settings()
    fields = {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}
    return {name: value for name, value in fields.items() if value != getattr(plain, name)}


@dataclass(frozen=True)
class LaunchSpec:
    """What to launch, and under which uid. `family`: what an API remembers of it (name, size, quantisation)."""

    settings: Settings
    uid: str = ""  # "": one is made from the model's name
    names: tuple[str, ...] = ()  # other names that requests may use for it; the model's own is always one
    family: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known_as(self) -> tuple[str, ...]:
        return (self.uid, self.settings.model, *self.names)

    def as_dict(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "settings": settings_as_dict(self.settings),
            "names": list(self.names),
            "family": dict(self.family),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LaunchSpec:
        try:
            return cls(from_mapping(fields["settings"]), fields["uid"], tuple(fields["names"]), dict(fields["family"]))
        except (KeyError, TypeError, ValueError) as error:
            raise OutriderError(
                f"not a launched model as it is written down: {type(error).__name__}: {error}"
            ) from error
