"""T04: where all is pinned the answer is "no room" at once, and after one release the next call works."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import BelowKind, LinkKind
from kvcairn.types import CopyState, Hints, MissReason
from tests.torture.support import MakeRig


def test_store_beside_pinned_blocks(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below, memory_blocks=4)
    blocks = Blocks(rig)
    keys, more = blocks.keys(1, 4), blocks.keys(2, 1)
    blocks.put(keys)
    assert rig.cache.drain(timeout_s=60)
    lease = blocks.space.acquire(keys)
    assert lease.count == 4
    began, busy = time.monotonic(), time.process_time()
    assert blocks.put(more) == [False]
    with blocks.space.reserve(more) as reservation:
        assert list(reservation.keys) == []
        assert reservation.reason == MissReason.NO_ROOM
    assert time.monotonic() - began <= 1.0
    assert time.process_time() - busy <= 0.5
    stats = rig.cache.stats()
    assert stats.tiers["memory"].leased_bytes == stats.tiers["memory"].capacity_bytes
    lease.release()
    assert blocks.put(more) == [True]
    assert blocks.read(more) == 1
    assert_idle(rig)


def test_store_beside_pinned_blocks_over_the_policies(make_rig: MakeRig, hierarchy: dict[str, Any]) -> None:
    rig = make_rig(memory_blocks=4, below_blocks=4, **hierarchy)
    blocks = Blocks(rig)
    keys, more = blocks.keys(1, 4), blocks.keys(2, 1)
    blocks.put(keys)
    assert rig.cache.drain(timeout_s=60)
    lease = blocks.space.acquire(keys)
    began = time.process_time()
    assert blocks.put(more) == [False]
    assert time.process_time() - began <= 0.5
    lease.release()
    assert blocks.put(more) == [True]
    assert blocks.read(more) == 1
    assert_idle(rig)


def test_a_demotion_that_finds_no_room_is_counted(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=8, below_blocks=4, write_policy="back")
    blocks = Blocks(rig)
    held = blocks.keys(1, 4)
    blocks.put(held)
    blocks.put(blocks.keys(2, 4))
    rig.cache.drain()
    rig.write_back()
    below = rig.core.state.levels[1].residency
    below.policy.touch(below.copies[0].state.nonzero()[0], 0.0)
    for copies in below.copies:
        copies.busy[copies.state == int(CopyState.READY)] += 1  # as if a reader hung on each
    for prompt in range(3, 12):
        assert all(blocks.put(blocks.keys(prompt, 2), deadline_s=0))
        rig.step(20)
    assert rig.cache.stats().tiers["disk"].writes_dropped["no_room"] > 0
    for copies in below.copies:
        copies.busy[copies.state == int(CopyState.READY)] -= 1
    rig.clock.advance(10.0)
    assert_idle(rig)


def test_load_beside_pinned_blocks(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk", memory_blocks=4, below_blocks=64)
    blocks = Blocks(rig)
    keys, more = blocks.keys(1, 4), blocks.keys(2, 1)
    for chain in (more, keys):
        assert all(blocks.put(chain))
        assert rig.cache.drain(timeout_s=60)
    assert blocks.space.lookup(more).by_tier == {"disk": 1}
    lease = blocks.space.acquire(keys)
    assert lease.count == 4
    with blocks.space.acquire(more, deadline_s=0.5) as none:
        assert (none.count, none.reason) == (0, MissReason.NO_ROOM)
    with blocks.space.prefetch(more) as job:
        rig.step(100)
        assert job.ready == 0
        lease.release()  # one that could not start is queued, never forgotten
        assert job.wait(5.0)
        assert job.ready == 1
    assert blocks.read(more) == 1
    assert_idle(rig)


def test_a_chain_longer_than_memory(make_rig: MakeRig, link: LinkKind, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    large = Blocks(make_rig(folder=folder, link=link, below="disk", below_blocks=64))
    keys = large.keys(1, 8)
    assert all(large.put(keys))
    large.rig.cache.close()
    blocks = Blocks(make_rig(folder=folder, link=link, below="disk", memory_blocks=4, below_blocks=64))
    assert blocks.space.lookup(keys).by_tier == {"disk": 8}
    with blocks.space.prefetch(keys) as job:
        job.wait(1.0)
        assert job.ready <= 4
    loaded = 0
    while loaded < 8:  # in windows, each leased, copied, released
        with blocks.space.acquire(keys, start=loaded, deadline_s=1.0) as lease:
            assert 1 <= lease.count <= 4
            assert lease.reason == (MissReason.NO_ROOM if lease.count < 8 - loaded else None)
        loaded += blocks.read(keys[: loaded + lease.count], start=loaded)
    assert_idle(blocks.rig)


def test_no_client_pins_more_than_its_share(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below, memory_blocks=16, settings=(("max_lease_fraction", 0.5),))
    blocks = Blocks(rig)
    first, second = blocks.keys(1, 6), blocks.keys(2, 6)
    blocks.put(first)
    blocks.put(second)
    with blocks.space.acquire(first) as lease, blocks.space.acquire(second) as other:
        assert lease.count == 6
        assert other.count == 2
        assert other.reason == MissReason.NO_ROOM
        assert all(blocks.put(blocks.keys(3, 4)))
    assert blocks.read(second[:2]) == 2
    assert_idle(rig)


def test_pins_of_hints_are_capped(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below, memory_blocks=16)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 16)
    assert all(blocks.put(keys))
    assert rig.cache.drain(timeout_s=60)
    assert 0 < blocks.space.hint(keys, Hints(pin=True)) < 16  # pins over the cap are refused with a count
    for prompt in range(2, 6):  # whatever was pinned, new blocks find room
        assert all(blocks.put(blocks.keys(prompt, 2)))
    assert blocks.space.hint(keys, Hints(pin=False)) == 0
    assert_idle(rig)
