"""The JSON Schema of the settings, for editors and for other programs. Layer 1, above config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvcairn.config import BUILT_IN_TIERS, Config, TierOptions

_EXAMPLES: Final = {"bytes": "8 GiB", "seconds": "200 ms"}


def config_schema(tier_types: Mapping[str, type[TierOptions]] = BUILT_IN_TIERS) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the settings, each kind of tier by its `type`."""
    kinds = list(tier_types.values())
    (root, *tiers), parts = msgspec.json.schema_components([Config, *kinds], ref_template="#/$defs/{name}")
    parts["Config"]["properties"]["tiers"] = {"type": "array", "minItems": 1, "items": {"anyOf": tiers}}
    parts["Config"]["required"] = ["tiers"]
    parts.pop("TierOptions", None)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kvcairn", **root, "$defs": parts}
    _allow_text(schema)
    return schema


def _allow_text(node: object) -> None:
    """Let whatever has a unit also be written as a text, in place."""
    if isinstance(node, dict):
        unit = node.pop("x-unit", None)
        if unit is not None:
            number = {key: node.pop(key) for key in ("type", "minimum") if key in node}
            node["anyOf"] = [number, {"type": "string", "examples": [_EXAMPLES[unit]]}]
        for child in list(node.values()):
            _allow_text(child)
    elif isinstance(node, list):
        for child in node:
            _allow_text(child)
