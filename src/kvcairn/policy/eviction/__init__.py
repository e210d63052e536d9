"""One file per eviction policy; `create` finds them by name, built in or offered by an installed package."""

from __future__ import annotations

from kvcairn import plugins
from kvcairn.errors import ConfigError
from kvcairn.policy.eviction.base import EvictionPolicy, Facts
from kvcairn.policy.eviction.lru import LRU

_BUILT_IN: dict[str, type[EvictionPolicy]] = {"lru": LRU}


def create(name: str, facts: Facts, path: str = "eviction") -> EvictionPolicy:
    """Return a new policy of that name.

    Raises:
        ConfigError: there is no such policy; names the setting `path` and what there is.
    """
    found = _BUILT_IN.get(name) or plugins.load(plugins.POLICIES).get(name)
    if found is None:
        known = ", ".join(sorted({*_BUILT_IN, *plugins.names(plugins.POLICIES)}))
        raise ConfigError(path, f"unknown eviction policy; there are: {known}", name)
    policy = found(facts)
    if not isinstance(policy, EvictionPolicy):
        raise ConfigError(path, f"{found.__module__}.{found.__qualname__} is no EvictionPolicy", name)
    return policy
