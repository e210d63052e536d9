"""The connector's worker side: copies between this worker's pages and the cache, on threads of its own."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcairn.adapters.vllm.metrics import Counts
from kvcairn.adapters.vllm.pages import NO_PAGE, Numbers, PageMemory
from kvcairn.adapters.vllm.steps import Load, StepPlan, Store
from kvcairn.cache import Cache
from kvcairn.errors import KVCairnError
from kvcairn.memory.lease import Lease
from kvcairn.space import Space

logger = logging.getLogger(__name__)

LOAD_THREADS = 4  # a load may wait for a slow tier; others go on meanwhile


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


class Worker:
    """Stores and loads for one worker. The engine's thread calls; copies run beside it.

    Stores go one after the other, so that they take one core. An error of the cache makes a store a dropped one and
    a load a failed one, which the engine computes.
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
        self._cache, self._space, self._memories = cache, space, list(memories)
        self._rank, self._timeout_s = rank, timeout_s
        self._store_thread = ThreadPoolExecutor(1, "kvcairn-store")
        self._load_threads = ThreadPoolExecutor(LOAD_THREADS, "kvcairn-load")
        self._stores: dict[int, Future[None]] = {}
        self._loads: dict[str, tuple[Load, Future[Loaded]]] = {}
        self._counts = counts

    def begin(self, plan: StepPlan) -> None:
        """Start the step's stores, then wait for those whose pages it overwrites."""
        if plan.stores:
            mark = self._memories[0].mark()
            for store in plan.stores:
                self._stores[store.number] = self._store_thread.submit(self._store, store, mark)
        for number in plan.fence:
            if number in self._stores:
                self._stores[number].exception()  # waits; what went wrong is told by `report`

    def start_loads(self, plan: StepPlan) -> None:
        """Start the step's loads."""
        for load in plan.loads:
            mark = self._memories[0].mark()
            self._loads[load.request] = load, self._load_threads.submit(self._load, load, mark)

    def ended_loads(self) -> list[Loaded]:
        """Return the loads that ended since the last call. Every load ends once."""
        ended = []
        for rid, (load, future) in list(self._loads.items()):
            if future.done():
                del self._loads[rid]
                ended.append(self._end_of(load, future))
        return ended

    def report(self) -> Counter[int]:
        """Return the numbers of the stores that ended since the last call."""
        ended = [number for number, future in self._stores.items() if future.done()]
        for number in ended:
            if error := self._stores.pop(number).exception():
                logger.error("a store went wrong", exc_info=error)
        return Counter(ended)

    def close(self) -> None:
        """End: copies that run are waited for, since they touch the engine's memory."""
        self._load_threads.shutdown(cancel_futures=True)
        self._store_thread.shutdown()

    @property
    def open_count(self) -> int:
        """Stores and loads whose end was not told yet."""
        return len(self._stores) + len(self._loads)

    def _store(self, store: Store, mark: Any) -> None:
        try:
            stored = self._store_blocks(store, mark)
        except KVCairnError as error:
            logger.warning("not stored: %s", error)
            stored = 0
        self._counts.add("stored_blocks", stored)
        self._counts.add("stored_bytes", stored * self._space.block_bytes)

    def _store_blocks(self, store: Store, mark: Any) -> int:
        """Copy what is not stored yet; return how many blocks that were."""
        tables = self._tables(store.pages, len(store.keys))
        parts = None
        if len(tables) > 1:  # of a group with a window only the blocks that the engine still had
            whole = [(table != NO_PAGE).all(axis=1) for table in tables]
            parts = [[group for group, flags in enumerate(whole) if flags[block]] for block in range(len(store.keys))]
        with self._space.reserve(store.keys, parts=parts, parent=store.parent) as slots:
            number = {key: block for block, key in enumerate(store.keys)}
            blocks = np.array([number[key] for key in slots.keys], dtype=np.int64)
            for group, (memory, table) in enumerate(zip(self._memories, tables, strict=True)):
                offsets = slots.offsets(group)
                here = np.flatnonzero(offsets >= 0)
                memory.store(self._space.arena, offsets[here], table[blocks[here]], mark)
            if blocks.size or slots.reason is None:  # where all is there already, this counts as a sight of it
                slots.commit()
            if slots.reason is not None:
                left = len(store.keys) - blocks.size - len(slots.in_flight)
                self._counts.add("not_stored_blocks", left)
        if store.hints is not None:
            self._space.hint(store.keys, store.hints)
        return int(blocks.size)

    def _load(self, load: Load, mark: Any) -> Loaded:
        """Copy blocks into pages, those that are leased first; then, window by window, what has to be brought."""
        until_s = time.monotonic() + self._timeout_s
        tables = self._tables(load.pages, len(load.keys))
        done = 0
        try:
            lease: Lease | None = self._adopt(load)
            while done < len(load.keys):
                if lease is None:
                    left_s = max(0.0, until_s - time.monotonic())
                    parent = load.keys[done - 1] if done else load.parent
                    lease = self._space.acquire(load.keys[done:], deadline_s=left_s, parent=parent)
                with lease:
                    self._copy_out(lease, tables, done, mark)
                    count, lease = lease.count, None
                done += count
                if not count or len(tables) > 1:
                    break
        except KVCairnError as error:
            logger.warning("request %s: computed instead of loaded: %s", load.request, error)
        return self._result(load, tables, min(done, len(load.keys)))

    def _copy_out(self, lease: Lease, tables: list[Numbers], done: int, mark: Any) -> None:
        for group, (memory, table) in enumerate(zip(self._memories, tables, strict=True)):
            offsets = lease.offsets(group)[: len(table) - done]  # more may have come than was asked for
            here = np.flatnonzero(offsets >= 0)
            memory.load(self._space.arena, offsets[here], table[done + here], mark)
            table[done + here] = NO_PAGE  # what is left over has not come

    def _result(self, load: Load, tables: list[Numbers], done: int) -> Loaded:
        failed = [set(table[table != NO_PAGE].tolist()) for table in tables]
        self._counts.add("loaded_blocks", done)
        self._counts.add("loaded_bytes", done * self._space.block_bytes)
        self._counts.add("failed_blocks", len(load.keys) - done)
        return Loaded(load.request, failed)

    def _adopt(self, load: Load) -> Lease | None:
        """Return the lease that the scheduler has made for this rank; None where it made none, or it is gone."""
        if not load.tickets:
            return None
        lease = self._cache.adopt(load.tickets[self._rank])
        assert isinstance(lease, Lease)
        return lease

    def _end_of(self, load: Load, future: Future[Loaded]) -> Loaded:
        if error := future.exception():
            logger.error("request %s: computed instead of loaded", load.request, exc_info=error)
            return Loaded(load.request, [set(pages) - {NO_PAGE} for pages in load.pages])
        return future.result()

    def _tables(self, pages: Sequence[Sequence[int]], blocks: int) -> list[Numbers]:
        """Return page numbers as one table a group, shape (blocks, pages of a block)."""
        return [np.array(part, dtype=np.int64).reshape(blocks, -1) for part in pages]
