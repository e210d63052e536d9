"""Memory of the caller, named by address: where `load_into` and `store_from` copy blocks to and from."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvcairn.errors import LayoutError
from kvcairn.memory.lease import Lease

Buffers = tuple[npt.ArrayLike, npt.ArrayLike]
"""(addresses, sizes): arrays of shape (blocks,) or (blocks, regions), in bytes of this process."""

Bytes = npt.NDArray[np.uint8]


class Regions:
    """The buffers of some blocks. A block's bytes go through its regions in order, group behind group.

    The caller keeps the memory alive; nothing here can check an address.
    """

    def __init__(self, buffers: Buffers, blocks: int, part_bytes: tuple[int, ...]) -> None:
        """Check the sizes.

        Raises:
            LayoutError: the regions of a block do not add up to its bytes.
        """
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

    def fill(self, number: int, lease: Lease, block: int) -> None:
        """Copy one leased block out. Bytes of a group that its prefix does not need are left as they are."""
        begin = 0
        for group, nbytes in enumerate(self._part_bytes):
            if lease.offsets(group)[block] >= 0:
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


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy without holding the GIL, which assignment to a memoryview would."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
