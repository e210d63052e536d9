"""Memory of the caller, named by address: where `load_into` and `store_from` copy blocks to and from."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvcairn import copying
from kvcairn import requests as rq
from kvcairn.checksum import CHECKSUM_BYTES
from kvcairn.errors import LayoutError
from kvcairn.layout import KVLayout
from kvcairn.memory.lease import Frame, Lease, Reservation
from kvcairn.memory.slots import round_up
from kvcairn.transfer.job import CopyJob
from kvcairn.types import Completion, JobState

Block = bytes | bytearray | memoryview | npt.NDArray[np.generic]
Buffers = tuple[npt.ArrayLike, npt.ArrayLike]
"""(addresses, sizes): arrays of shape (blocks,) or (blocks, regions), in bytes of this process."""

Addresses = npt.NDArray[np.uint64]
READ_BYTES = 16 << 20  # of one read, or one block
READ_BLOCKS = 64
READS = 4  # at a time


def bytes_of(block: Block, number: int, layout: KVLayout) -> memoryview:
    """Return the bytes of a block, without a copy where it lies in one piece.

    Raises:
        LayoutError: it is no bytes, or a float array of another dtype than the layout has: as many bytes of it would
            be other numbers to whoever reads them. States have a dtype of their own, which no layout names.
    """
    if isinstance(block, np.ndarray):
        has_states = any(group.kind == "state" for group in layout.groups)
        if block.dtype.kind == "f" and block.dtype.name != layout.dtype and not has_states:
            raise LayoutError(
                f"block {number} is a {block.dtype.name} array, and the layout has {layout.dtype}: convert it, "
                "or where these are the right bytes give them as .view(np.uint8)"
            )
        return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    try:
        return memoryview(block).cast("B")
    except TypeError as error:
        remedy = ": give tensor.contiguous().view(torch.uint8).cpu().numpy()" if hasattr(block, "data_ptr") else ""
        kind = f"{type(block).__module__}.{type(block).__qualname__}".removeprefix("builtins.")
        reason = f"block {number} is a {kind}, and blocks are bytes, memoryviews or numpy arrays"
        raise LayoutError(f"{reason}{remedy} ({error})") from error


class Regions:
    """The buffers of some blocks. A block's bytes go through its regions in order, group behind group.

    The caller keeps the memory alive; nothing here can check an address.
    """

    def __init__(self, buffers: Buffers, blocks: int, part_bytes: tuple[int, ...]) -> None:
        """Check the sizes.

        Raises:
            LayoutError: the regions of a block do not add up to its bytes.
        """
        if not isinstance(buffers, tuple | list) or len(buffers) != 2:
            found = f"{len(buffers)} of them" if isinstance(buffers, tuple | list) else type(buffers).__name__
            raise LayoutError(f"buffers are two arrays, addresses and sizes; got {found}")
        if any(hasattr(each, "data_ptr") or _holds_tensors(each) for each in buffers):
            raise LayoutError("buffers are addresses and sizes, not tensors: give tensor.data_ptr() and its bytes")
        if blocks and any(np.asarray(each).dtype.kind not in "iu" for each in buffers):
            raise LayoutError("addresses and sizes must be whole numbers: a float cannot hold every address")
        columns = (blocks, -1) if blocks else (0, 1)
        try:
            addresses: npt.NDArray[np.uint64] = np.asarray(buffers[0], dtype=np.uint64).reshape(columns)
            sizes: npt.NDArray[np.int64] = np.asarray(buffers[1], dtype=np.int64).reshape(columns)
        except ValueError as error:
            raise LayoutError(f"buffers of {blocks} blocks have one row for each block: {error}") from error
        wanted = sum(part_bytes)
        if (addresses == 0).any() or (np.asarray(buffers[0]) < 0).any():
            raise LayoutError("an address is 0 or negative")
        if addresses.shape != sizes.shape or (sizes < 0).any() or (sizes.sum(axis=1) != wanted).any():
            raise LayoutError(f"the regions of each of {blocks} blocks must add up to {wanted} bytes")
        self._addresses, self._sizes, self._part_bytes = addresses, sizes, part_bytes

    def copy_in(self, start: int, count: int, bases: Sequence[Addresses]) -> None:
        """Fill the regions of `count` blocks, from number `start` on.

        Args:
            start: number of the first block.
            count: how many.
            bases: for each group the address of each block's part; 0 where there is none: its bytes stay as they are.
        """
        targets, sources, sizes, _ = self._moves(np.arange(start, start + count), bases)
        copying.copy(targets, sources, sizes, copying.THREADS)

    def copy_out(self, numbers: Sequence[int], bases: Sequence[Addresses]) -> None:
        """Copy the regions of those blocks to the parts that begin at `bases`, as in `copy_in`."""
        sources, targets, sizes, _ = self._moves(np.array(numbers, dtype=np.intp), bases)
        copying.copy(targets, sources, sizes, copying.THREADS)

    def copy_out_hashed(self, numbers: Sequence[int], bases: Sequence[Addresses]) -> list[list[bytes]]:
        """Do the same, and return for each group the checksum of each block's part; empty where there is none."""
        sources, targets, sizes, counts = self._moves(np.array(numbers, dtype=np.intp), bases)
        digests = copying.copy_hashed(targets, sources, sizes, copying.THREADS, counts)
        sums = [digests[begin : begin + CHECKSUM_BYTES] for begin in range(0, len(digests), CHECKSUM_BYTES)]
        groups = [sums[begin : begin + len(numbers)] for begin in range(0, len(sums), max(1, len(numbers)))]
        return [
            [digest if address else b"" for digest, address in zip(group, base.tolist(), strict=True)]
            for group, base in zip(groups, bases, strict=True)
        ]

    def _moves(
        self, numbers: npt.NDArray[np.intp], bases: Sequence[Addresses]
    ) -> tuple[Addresses, Addresses, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return addresses in the regions, addresses in the parts, and sizes, of all pieces that lie in one of each.

        They are in the order of groups and blocks; the fourth array says how many pieces each part has.
        """
        addresses, sizes = self._addresses[numbers], self._sizes[numbers]
        ends = np.cumsum(sizes, axis=1)
        begins = ends - sizes
        regions, parts, pieces, counts = [], [], [], []
        low = 0
        for nbytes, base in zip(self._part_bytes, bases, strict=True):
            first, last = np.maximum(begins, low), np.minimum(ends, low + nbytes)
            there = (first < last) & (base != 0)[:, None]
            regions.append((addresses + (first - begins).astype(np.uint64))[there])
            parts.append((base[:, None] + (first - low).astype(np.uint64))[there])
            pieces.append((last - first)[there])
            counts.append(there.sum(axis=1, dtype=np.int64))
            low += nbytes
        return np.concatenate(regions), np.concatenate(parts), np.concatenate(pieces), np.concatenate(counts)


def _holds_tensors(numbers: npt.ArrayLike) -> bool:
    return isinstance(numbers, list | tuple) and any(hasattr(each, "data_ptr") for each in numbers)


def addresses_of(slots: Lease | Reservation, groups: int) -> list[Addresses]:
    """Return for each group where the part of each block lies; 0 where it has none."""
    begin = copying.address_of(slots.arena)
    offsets = [slots.offsets(group) for group in range(groups)]
    return [np.where(each >= 0, each + begin, 0).astype(np.uint64) for each in offsets]


class StoreFrom:
    """The work of one `store_from`: bytes go from the regions to the slots that `put` reserves, and are published."""

    def __init__(
        self,
        frame: Frame,
        put: Callable[[Callable[[Reservation], None]], list[bool]],
        chain: list[bytes],
        regions: Regions,
    ) -> None:
        """Be ready to store `chain` from `regions`."""
        self._frame, self._put, self._regions = frame, put, regions
        self._numbers = {key: number for number, key in enumerate(chain)}

    def __call__(self, job: CopyJob) -> None:
        """Store what is absent, as far as there is room."""
        job.ok[:] = self._put(self._fill)

    def _fill(self, slots: Reservation) -> None:
        bases = addresses_of(slots, len(self._frame.part_bytes))
        numbers = [self._numbers[key] for key in slots.keys]
        if self._frame.hashes_all:
            slots.commit_hashed(self._regions.copy_out_hashed(numbers, bases))
        else:
            self._regions.copy_out(numbers, bases)
            slots.commit()


class LoadInto:
    """The work of one `load_into`: out of memory what is there, from slower tiers what is not.

    A tier that hangs may write to what it was given until its call returns, however late. So tiers read into memory
    of ours, several calls at a time, and what has come in time is copied from there.
    """

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
        block_bytes = sum(frame.part_bytes)
        self._read_blocks = max(1, min(READ_BLOCKS, READ_BYTES // max(1, block_bytes), -(-len(chain) // READS)))
        self._free: list[Slab] = []

    def __call__(self, job: CopyJob) -> Completion | None:
        """Load until all is there, nothing more can be had, or the deadline.

        Returns the reads that go on behind it, if any.
        """
        done = 0
        late = Late()
        while done < len(self._chain) and not job.is_cancelled:
            here = self._copy_out(done)
            if not here and self._frame.link.reads_into_buffers() and self._frame.link.now() < self._until_s:
                here = self._read_out(job, done, late)
            if not here:
                self._lease(rq.Acquire(self._frame.space, self._chain, done), 0.0).release()  # counts what is missed
                break
            job.ok[done : done + here] = [True] * here
            done += here
        return late if late.reads else None

    def _copy_out(self, start: int) -> int:
        """Copy the run that is in memory, or can be brought there where there is no other way; return its length."""
        link = self._frame.link
        wait_s = 0.0 if link.reads_into_buffers() else max(0.0, self._until_s - link.now())
        request = rq.Acquire(self._frame.space, self._chain, start, None, wait_s, counts_rest=False)
        with self._lease(request, wait_s) as lease:
            if lease.count:
                bases = addresses_of(lease, len(self._frame.part_bytes))
                self._regions.copy_in(start, lease.count, bases)
            return lease.count

    def _read_out(self, job: CopyJob, start: int, late: Late) -> int:
        """Copy the run that lies on slower tiers; return how much of it came in time."""
        link = self._frame.link
        reads: deque[SlabRead] = deque()
        begin = done = start
        end = len(self._chain)
        while True:
            while begin < end and len(reads) < READS and not job.is_cancelled:
                read = self._start(begin)
                reads.append(read)
                begin += read.status.total
                if read.status.total < read.wanted:
                    end = begin  # what follows is in memory, or nowhere
            if not reads:
                return done - start
            if not link.wait(reads[0].query, self._until_s - link.now()):
                break
            read = reads.popleft()
            count = read.status.ready
            self._regions.copy_in(done, count, read.slab.bases(count, self._frame.part_bytes))
            self._free.append(read.slab)
            done += count
            if count < read.status.total:
                end = begin = len(self._chain)  # the others are behind a hole
                break
        for read in reads:
            link.call(rq.ReadCancel(read.status.job))
        late.reads += [read for read in reads if not read.query()]
        return done - start

    def _start(self, begin: int) -> SlabRead:
        """Start to read the next blocks."""
        chain = self._chain[begin : begin + self._read_blocks]
        slab = self._free.pop() if self._free else Slab(self._read_blocks, sum(self._frame.part_bytes))
        request = rq.ReadInto(self._frame.space, chain, 0, None, slab.addresses[: len(chain)])
        return SlabRead(self._frame, self._frame.link.call(request), slab, len(chain))


class Slab:
    """Memory for some whole blocks, each on a page of its own."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        """Map it; the pages come when they are first written."""
        step = round_up(block_bytes)
        self._memory = mmap.mmap(-1, max(1, blocks * step))
        begin = copying.address_of(memoryview(self._memory))
        self.addresses = [begin + number * step for number in range(blocks)]

    def bases(self, count: int, part_bytes: Sequence[int]) -> list[Addresses]:
        """Return for each group where the parts of the first blocks lie."""
        first = np.array(self.addresses[:count], dtype=np.uint64)
        return [first + np.uint64(sum(part_bytes[:group])) for group in range(len(part_bytes))]


class SlabRead:
    """One read into a slab."""

    def __init__(self, frame: Frame, status: rq.JobStatus, slab: Slab, wanted: int) -> None:
        """Follow the read that this status is of."""
        self._link, self.status, self.slab, self.wanted = frame.link, status, slab, wanted

    def query(self) -> bool:
        """Return whether no tier can touch the slab any more."""
        if self.status.state is JobState.LOADING:
            self.status = self._link.call(rq.ReadStatus(self.status.job))
        return self.status.state is not JobState.LOADING


class Late:
    """Reads that nobody waits for any more; their slabs are kept until they have ended."""

    def __init__(self) -> None:
        """None yet."""
        self.reads: list[SlabRead] = []

    def query(self) -> bool:
        """Return whether all have ended."""
        return all(read.query() for read in self.reads)
