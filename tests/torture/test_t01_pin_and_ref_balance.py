"""T01: after thousands of random requests nothing is pinned, and the whole pool can be filled anew."""

from __future__ import annotations

import random
from typing import Any

from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import BelowKind, LinkKind, Rig
from tests.torture.support import MakeRig

POOL, OPERATIONS = 64, 5_000
Keys = list[bytes]


def store(blocks: Blocks, one: Keys, two: Keys, draw: random.Random) -> None:
    blocks.put(one[: draw.randint(1, 8)])


def look_twice_retrieve_once(blocks: Blocks, one: Keys, two: Keys, draw: random.Random) -> None:
    assert blocks.space.lookup(one) == blocks.space.lookup(one)
    blocks.read(one)


def look_both_retrieve_the_first(blocks: Blocks, one: Keys, two: Keys, draw: random.Random) -> None:
    blocks.space.lookup(one)
    blocks.space.lookup(two)
    blocks.read(one)


def the_device_has_the_first(blocks: Blocks, one: Keys, two: Keys, draw: random.Random) -> None:
    blocks.read(one, start=draw.randint(0, 8))


def never_retrieved(blocks: Blocks, one: Keys, two: Keys, draw: random.Random) -> None:
    blocks.space.lookup(one)


def asynchronous_and_left_alone(blocks: Blocks, one: Keys, two: Keys, draw: random.Random) -> None:
    job = blocks.space.prefetch(one)
    if draw.random() < 0.5:
        job.cancel()
    job.close()


def asynchronous_released_twice(blocks: Blocks, one: Keys, two: Keys, draw: random.Random) -> None:
    with blocks.space.prefetch(one) as job:
        job.wait(1.0)
        lease = job.lease()
    lease.release()
    lease.release()


def reserved_and_given_up_half_the_time(blocks: Blocks, one: Keys, two: Keys, draw: random.Random) -> None:
    with blocks.space.reserve(one) as reservation:
        if draw.random() < 0.5:
            for i, key in enumerate(reservation.keys):
                blocks.oracle.fill(reservation[i], blocks.descriptor, key)
            reservation.commit()


REQUESTS = [
    store, look_twice_retrieve_once, look_both_retrieve_the_first, the_device_has_the_first, never_retrieved,
    asynchronous_and_left_alone, asynchronous_released_twice, reserved_and_given_up_half_the_time,
]  # fmt: skip


def test_pin_and_ref_balance(make_rig: MakeRig, link: LinkKind, below: BelowKind, seed: int) -> None:
    play(make_rig(link=link, below=below, memory_blocks=POOL, below_blocks=2 * POOL), OPERATIONS, seed)


def test_pin_and_ref_balance_over_the_policies(make_rig: MakeRig, hierarchy: dict[str, Any], seed: int) -> None:
    play(make_rig(memory_blocks=POOL, below_blocks=2 * POOL, **hierarchy), OPERATIONS // 5, seed)


def play(rig: Rig, operations: int, seed: int) -> None:
    blocks, draw = Blocks(rig), random.Random(seed)
    prompts = [blocks.keys(prompt, 8) for prompt in range(20)]
    for _ in range(operations):
        draw.choice(REQUESTS)(blocks, draw.choice(prompts), draw.choice(prompts), draw)
        stats = rig.cache.stats()
        assert min(tier.leased_bytes for tier in stats.tiers.values()) >= 0
    assert_idle(rig)
    fresh = [blocks.keys(100 + prompt, 8) for prompt in range(POOL // 8)]
    for keys in fresh:
        assert all(blocks.put(keys))
        assert rig.cache.drain(timeout_s=60)  # a block that is being written stays until it is
    assert [blocks.space.lookup(keys).by_tier for keys in fresh] == [{"memory": 8}] * len(fresh)
