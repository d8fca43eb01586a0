"""The kinds of heads, which are the names of the drafters that read them; how a config.json tells the kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EAGLE, MEDUSA = "eagle", "medusa"


def kind_of(config: Mapping[str, Any]) -> str:
    """Medusa's files say what they are; all others are read as EAGLE's."""
    medusa = config.get("model_type") == MEDUSA or any(MEDUSA in key for key in config)
    return MEDUSA if medusa else EAGLE
