"""Pages on their way between the device and the cache, one thread for each direction."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from kvcairn.adapters.sglang.devicepages import DevicePages, Rows
from kvcairn.adapters.sglang.guard import never_raises
from kvcairn.adapters.sglang.store import PlacedStore
from kvcairn.buffers import Addresses, addresses_of
from kvcairn.memory.lease import Lease


class _Load(NamedTuple):
    """Pages that a request waits for: pinned in memory, to be copied to the device."""

    lease: Lease
    indices: torch.Tensor
    pages: int


class Loads:
    """Copies pinned pages to the device, layer by layer. Called by the scheduler's thread.

    Attributes:
        counter: what the model's layers wait on; a batch that fails is one that did not land.
    """

    def __init__(self, pages: DevicePages, layers: int) -> None:
        """Copy blocks to those pages."""
        self.counter = LayerWiseLoadCounter(layers)
        self._pages, self._layers = pages, layers
        self._queued: dict[str, _Load] = {}
        self._worker = ThreadPoolExecutor(1, "kvcairn-load")

    def queue(self, request: str, lease: Lease, indices: torch.Tensor, pages: int) -> None:
        """Have the next batch bring the first `pages` of a lease, and end the lease."""
        self._queued[request] = _Load(lease, indices, pages)

    def cancel(self, request: str) -> bool:
        """Take a load back that is not under way; return whether there was one."""
        load = self._queued.pop(request, None)
        if load is not None:
            load.lease.release()
        return load is not None

    def start(self) -> int:
        """Start what is queued; return the number of the batch, -1 where nothing is queued."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = int(self.counter.update_producer())
        self._worker.submit(self._bring, index, loads, recorded(self._pages.device))
        return index

    def finish(self, index: int) -> bool:
        """Wait until a batch writes nothing more; return whether all of it landed."""
        return bool(self.counter.finish(index))

    def quiesce(self) -> None:
        """Forget what is queued, and wait for what is under way."""
        for request in list(self._queued):
            self.cancel(request)
        self._worker.submit(int).result()
        self.counter.reset()

    def close(self) -> None:
        """Quiesce, and end the thread."""
        self.quiesce()
        self._worker.shutdown()

    def _bring(self, index: int, loads: list[_Load], ready: list[Any]) -> None:
        try:
            self._copy(index, loads, ready)
        finally:
            self.counter.fail(index, RuntimeError("the load stopped"))  # layers that have landed stay so
            for load in loads:
                load.lease.release()

    @never_raises(lambda *_: None)
    def _copy(self, index: int, loads: list[_Load], ready: list[Any]) -> None:
        for event in ready:
            event.synchronize()
        placed: list[tuple[Rows, Addresses]] = []
        for load in loads:
            blocks = addresses_of(load.lease, 1)[0][: load.pages]
            placed.append((self._pages.rows(load.indices, load.pages), blocks))
        for layer in range(self._layers):
            for rows, blocks in placed:
                self._pages.fill(layer, rows, blocks)
            self.counter.complete(index, layer)


class Offloads:
    """Stores pages of the device, in the order in which they are handed over."""

    def __init__(self, store: PlacedStore, pages: DevicePages) -> None:
        """Store those pages there."""
        self._store, self._pages = store, pages
        self._results: deque[Future[bool]] = deque()
        self._worker = ThreadPoolExecutor(1, "kvcairn-offload")
        self._is_stopping = threading.Event()

    def queue(self, hashes: Sequence[str], indices: torch.Tensor, ready: list[Any], timeout_s: float) -> None:
        """Store pages when the events have come; what is not stored by the deadline is not stored."""
        self._results.append(self._worker.submit(self._save, list(hashes), indices, ready, timeout_s))

    def pass_over(self) -> None:
        """Note pages as stored which another rank stores."""
        done: Future[bool] = Future()
        done.set_result(True)
        self._results.append(done)

    def completed(self) -> int:
        """Return how many have ended of which all earlier ones have ended."""
        running = (number for number, each in enumerate(self._results) if not each.done())
        return next(running, len(self._results))

    def pop(self) -> bool:
        """Return whether all pages of the oldest are stored."""
        return self._results.popleft().result()

    def quiesce(self) -> None:
        """Wait for what is under way, leave out what has not begun, and forget the results."""
        self._is_stopping.set()
        self._worker.submit(int).result()
        self._results.clear()
        self._is_stopping.clear()

    def close(self) -> None:
        """Store what was handed over, and end the thread."""
        self._worker.shutdown()
        self._results.clear()

    @never_raises(lambda *_: False)
    def _save(self, hashes: list[str], indices: torch.Tensor, ready: list[Any], timeout_s: float) -> bool:
        if self._is_stopping.is_set():
            return False
        for event in ready:
            event.synchronize()
        places, kept = self._pages.sources(self._pages.rows(indices, len(hashes)))
        is_stored = all(self._store.store_from(hashes, places, timeout_s))
        del kept  # not before: the places are in it
        return is_stored


def recorded(device: torch.device, *streams: Any) -> list[Any]:
    """Return events of what is under way on the device: on the current stream, and on those."""
    if device.type == "cpu":
        return []
    events = []
    for stream in (torch.get_device_module(device).current_stream(device), *streams):
        events.append(torch.get_device_module(device).Event())
        events[-1].record(stream)
    return events
