"""Moves pages between SGLang's memory and the space of their blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from kvcairn import requests as rq
from kvcairn.adapters.sglang.keys import block_keys
from kvcairn.adapters.sglang.pages import Pages, Places
from kvcairn.cache import Cache
from kvcairn.memory.slots import round_up
from kvcairn.space import Space
from kvcairn.types import UNKNOWN


class WriteBuffer:
    """The cache's memory as a buffer in front of slower tiers: it is filled by half, then written out.

    What memory lets go before a slower tier has it would be lost, and memory lets go of the oldest when it is full.
    """

    def __init__(self, cache: Cache) -> None:
        """Write through that cache."""
        self._cache = cache
        self._half_bytes = next(iter(cache.stats().tiers.values())).capacity_bytes // 2
        self._unwritten_bytes = 0
        self._guard = threading.Lock()

    def blocks(self, block_bytes: int) -> int:
        """Return how many blocks may be stored at once."""
        return max(1, self._half_bytes // round_up(block_bytes))

    def make_room(self, blocks: int, block_bytes: int, timeout_s: float) -> bool:
        """Wait until so many blocks can be stored and nothing is lost; return whether that is so."""
        nbytes = blocks * round_up(block_bytes)
        with self._guard:
            if self._unwritten_bytes and self._unwritten_bytes + nbytes > self._half_bytes:
                if not self._cache.drain(timeout_s=timeout_s):
                    return False
                self._unwritten_bytes = 0
            self._unwritten_bytes += nbytes
            return True


class PlacedStore:
    """Blocks of pages that lie anywhere. Any thread; methods block until their deadline at most.

    Attributes:
        space: where the blocks are.
    """

    def __init__(self, space: Space, buffer: WriteBuffer | None = None) -> None:
        """Move pages to and from that space; what is stored goes through the buffer, if there is one."""
        self.space, self._buffer = space, buffer

    def contains(self, hashes: Sequence[str]) -> int:
        """Return the length of the leading run that can be loaded."""
        return self.space.contains(block_keys(hashes))

    def flags(self, hashes: Sequence[str]) -> list[bool]:
        """Return for each page whether it can be loaded."""
        frame = self.space.frame
        reply: rq.Flags = frame.link.call(rq.Readable(frame.space, block_keys(hashes)))
        return reply.flags

    def load_into(self, hashes: Sequence[str], places: Places, timeout_s: float) -> list[bool]:
        """Load pages into any places."""
        job = self.space.load_into(block_keys(hashes), places, timeout_s)
        job.wait()
        return job.ok

    def store_from(self, hashes: Sequence[str], places: Places, timeout_s: float) -> list[bool]:
        """Store pages from any places."""
        until_s = time.monotonic() + timeout_s
        keys, ok = block_keys(hashes), self.flags(hashes)
        addresses, sizes = places
        self.space.touch([key for key, is_there in zip(keys, ok, strict=True) if is_there])
        buffer, nbytes = self._buffer, self.space.block_bytes
        for begin, end in _runs(ok, buffer.blocks(nbytes) if buffer else max(1, len(ok))):
            left_s = max(0.0, until_s - time.monotonic())
            if buffer and not buffer.make_room(end - begin, nbytes, left_s):
                break
            left_s = max(0.0, until_s - time.monotonic())
            job = self.space.store_from(keys[begin:end], (addresses[begin:end], sizes[begin:end]), left_s, UNKNOWN)
            job.wait()  # the buffers belong to the job
            ok[begin:end] = job.ok
        return ok


class PoolStore(PlacedStore):
    """The pages of one host pool and their blocks.

    Attributes:
        pages: where the pool's pages lie.
    """

    def __init__(self, space: Space, pages: Pages, buffer: WriteBuffer) -> None:
        """Move pages between the two."""
        super().__init__(space, buffer)
        self.pages = pages

    def load(self, hashes: Sequence[str], indices: torch.Tensor, timeout_s: float) -> list[bool]:
        """Load pages into the pool; what was not there by the deadline is not touched afterwards.

        Raises:
            ValueError: the indices do not fit the pages.
        """
        target = self.pages.targets(indices, len(hashes))
        ok = self.load_into(hashes, target.places, timeout_s)
        target.finish(ok.index(False) if False in ok else len(ok))
        return ok

    def store(self, hashes: Sequence[str], indices: torch.Tensor, timeout_s: float) -> list[bool]:
        """Store pages of the pool that are not there yet; True for those that are there now.

        Raises:
            ValueError: the indices do not fit the pages.
        """
        places, kept = self.pages.sources(indices, len(hashes))
        ok = self.store_from(hashes, places, timeout_s)
        del kept  # not before: the places are in it
        return ok


def _runs(is_there: list[bool], most: int) -> list[tuple[int, int]]:
    """Return (begin, end) of what is missing, cut into runs without a hole and of at most so many."""
    runs: list[tuple[int, int]] = []
    begin = 0
    while False in is_there[begin:]:
        begin = is_there.index(False, begin)
        end = is_there.index(True, begin) if True in is_there[begin:] else len(is_there)
        runs += [(at, min(at + most, end)) for at in range(begin, end, most)]
        begin = end
    return runs
