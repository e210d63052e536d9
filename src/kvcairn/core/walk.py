"""How far a chain can be restored, from which tiers, and why no further. Pure: a walk changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcairn.core.level import Level
from kvcairn.core.residency import READY, RESERVED, WRITING, Fastest
from kvcairn.core.spaces import SpaceInfo
from kvcairn.index.arrays import Rows
from kvcairn.index.tree import Tree
from kvcairn.types import CopyState, Hit, MissReason, TooSlow

Levels = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Walk:
    """What was found; blocks are counted from the first one wanted.

    Attributes:
        rows: row of each key wanted, -1 where it is not known.
        levels: number of the slowest tier needed for each of the first `length` blocks, plus one.
        length: longest restorable run.
        sparse: restorable lengths where they are not all of 1..length.
        reason: why it ends, None if nothing is missing.
        too_slow: what the planner cut off.
    """

    rows: Rows
    levels: Levels
    length: int
    sparse: tuple[int, ...] | None
    reason: MissReason | None
    too_slow: TooSlow | None = None

    def cut(self, length: int, reason: MissReason, too_slow: TooSlow | None = None) -> Walk:
        """Return the part of it that is `length` long."""
        sparse = None if self.sparse is None else tuple(each for each in self.sparse if each <= length)
        return Walk(self.rows, self.levels[:length], length, sparse, reason, too_slow)


class Walker:
    """Walks chains over all tiers."""

    def __init__(self, tree: Tree, fastest: Fastest, levels: list[Level]) -> None:
        """Look at these tiers, the fastest first."""
        self._tree, self._fastest, self._levels = tree, fastest, levels
        self.has_expiry = False  # set by the first time to live

    def walk(self, space: SpaceInfo, keys: list[bytes], now_s: float) -> Walk:
        """Return how far `keys` can be restored from any tier that works."""
        rows = self._tree.find(space.rows, keys)
        return self._measure(space, keys, rows, [self.usable(g, rows, now_s) for g in range(len(space.groups))], now_s)

    def walk_ahead(self, space: SpaceInfo, keys: list[bytes], now_s: float) -> Walk:
        """Return how far `keys` can be restored once all that is being written to memory is there."""
        rows = self._tree.find(space.rows, keys)
        usable = []
        for group in range(len(space.groups)):
            found, state = self.usable(group, rows, now_s), self._levels[0].residency.of(group).state[rows]
            found[(found == 0) & ((state == RESERVED) | (state == WRITING))] = 1
            usable.append(found)
        return self._measure(space, keys, rows, usable, now_s)

    def _measure(self, space: SpaceInfo, keys: list[bytes], rows: Rows, usable: list[Levels], now_s: float) -> Walk:
        if len(space.groups) == 1 and space.groups[0].kind == "full":
            found = usable[0]
            length = _run(found)
            sparse = None
        else:
            sparse = restorable(space, [u > 0 for u in usable])
            length = sparse[-1] if sparse else 0
            found = np.ones(rows.size, dtype=np.uint8)  # what no group needs costs nothing
            for group, (low, high) in enumerate(space.ranges(length)):
                found[low:high] = np.maximum(found[low:high], usable[group][low:high])
        reason = None if length == len(keys) else self._reason(space, keys, rows, length, now_s)
        return Walk(rows, found[:length], length, sparse, reason)

    def in_memory(self, space: SpaceInfo, rows: Rows, now_s: float) -> tuple[int, ...] | range:
        """Return the lengths that can be restored from memory alone, ascending."""
        flags = [self._fastest.of(g)[rows] == 1 for g in range(len(space.groups))]
        if self.has_expiry:
            flags = [each & ~self._expired(rows, now_s) for each in flags]
        if len(flags) == 1 and space.groups[0].kind == "full":
            return range(1, 1 + _run(flags[0]))
        return restorable(space, flags)

    def usable(self, group: int, rows: Rows, now_s: float) -> Levels:
        """Return the number of the fastest working tier with each row, plus one; 0 where there is none."""
        best: Levels = self._fastest.of(group)[rows]
        if any(level.breaker.is_open(now_s) for level in self._levels):
            best = np.zeros_like(best)
            for number in range(len(self._levels) - 1, -1, -1):
                level = self._levels[number]
                if group < len(level.residency.copies) and not level.breaker.is_open(now_s):
                    best[level.residency.copies[group].state[rows] == READY] = number + 1
        if self.has_expiry:
            best = np.where(self._expired(rows, now_s), 0, best).astype(np.uint8)
        return best

    def hit(self, space: SpaceInfo, walk: Walk) -> Hit:
        """Return a walk as the public value."""
        assert space.descriptor is not None
        return Hit(
            blocks=walk.length,
            block_tokens=space.descriptor.block_tokens,
            by_tier=self.by_tier(walk.levels),
            pending=self._pending(walk) if walk.reason is MissReason.PENDING else 0,
            reason=walk.reason,
            sparse=walk.sparse,
            too_slow=walk.too_slow,
        )

    def by_tier(self, levels: Levels) -> dict[str, int]:
        """Count blocks by tier name."""
        if levels.size == 0:
            return {}
        data = levels.tobytes()
        if data.count(data[:1]) == levels.size:
            return {self._levels[data[0] - 1].name: levels.size}
        counts = np.bincount(levels, minlength=len(self._levels) + 1)
        return {level.name: int(n) for level, n in zip(self._levels, counts[1:], strict=False) if n}

    def reason_of(self, space: SpaceInfo, key: bytes, row: int, group: int, now_s: float) -> MissReason:
        """Say why one copy cannot be had."""
        if row >= 0:
            if bool(self._expired(np.array([row], dtype=np.intp), now_s)[0]):
                return MissReason.EXPIRED
            states = [
                int(level.residency.copies[group].state[row])
                for level in self._levels
                if group < len(level.residency.copies)
            ]
            if READY in states:
                return MissReason.TIER_DOWN
            if CopyState.RESERVED in states or CopyState.WRITING in states:
                return MissReason.PENDING
        reason = self._tree.why_gone(space.rows, key, row)
        if reason is MissReason.NEVER_STORED and any(level.unscanned for level in self._levels):
            return MissReason.UNKNOWN
        return reason

    def _reason(self, space: SpaceInfo, keys: list[bytes], rows: Rows, length: int, now_s: float) -> MissReason:
        """Say why a run of `length` is the longest: the first copy missing for all of `keys`."""
        for group, (low, high) in enumerate(space.ranges(len(keys))):
            low = max(low, length) if space.is_full(group) else low
            missing = np.flatnonzero(self.usable(group, rows[low:high], now_s) == 0)
            if missing.size:
                at = low + int(missing[0])
                return self.reason_of(space, keys[at], int(rows[at]), group, now_s)
        return MissReason.UNKNOWN

    def _pending(self, walk: Walk) -> int:
        """Count the blocks right behind the run that are being written."""
        rest = walk.rows[walk.length :]
        busy = np.zeros(rest.size, dtype=np.bool_)
        for level in self._levels:
            for copies in level.residency.copies:
                busy |= np.isin(copies.state[rest], (int(CopyState.RESERVED), int(CopyState.WRITING)))
        return rest.size if busy.all() else int(busy.argmin())

    def _expired(self, rows: Rows, now_s: float) -> npt.NDArray[np.bool_]:
        if not self.has_expiry:
            return np.zeros(rows.size, dtype=np.bool_)
        expires = self._tree.nodes.hinted.expires_s[rows]
        return (expires > 0) & (expires <= now_s)


def _run(flags: npt.NDArray[np.generic]) -> int:
    """Return how many of the flags stand before the first 0."""
    at = flags.tobytes().find(0)
    return flags.size if at < 0 else at


def renumber(levels: Levels, gone: int) -> None:
    """A tier was taken away: what came from it counts as memory's, and the tiers behind it move up."""
    levels[levels == gone] = 1
    levels[levels > gone] -= 1


def restorable(space: SpaceInfo, flags: list[npt.NDArray[np.bool_]]) -> tuple[int, ...]:
    """Return every length for which all groups have what it needs, ascending.

    Args:
        space: whose groups say what a length needs.
        flags: for each group, which blocks it has.
    """
    total = flags[0].size if flags else 0
    lengths = np.arange(1, total + 1)
    good = np.ones(total, dtype=np.bool_)
    assert space.descriptor is not None
    for group, have in zip(space.groups, flags, strict=True):
        back = group.blocks_back(space.descriptor.block_tokens)
        last_hole = np.maximum.accumulate(np.where(have, 0, lengths))  # number of the last block missing up to here
        needed_from = np.zeros_like(lengths) if back is None else np.maximum(lengths - back, 0)
        good &= last_hole <= needed_from
    return tuple(lengths[good].tolist())
