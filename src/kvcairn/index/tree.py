"""The prefix tree over all tiers: one row a block, and a table from key to row for each space.

Rows and keys live in typed arrays, so that the garbage collector has nothing to walk. The tree knows blocks and
their chain; where copies lie is kept in `Copies`, one for each tier and layer group. A row stays while any copy of it
exists or any child refers to it.

Owner thread only, no I/O, never blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcairn.index.arrays import NO_ROWS, Rows, column, grown
from kvcairn.index.copies import Copies
from kvcairn.index.ghosts import Ghosts
from kvcairn.index.hinted import Hinted
from kvcairn.index.table import KeyTable
from kvcairn.types import CopyState, MissReason

ROOT = -1
UNKNOWN_PARENT = -2
_FIRST_ROWS = 1024
FEW = 16  # rows linked at once that are fewer than a 16th of the tree are looked at by themselves
_REASONS = list(MissReason)
_CODE = {reason: code for code, reason in enumerate(_REASONS)}


class SpaceRows:
    """The blocks of one space: its table from key to row."""

    def __init__(self, number: int, space_id: bytes, nodes: Nodes) -> None:
        """Start empty."""
        self.number, self.space_id = number, space_id
        self.rows = KeyTable(lambda: nodes.key)


class Tree:
    """All blocks of all spaces."""

    def __init__(self) -> None:
        """Start empty."""
        self.spaces: list[SpaceRows] = []
        self.ghosts = Ghosts()
        self.nodes = Nodes(_FIRST_ROWS)
        self._copies: list[Copies] = []
        self._free: Rows = np.arange(_FIRST_ROWS - 1, -1, -1, dtype=np.intp)  # a stack
        self._free_rows = _FIRST_ROWS

    def __len__(self) -> int:
        """Number of blocks known, with and without copies."""
        return self.nodes.rows - self._free_rows

    def add_space(self, space_id: bytes) -> SpaceRows:
        """Return the rows of a space, made if need be."""
        for space in self.spaces:
            if space.space_id == space_id:
                return space
        self.spaces.append(SpaceRows(len(self.spaces), space_id, self.nodes))
        return self.spaces[-1]

    def add_copies(self) -> Copies:
        """Return new columns for one tier and layer group, that grow with the tree."""
        self._copies.append(Copies(self.nodes.rows))
        return self._copies[-1]

    def drop_copies(self, copies: Copies) -> None:
        """Let columns go that are empty."""
        self._copies = [c for c in self._copies if c is not copies]

    def find(self, space: SpaceRows, keys: Sequence[bytes]) -> Rows:
        """Return the row of each key, -1 where it is not known."""
        return space.rows.find(keys)

    def ensure(self, space: SpaceRows, keys: Sequence[bytes], parent: int, found: Rows | None = None) -> Rows:
        """Return the row of each key of a chain behind row `parent`, made where it is not known, and link them.

        `parent` may be ROOT or UNKNOWN_PARENT. A row whose parent was unknown is linked as soon as a call knows it.
        `found` is what `find` said of the keys, where since then rows may have left but none was made.
        """
        rows = self.find(space, keys) if found is None else np.where(self.nodes.space[found] < 0, -1, found)
        if rows.size == 0:
            return rows
        missing = (rows < 0).nonzero()[0]
        if missing.size:
            new_keys = list(dict.fromkeys(keys[i] for i in missing.tolist()))
            fresh = self._new(space, new_keys)
            if len(new_keys) == missing.size:
                rows[missing] = fresh
            else:  # a key stands there twice
                rows = self.find(space, keys)
        self._link(rows, parent)
        return rows

    def adopt(self, space: SpaceRows, keys: Sequence[bytes], parents: Sequence[bytes | None]) -> None:
        """Make rows for blocks that are not one chain; a parent that is not known yet is made as well."""
        known = set(keys)
        above = [key for key in dict.fromkeys(parents) if key is not None and key not in known]
        for chosen in (list(keys), above):
            missing = [key for key, row in zip(chosen, self.find(space, chosen).tolist(), strict=True) if row < 0]
            if missing:
                self._new(space, missing)
        linked = [i for i, parent in enumerate(parents) if parent is not None and parent != keys[i]]
        rows = self.find(space, keys)[linked]
        above_rows = self.find(space, [parents[i] or b"" for i in linked])
        is_loose = self.nodes.parent[rows] == UNKNOWN_PARENT
        self._attach_all(rows[is_loose], above_rows[is_loose])

    def by_recency(self, rows: Rows, used: npt.NDArray[np.int64]) -> Rows:
        """Return rows in the order in which a policy takes them up: the most recent first, each behind its parent.

        `used` says when each was used, on any scale above zero; a row counts as used when anything below it was.
        Rows given twice are returned once.
        """
        above = self._parents()
        depth, far = (above >= 0).astype(np.int64), above
        while (far >= 0).any():  # twice as far up with every turn
            depth += depth[far]
            far = far[far]
        latest = np.zeros(above.size, dtype=np.int64)
        np.maximum.at(latest, rows, used)
        is_given = np.zeros(above.size, dtype=np.bool_)
        is_given[rows] = True
        rows = np.flatnonzero(is_given)
        by_depth = rows[np.argsort(-depth[rows], kind="stable")]
        for level in np.split(by_depth, np.flatnonzero(np.diff(depth[by_depth])) + 1):
            np.maximum.at(latest, above[level], latest[level])
        return rows[np.lexsort((depth[rows], -latest[rows]))]

    def key(self, row: int) -> bytes:
        """Return the key of a row."""
        return bytes(self.nodes.key[row])

    def parent_key(self, row: int) -> bytes | None:
        """Return the key of the parent; None at the root and where it is unknown."""
        parent = int(self.nodes.parent[row])
        return self.key(parent) if parent >= 0 else None

    def space_of(self, row: int) -> SpaceRows:
        """Return the space that a row belongs to."""
        return self.spaces[int(self.nodes.space[row])]

    def why_gone(self, space: SpaceRows, key: bytes, row: int) -> MissReason:
        """Return why a block has no readable copy; `row` is -1 where the tree does not know it any more."""
        reason = _REASONS[int(self.nodes.gone[row])] if row >= 0 else MissReason.NEVER_STORED
        return self.ghosts.recall(space.number, key) if reason is MissReason.NEVER_STORED else reason

    def note_gone(self, rows: Rows, reason: MissReason) -> None:
        """Remember why the last copies of these rows left."""
        self.nodes.gone[rows] = _CODE[reason]

    def prune(self, rows: Rows) -> None:
        """Forget those rows that have neither copies nor children, and parents that become so."""
        nodes = self.nodes
        for start in rows[(nodes.copies[rows] == 0) & (nodes.children[rows] == 0)].tolist():
            row = start
            while row >= 0 and nodes.copies[row] == 0 and nodes.children[row] == 0 and nodes.space[row] >= 0:
                space, key, parent = self.space_of(row), self.key(row), int(nodes.parent[row])
                reason = _REASONS[int(nodes.gone[row])]
                if reason is not MissReason.NEVER_STORED:
                    self.ghosts.remember(space.number, key, reason)
                space.rows.discard(key, row)
                nodes.clear(row)
                self._free[self._free_rows] = row
                self._free_rows += 1
                if parent >= 0:
                    nodes.children[parent] -= 1
                row = parent

    def ancestors(self, row: int) -> list[int]:
        """Return the known rows above a row, nearest first."""
        found = []
        parent = int(self.nodes.parent[row])
        while parent >= 0:
            found.append(parent)
            parent = int(self.nodes.parent[parent])
        return found

    def check(self) -> None:
        """Raise AssertionError where the tree is not one."""
        nodes = self.nodes
        used = np.flatnonzero(nodes.space[:-1] >= 0)
        assert used.size == len(self) == sum(len(s.rows) for s in self.spaces)
        parents = nodes.parent[used]
        counts = np.bincount(parents[parents >= 0], minlength=nodes.rows + 1)
        assert (counts[used] == nodes.children[used]).all(), "children counts are off"
        for space in self.spaces:
            rows = space.rows.rows()
            assert (nodes.space[rows] == space.number).all()
            assert (self.find(space, [self.key(row) for row in rows.tolist()]) == rows).all()

    def _new(self, space: SpaceRows, keys: list[bytes]) -> Rows:
        if len(keys) > self._free_rows:
            self._grow(len(keys) - self._free_rows)
        rows = self._free[self._free_rows - len(keys) : self._free_rows][::-1].copy()
        self._free_rows -= len(keys)
        self.nodes.start(rows, space.number, keys)
        space.rows.add(keys, rows)
        return rows

    def _grow(self, at_least: int) -> None:
        before = self.nodes.rows
        rows = max(before + at_least, before * 5 // 4)
        self.nodes.grow(rows)
        for copies in self._copies:
            copies.grow(rows)
        free = np.empty(rows, dtype=np.intp)
        free[: rows - before] = np.arange(rows - 1, before - 1, -1)
        free[rows - before : rows - before + self._free_rows] = self._free[: self._free_rows]
        self._free, self._free_rows = free, self._free_rows + rows - before

    def _link(self, rows: Rows, parent: int) -> None:
        nodes = self.nodes
        parents = np.empty_like(rows)
        parents[0], parents[1:] = parent, rows[:-1]
        loose = (nodes.parent[rows] == UNKNOWN_PARENT) & (parents != UNKNOWN_PARENT) & (parents != rows)
        if not loose.any():
            return
        bare = loose & (nodes.copies[rows] == 0) & (nodes.children[rows] == 0)
        if (rows == parent).any() or len(set(rows.tolist())) < rows.size:
            bare[:] = False  # no chain: one by one, each looked at for a ring
        nodes.parent[rows[bare]] = parents[bare]
        nodes.children[parents[bare & (parents >= 0)]] += 1
        for at in (loose & ~bare).nonzero()[0].tolist():
            if nodes.parent[rows[at]] == UNKNOWN_PARENT:
                self._attach(int(rows[at]), int(parents[at]))

    def _parents(self) -> Rows:
        """Return the parent of each row; -1, which stands for no row and has no parent, where there is none known."""
        above: Rows = np.maximum(self.nodes.parent, -1).astype(np.intp)
        above[-1] = -1
        return above

    def _attach_all(self, rows: Rows, above: Rows) -> None:
        """Link rows, each given once, whose parents were unknown; one by one where some would make a ring."""
        nodes = self.nodes
        is_ring = np.zeros(rows.size, dtype=np.bool_)
        is_simple = rows.size < nodes.rows // FEW and self._ends_elsewhere(rows, above)
        nodes.parent[rows] = above
        if not is_simple:
            is_ring = _far_up(self._parents())[rows] >= 0
            nodes.parent[rows[is_ring]] = UNKNOWN_PARENT
        good, top = rows[~is_ring], above[~is_ring]
        np.add.at(nodes.children, top, 1)
        for copies in self._copies:
            np.add.at(copies.children, top, (copies.state[good] == CopyState.READY).astype(copies.children.dtype))
        for row, parent in zip(rows[is_ring].tolist(), above[is_ring].tolist(), strict=True):
            self._attach(row, parent)

    def _ends_elsewhere(self, rows: Rows, above: Rows) -> bool:
        """Whether rows without a parent can be linked without a look at the whole tree.

        That is so where every way up leaves the rows, and from there on ends at none of them.
        """
        if rows.size == 0:
            return True
        order = np.argsort(rows)
        place = order[np.minimum(np.searchsorted(rows[order], above), rows.size - 1)]
        inner = np.append(np.where(rows[place] == above, place, -1), -1)
        if (_far_up(inner) >= 0).any():
            return False
        at, ends = np.unique(above[inner[:-1] < 0]), [NO_ROWS]
        while at.size:
            up = self.nodes.parent[at]
            ends.append(at[up == UNKNOWN_PARENT])
            at = up[up >= 0].astype(np.intp)
        return not np.isin(np.concatenate(ends), rows).any()

    def _attach(self, row: int, above: int) -> None:
        """Link a floating segment under its parent, on every tier where it has copies."""
        if above >= 0 and row in self.ancestors(above):
            return  # keys that are no chain must not make a ring
        self.nodes.parent[row] = above
        if above >= 0:
            self.nodes.children[above] += 1
            for copies in self._copies:
                copies.children[above] += int(copies.state[row] == CopyState.READY)


def _far_up(above: Rows) -> Rows:
    """Follow parents (-1: none, and the last element is -1) up to the end: -1, or anything else inside of a ring."""
    far = above
    for _ in range(above.size.bit_length()):
        if not (far >= 0).any():
            break
        far = far[far]
    return far


class Nodes:
    """Columns of the tree, one element a row."""

    def __init__(self, rows: int) -> None:
        """Make `rows` free rows."""
        self.rows = rows
        self.parent = column("i4", rows, UNKNOWN_PARENT)
        self.children = column("i4", rows)
        self.space = column("i4", rows, -1)  # -1: the row is free
        self.copies = column("u1", rows)  # copies on all tiers, in any state
        self.gone = column("u1", rows)  # why the last copy left, as a code
        self.serial = column("u4", rows)  # grows when a row is used again
        self.sights = column("u1", rows)  # how often it was seen, where a write policy asks for it
        self.hinted = Hinted(rows)
        self.key = np.zeros((rows + 1, 32), dtype=np.uint8)

    def grow(self, rows: int) -> None:
        """Add free rows."""
        self.rows = rows
        self.parent, self.children = grown(self.parent, rows, UNKNOWN_PARENT), grown(self.children, rows)
        self.space, self.copies = grown(self.space, rows, -1), grown(self.copies, rows)
        self.gone, self.serial = grown(self.gone, rows), grown(self.serial, rows)
        self.sights = grown(self.sights, rows)
        self.key = grown(self.key, rows)
        self.hinted.grow(rows)

    def start(self, rows: Rows, space: int, keys: list[bytes]) -> None:
        """Give free rows to new blocks, parent unknown."""
        self.space[rows] = space
        self.gone[rows] = _CODE[MissReason.NEVER_STORED]
        self.serial[rows] += 1
        self.sights[rows] = 0
        self.key[rows] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 32)

    def clear(self, row: int) -> None:
        """Make a row free."""
        self.space[row] = -1
        self.parent[row] = UNKNOWN_PARENT
        self.hinted.clear(row)


__all__ = ["NO_ROWS", "ROOT", "UNKNOWN_PARENT", "Nodes", "Rows", "SpaceRows", "Tree"]
