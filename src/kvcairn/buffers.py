"""Memory of the caller, named by address: where `load_into` and `store_from` copy blocks to and from."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcairn import requests as rq
from kvcairn.errors import LayoutError
from kvcairn.memory.lease import Frame, Lease
from kvcairn.requests import Region
from kvcairn.transfer.job import CopyJob
from kvcairn.types import Completion, JobState

Buffers = tuple[npt.ArrayLike, npt.ArrayLike]
"""(addresses, sizes): arrays of shape (blocks,) or (blocks, regions), in bytes of this process."""

Bytes = npt.NDArray[np.uint8]
READ_BLOCKS = 64  # of one direct read


class Regions:
    """The buffers of some blocks. A block's bytes go through its regions in order, group behind group.

    The caller keeps the memory alive; nothing here can check an address.
    """

    def __init__(self, buffers: Buffers, blocks: int, part_bytes: tuple[int, ...]) -> None:
        """Check the sizes.

        Raises:
            LayoutError: the regions of a block do not add up to its bytes.
        """
        if blocks and any(np.asarray(each).dtype.kind not in "iu" for each in buffers):
            raise LayoutError("addresses and sizes must be whole numbers: a float cannot hold every address")
        columns = (blocks, -1) if blocks else (0, 1)
        try:
            addresses: npt.NDArray[np.uint64] = np.asarray(buffers[0], dtype=np.uint64).reshape(columns)
            sizes: npt.NDArray[np.int64] = np.asarray(buffers[1], dtype=np.int64).reshape(columns)
        except ValueError as error:
            raise LayoutError(f"buffers of {blocks} blocks have one row for each block: {error}") from error
        wanted = sum(part_bytes)
        if addresses.shape != sizes.shape or (sizes < 0).any() or (sizes.sum(axis=1) != wanted).any():
            raise LayoutError(f"the regions of each of {blocks} blocks must add up to {wanted} bytes")
        self._addresses, self._sizes, self._part_bytes = addresses, sizes, part_bytes

    def rows(self, start: int, end: int) -> list[list[Region]]:
        """Return the regions of blocks [start, end), as requests carry them."""
        pairs = zip(self._addresses[start:end].tolist(), self._sizes[start:end].tolist(), strict=True)
        return [[Region(a, n) for a, n in zip(addresses, sizes, strict=True)] for addresses, sizes in pairs]

    def fill(self, number: int, lease: Lease, block: int) -> None:
        """Copy one leased block out. Bytes of a group that its prefix does not need are left as they are."""
        begin = 0
        for group, nbytes in enumerate(self._part_bytes):
            if lease.has(block, group):
                part, done = lease.part(block, group), 0
                for target in self._views(number, begin, begin + nbytes):
                    copy_bytes(part[done : done + target.size], target.data)
                    done += target.size
            begin += nbytes

    def gather(self, number: int) -> Bytes:
        """Return the bytes of one block in one piece, without a copy where its region is one."""
        views = self._views(number, 0, sum(self._part_bytes))
        return views[0] if len(views) == 1 else np.concatenate(views)

    def _views(self, number: int, begin: int, end: int) -> list[Bytes]:
        """Return the memory that bytes [begin, end) of a block lie in."""
        views, at = [], 0
        for address, nbytes in zip(self._addresses[number].tolist(), self._sizes[number].tolist(), strict=True):
            low, high = max(at, begin), min(at + nbytes, end)
            if low < high:
                views.append(np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(address + low - at)))
            at += nbytes
        return views


class LoadInto:
    """The work of one `load_into`: out of memory what is there, straight from slower tiers what is not."""

    def __init__(
        self,
        frame: Frame,
        lease: Callable[[rq.Acquire, float], Lease],
        chain: list[bytes],
        regions: Regions,
        until_s: float,
    ) -> None:
        """Be ready to load `chain` into `regions`; `lease` acquires."""
        self._frame, self._lease, self._chain, self._regions = frame, lease, chain, regions
        self._until_s = until_s
        self._left: ReadEnd | None = None  # a read that goes on behind the deadline

    def __call__(self, job: CopyJob) -> Completion | None:
        """Load until all is there, nothing more can be had, or the deadline.

        Returns what has to end before the buffers are free, if anything.
        """
        until_s, done = self._until_s, 0
        while done < len(self._chain) and not job.is_cancelled:
            here = self._copy_out(done)
            if not here and self._frame.link.now() < until_s:
                here = self._read_out(done, until_s)
            if not here:
                self._lease(rq.Acquire(self._frame.space, self._chain, done), 0.0).release()  # counts what is missed
                break
            job.ok[done : done + here] = [True] * here
            done += here
        return self._left

    def _copy_out(self, start: int) -> int:
        """Copy the run that is in memory; return its length."""
        with self._lease(rq.Acquire(self._frame.space, self._chain, start, counts_rest=False), 0.0) as lease:
            for block in range(lease.count):
                self._regions.fill(start + block, lease, block)
            return lease.count

    def _read_out(self, start: int, until_s: float) -> int:
        """Have the next blocks, which lie on slower tiers, read straight into the buffers; return how many were."""
        link = self._frame.link
        end = start + READ_BLOCKS
        request = rq.ReadInto(self._frame.space, self._chain[:end], start, None, self._regions.rows(start, end))
        read = ReadEnd(self._frame, link.call(request))
        if not link.wait(read.query, until_s - link.now()):
            link.call(rq.ReadCancel(read.status.job))
        if not read.query():  # a call that runs may write to the buffers until it returns
            self._left = read
            return 0
        return read.status.ready


class ReadEnd:
    """The end of one direct read."""

    def __init__(self, frame: Frame, status: rq.JobStatus) -> None:
        """Wait for the read that this status is of."""
        self._link, self.status = frame.link, status

    def query(self) -> bool:
        """Return whether no tier can touch the buffers any more."""
        if self.status.state is JobState.LOADING:
            self.status = self._link.call(rq.ReadStatus(self.status.job))
        return self.status.state is not JobState.LOADING


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy without holding the GIL, which assignment to a memoryview would."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
