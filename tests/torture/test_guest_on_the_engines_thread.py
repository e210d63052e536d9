"""A good guest in the engine's process: little for its garbage collector, and short holds of its interpreter lock."""

from __future__ import annotations

import gc
import sys
import threading
import time

import numpy as np
import pytest

from kvcairn.host import Host
from kvcairn.layout import KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.testing.rig import PAGE_BYTES
from tests.torture.support import MakeRig

MANY_BLOCKS, CHAIN, MOST_OBJECTS = 1_000_000, 1_000, 1_000
BLOCKS, BLOCK_BYTES, ROUNDS, MOST_HELD_S = 4, 16 << 20, 40, 1e-3


@pytest.mark.slow
def test_a_million_blocks_are_nothing_to_collect(make_rig: MakeRig) -> None:
    # No byte of the arena is touched, so its 4 GiB are address space only.
    if (Host().memory_bytes() or 0) < MANY_BLOCKS * PAGE_BYTES * 5 // 4:
        pytest.skip("this machine has too little memory for the settings to be accepted")
    rig = make_rig(memory_blocks=MANY_BLOCKS + CHAIN, settings=(("verify_memory", "never"),))
    space = rig.space()

    def store(chain: int) -> None:
        with space.reserve(space.keys(np.arange(4 * CHAIN, dtype=np.uint32) + chain * 4 * CHAIN)) as reservation:
            assert len(reservation.keys) == CHAIN
            reservation.commit()

    store(0)
    gc.collect()
    before = len(gc.get_objects())
    for chain in range(1, MANY_BLOCKS // CHAIN):
        store(chain)
    gc.collect()
    added = len(gc.get_objects()) - before
    assert rig.cache.stats().tiers["memory"].blocks == MANY_BLOCKS
    assert added < MOST_OBJECTS


class Pulse:
    """A second thread that notes the longest time between two of its turns."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest_s = 0.0

    def __enter__(self) -> Pulse:
        self._interval_s = sys.getswitchinterval()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        sys.setswitchinterval(self._interval_s)

    def _run(self) -> None:
        # Between two steps of Python code a thread gives way when asked to, after this interval (5 ms by default).
        # What remains are calls that do not give way.
        sys.setswitchinterval(5e-5)
        last = time.perf_counter()
        while not self._is_over.is_set():
            time.sleep(0)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            last = now


@pytest.mark.slow
def test_no_call_holds_the_interpreter_for_long(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=2 * BLOCKS * BLOCK_BYTES // PAGE_BYTES, threads=True)
    layout = KVLayout(groups=(LayerGroup.full(16, BLOCK_BYTES // 16 // 64),), dtype="float16")
    space = rig.cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=64))
    engine, target = np.ones(BLOCK_BYTES, dtype=np.uint8), np.ones(BLOCK_BYTES, dtype=np.uint8)

    def copy(keys: list[bytes]) -> None:
        np.copyto(target, engine)

    def store(keys: list[bytes]) -> None:
        with space.reserve(keys) as reservation:
            np.copyto(np.frombuffer(reservation[0], dtype=np.uint8), engine)
            reservation.commit()

    def load(keys: list[bytes]) -> None:
        with space.acquire(keys) as lease:
            np.copyto(target, np.frombuffer(lease[0], dtype=np.uint8))

    def put(keys: list[bytes]) -> None:
        space.forget(keys)
        assert space.put(keys, [engine]) == [True]

    def get(keys: list[bytes]) -> None:
        assert len(space.get(keys)) == 1

    calls = (copy, store, load, put, get)
    held: dict[str, list[float]] = {call.__name__: [] for call in calls}
    for turn in range(ROUNDS):
        keys = space.keys(np.arange(64, dtype=np.uint32) + turn % BLOCKS * 64)
        for call in calls:
            with Pulse() as pulse:
                call(keys)
            held[call.__name__].append(pulse.longest_s)
        space.forget(keys)
    # A call that holds the lock does so in every round; the operating system takes a turn away now and then, on a
    # busy machine from a plain copy too, which never holds it.
    limit_s = max(MOST_HELD_S, 2 * min(held["copy"]))
    assert {name: min(times) for name, times in held.items() if min(times) > limit_s} == {}
