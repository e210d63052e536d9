"""The connector's worker side: copies that run beside the engine, on threads of their own."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from kvcairn.adapters.vllm.pages import NO_PAGE
from kvcairn.adapters.vllm.steps import Load, StepPlan
from kvcairn.adapters.vllm.transfers import Loaded, Transfers

logger = logging.getLogger(__name__)

MOST_WAITING_BLOCKS = 64  # of stores; a step that overwrites their pages waits for all of them
LOAD_THREADS = 4  # a load may wait for a slow tier; others go on meanwhile


class Worker:
    """Stores and loads of one worker. The engine's thread only; waits in `begin` alone, for the pages of the fence.

    Stores go one after the other, so that they take one core. Where they do not keep up new ones are dropped.

    Attributes:
        transfers: what does the copying.
    """

    def __init__(self, transfers: Transfers) -> None:
        """Run these transfers."""
        self.transfers = transfers
        self._store_thread = ThreadPoolExecutor(1, "kvcairn-store")
        self._load_threads = ThreadPoolExecutor(LOAD_THREADS, "kvcairn-load")
        self._stores: dict[int, tuple[int, Future[None]]] = {}  # with the number of blocks
        self._loads: dict[str, tuple[Load, Future[Loaded]]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Start the step's stores, then wait for those whose pages it overwrites."""
        mark = self.transfers.mark() if plan.stores else None
        for store in plan.stores:
            waiting = sum(blocks for blocks, future in self._stores.values() if not future.done())
            if waiting and waiting + len(store.keys) > MOST_WAITING_BLOCKS:
                self.transfers.drop(store)
                future: Future[None] = Future()
                future.set_result(None)
            else:
                future = self._store_thread.submit(self.transfers.store, store, mark)
            self._stores[store.number] = len(store.keys), future
        for number in plan.fence:
            if number in self._stores:
                self._stores[number][1].exception()  # waits; what went wrong is told by `stored`

    def start_loads(self, plan: StepPlan) -> None:
        """Start the step's loads."""
        for load in plan.loads:
            mark = self.transfers.mark()
            self._loads[load.request] = load, self._load_threads.submit(self.transfers.load, load, mark)

    def ended_loads(self) -> list[Loaded]:
        """Return the loads that ended since the last call. Every load ends once."""
        ended = []
        for rid, (load, future) in list(self._loads.items()):
            if future.done():
                del self._loads[rid]
                ended.append(self._end_of(load, future))
        return ended

    def stored(self) -> Counter[int]:
        """Return the numbers of the stores that ended since the last call."""
        ended = [number for number, (_, future) in self._stores.items() if future.done()]
        for number in ended:
            if error := self._stores.pop(number)[1].exception():
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

    def _end_of(self, load: Load, future: Future[Loaded]) -> Loaded:
        if error := future.exception():
            logger.error("request %s: computed instead of loaded", load.request, exc_info=error)
            return Loaded(load.request, [set(pages) - {NO_PAGE} for pages in load.pages])
        return future.result()
