"""One file per eviction policy; `create` finds them by name, plug-ins by entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvcairn.errors import ConfigError
from kvcairn.policy.eviction.base import EvictionPolicy

GROUP = "kvcairn.policies"


def names() -> list[str]:
    """Names of the installed eviction policies, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)} | set(_builtin()))


def create(name: str, path: str = "eviction") -> EvictionPolicy:
    """Return a new policy of that name.

    Raises:
        ConfigError: there is no such policy; names the setting `path` and what there is.
    """
    for point in entry_points(group=GROUP, name=name):
        policy = point.load()()
        if not isinstance(policy, EvictionPolicy):
            raise ConfigError(path, f"entry point {point.value} is no EvictionPolicy", name)
        return policy
    if name in _builtin():
        return _builtin()[name]()
    raise ConfigError(path, f"unknown eviction policy; there are: {', '.join(names())}", name)


def _builtin() -> dict[str, type[EvictionPolicy]]:
    """Return the policies of this package, for an installation whose entry points cannot be read."""
    from kvcairn.policy.eviction.lru import LRU

    return {"lru": LRU}
