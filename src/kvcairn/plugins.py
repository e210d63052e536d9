"""Plug-ins: classes that other packages offer under an entry point group. Layer 0."""

from __future__ import annotations

from importlib.metadata import entry_points

TIERS = "kvcairn.tiers"
POLICIES = "kvcairn.policies"


def load(group: str) -> dict[str, type]:
    """Return the classes that installed packages offer in a group, by name. Imports their modules."""
    return {point.name: point.load() for point in entry_points(group=group)}


def names(group: str) -> set[str]:
    """Return the names that installed packages offer in a group. Imports nothing."""
    return {point.name for point in entry_points(group=group)}
