from __future__ import annotations

import math
from typing import Any

import pytest

from kvcairn.core.hints import PIN_FRACTION
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.types import Hints, MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, space_of, state, store

CAP = int(8 * PIN_FRACTION)


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(memory_blocks=8)


def test_a_pin_keeps_a_block_under_a_cap(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 4)
    store(space, keys)
    assert space.hint(keys, Hints(pin=True)) == CAP
    assert space.hint(keys[:1], Hints(pin=True)) == 1
    store(space, chain(space, 8, 1))
    assert space.contains(keys) == CAP
    assert space.hint(keys, Hints()) == 0
    store(space, chain(space, 8, 2))
    assert space.contains(keys) == 0
    assert_idle(rig)


def test_what_is_not_in_memory_is_not_pinned(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 2)
    assert space.hint(keys, Hints(pin=True)) == 0
    with space.reserve(keys):
        assert space.hint(keys, Hints(pin=True)) == 0
    assert_idle(rig)


@pytest.mark.parametrize("how", ["forget", "clear", "clear space", "expire", "forget twice"])
def test_a_pinned_block_can_leave_and_come_again(rig: Rig, how: str) -> None:
    blocks = Blocks(rig)
    space, keys = blocks.space, blocks.keys(1, 2)
    for _ in range(3):
        assert blocks.put(keys) == [True, True]
        assert space.hint(keys, Hints(pin=True, ttl_s=1.0)) == 2
        if how == "expire":
            rig.clock.advance(1.0)
        elif how.startswith("forget"):
            space.forget(keys)
            if "twice" in how:
                space.forget(keys)
        else:
            rig.cache.clear(space if "space" in how else None)
        assert space.contains(keys) == 0
    assert blocks.put(keys, deadline_s=0) == [True, True]
    space.forget(keys)
    assert assert_idle(rig).tiers["memory"].used_bytes == 0


def test_a_block_of_several_groups_is_pinned_whole_or_not(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=12)
    space = space_of(rig, full(), state())
    keys = chain(space, 3)
    store(space, keys)
    assert space.hint(keys, Hints(pin=True)) == 1  # three pages may be pinned, a block takes two
    assert rig.cache.stats().tiers["memory"].leased_bytes == 2 * PAGE_BYTES
    space.hint(keys, Hints())
    assert_idle(rig)


def test_a_time_to_live_begins_with_the_hint(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 3)
    store(space, keys)
    space.hint(keys[1:], Hints(ttl_s=10.0))
    rig.clock.advance(5.0)
    space.hint(keys[2:], Hints(ttl_s=100.0))
    rig.clock.advance(5.0)
    assert space.lookup(keys).blocks == 1
    assert space.lookup(keys).reason is MissReason.EXPIRED
    assert space.contains(keys[2:]) == 1
    assert_idle(rig)


def test_a_time_to_live_of_zero_is_over_at_once(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 1)
    store(space, keys)
    space.hint(keys, Hints(ttl_s=0.0))
    assert space.lookup(keys).reason is MissReason.EXPIRED


@pytest.mark.parametrize(
    "fields", [{"priority": -1}, {"priority": 101}, {"ttl_s": -0.1}, {"ttl_s": math.nan}, {"ttl_s": -math.inf}]
)
def test_a_hint_out_of_range_is_refused(rig: Rig, fields: dict[str, Any]) -> None:
    space = rig.space()
    with pytest.raises(ValueError, match=next(iter(fields))):
        space.hint(chain(space, 1), Hints(**fields))


def test_hints_about_nothing(rig: Rig) -> None:
    space = rig.space()
    assert space.hint([], Hints(pin=True, ttl_s=math.inf)) == 0
    assert_idle(rig)
