"""One worker's copies between its pages and the cache. They may take a while, and run on threads of the worker."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcairn.adapters.vllm.metrics import Counts
from kvcairn.adapters.vllm.pages import NO_PAGE, Numbers, PageMemory
from kvcairn.adapters.vllm.steps import Load, Store
from kvcairn.cache import Cache
from kvcairn.errors import KVCairnError
from kvcairn.memory.lease import Lease
from kvcairn.space import Space

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.01


@dataclass
class Loaded:
    """How a load ended.

    Attributes:
        request: its id.
        failed_pages: pages that hold nothing of use, by group.
    """

    request: str
    failed_pages: list[set[int]]

    @property
    def is_whole(self) -> bool:
        """Whether all pages were filled."""
        return not any(self.failed_pages)


class Transfers:
    """Stores and loads. Any thread, several at once.

    An error of the cache makes a store a dropped one, and a load a failed one, which the engine computes.

    Attributes:
        space: of this worker's blocks.
        memories: the pages of each layer group.
        copied_bytes: copied out of the engine's memory since the start.
    """

    def __init__(
        self,
        cache: Cache,
        space: Space,
        memories: Sequence[PageMemory],
        rank: int,
        timeout_s: float,
        counts: Counts,
    ) -> None:
        """Copy between the pages of each layer group and blocks of `space`.

        Args:
            cache: that adopts tickets.
            space: of this worker's blocks.
            memories: the pages of each layer group.
            rank: which ticket of a load is this worker's.
            timeout_s: longest time of a load.
            counts: where blocks and bytes are counted.
        """
        self._cache, self.space, self.memories = cache, space, list(memories)
        self._rank, self._timeout_s = rank, timeout_s
        self._taken: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._counts = counts
        self.copied_bytes = 0

    def mark(self) -> Any:
        """Return a mark in the engine's work on its device, which copies wait for."""
        return self.memories[0].mark()

    def taken(self) -> Counter[str]:
        """Return the requests whose lease was taken over since the last call."""
        taken: Counter[str] = Counter()
        while not self._taken.empty():
            taken[self._taken.get()] += 1
        return taken

    def store(self, store: Store, mark: Any) -> None:
        """Copy blocks out of pages."""
        try:
            stored = self._store_blocks(store, mark)
        except KVCairnError as error:
            logger.warning("not stored: %s", error)
            stored = 0
        self._counts.add("stored_blocks", stored)
        self._counts.add("stored_bytes", stored * self.space.block_bytes)
        self.copied_bytes += stored * self.space.block_bytes

    def drop(self, store: Store) -> None:
        """Count a store that is not carried out."""
        self._counts.add("not_stored_blocks", len(store.keys))

    def _store_blocks(self, store: Store, mark: Any) -> int:
        """Copy what is not stored yet; return how many blocks that were."""
        tables = self._tables(store.pages, len(store.keys))
        parts = None
        if len(tables) > 1:  # of a group with a window only the blocks that the engine still had
            whole = [(table != NO_PAGE).all(axis=1) for table in tables]
            parts = [[group for group, flags in enumerate(whole) if flags[block]] for block in range(len(store.keys))]
        with self.space.reserve(store.keys, parts=parts, parent=store.parent) as slots:
            number = {key: block for block, key in enumerate(store.keys)}
            blocks = np.array([number[key] for key in slots.keys], dtype=np.int64)
            for group, (memory, table) in enumerate(zip(self.memories, tables, strict=True)):
                offsets = slots.offsets(group)
                here = np.flatnonzero(offsets >= 0)
                memory.store(slots.arena, offsets[here], table[blocks[here]], mark)
            if blocks.size or slots.reason is None:  # where all is there already, this counts as a sight of it
                slots.commit()
            if slots.reason is not None:
                left = len(store.keys) - blocks.size - len(slots.in_flight)
                self._counts.add("not_stored_blocks", left)
        if store.hints is not None:
            self.space.hint(store.keys, store.hints)
        return int(blocks.size)

    def load(self, load: Load, mark: Any) -> Loaded:
        """Copy blocks into pages, those that are leased first; then, window by window, what has to be brought."""
        until_s = time.monotonic() + self._timeout_s
        tables = self._tables(load.pages, len(load.keys))
        done = 0
        try:
            taken = self._adopt(load)
            lease = self._bring(load.keys, load.parent, until_s) if taken is None else taken
            while True:
                with lease:
                    self._copy_out(lease, tables, done, mark)
                done += lease.count
                if not lease.count or done >= len(load.keys) or len(tables) > 1:
                    break
                lease = self._bring(load.keys[done:], load.keys[done - 1], until_s)
        except KVCairnError as error:
            logger.warning("request %s: computed instead of loaded: %s", load.request, error)
        return self._result(load, tables, min(done, len(load.keys)))

    def _copy_out(self, lease: Lease, tables: list[Numbers], done: int, mark: Any) -> None:
        for group, (memory, table) in enumerate(zip(self.memories, tables, strict=True)):
            offsets = lease.offsets(group)[: len(table) - done]  # more may have come than was asked for
            here = np.flatnonzero(offsets >= 0)
            memory.load(lease.arena, offsets[here], table[done + here], mark)
            table[done + here] = NO_PAGE  # what is left over has not come

    def _result(self, load: Load, tables: list[Numbers], done: int) -> Loaded:
        failed = [set(table[table != NO_PAGE].tolist()) for table in tables]
        self._counts.add("loaded_blocks", done)
        self._counts.add("loaded_bytes", done * self.space.block_bytes)
        self._counts.add("failed_blocks", len(load.keys) - done)
        return Loaded(load.request, failed)

    def _adopt(self, load: Load) -> Lease | None:
        """Return the lease that the scheduler has made for this rank; None where it made none, or it is gone."""
        if not load.tickets:
            return None
        lease = self._cache.adopt(load.tickets[self._rank])
        assert isinstance(lease, Lease)
        self._taken.put(load.request)
        return lease

    def _bring(self, keys: list[bytes], parent: bytes | None, until_s: float) -> Lease:
        """Bring blocks into memory; return a lease of those that came, or of as many as memory holds at once."""
        job = self.space.prefetch(keys, parent=parent)
        while not (job.query() or (job.is_stalled and job.ready)) and time.monotonic() < until_s:
            job.wait(LOOK_AGAIN_S)
        return job.lease(job.ready or None)

    def _tables(self, pages: Sequence[Sequence[int]], blocks: int) -> list[Numbers]:
        """Return page numbers as one table a group, shape (blocks, pages of a block)."""
        return [np.array(part, dtype=np.int64).reshape(blocks, -1) for part in pages]
