"""Makes room on one tier: plans which copies leave, and only then lets them go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from kvcairn.core.residency import READY, Residency
from kvcairn.core.spaces import Spaces
from kvcairn.index.arrays import Rows
from kvcairn.types import MissReason

Victim = tuple[int, list[int]]  # row, groups
LOOKED_AT_ONCE = 64  # candidates


class Room:
    """Room on one tier, made when it is asked for."""

    def __init__(self, residency: Residency, spaces: Spaces, evicting: Callable[[int, Rows], None]) -> None:
        """Work on that tier; `evicting(group, rows)` is told of copies before they leave."""
        self._residency, self._spaces, self._evicting = residency, spaces, evicting
        self._passed: dict[int, None] = {}  # candidates met that may not go, in the order in which they were met

    def make(self, slot_bytes: int, count: int) -> int:
        """Evict until `count` slots of that size can be taken, or as many as can be; return how many can.

        Copies of the same slot size go first. Where they do not suffice, segments of other sizes are emptied.
        """
        allocator = self._residency.allocator
        have = allocator.obtainable(slot_bytes, count)
        if have >= count:
            return count
        counts = self._residency.counts
        if counts.stuck.get(slot_bytes) == counts.let_go:
            return have  # nothing could leave, and nothing was let go of since
        self._evict(self._same_size(slot_bytes, count - have))
        while (have := allocator.obtainable(slot_bytes, count)) < count:
            victims = self._other_sizes(slot_bytes)
            if not victims:
                break
            self._evict(victims)
        self._defer_held()
        if have < count:
            counts.stuck[slot_bytes] = counts.let_go
        return min(have, count)

    def _defer_held(self) -> None:
        """Have candidates that somebody holds met later; those that wait for children or a write keep their place."""
        rows = np.array(list(self._passed)[::-1], dtype=np.intp)
        held = np.zeros(rows.size, dtype=np.bool_)
        for copies in self._residency.copies:
            held |= copies.pins[rows] > 0
        if held.any():
            self._residency.policy.defer(rows[held])

    def _evict(self, victims: list[Victim]) -> None:
        by_group: dict[int, list[int]] = {}
        for row, groups in victims:
            for group in groups:
                by_group.setdefault(group, []).append(row)
        for group, chosen in by_group.items():
            rows = np.array(chosen, dtype=np.intp)
            self._evicting(group, rows)
            self._residency.drop(group, rows, MissReason.EVICTED)

    def _same_size(self, slot_bytes: int, count: int) -> list[Victim]:
        victims: list[Victim] = []
        for row, groups in self._may_go(slot_bytes):
            victims.append((row, groups))
            count -= sum(self._slot_bytes(row, group) == slot_bytes for group in groups)
            if count <= 0:
                break
        return victims

    def _other_sizes(self, slot_bytes: int) -> list[Victim]:
        """Victims in policy order until enough neighbouring segments would be empty; only those that matter for it."""
        allocator = self._residency.allocator
        segments = allocator.segments.items()
        live = {n: s.slots - s.free_slots for n, s in segments if s.slot_bytes != slot_bytes and s.free_slots < s.slots}
        victims: list[Victim] = []
        for row, groups in self._may_go(None):
            victims.append((row, groups))
            emptied = False
            for group in groups:
                number = self._segment(row, group)
                if number in live:
                    live[number] -= 1
                    emptied = emptied or live[number] == 0
            if emptied:
                target = allocator.room_in({n for n, left in live.items() if left == 0}, slot_bytes)
                if target is not None:
                    return self._needed(victims, target)
        return []

    def _needed(self, victims: list[Victim], target: set[int]) -> list[Victim]:
        """Of the victims (children before parents), those in the target and those below them."""
        parent = self._residency.tree.nodes.parent
        needed: set[int] = set()
        kept: list[Victim] = []
        for row, groups in reversed(victims):
            if int(parent[row]) in needed or any(self._segment(row, group) in target for group in groups):
                needed.add(row)
                kept.append((row, groups))
        return kept[::-1]

    def _may_go(self, slot_bytes: int | None) -> Iterator[Victim]:
        """Yield what may leave, in policy order, as if each one before had left already.

        A node that stands before its children in the order is passed over, and taken up again behind the last of them.
        """
        gone: dict[tuple[int, int], int] = {}  # (group, parent): children that leave
        passed = self._passed
        passed.clear()
        parents = self._residency.tree.nodes.parent
        for candidate in self._candidates():
            row = candidate
            while row >= 0 and (slot_bytes is None or self._has_size(row, slot_bytes)):
                groups = self._groups_to_go(row, gone)
                if not groups:
                    passed[row] = None
                    break
                passed.pop(row, None)
                above = int(parents[row])
                for group in groups:
                    gone[group, above] = gone.get((group, above), 0) + 1
                yield row, groups
                row = above if above in passed else -1

    def _candidates(self) -> Iterator[int]:
        """Yield rows in policy order. Once one was met that may not go, those that somebody holds are passed together.

        A tier that stands still holds the sources of its writes, and they are the first in the order.
        """
        candidates = iter(self._residency.policy.candidates())
        for row in candidates:
            yield row
            if self._passed:
                break
        while chunk := list(islice(candidates, LOOKED_AT_ONCE)):
            rows = np.array(chunk, dtype=np.intp)
            may_go = np.zeros(rows.size, dtype=np.bool_)
            for copies in self._residency.copies:
                may_go |= (copies.state[rows] == READY) & (copies.pins[rows] == 0) & (copies.busy[rows] == 0)
            self._passed.update(dict.fromkeys(rows[~may_go].tolist()))
            yield from rows[may_go].tolist()

    def _groups_to_go(self, row: int, gone: dict[tuple[int, int], int]) -> list[int]:
        """Groups of a node that may leave: all of a leaf that nobody holds, else only those that need no leaf."""
        copies = self._residency.copies
        ready = [g for g, c in enumerate(copies) if c.state[row] == READY]
        free = [g for g in ready if copies[g].pins[row] == 0 and copies[g].busy[row] == 0]
        space = self._spaces[int(self._residency.tree.nodes.space[row])]
        full = [g for g in ready if space.is_full(g)]
        is_leaf = all(copies[g].children[row] == gone.get((g, row), 0) for g in full)
        if is_leaf and len(free) == len(ready):
            return ready
        return [g for g in free if g not in full]

    def _has_size(self, row: int, slot_bytes: int) -> bool:
        copies = self._residency.copies
        return any(c.state[row] == READY and self._slot_bytes(row, g) == slot_bytes for g, c in enumerate(copies))

    def _slot_bytes(self, row: int, group: int) -> int:
        return self._residency.slot_bytes(self._spaces[int(self._residency.tree.nodes.space[row])], group)

    def _segment(self, row: int, group: int) -> int:
        return self._residency.allocator.locate(int(self._residency.copies[group].slot[row]))[0].number
