"""What has been promised to requests: pages pinned in memory from the lookup until the load, or the next lookup."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvcairn.adapters.sglang.keys import block_keys
from kvcairn.memory.lease import Lease
from kvcairn.space import Space
from kvcairn.types import UNKNOWN

MOST = 64  # SGLang looks again for a request before it loads, so an older promise is hardly ever asked for


class _Promise(NamedTuple):
    keys: list[bytes]
    lease: Lease


class Promises:
    """Owns a lease for each request that was told of a hit. Used by the scheduler's thread alone.

    Nothing here depends on the time, so that all ranks, which are asked the same, keep the same promises.
    """

    def __init__(self, space: Space, wait_s: float) -> None:
        """Promise blocks of that space; a lookup waits up to `wait_s` for slower tiers, never for memory."""
        self._space, self._wait_s = space, wait_s
        self._open: OrderedDict[str, _Promise] = OrderedDict()

    def make(self, request: str, hashes: Sequence[str]) -> int:
        """Pin the leading run of those pages that is in memory in time; return its length."""
        keys = block_keys(hashes)
        kept = self._open.get(request)
        if kept is not None and kept.keys == keys and kept.lease.count == len(keys):
            return kept.lease.count
        self.drop(request)
        lease = self._lease(keys)
        if not lease.count:
            lease.release()
            return 0
        self._open[request] = _Promise(keys, lease)
        if len(self._open) > MOST:
            self.drop(next(iter(self._open)))
        return lease.count

    def take(self, request: str, hashes: Sequence[str]) -> Lease | None:
        """Hand over the lease of exactly those pages; None where not all of them are in memory."""
        keys = block_keys(hashes)
        promise = self._open.pop(request, None)
        if promise is not None and promise.keys[: len(keys)] == keys and promise.lease.count >= len(keys):
            return promise.lease
        if promise is not None:
            promise.lease.release()
        lease = self._space.acquire(keys, deadline_s=0, parent=UNKNOWN)
        if lease.count == len(keys):
            return lease
        lease.release()
        return None

    def drop(self, request: str) -> None:
        """Let go of what was promised to a request."""
        promise = self._open.pop(request, None)
        if promise is not None:
            promise.lease.release()

    def drop_all(self) -> None:
        """Let go of all."""
        while self._open:
            self.drop(next(iter(self._open)))

    def _lease(self, keys: list[bytes]) -> Lease:
        lease = self._space.acquire(keys, deadline_s=self._wait_s, parent=UNKNOWN)
        if lease.count == len(keys) or not self._open or self._space.contains(keys) <= lease.count:
            return lease
        lease.release()
        self.drop_all()  # requests that went away may hold what this one is allowed to pin
        return self._space.acquire(keys, deadline_s=self._wait_s, parent=UNKNOWN)
