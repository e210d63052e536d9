"""Takes up what an earlier run left on a tier, as it is opened."""

from __future__ import annotations

import logging

import numpy as np

from kvcairn.core.level import Level
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.memory.slots import Addresses
from kvcairn.tiers.base import Delete
from kvcairn.tiers.inventory import Inventory
from kvcairn.types import MissReason

logger = logging.getLogger(__name__)


def restore(state: State, level: Level, found: Inventory) -> list[Delete]:
    """Take up what an earlier run left on a tier; return what finds no place any more."""
    for space_id, key in found.lost:
        state.tree.ghosts.remember(state.spaces.known(space_id).number, key, MissReason.VANISHED)
    if not len(found):
        return []
    allocator = level.residency.allocator
    order = np.argsort(-found.place[:, 4], kind="stable")
    wanted = order[~found.outdated()[order]]
    addresses = np.full(len(found), -1, dtype=np.int32)
    addresses[wanted] = allocator.restore(found.place[wanted])
    for space_id, mine in found.spaces():
        space = state.spaces.known(space_id)
        for i in mine[addresses[mine] < 0].tolist():
            state.tree.ghosts.remember(space.number, found.key[i], MissReason.EVICTED)
        mine = mine[addresses[mine] >= 0]
        if mine.size:
            _restore_space(state, level, space, found.take(mine), addresses[mine])
    allocator.retired += sorted(set(found.place[:, 0].tolist()) - allocator.segments.keys())
    left = [Delete(item.block, item.slot) for item in found.take(np.flatnonzero(addresses < 0))]
    if left:
        logger.warning("tier %r: %d blocks of an earlier run do not fit and are dropped", level.name, len(left))
    return left


def _restore_space(state: State, level: Level, space: SpaceInfo, found: Inventory, addresses: Addresses) -> None:
    tree, residency = state.tree, level.residency
    parents = dict(zip(found.key, found.parent, strict=True))
    tree.adopt(space.rows, list(parents), list(parents.values()))
    rows = tree.find(space.rows, found.key)
    is_one = bool((found.group == found.group[0]).all())
    for group in found.group[:1].tolist() if is_one else np.unique(found.group).tolist():
        mine = np.flatnonzero(found.group == group)
        space.part_bytes.setdefault(group, int(found.nbytes[mine[0]]))
        residency.restore(group, rows[mine], addresses[mine])
        residency.of(group).checksum[rows[mine]] = found.checksum[mine]
    residency.policy.add(tree.by_recency(rows, found.place[:, 4]), state.now())
