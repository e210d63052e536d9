"""Plug-ins: classes that other packages offer under an entry point group. Layer 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

TIERS = "kvcairn.tiers"
POLICIES = "kvcairn.policies"


def load(group: str) -> dict[str, type]:
    """Return the classes that installed packages offer in a group, by name. Imports their modules."""
    return {point.name: point.load() for point in _entry_points(group)}


def names(group: str) -> set[str]:
    """Return the names that installed packages offer in a group. Imports nothing."""
    return {point.name for point in _entry_points(group)}


def _entry_points(group: str) -> EntryPoints:
    import importlib.metadata  # a tenth of what `import kvcairn` takes, and needed only when settings are read

    return importlib.metadata.entry_points(group=group)
