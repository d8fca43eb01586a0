"""The kinds of heads, which are the names of the drafters that read them; how a config.json tells the kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

EAGLE, BLOCK, MEDUSA = "eagle", "block", "medusa"
PUBLIC_BLOCK, OWN_BLOCK = "dspark", "outrider_block"  # what the configs of block heads call themselves
SHIPPED = Path(__file__).parent.parent.parent / "heads"  # the heads of the package: <target>/<kind>/


def kind_of(config: Mapping[str, Any]) -> str:
    """Files of Medusa and of block heads say what they are; all others are read as EAGLE's."""
    if config.get("speculators_model_type") in (PUBLIC_BLOCK, OWN_BLOCK):
        return BLOCK
    medusa = config.get("model_type") == MEDUSA or any(MEDUSA in key for key in config)
    return MEDUSA if medusa else EAGLE
