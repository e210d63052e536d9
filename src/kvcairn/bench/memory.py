"""Bench `memory`: blocks of 32 MiB into and out of the memory tier, beside a plain copy of as many bytes."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcairn.bench.figures import ATTEMPTS, PAIRS, Contender, Figure, Time, cost, measure, quartiles, rate, timed
from kvcairn.bench.gil import first_in_line, watching
from kvcairn.bench.pages import PAIRS as PAGE_PAIRS
from kvcairn.bench.pages import TOTAL_BYTES, run_pages
from kvcairn.cache import Cache
from kvcairn.config import Config
from kvcairn.errors import KVCairnError
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.space import Space

BLOCK_TOKENS: Final = 256  # of 128 KiB each, as in a model with 32 layers and 8 heads of 128: 32 MiB
RUN_BLOCKS: Final = 8  # one prompt of 2,048 tokens; 256 MiB, so nothing is found in the processor's cache
TIER_BLOCKS: Final = 2 * RUN_BLOCKS
GIL_BLOCKS: Final = 2  # 64 MiB
GIL_RUNS: Final = 15
IMPORTS: Final = 5
_STEADY_NS: Final = 500_000  # a plain copy must let the other thread run more often than this
_IMPORT: Final = "import time; begin = time.process_time(); import kvcairn; print(time.process_time() - begin)"
_BENCH: Final = "memory"

Bytes = npt.NDArray[np.uint8]


def run_memory(
    block_tokens: int = BLOCK_TOKENS, pairs: int = PAIRS, gil_runs: int = GIL_RUNS, page_bytes: int = TOTAL_BYTES
) -> Iterator[Figure]:
    """Yield the figures of the memory tier, then those of the copy core, as they are measured.

    Blocks for about twenty seconds; takes 850 MiB with blocks of 256 tokens.
    """
    layout = KVLayout.full(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    space_of = SpaceDescriptor(model="bench", weights="none", layout=layout, block_tokens=block_tokens)
    nbytes = layout.part_bytes(0, block_tokens)
    with Cache.open(_config(nbytes)) as cache:
        traffic = Traffic(cache.space(space_of), nbytes)
        traffic.warm_up()
        yield rate(_BENCH, "store", RUN_BLOCKS * nbytes, 0.9, measure(traffic.store, traffic.copy_in, pairs=pairs))
        yield rate(_BENCH, "load", RUN_BLOCKS * nbytes, 0.9, measure(traffic.load(), traffic.copy_out, pairs=pairs))
        yield cost(_BENCH, "store_call", [traffic.store_call() for _ in range(pairs)])
        yield cost(_BENCH, "load_call", [traffic.load_call() for _ in range(pairs)])
        yield _gil_hold(traffic, gil_runs)
    del traffic
    yield _import_cost(IMPORTS)
    yield from run_pages(page_bytes, min(pairs, PAGE_PAIRS))


class Traffic:
    """Blocks on their way in and out, and the plain copies to compare them with. All memory is touched before."""

    def __init__(self, space: Space, nbytes: int) -> None:
        """Make the buffers."""
        self._space = space
        self._engine: Bytes = np.arange(nbytes // 4, dtype=np.uint32).view(np.uint8)
        self._out: Bytes = np.ones(nbytes, dtype=np.uint8)
        self._plain = [np.ones(nbytes, dtype=np.uint8) for _ in range(RUN_BLOCKS)]
        self._names = itertools.count()

    def warm_up(self) -> None:
        """Go through every slot and every buffer more than once."""
        for _ in range(2 * TIER_BLOCKS // RUN_BLOCKS):
            self.store()
            self.copy_in()
            self.copy_out()

    def store(self) -> Time:
        """Reserve, copy, commit a run; blocks that were stored long ago make room."""
        keys = self._new_keys(RUN_BLOCKS)
        return timed(lambda: self._store(keys))

    def load(self) -> Contender:
        """Acquire, copy out, release a run: one of two in turn."""
        runs = [self._new_keys(RUN_BLOCKS) for _ in range(TIER_BLOCKS // RUN_BLOCKS)]
        for keys in runs:
            self._store(keys)
        turn = itertools.cycle(runs)

        def run() -> Time:
            keys = next(turn)
            return timed(lambda: self._load(keys))

        return run

    def store_call(self) -> Time:
        """Reserve and commit one block and copy nothing, right after other bytes have filled the processor's caches."""
        keys = self._new_keys(1)
        np.copyto(self._out, self._engine)
        return timed(lambda: self._space.reserve(keys).commit())

    def load_call(self) -> Time:
        """Acquire and release one block and copy nothing, likewise."""
        keys = self._new_keys(1)
        self._store(keys)
        return timed(lambda: self._space.acquire(keys, deadline_s=0).release())

    def copy_in(self) -> Time:
        """Copy the engine's bytes to as many plain buffers."""
        return timed(lambda: _copy_all(self._plain, [self._engine] * RUN_BLOCKS))

    def copy_out(self) -> Time:
        """Copy as many plain buffers to the engine."""
        return timed(lambda: _copy_all([self._out] * RUN_BLOCKS, self._plain))

    def moves(self) -> dict[str, Callable[[], object]]:
        """Every way in which 64 MiB go in or out, by name. What is returned is kept until the watch has looked."""
        keys = self._new_keys(GIL_BLOCKS)
        self._store(keys)
        return {
            "reserve": lambda: self._store(self._new_keys(GIL_BLOCKS)),
            "acquire": lambda: self._load(keys),
            "put": lambda: self._space.put(self._new_keys(GIL_BLOCKS), [self._engine] * GIL_BLOCKS),
            "get": lambda: self._space.get(keys),
            "plain": lambda: _copy_all(self._plain[:GIL_BLOCKS], [self._engine] * GIL_BLOCKS),
        }

    def _new_keys(self, blocks: int) -> list[bytes]:
        tokens = np.full(blocks * self._space.descriptor.block_tokens, next(self._names))
        return self._space.keys(tokens)

    def _store(self, keys: list[bytes]) -> None:
        with self._space.reserve(keys) as reservation:
            for block in range(len(reservation)):
                np.copyto(_array(reservation[block]), self._engine)
            reservation.commit()

    def _load(self, keys: list[bytes]) -> None:
        with self._space.acquire(keys, deadline_s=0) as lease:
            if lease.count != len(keys):
                raise KVCairnError(f"{len(keys)} blocks were stored, {lease.count} are there: {lease.reason}")
            for block in range(lease.count):
                np.copyto(self._out, _array(lease[block]))


def _gil_hold(traffic: Traffic, runs: int) -> Figure:
    """The longest that another thread had to wait while 64 MiB moved; of the ways to move them the worst.

    A call that does not let go makes a gap in every repetition, a busy host only in some: so the least of the
    repetitions' longest gaps bounds what the calls hold. The same with a plain copy says whether that is so here.
    """
    seen: list[dict[str, int]] = []
    plain_ns = attempt = 0
    while attempt < ATTEMPTS and (not seen or plain_ns > _STEADY_NS):
        attempt += 1
        with first_in_line() if attempt > 1 else contextlib.nullcontext(), watching() as watch:
            moves = traffic.moves()
            seen += [{name: watch.longest_gap_ns(move) for name, move in moves.items()} for _ in range(runs)]
        plain_ns = min(run["plain"] for run in seen)
    gaps = {name: min(run[name] for run in seen) for name in moves if name != "plain"}
    worst = max(gaps.values())
    return Figure(
        bench=_BENCH, name="gil_hold", value=worst / 1e6, unit="ms", reference=plain_ns / 1e6,
        ratio=worst / plain_ns, runs=len(seen), limit=1.0, attempts=attempt, noisy=plain_ns > _STEADY_NS,
    )  # fmt: skip


def _import_cost(runs: int) -> Figure:
    """CPU time of `import kvcairn` in a new interpreter, numpy's share in it, behind one that fills the file cache."""
    times = [float(subprocess.check_output([sys.executable, "-c", _IMPORT])) for _ in range(1 + runs)][1:]
    low, value, high = quartiles(times)
    return Figure(bench=_BENCH, name="import_s", value=value, unit="s", runs=runs, limit=0.3, low=low, high=high)


def _copy_all(targets: list[Bytes], sources: list[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def _array(view: Any) -> Bytes:
    return np.frombuffer(view, dtype=np.uint8)


def _config(nbytes: int) -> Config:
    # One region, as in a large arena, where a region holds tens of blocks; in a small one they would be one block each.
    memory = {"type": "memory", "capacity": TIER_BLOCKS * nbytes, "region": TIER_BLOCKS * nbytes}
    return Config.from_dict({"tiers": [memory]})
