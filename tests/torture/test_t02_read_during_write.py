"""T02: a reader sees a miss or all of the right bytes, never a part; a second put is a quiet no-op."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import BelowKind, LinkKind
from tests.torture.support import MakeRig

SLOW_WRITES = Fault(kind=FaultKind.DELAY, ops=frozenset(["write"]), delay_s=0.1)


def test_read_while_it_is_reserved(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    with blocks.space.reserve(keys) as reservation:
        assert list(reservation.keys) == keys
        hit = blocks.space.lookup(keys)
        assert (hit.blocks, hit.pending, hit.reason) == (0, 4, "pending")
        assert blocks.read(keys, deadline_s=0.0) == 0
        with blocks.space.reserve(keys) as second:
            assert list(second.keys) == []
            assert list(second.in_flight) == keys
        for i, key in enumerate(keys):
            blocks.oracle.fill(reservation[i], blocks.descriptor, key)
        reservation.commit()
    assert blocks.read(keys) == 4


def test_one_copy_whoever_puts(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    assert blocks.put(keys) == [True] * 4
    used = rig.cache.stats().tiers["memory"].used_bytes
    assert blocks.put(keys) == [True] * 4
    rig.step()  # the write down may have begun: storing again changes nothing
    assert blocks.put(keys) == [True] * 4
    stats = assert_idle(rig)
    assert stats.tiers["memory"].used_bytes == used
    assert {tier.blocks for tier in stats.tiers.values()} == {4}
    assert blocks.read(keys) == 4


def test_a_key_named_twice_is_stored_once(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    twice = [keys[0], keys[1], keys[1]]
    try:
        done = blocks.put(twice)
    except ValueError:
        done = []
    assert len(done) in (0, 3)
    assert_idle(rig)
    assert blocks.put(keys) == [True, True]
    assert {tier.blocks for tier in assert_idle(rig).tiers.values()} == {2}
    assert blocks.read(keys) == 2


@pytest.mark.slow
def test_readers_and_writers_at_once(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk", threads=True, memory_blocks=64, below_blocks=256, faults=(SLOW_WRITES,))
    blocks = Blocks(rig)
    prompts = [blocks.keys(prompt, 4) for prompt in range(12)]
    is_done = threading.Event()

    def store() -> None:
        for _ in range(3):
            for keys in prompts:
                blocks.put(keys)

    def poll() -> None:
        while not is_done.wait(0.01):
            for keys in prompts:
                assert blocks.read(keys, deadline_s=0.0) in range(5)

    with ThreadPoolExecutor(3) as pool:
        reader, *writers = [pool.submit(work) for work in (poll, store, store)]
        wait(writers)
        is_done.set()
        for done in (reader, *writers):
            done.result()
    assert_idle(rig)
    assert [blocks.space.lookup(keys).blocks for keys in prompts] == [4] * 12
    assert [blocks.read(keys) for keys in prompts] == [4] * 12
