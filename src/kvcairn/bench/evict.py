"""Bench `evict`: what it costs to let 32 blocks go among a million, for every eviction policy."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from kvcairn.bench.figures import Figure, Time, latency, measure, timed
from kvcairn.cache import Cache
from kvcairn.config import BUILT_IN_EVICTIONS, Config, MemoryTierOptions
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.layout import KVLayout, SpaceDescriptor

BLOCKS: Final = 1_000_000
FEW: Final = 10_000
PAIRS: Final = 200
EVICTED: Final = 32
LIMIT: Final = 4.0  # times the cost among few
BLOCK_TOKENS: Final = 16
CHAIN_BLOCKS: Final = 256
SLOT_BYTES: Final = 4096
_BENCH: Final = "evict"
_WARM_UP: Final = 50


def run_evict(
    policies: Sequence[str] = BUILT_IN_EVICTIONS, blocks: int = BLOCKS, few: int = FEW, pairs: int = PAIRS
) -> Iterator[Figure]:
    """Yield a figure for each policy: letting 32 go among `blocks`, beside the same among `few`.

    Blocks for some minutes and takes about 1 GiB. The arena is mapped but never touched.

    Raises:
        RuntimeError: fewer than 32 could be let go, so the figure would say nothing.
    """
    for policy in policies:
        with FullMemory(policy, blocks) as large, FullMemory(policy, few) as small:
            measured = measure(large.run, small.run, pairs=pairs, by_cpu=True)
        yield latency(_BENCH, f"evict_{EVICTED}_{policy}", "us", LIMIT, measured)


class FullMemory:
    """A cache whose memory tier is full, with prompts that are used again and prompts that are not."""

    def __init__(self, policy: str, blocks: int) -> None:
        """Store prompts until there is no slot left, and let some go, so that the policy has seen both."""
        # Not from_dict, which would ask for the memory of an arena that is mapped here but never written.
        memory = MemoryTierOptions(capacity_bytes=blocks * SLOT_BYTES, prefault=False, eviction=policy)
        config = Config(tiers=(memory,), verify_memory="never")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what `lfu` is bad at is not what is measured
            core = open_core(config)
        self._state = core.state
        self._cache = Cache(Direct(core), config)
        layout = KVLayout.full(layers=1, kv_heads=1, head_dim=SLOT_BYTES // BLOCK_TOKENS // 4, dtype="bfloat16")
        self._space = self._cache.space(
            SpaceDescriptor(model="bench", weights="none", layout=layout, block_tokens=BLOCK_TOKENS)
        )
        self._draw, self._names, self._prompts = random.Random(0), itertools.count(), list[list[bytes]]()
        while self._free(CHAIN_BLOCKS) == CHAIN_BLOCKS:
            self._store(CHAIN_BLOCKS)
        self._store(self._free(CHAIN_BLOCKS))
        for _ in range(_WARM_UP):
            self.run()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the cache."""
        self._cache.close(drain=False)

    def run(self) -> Time:
        """Use an old prompt, let 32 blocks go, and return how long that took; then store as many new ones."""
        self._space.acquire(self._draw.choice(self._prompts), deadline_s=0).release()
        room = self._state.memory.room(self._state.spaces)
        time = timed(lambda: room.make(SLOT_BYTES, EVICTED))
        if (free := self._free(EVICTED)) < EVICTED:
            raise RuntimeError(f"{EVICTED} blocks were to be let go, there is room for {free}")
        self._store(EVICTED)
        return time

    def _free(self, most: int) -> int:
        return self._state.memory.residency.allocator.obtainable(SLOT_BYTES, most)

    def _store(self, blocks: int) -> None:
        if blocks:
            keys = self._space.keys([next(self._names)] * (blocks * BLOCK_TOKENS))
            with self._space.reserve(keys) as slots:
                slots.commit()
            self._prompts.append(keys)
