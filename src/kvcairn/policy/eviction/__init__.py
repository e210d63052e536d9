"""One file per eviction policy; `create` finds them by name, built in or offered by an installed package."""

from __future__ import annotations

from typing import Any

from kvcairn import kinds
from kvcairn.errors import ConfigError
from kvcairn.policy.eviction.arc import ARC
from kvcairn.policy.eviction.base import EvictionPolicy, Facts
from kvcairn.policy.eviction.fifo import FIFO
from kvcairn.policy.eviction.lfu import LFU
from kvcairn.policy.eviction.lru import LRU
from kvcairn.policy.eviction.priority import Priority
from kvcairn.policy.eviction.s3fifo import S3FIFO
from kvcairn.policy.eviction.session import Session

BUILT_IN: dict[str, type[EvictionPolicy]] = {
    "arc": ARC,
    "fifo": FIFO,
    "lfu": LFU,
    "lru": LRU,
    "priority": Priority,
    "s3fifo": S3FIFO,
    "session": Session,
}


def create(name: str, facts: Facts, path: str = "eviction") -> EvictionPolicy:
    """Return a new policy of that name.

    Raises:
        ConfigError: there is no such policy; names the setting `path` and what there is.
    """
    found: Any = BUILT_IN.get(name) or kinds.load_eviction(name, path)
    if found is None:
        raise ConfigError(path, f"unknown eviction policy; there are: {', '.join(kinds.eviction_names())}", name)
    policy: EvictionPolicy = found(facts)
    return policy
