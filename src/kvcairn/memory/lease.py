"""Handles to slots: a lease to read, a reservation to write. Each is a context manager and ends once.

A handle may be used and ended on any thread. Views that it gave out are invalidated with it where nobody else
refers to their memory; a numpy array made from a view must not be used after the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvcairn import copying
from kvcairn.checksum import CHECKSUM_BYTES, checksum
from kvcairn.errors import ClosedError, LayoutError, LeaseError
from kvcairn.requests import Abort, Commit, Leased, Link, Release, Reserved
from kvcairn.types import Completion, MissReason

Offsets = npt.NDArray[np.int64]
SAMPLED = 4  # of the 256 possible first bytes of a key: `sample` verifies one block in 64


class Frame(msgspec.Struct, frozen=True):
    """What handles of one space need to know.

    Attributes:
        link: the way to the core.
        space: number of the space.
        part_bytes: bytes of each group of a block.
        verify: the setting `verify_memory`.
        jobs: handles of open prefetch jobs by number, for `Cache.poll`.
    """

    link: Link
    space: int
    part_bytes: tuple[int, ...]
    verify: str
    jobs: MutableMapping[int, Any]

    @property
    def hashes_all(self) -> bool:
        """Whether every block gets its checksum in the commit."""
        return self.verify == "always" or self.link.has_lower_tiers()

    def is_hashed(self, key: bytes) -> bool:
        """Whether a block gets its checksum in the commit: with a tier below always, else as `verify` says."""
        if self.hashes_all:
            return True
        return self.verify == "sample" and key[0] < SAMPLED


class _Slots:
    """What leases and reservations share: views of slots, and one end."""

    def __init__(self, frame: Frame, offsets: list[list[int]], kind: str, number: int) -> None:
        self._frame, self._offsets, self._kind, self._number = frame, offsets, kind, number
        self._memory = frame.link.memory(number)
        self._views: list[memoryview] = []
        self._guard = threading.Lock()
        self._is_open = True

    def part(self, block: int, group: int = 0) -> memoryview:
        """Return the bytes of one group of one block.

        Raises:
            LeaseError: the handle has ended.
            LayoutError: there is no such group, or the block has no copy of it here.
            IndexError: there is no such block.
        """
        begin = self._begin(block, group)
        view = self._cut(self.arena[begin : begin + self._frame.part_bytes[group]])
        with self._guard:
            self._views.append(view)
        return view

    def has(self, block: int, group: int = 0) -> bool:
        """Return whether a block has a copy of the group here."""
        return self._of(group)[block] >= 0

    def copy(self, block: int, group: int = 0) -> bytes:
        """Return a copy of the bytes of one group of one block; does not hold the GIL meanwhile.

        Raises:
            LeaseError, LayoutError, IndexError: as `part`.
        """
        self._frame.link.check_open()
        return self._memory.read(self._begin(block, group), self._frame.part_bytes[group])

    @property
    def arena(self) -> memoryview:
        """The memory that `offsets` count in, as flat bytes: `space.arena`, until a daemon restarts.

        Raises:
            ClosedError: the cache is closed.
        """
        self._frame.link.check_open()
        return self._memory.view

    def offsets(self, group: int = 0) -> Offsets:
        """Return where each block of a group begins in `arena`, in bytes; -1 where it has no copy here."""
        return np.array(self._of(group), dtype=np.int64)

    def ticket(self) -> bytes:
        """Return a token with which `Cache.adopt`, in another process of the same engine, shares this handle."""
        self._must_be_open()
        self._frame.link.check_open()
        return msgspec.msgpack.encode((self._frame.link.boot_id, self._kind, self._number))

    def _cut(self, view: memoryview) -> memoryview:
        return view

    def _begin(self, block: int, group: int) -> int:
        offsets = self._of(group)
        if not -len(offsets) <= block < len(offsets):
            raise IndexError(f"block {block} of {len(offsets)}")
        if offsets[block] < 0:
            raise LayoutError(f"block {block} has no copy of group {group} here")
        return offsets[block]

    def _of(self, group: int) -> list[int]:
        self._must_be_open()
        if not 0 <= group < len(self._offsets):
            raise LayoutError(f"there is no group {group}; the layout has {len(self._frame.part_bytes)}")
        return self._offsets[group]

    def _only_part(self, block: int) -> memoryview:
        if len(self._frame.part_bytes) != 1:
            raise LayoutError("a block of several layer groups does not lie in one piece: use part(block, group)")
        return self.part(block)

    def _must_be_open(self) -> None:
        if not self._is_open:
            raise LeaseError(f"this {self._kind} has ended")

    def _end(self) -> bool:
        """Mark as ended and take the views back; False where that has been done before."""
        with self._guard:
            was_open, self._is_open = self._is_open, False
            views, self._views = self._views, []
        for view in views:
            try:
                view.release()
            except BufferError:  # an array made from it is still alive
                continue
        return was_open


class Lease(_Slots):
    """Blocks pinned in memory, to be read until `release`.

    Attributes:
        count: number of blocks, from `start` on.
        reason: why there are no more, None if all that were asked for are here.
    """

    def __init__(self, frame: Frame, leased: Leased) -> None:
        """Wrap what `acquire` or a job returned."""
        super().__init__(frame, leased.offsets, "lease", leased.lease)
        self.count: int = leased.count
        self.reason: MissReason | None = leased.reason

    def __len__(self) -> int:
        """Number of blocks."""
        return self.count

    def __getitem__(self, block: int) -> memoryview:
        """Return a read-only view of block `start + block`; layouts of one group only.

        Raises:
            LeaseError, LayoutError, IndexError: as `part`.
        """
        return self._only_part(block)

    def release(self) -> None:
        """End the lease. Idempotent, any thread, never waits."""
        if self._end():
            quietly(lambda: self._frame.link.call(Release(self._number)))

    def release_when(self, done: Completion) -> None:
        """End the lease for this handle now; the slots stay held until `done.query()` is true.

        Raises:
            LeaseError: the lease has ended.
            TypeError: `done` has no `query`; the lease stays open.
        """
        self._must_be_open()
        _must_have_query(done)
        number, link = self._number, self._frame.link
        if self._end():
            link.when(done, lambda: quietly(lambda: link.call(Release(number))))

    def __enter__(self) -> Self:
        """Return the lease."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release."""
        self.release()

    def _cut(self, view: memoryview) -> memoryview:
        return view.toreadonly()


class Reservation(_Slots):
    """Slots to be written, then published by `commit`. Leaving `with` without a commit gives them back.

    Attributes:
        keys: the keys covered, in chain order: those of the call that were not in memory.
        in_flight: keys of the call that another is writing.
        reason: `no_room` where it is shorter than wanted, else None.
        is_final: nothing is covered, and nothing else holds room that could be waited for.
    """

    def __init__(self, frame: Frame, keys: Sequence[bytes], reserved: Reserved) -> None:
        """Wrap what `reserve` returned for `keys`."""
        super().__init__(frame, reserved.offsets, "reservation", reserved.reservation)
        self.keys: list[bytes] = [keys[block] for block in reserved.blocks]
        self.in_flight: list[bytes] = [keys[block] for block in reserved.in_flight]
        self.reason: MissReason | None = reserved.reason
        self.is_final: bool = reserved.is_final

    def __len__(self) -> int:
        """Number of blocks covered."""
        return len(self.keys)

    def __getitem__(self, block: int) -> memoryview:
        """Return a writable view of the slot of `keys[block]`; layouts of one group only.

        Raises:
            LeaseError, LayoutError, IndexError: as `part`.
        """
        return self._only_part(block)

    def commit(self, ok: Sequence[bool] | None = None) -> None:
        """Publish all blocks, or those with `ok[i]`; the others are given back. Never waits for a slower tier.

        Raises:
            LeaseError: the reservation has ended.
            ValueError: `ok` has another length; the reservation stays open.
        """
        self._must_be_open()
        request = self._commit_request(ok)
        if self._end():
            self._frame.link.call(request)

    def commit_blocks(self, blocks: Sequence[memoryview]) -> None:
        """Copy a whole block, its parts one behind the other, over the slots of each key, and publish them all.

        Without the GIL; a checksum is made on the way. The blocks have the size of the space's, which is not checked.

        Raises:
            LeaseError: the reservation has ended.
            ValueError: there is not one block for each key; the reservation stays open.
        """
        self._must_be_open()
        sums = self._copy_in(blocks)
        if self._end():
            self._frame.link.call(Commit(self._number, None, sums))

    def commit_hashed(self, checksums: list[list[bytes]]) -> None:
        """Publish all blocks, whose checksums were made while they were copied.

        Args:
            checksums: for each group that of each key's part; empty where it has none here.

        Raises:
            LeaseError: the reservation has ended.
        """
        self._must_be_open()
        if self._end():
            self._frame.link.call(Commit(self._number, None, checksums))

    def commit_when(self, done: Completion, ok: Sequence[bool] | None = None) -> None:
        """Commit as soon as `done.query()` is true; until then the slots stay reserved, and this handle has ended.

        Raises:
            LeaseError, ValueError: as `commit`.
            TypeError: `done` has no `query`; the reservation stays open.
        """
        self._must_be_open()
        _must_have_query(done)
        link, keys = self._frame.link, list(self.keys)
        self._checked(ok)
        twin = Reservation(
            self._frame, keys, Reserved(self._number, list(range(len(keys))), self._offsets, [], self.reason)
        )
        if self._end():
            link.when(done, lambda: quietly(lambda: twin.commit(ok)))

    def abort(self) -> None:
        """Give all slots back. Idempotent, any thread, never waits."""
        if self._end():
            quietly(lambda: self._frame.link.call(Abort(self._number)))

    def __enter__(self) -> Self:
        """Return the reservation."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort unless committed."""
        self.abort()

    def _commit_request(self, ok: Sequence[bool] | None) -> Commit:
        flags = self._checked(ok)
        wanted = [self._frame.is_hashed(key) and (flags is None or flags[i]) for i, key in enumerate(self.keys)]
        if not any(wanted):
            return Commit(self._number, flags)
        return Commit(self._number, flags, [self._checksums(group, wanted) for group in range(len(self._offsets))])

    def _checked(self, ok: Sequence[bool] | None) -> list[bool] | None:
        flags = None if ok is None else [bool(each) for each in ok]
        if flags is not None and len(flags) != len(self.keys):
            raise ValueError(f"ok has {len(flags)} elements for {len(self.keys)} reserved blocks")
        return flags

    def _copy_in(self, blocks: Sequence[memoryview]) -> list[list[bytes]] | None:
        """Copy blocks to their slots; return their checksums, None where there is none to verify."""
        arena = copying.address_of(self.arena)
        plain: list[tuple[int, int, int]] = []
        hashed: list[tuple[int, int, int]] = []
        places: list[tuple[int, int]] = []
        for at, (key, block) in enumerate(zip(self.keys, blocks, strict=True)):
            source, is_hashed = copying.address_of(block), self._frame.is_hashed(key)
            for group, nbytes in enumerate(self._frame.part_bytes):
                if self._offsets[group][at] >= 0:
                    (hashed if is_hashed else plain).append((arena + self._offsets[group][at], source, nbytes))
                    if is_hashed:
                        places.append((group, at))
                source += nbytes
        copying.copy(*copying.moves(plain), copying.THREADS)
        if not hashed:
            return None
        digests = copying.copy_hashed(*copying.moves(hashed), copying.THREADS)
        sums = [[b""] * len(self.keys) for _ in self._offsets]
        for number, (group, at) in enumerate(places):
            sums[group][at] = digests[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
        return sums

    def _checksums(self, group: int, wanted: list[bool]) -> list[bytes]:
        arena, nbytes = self.arena, self._frame.part_bytes[group]
        return [
            checksum(arena[begin : begin + nbytes]) if want and begin >= 0 else b""
            for begin, want in zip(self._offsets[group], wanted, strict=True)
        ]


def first_damaged(frame: Frame, leased: Leased) -> int | None:
    """Return the first block of a lease whose bytes do not match the checksum made at its commit."""
    if not leased.checksums:
        return None
    arena = frame.link.memory(leased.lease).view
    damaged = [
        block
        for group, sums in enumerate(leased.checksums)
        for block, (begin, expected) in enumerate(zip(leased.offsets[group], sums, strict=True))
        if expected and begin >= 0 and checksum(arena[begin : begin + frame.part_bytes[group]]) != expected
    ]
    return min(damaged, default=None)


def _must_have_query(done: Completion) -> None:
    if not callable(getattr(done, "query", None)):
        raise TypeError(f"expected an event with a query() method, got {done!r}")


def quietly(act: Callable[[], object]) -> None:
    """End something; where the cache was closed meanwhile, that has ended it already."""
    try:
        act()
    except (ClosedError, LeaseError):
        return
