"""What proves a tier, a policy or the cache: suites, an oracle of bytes, a fake engine, tiers that fail on purpose.

Nothing in kvcairn imports it. The suites need pytest, the machine needs hypothesis; both are loaded when asked for.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_PLACES: Final = {
    "Blocks": "blocks",
    "ByteOracle": "oracle",
    "CacheMachine": "machine",
    "DictContent": "dict_tier",
    "DictTier": "dict_tier",
    "FakeEngine": "engine",
    "Fault": "faulty",
    "FaultKind": "faulty",
    "FaultyTier": "faulty",
    "PlainFacts": "plain_facts",
    "PolicyTests": "policy_tests",
    "Rig": "rig",
    "Setup": "rig",
    "TierTests": "tier_tests",
    "WrongBytes": "oracle",
    "assert_idle": "blocks",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_PLACES)
