"""One file per eviction policy; `create` finds them by name, built in or offered by an installed package."""

from __future__ import annotations

from kvcairn import plugins
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
    found = BUILT_IN.get(name) or plugins.load(plugins.POLICIES).get(name)
    if found is None:
        known = ", ".join(sorted({*BUILT_IN, *plugins.names(plugins.POLICIES)}))
        raise ConfigError(path, f"unknown eviction policy; there are: {known}", name)
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(path, f"{found.__module__}.{found.__qualname__} is no EvictionPolicy", name)
    return found(facts)
