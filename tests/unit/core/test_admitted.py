"""The memory tier's own write policy."""

from __future__ import annotations

import numpy as np
import pytest

from kvcairn.errors import ConfigError
from kvcairn.space import Space
from kvcairn.testing.rig import Rig
from kvcairn.types import MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, rows_of, sliding, space_of


def put(space: Space, keys: list[bytes]) -> list[bool]:
    return space.put(keys, [bytes(space.block_bytes)] * len(keys), deadline_s=0)


def test_a_selective_memory_takes_a_block_at_its_second_sight(make_rig: MakeRig) -> None:
    rig = make_rig(memory_write_policy="selective")
    space = rig.space()
    keys = chain(space, 4)
    assert put(space, keys[:2]) == [False, False]
    hit = space.lookup(keys)
    assert (hit.blocks, hit.reason) == (0, MissReason.NEVER_STORED)
    assert put(space, keys) == [True, True, False, False]
    assert put(space, keys) == [True, True, True, True]
    assert rig.cache.stats().tiers["memory"].blocks == 4


def test_what_it_does_not_take_costs_no_row_and_no_slot(make_rig: MakeRig) -> None:
    rig = make_rig(memory_write_policy="selective")
    space = rig.space()
    for prompt in range(50):
        with space.reserve(chain(space, 8, prompt)) as slots:
            assert (slots.keys, slots.in_flight, slots.reason) == ([], [], None)
    assert len(rig.core.state.tree) == 0
    assert rig.cache.stats().tiers["memory"].used_bytes == 0


def test_none_is_taken_behind_one_that_is_not(make_rig: MakeRig) -> None:
    rig = make_rig(memory_write_policy="selective")
    space = rig.space()
    keys = chain(space, 3)
    put(space, keys[1:])  # a chain that somebody began in the middle
    assert put(space, keys) == [False, False, False]
    assert put(space, keys) == [True, True, True]


def test_a_call_that_asks_again_for_room_is_one_sight(make_rig: MakeRig) -> None:
    """While another writes the first block a put comes again and again; the others have been seen once all the same."""
    rig = make_rig(memory_write_policy="selective")
    space = rig.space()
    keys = chain(space, 3)
    put(space, keys[:1])
    with space.reserve(keys[:1]) as other:
        assert other.keys == keys[:1]
        assert space.put(keys, [bytes(space.block_bytes)] * 3, deadline_s=0.05) == [False, False, False]
    assert put(space, keys[1:2]) == [True]


def test_the_sights_before_it_was_stored_count_below(make_rig: MakeRig) -> None:
    """Both tiers are selective: at the second sight the block goes to both."""
    rig = make_rig(memory_write_policy="selective", write_policy="selective", below="dict")
    space = rig.space()
    keys = chain(space, 2)
    put(space, keys)
    put(space, keys)
    assert rig.core.state.tree.nodes.sights[rows_of(rig.core, space, keys)].tolist() == [2, 2]
    rig.cache.drain()
    assert rig.cache.stats().tiers["disk"].blocks == 2


@pytest.mark.parametrize("policy", ["through", "back"])
def test_other_policies_take_what_is_handed_over(make_rig: MakeRig, policy: str) -> None:
    space = make_rig(memory_write_policy=policy).space()
    assert put(space, chain(space, 3)) == [True, True, True]


def test_none_takes_nothing_and_serves_what_the_tier_below_has(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = rig.space()
    keys = chain(space, 3)
    put(space, keys)
    rig.cache.drain()
    rig.core.state.memory.write_policy = "none"
    rig.cache.clear(tier="memory")
    with space.reserve(keys) as slots:
        assert slots.keys == []
    with space.acquire(keys, deadline_s=1) as lease:
        assert lease.count == 3
    other = chain(space, 2, prompt=1)
    assert put(space, other) == [False, False]


def test_groups_are_taken_together(make_rig: MakeRig) -> None:
    rig = make_rig(memory_write_policy="selective", hybrid=True)
    space = space_of(rig, full(), sliding(2))
    keys = chain(space, 4)
    for expected in (0, 4):
        with space.reserve(keys) as slots:
            assert np.count_nonzero(np.array(slots.offsets(0)) >= 0) == expected
            assert np.count_nonzero(np.array(slots.offsets(1)) >= 0) == expected
            slots.commit()
    assert space.lookup(keys).blocks == 4


def test_an_adapter_refuses_a_policy_that_it_cannot_carry_out(rig: Rig, make_rig: MakeRig) -> None:
    rig.space().check_write_policy("through", "none")
    with pytest.raises(ConfigError, match=r"write_policy.*'back'.*set it to .through. or .none."):
        make_rig(memory_write_policy="back").space().check_write_policy("through", "none")
