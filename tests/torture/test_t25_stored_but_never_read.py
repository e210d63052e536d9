"""T25: what was stored is found by the next process, though memory is a quarter of it; every miss has a reason."""

from __future__ import annotations

from typing import Any

import pytest

from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import BelowKind, LinkKind
from kvcairn.types import MissReason
from tests.torture.support import MakeRig

PROMPTS, BLOCKS = 24, 8
DEMAND = PROMPTS * BLOCKS


@pytest.mark.parametrize("threads", [False, True])
def test_round_two_hits(make_rig: MakeRig, link: LinkKind, threads: bool) -> None:
    rig = make_rig(link=link, below="disk", memory_blocks=DEMAND // 4, below_blocks=2 * DEMAND, threads=threads)
    blocks = Blocks(rig)
    prompts = [blocks.keys(prompt, BLOCKS) for prompt in range(PROMPTS)]
    for keys in prompts:
        assert all(blocks.put(keys))
        assert rig.cache.drain(timeout_s=60)
    assert_idle(rig)
    rig.reopen()
    jobs = [blocks.space.prefetch(keys, deadline_s=60.0) for keys in prompts]  # all at once
    hits = 0
    for job, keys in zip(jobs, prompts, strict=True):
        job.wait(60.0)
        with job.lease() as lease:
            for i in range(lease.count):
                blocks.oracle.check(lease[i], blocks.descriptor, keys[i])
            hits += lease.count
    assert hits >= 0.95 * DEMAND
    stats = assert_idle(rig)
    assert sum(stats.hits_by_tier.values()) == hits


@pytest.mark.parametrize("write_policy", ["through", "back"])
@pytest.mark.parametrize("lower_tiers", [1, 3])
def test_round_two_hits_over_the_policies(make_rig: MakeRig, write_policy: str, lower_tiers: int) -> None:
    rig = make_rig(
        below="dict", memory_blocks=DEMAND // 4, below_blocks=2 * DEMAND, write_policy=write_policy,
        lower_tiers=lower_tiers,
    )  # fmt: skip
    blocks = Blocks(rig)
    prompts = [blocks.keys(prompt, BLOCKS) for prompt in range(PROMPTS)]
    for keys in prompts:
        assert all(blocks.put(keys))
        assert rig.cache.drain(timeout_s=60)
    assert_idle(rig)
    rig.reopen()
    assert sum(blocks.read(keys, deadline_s=60.0) for keys in prompts) >= 0.95 * DEMAND
    assert_idle(rig)


def test_a_prompt_that_came_twice_is_there_under_selective(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=DEMAND // 4, below_blocks=2 * DEMAND, write_policy="selective")
    blocks = Blocks(rig)
    prompts = [blocks.keys(prompt, BLOCKS) for prompt in range(PROMPTS)]
    for number, keys in enumerate(prompts):
        assert all(blocks.put(keys))
        if number % 2:
            assert blocks.read(keys) == BLOCKS
        assert rig.cache.drain(timeout_s=60)
    rig.reopen()
    assert [blocks.space.contains(keys) for keys in prompts] == [0, BLOCKS] * (PROMPTS // 2)
    assert_idle(rig)


def test_reasons_add_up_over_the_policies(make_rig: MakeRig, hierarchy: dict[str, Any]) -> None:
    rig = make_rig(memory_blocks=16, below_blocks=24, **hierarchy)
    blocks = Blocks(rig)
    for turn in range(60):
        keys = blocks.keys(turn * 7 % 11, BLOCKS)
        blocks.read(keys, deadline_s=1.0)
        blocks.put(keys)
        rig.step(2)
    stats = assert_idle(rig)
    assert stats.blocks_asked == 60 * BLOCKS
    assert set(stats.hits_by_tier) <= set(stats.tiers)
    assert stats.misses_by_reason.get("unknown", 0) == 0


def test_a_miss_evicts_nothing(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below, memory_blocks=32)
    blocks = Blocks(rig)
    prompts = [blocks.keys(prompt, BLOCKS) for prompt in range(4)]
    for keys in prompts:
        assert all(blocks.put(keys))
    before = assert_idle(rig)
    for prompt in range(100, 150):
        keys = blocks.keys(prompt, BLOCKS)
        assert blocks.space.lookup(keys).reason == MissReason.NEVER_STORED
        assert blocks.read(keys) == 0
        with blocks.space.prefetch(keys) as job:
            job.wait(1.0)
            assert job.ready == 0
    after = assert_idle(rig)
    assert after.tiers == before.tiers
    assert [blocks.space.lookup(keys).by_tier for keys in prompts] == [{"memory": BLOCKS}] * 4


def test_no_persisted_prefix_lacks_its_head(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk", memory_blocks=24, below_blocks=40)
    blocks = Blocks(rig)
    prompts = [blocks.keys(prompt % 12, 1 + prompt % BLOCKS) for prompt in range(200)]
    for number, keys in enumerate(prompts):
        blocks.put(keys)
        if number % 3:
            rig.step(number % 5)
        if number % 20 == 19:
            assert_idle(rig)
            rig.reopen()
            held = rig.cache.stats().tiers["disk"].blocks
            longest = {chain[0]: chain for chain in (blocks.keys(prompt, BLOCKS) for prompt in range(12))}
            counted = sum(blocks.space.lookup(chain).blocks for chain in longest.values())
            assert counted == held, "every block on disk is reached from its root"


def test_reasons_add_up(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below, memory_blocks=16, below_blocks=24)
    blocks = Blocks(rig)
    asked = 0
    for turn in range(60):
        keys = blocks.keys(turn * 7 % 11, BLOCKS)
        found = blocks.read(keys, deadline_s=1.0)
        asked += BLOCKS
        if found < BLOCKS:
            assert blocks.space.lookup(keys).reason is not None
        blocks.put(keys)
        rig.step(2)
    stats = assert_idle(rig)
    assert stats.blocks_asked == asked
    assert sum(stats.misses_by_reason.values()) + sum(stats.hits_by_tier.values()) == asked
    assert set(stats.misses_by_reason) <= {reason.value for reason in MissReason}
    assert stats.misses_by_reason.get("unknown", 0) == 0


def test_one_request_and_a_restart(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk", threads=True)
    blocks = Blocks(rig)
    keys = blocks.keys(1, BLOCKS)
    assert all(blocks.put(keys))
    rig.reopen()
    assert blocks.space.lookup(keys).by_tier == {"disk": BLOCKS}
    assert blocks.read(keys, deadline_s=30.0) == BLOCKS
