"""Bench `hierarchy`: what a store into a full memory tier costs while the tier below stands still."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvcairn.bench.figures import Figure, Time, latency, measure, timed
from kvcairn.cache import Cache
from kvcairn.config import Config
from kvcairn.core.core import Core
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.transfer.task import Task
from kvcairn.units import PAGE_BYTES

STORES: Final = 1000  # of one block each, every one of which needs room
MEMORY_BLOCKS: Final = 2048
BLOCK_TOKENS: Final = 16
THREADS: Final = 4  # of a tier
PAIRS: Final = 9
LIMIT: Final = 1.1  # times the cost beside a running tier
_BENCH: Final = "hierarchy"


def run_hierarchy(stores: int = STORES, pairs: int = PAIRS) -> Iterator[Figure]:
    """Yield a figure for each write policy that writes in the background. Blocks for some ten seconds.

    Raises:
        RuntimeError: stores were lost without being counted, so the figure would say nothing.
    """
    for write_policy in ("back", "through"):
        with Stores(write_policy, stores) as running, Stores(write_policy, stores) as stopped:
            stopped.stop()
            measured = measure(stopped.run, running.run, pairs=pairs, by_cpu=True)
            stopped.check_counts()
        yield latency(_BENCH, f"store_tier_stopped_{write_policy}", "ms", LIMIT, measured)


class Stores:
    """A cache with a small full memory tier over a disk tier, and blocks on their way in."""

    def __init__(self, write_policy: str, count: int) -> None:
        """Fill the memory tier."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvcairn-bench-")
        config = Config.from_dict({"tiers": list(_tiers(Path(self._folder.name), write_policy))})
        self._core: Core = open_core(config)
        self._cache = Cache(Direct(self._core), config)
        layout = KVLayout.full(layers=1, kv_heads=1, head_dim=PAGE_BYTES // BLOCK_TOKENS // 4, dtype="bfloat16")
        self._space = self._cache.space(
            SpaceDescriptor(model="bench", weights="none", layout=layout, block_tokens=BLOCK_TOKENS)
        )
        self._count, self._names, self._goes_on = count, itertools.count(), threading.Event()
        for _ in range(-(-2 * MEMORY_BLOCKS // count)):
            self.run()
        self._cache.drain()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the tier go on, close, and remove the folder."""
        self._goes_on.set()
        self._cache.close(drain=False)
        self._folder.cleanup()

    def stop(self) -> None:
        """Keep every thread of the disk tier busy, so that no write begins."""
        for _ in range(2 * THREADS):
            task = Task("disk", "stand still", self._goes_on.wait, lambda value, error: None, lambda: None, 0)
            task.timeout_s = float("inf")
            self._core.state.executor.submit(task)

    def run(self) -> Time:
        """Store new prompts of one block each, and return how long that took on this thread."""
        first = [next(self._names) for _ in range(self._count)]
        chains = [self._space.keys([name] * BLOCK_TOKENS) for name in first]
        return timed(lambda: self._store_all(chains))

    def check_counts(self) -> None:
        """See that whatever is not in memory any more, and not below, was counted."""
        self._goes_on.set()
        self._cache.drain()
        asked = next(self._names)
        stats = self._cache.stats()
        dropped = sum(stats.tiers["disk"].writes_dropped.values())
        kept = sum(self._space.contains(self._space.keys([name] * BLOCK_TOKENS)) for name in range(asked))
        if kept + dropped < asked:
            raise RuntimeError(f"{asked} blocks were stored; {kept} are there and {dropped} are counted as dropped")

    def _store_all(self, chains: list[list[bytes]]) -> None:
        for keys in chains:
            with self._space.reserve(keys) as slots:
                slots.commit()


def _tiers(folder: Path, write_policy: str) -> Iterator[dict[str, object]]:
    yield {"type": "memory", "capacity": MEMORY_BLOCKS * PAGE_BYTES}
    yield {
        "type": "disk",
        "path": str(folder),
        "capacity": 40 * MEMORY_BLOCKS * PAGE_BYTES,
        "write_policy": write_policy,
    }
