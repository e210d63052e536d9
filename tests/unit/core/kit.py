"""What the tests of the core share: spaces of any layout, and steps that need more than a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcairn.core.core import Core
from kvcairn.index.arrays import Rows
from kvcairn.layout import KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.space import Space
from kvcairn.testing.rig import Rig
from kvcairn.types import CopyState

TOKENS = 4  # of a block
PART_BYTES = 32 * TOKENS
STATES = {int(state): state.name for state in CopyState}


def full() -> LayerGroup:
    return LayerGroup.full((0,), 32)


def sliding(blocks: int) -> LayerGroup:
    """Layers that look back over so many blocks."""
    return LayerGroup.sliding((1,), 32, window=blocks * TOKENS)


def state() -> LayerGroup:
    return LayerGroup.state((2,), 100)


def space_of(rig: Rig, *groups: LayerGroup, tenant: str = "") -> Space:
    layout = KVLayout(groups=groups, dtype="float16")
    descriptor = SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=TOKENS, tenant=tenant)
    return rig.cache.space(descriptor)


def chain(space: Space, blocks: int, prompt: int = 0) -> list[bytes]:
    """Keys of a prompt that shares nothing with the prompts of other numbers."""
    tokens = space.descriptor.block_tokens
    return space.keys(range(prompt * 1_000_000, prompt * 1_000_000 + blocks * tokens))


def store(space: Space, keys: Sequence[bytes], parts: Iterable[Sequence[int]] | None = None) -> None:
    """Store the named groups of each block, all by default."""
    wanted = None if parts is None else [list(groups) for groups in parts]
    with space.reserve(list(keys), parts=wanted) as slots:
        slots.commit()


def rows_of(core: Core, space: Space, keys: Sequence[bytes]) -> Rows:
    return core.state.tree.find(core.state.spaces[space.frame.space].rows, list(keys))


def states(core: Core, space: Space, keys: Sequence[bytes], level: int = 0, group: int = 0) -> list[str]:
    """Name the state of each copy on one tier."""
    column = core.state.levels[level].residency.of(group).state
    return [STATES[int(column[row])] for row in rows_of(core, space, keys)]


def is_closed_under_parents(core: Core, level: int, group: int = 0) -> bool:
    """Whether every readable copy on a tier has its parent's beside it."""
    tree, copies = core.state.tree, core.state.levels[level].residency.of(group)
    ready = np.flatnonzero(copies.state[:-1] == int(CopyState.READY))
    above = tree.nodes.parent[ready]
    return bool((copies.state[above[above >= 0]] == int(CopyState.READY)).all())
