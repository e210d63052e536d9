from __future__ import annotations

import math
from typing import Any

import pytest

from kvcairn.core.hints import PIN_FRACTION
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.types import Hints, MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, rows_of, space_of, state, store

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


def order(rig: Rig, level: int, *chains: list[bytes]) -> list[int]:
    """The numbers of the chains, each of one block, in the order in which they would leave a tier."""
    rows = [int(rows_of(rig.core, rig.space(), keys)[0]) for keys in chains]
    return [rows.index(row) for row in rig.core.state.levels[level].residency.policy.candidates()]


def stored_on_all(rig: Rig, count: int) -> list[list[bytes]]:
    """Store prompts of one block each, one after the other, on every tier."""
    chains = [chain(rig.space(), 1, prompt) for prompt in range(count)]
    for keys in chains:
        store(rig.space(), keys)
        rig.cache.drain()
        rig.clock.advance(10.0)
    return chains


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_priority_reaches_the_policies_of_all_tiers(make_rig: MakeRig, when: str) -> None:
    rig = make_rig(eviction="priority", below="dict", lower_tiers=2)
    chains = stored_on_all(rig, 3)
    if when == "after":
        for hinted, priority in ((0, 90), (2, 10)):
            rig.space().hint(chains[hinted], Hints(priority=priority))
        assert [order(rig, level, *chains) for level in range(3)] == [[2, 1, 0]] * 3
        return
    with rig.space().reserve(chain(rig.space(), 1, 7)) as slots:
        rig.space().hint(chain(rig.space(), 1, 7), Hints(priority=0))
        slots.commit()
    rig.cache.drain()
    chains.append(chain(rig.space(), 1, 7))
    assert [order(rig, level, *chains) for level in range(3)] == [[3, 0, 1, 2]] * 3


def test_the_end_of_a_session_reaches_the_policies_of_all_tiers(make_rig: MakeRig) -> None:
    rig = make_rig(eviction="session", below="dict", lower_tiers=2)
    chains = stored_on_all(rig, 3)
    rig.space().hint(chains[2], Hints(session="a", ends_session=True))
    assert [order(rig, level, *chains) for level in range(3)] == [[2, 0, 1]] * 3


def test_what_is_evicted_first_is_what_was_hinted(make_rig: MakeRig) -> None:
    rig = make_rig(eviction="session", memory_blocks=3)
    chains = stored_on_all(rig, 3)
    rig.space().hint(chains[1], Hints(ends_session=True))
    store(rig.space(), chain(rig.space(), 1, 9))
    assert [rig.space().contains(keys) for keys in chains] == [1, 0, 1]


def test_a_hint_ends_with_its_block(make_rig: MakeRig) -> None:
    rig = make_rig(eviction="priority")
    (keys,) = stored_on_all(rig, 1)
    row = int(rows_of(rig.core, rig.space(), keys)[0])
    rig.space().hint(keys, Hints(priority=90, session="a"))
    hinted = rig.core.state.tree.nodes.hinted
    assert int(hinted.priority[row]) == 90 and int(hinted.session[row]) > 0
    rig.space().forget(keys)
    rig.cache.clear()
    store(rig.space(), keys)
    row = int(rows_of(rig.core, rig.space(), keys)[0])
    assert (int(hinted.priority[row]), int(hinted.session[row])) == (50, 0)


def test_what_several_sessions_share_stays_when_one_of_them_ends(make_rig: MakeRig) -> None:
    """The system prompt: two conversations begin with it, and one is over."""
    rig = make_rig(eviction="session", memory_blocks=6)
    space = rig.space()
    prompt = space.keys(range(2 * space.descriptor.block_tokens))
    turns = [space.keys([name] * 2 * space.descriptor.block_tokens, parent=prompt[-1]) for name in (7001, 7002)]
    for name, own in zip("ab", turns, strict=True):
        store(space, prompt + own)
        space.hint(prompt + own, Hints(session=name))
    space.hint(prompt + turns[0], Hints(session="a", ends_session=True))
    store(space, chain(space, 2, 9))
    assert [space.contains(prompt), space.contains(prompt + turns[1])] == [2, 4]
    assert space.contains(prompt + turns[0]) == 2, "what was its own went first"


def test_a_session_that_is_named_again_is_still_alone(make_rig: MakeRig) -> None:
    rig = make_rig(eviction="session", memory_blocks=4)
    space = rig.space()
    keys, other = chain(space, 2), chain(space, 2, 1)
    store(space, keys)
    for _ in range(3):
        space.hint(keys, Hints(session="a"))
    store(space, other)
    space.hint(keys, Hints(session="a", ends_session=True))
    store(space, chain(space, 2, 2))
    assert [space.contains(keys), space.contains(other)] == [0, 2]
