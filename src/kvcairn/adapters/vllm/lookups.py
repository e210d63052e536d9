"""How much of a request can be loaded: asked at arrival, brought into memory, leased when its pages are there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcairn.adapters.vllm.chain import Chain
from kvcairn.adapters.vllm.controls import Controls
from kvcairn.adapters.vllm.handover import Handover
from kvcairn.adapters.vllm.steps import Load, Pages
from kvcairn.config import PrefetchOptions
from kvcairn.errors import KVCairnError
from kvcairn.memory.lease import Lease
from kvcairn.ranks import lookup_all
from kvcairn.space import Space
from kvcairn.transfer.job import Job
from kvcairn.types import Hit, JobState

logger = logging.getLogger(__name__)


@dataclass
class Prefetch:
    """Blocks on their way into memory.

    Attributes:
        start: first block wanted.
        found: blocks that could be had when it began, from `start` on.
        by_tier: which tiers they were on then.
        jobs: one for each rank.
        until_s: when a request waits no longer; None: until all is there.
    """

    start: int
    found: int
    by_tier: dict[str, int]
    jobs: list[Job]
    until_s: float | None

    def is_waited_for(self, now_s: float) -> bool:
        """Whether a request should ask again later."""
        if all(job.query() or job.is_stalled for job in self.jobs):
            return False
        return self.until_s is None or now_s < self.until_s

    @property
    def count(self) -> int:
        """Blocks that a load will bring: those in memory, and all where memory is too small to hold them at once."""
        if any(job.is_stalled for job in self.jobs):
            return self.found
        return min(job.ready for job in self.jobs)

    def close(self) -> None:
        """Let go."""
        for job in self.jobs:
            job.close()


@dataclass
class Promise:
    """What the engine was told: that blocks [start, end) can be loaded.

    Attributes:
        start: the block that the first token the engine lacks is in.
        end: behind the last one; `start` where there is none.
        wanted: behind the last block that was asked for.
        computed_tokens: tokens that the engine has itself.
        by_tier: where the blocks were when they were found.
    """

    start: int
    end: int
    wanted: int
    computed_tokens: int
    by_tier: dict[str, int]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to load."""
        return self.end <= self.start


class Lookups:
    """The loads of one scheduler. Its thread only; nothing here waits.

    A tier that fails makes blocks misses; no error of the cache reaches the engine.

    Attributes:
        handover: leases that workers have not taken over yet.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        memory: str,
        prefetch: PrefetchOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look in the spaces of all ranks; `memory` is the name of the fastest tier."""
        self._spaces, self._memory, self._options, self._clock = list(spaces), memory, prefetch, clock
        self._block_tokens = spaces[0].descriptor.block_tokens
        self.handover = Handover(len(self._spaces))
        self._prefetches: dict[str, Prefetch] = {}
        self._promises: dict[str, Promise] = {}
        self._by_tier: dict[str, dict[str, int]] = {}  # of the last promise that was taken
        self._failed: set[str] = set()

    def arrive(self, chain: Chain, computed_tokens: Callable[[], int], controls: Controls) -> None:
        """A request came: begin to bring what lies on slower tiers, behind what the engine has itself."""
        try:
            hit = lookup_all(self._spaces, chain.keys)
            if self._is_here(hit):
                return
            tokens = computed_tokens()
            self._look(chain, tokens // self._block_tokens, self._wanted(chain, tokens, controls))
        except KVCairnError as error:
            logger.warning("request %s: nothing is prefetched: %s", chain.request.request_id, error)

    def match(self, chain: Chain, computed_tokens: int, controls: Controls) -> int | None:
        """Return how many tokens behind `computed_tokens` can be loaded; None: ask again."""
        rid, start = chain.request.request_id, computed_tokens // self._block_tokens
        wanted = self._wanted(chain, computed_tokens, controls)
        found = (0, {}) if rid in self._failed or wanted <= start else self._match(chain, start, wanted)
        if found is None:
            return None
        count, by_tier = found
        end = start + count
        tokens = max(0, end * self._block_tokens - computed_tokens)
        self._promises[rid] = Promise(start, end if tokens else start, wanted, computed_tokens, by_tier)
        return tokens

    def promised(self, rid: str) -> Promise | None:
        """Return what was said last about a request."""
        return self._promises.get(rid)

    def load(self, chain: Chain, pages: Callable[[int, int], Pages]) -> Load:
        """The engine took the promise and has pages: lease what is in memory.

        Args:
            chain: of the request.
            pages: gives the pages of blocks [start, end).
        """
        rid = chain.request.request_id
        promise, prefetch = self._promises.pop(rid), self._prefetches.pop(rid, None)
        self._by_tier[rid] = promise.by_tier
        start = promise.start if prefetch is None else prefetch.start
        try:
            if prefetch is None:
                leases = self._acquire(chain.keys[: promise.wanted], start)
            else:
                leases = [job.lease(job.ready if job.is_stalled else None) for job in prefetch.jobs]
            tickets = self.handover.give(rid, leases)
        except KVCairnError as error:
            logger.warning("request %s: computed instead of loaded: %s", rid, error)
            tickets = []
        parent = chain.keys[start - 1] if start else None
        return Load(rid, parent, chain.keys[start : promise.end], pages(start, promise.end), tickets)

    def miss(self, chain: Chain) -> None:
        """The engine computes what it was told cannot be loaded: that is counted, with the reason."""
        promise = self._promises.get(chain.request.request_id)
        self.decline(chain.request.request_id)
        if promise is None or promise.start >= promise.wanted:
            return
        try:
            for lease in self._acquire(chain.keys[: promise.wanted], promise.start):
                lease.release()
        except KVCairnError as error:
            logger.warning("request %s: a miss is not counted: %s", chain.request.request_id, error)

    def decline(self, rid: str) -> None:
        """The engine does not want what was promised."""
        self._promises.pop(rid, None)
        if prefetch := self._prefetches.pop(rid, None):
            prefetch.close()

    def fail(self, rid: str) -> None:
        """A load did not bring everything: what failed once is not tried again for the same request."""
        if rid in self._by_tier:
            self._failed.add(rid)

    def sources(self, rid: str, tokens: int) -> dict[str, int]:
        """Split tokens that were just taken by the tier that had them, the fastest first."""
        found: dict[str, int] = {}
        for tier, blocks in self._by_tier.get(rid, {}).items():
            found[tier] = min(blocks * self._block_tokens, tokens - sum(found.values()))
        return {tier: count for tier, count in found.items() if count}

    def forget(self, rid: str) -> None:
        """The request is over; a load that runs goes on until its workers are done."""
        self._failed.discard(rid)
        self._by_tier.pop(rid, None)
        self.decline(rid)

    def close(self) -> None:
        """Let go of everything."""
        for prefetch in self._prefetches.values():
            prefetch.close()
        self.handover.close()

    @property
    def open_count(self) -> int:
        """Prefetches and leases that are open."""
        return len(self._prefetches) + len(self.handover)

    def _acquire(self, keys: list[bytes], start: int) -> list[Lease]:
        """Lease what is in memory now; what is not is counted as missed."""
        return [space.acquire(keys, start, deadline_s=0.0) for space in self._spaces]

    def _wanted(self, chain: Chain, computed_tokens: int, controls: Controls) -> int:
        """Return how many blocks of the whole prompt may be loaded, as its controls say."""
        blocks = len(chain.extend())
        if controls.max_load_tokens is None:
            return blocks
        return min(blocks, (computed_tokens + controls.max_load_tokens) // self._block_tokens)

    def _match(self, chain: Chain, start: int, wanted: int) -> tuple[int, dict[str, int]] | None:
        """Return how many blocks from `start` on can be loaded, and from where; None: ask again."""
        try:
            return self._look(chain, start, wanted)
        except KVCairnError as error:
            logger.warning("request %s: computed instead of loaded: %s", chain.request.request_id, error)
            self._prefetches.pop(chain.request.request_id, None)
            return 0, {}

    def _look(self, chain: Chain, start: int, wanted: int) -> tuple[int, dict[str, int]] | None:
        rid, keys = chain.request.request_id, chain.keys[:wanted]
        if start >= wanted:
            return 0, {}
        prefetch = self._prefetches.get(rid)
        if prefetch is not None and prefetch.start > start:  # pages that the engine had are gone
            self._prefetches.pop(rid).close()
            prefetch = None
        if prefetch is None:
            hit = lookup_all(self._spaces, keys, start)
            if self._is_here(hit):
                return hit.blocks, hit.by_tier
            prefetch = self._begin(rid, keys, start, hit.blocks, dict(hit.by_tier))
        if prefetch.is_waited_for(self._clock()):
            return None
        if any(job.state is JobState.CANCELLED for job in prefetch.jobs):  # unclaimed for too long
            self._prefetches.pop(rid).close()
            return self._look(chain, start, wanted)
        return max(0, prefetch.start + prefetch.count - start), prefetch.by_tier

    def _is_here(self, hit: Hit) -> bool:
        """Whether all that can be had is in memory now."""
        return set(hit.by_tier) <= {self._memory} and not hit.pending

    def _begin(self, rid: str, keys: list[bytes], start: int, found: int, by_tier: dict[str, int]) -> Prefetch:
        jobs: list[Job] = []
        for space in self._spaces:
            jobs.append(space.prefetch(keys, start))
        wait_s = self._options.wait_s(None, (len(keys) - start) * self._block_tokens)
        until_s = None if wait_s is None else self._clock() + wait_s
        self._prefetches[rid] = Prefetch(start, found, by_tier, jobs, until_s)
        return self._prefetches[rid]
