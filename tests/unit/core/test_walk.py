from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.walk import restorable
from kvcairn.index.tree import Tree
from kvcairn.layout import KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.requests import HitReply, Lookup
from kvcairn.space import Space
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import Rig, Setup
from kvcairn.types import UNKNOWN, Hints, MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import TOKENS, chain, full, sliding, space_of, state, store

LAYOUTS = [
    (full(),),
    (full(), sliding(2)),
    (full(), state()),
    (full(), sliding(1), state()),
    (full(), sliding(3), state()),
    (sliding(2),),
    (state(),),
    (sliding(2), state()),
]


def needs(group: LayerGroup, length: int) -> range:
    """The blocks that a group must have to restore a length."""
    back = {"full": length, "state": 1, "sliding": -(-group.window // TOKENS)}[group.kind]
    return range(max(0, length - back), length)


def lengths(groups: tuple[LayerGroup, ...], flags: list[list[bool]]) -> list[int]:
    """Every restorable length, by trying each."""
    total = len(flags[0])
    return [
        n for n in range(1, total + 1)
        if all(have[i] for g, have in zip(groups, flags, strict=True) for i in needs(g, n))
    ]  # fmt: skip


@given(st.sampled_from(LAYOUTS), st.integers(0, 9), st.randoms(use_true_random=False), st.floats(0.3, 1))
def test_restorable_lengths_are_those_that_can_be_restored(
    groups: tuple[LayerGroup, ...], total: int, draw: random.Random, share: float
) -> None:
    flags = [[draw.random() < share for _ in range(total)] for _ in groups]
    info = SpaceInfo(Tree().add_space(b"s"))
    layout = KVLayout(groups=groups, dtype="int8")
    info.descriptor = SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=TOKENS)
    found = restorable(info, [np.array(have, dtype=np.bool_) for have in flags])
    assert list(found) == lengths(groups, flags)


@settings(max_examples=40)
@given(st.sampled_from(LAYOUTS), st.integers(1, 7), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_hit_is_what_all_groups_can_restore_whatever_tier_has_it(
    tmp_path_factory: pytest.TempPathFactory,
    groups: tuple[LayerGroup, ...],
    blocks: int,
    start: int,
    draw: random.Random,
) -> None:
    with Rig(Setup(below="dict"), tmp_path_factory.mktemp("rig")) as rig:
        space = space_of(rig, *groups)
        keys = chain(space, blocks)
        below = [[g for g in range(len(groups)) if draw.random() < 0.6] for _ in keys]
        above = [[g for g in range(len(groups)) if draw.random() < 0.6] for _ in keys]
        store(space, keys, below)
        rig.cache.drain()
        rig.cache.clear(tier="memory")
        store(space, keys, above)
        on_disk = rig.cache.stats().tiers["disk"].blocks
        start = min(start, blocks)
        flags = [
            [g in above[i] or g in below[i] for i in range(start, blocks)] if on_disk else
            [g in above[i] for i in range(start, blocks)]
            for g in range(len(groups))
        ]  # fmt: skip
        hit = space.lookup(keys, start)
        if on_disk == sum(map(len, below)):  # nothing was left out for want of a parent
            assert list(hit.boundaries) == lengths(groups, flags)
        assert hit.blocks == max(hit.boundaries, default=0)
        assert (hit.reason is None) == (hit.blocks == blocks - start)
        before = rig.core.state.version
        rig.core.check()
        with space.acquire(keys, start, deadline_s=9.0) as lease:
            assert lease.count == hit.blocks
            for number, group in enumerate(groups):
                present = [i for i, at in enumerate(lease.offsets(number)) if at >= 0]
                assert present == list(needs(group, lease.count))
        assert rig.core.state.version > before
        rig.core.check()


def test_a_lookup_changes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = rig.space()
    keys = chain(space, 3)
    store(space, keys)
    rig.cache.drain()
    before, order = rig.cache.stats(), list(rig.core.state.memory.residency.policy.candidates())
    for some in (keys, keys[::-1], chain(space, 3, 1), []):
        space.lookup(some)
        space.probe(some)
    assert rig.cache.stats() == before
    assert list(rig.core.state.memory.residency.policy.candidates()) == order
    assert len(rig.core.state.tree) == 3


def test_nothing_asked_is_nothing_missed(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 2)
    for hit in (space.lookup([]), space.lookup(keys, start=2)):
        assert (hit.blocks, hit.reason, hit.pending, hit.by_tier, hit.boundaries) == (0, None, 0, {}, ())


def test_tokens_are_those_of_the_blocks(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 3)
    store(space, keys)
    hit = space.lookup(keys, start=1)
    assert (hit.blocks, hit.tokens, hit.by_tier) == (2, 2 * TOKENS, {"memory": 2})


class TestReasons:
    """Why a run ends where it does."""

    @pytest.fixture
    def rig(self, make_rig: MakeRig) -> Rig:
        return make_rig(below="dict", memory_blocks=8)

    @pytest.fixture
    def space(self, rig: Rig) -> Space:
        return rig.space()

    def test_never_stored(self, space: Space) -> None:
        keys = chain(space, 3)
        store(space, keys[:1])
        assert space.lookup(keys).reason is MissReason.NEVER_STORED
        assert space.lookup(chain(space, 2, 9)).reason is MissReason.NEVER_STORED

    def test_evicted(self, make_rig: MakeRig) -> None:
        rig = make_rig(memory_blocks=4)
        space = rig.space()
        keys = chain(space, 4)
        store(space, keys)
        store(space, chain(space, 2, 1))
        hit = space.lookup(keys)
        assert (hit.blocks, hit.reason) == (2, MissReason.EVICTED)

    def test_expired(self, rig: Rig, space: Space) -> None:
        keys = chain(space, 3)
        store(space, keys)
        space.hint(keys[1:], Hints(ttl_s=5.0))
        rig.clock.advance(4.99)
        assert space.lookup(keys).blocks == 3
        rig.clock.advance(0.01)
        hit = space.lookup(keys)
        assert (hit.blocks, hit.reason) == (1, MissReason.EXPIRED)
        with space.acquire(keys) as lease:
            assert (lease.count, lease.reason) == (1, MissReason.EXPIRED)

    def test_pending(self, space: Space) -> None:
        keys = chain(space, 4)
        store(space, keys[:1])
        with space.reserve(keys[:3]):
            hit = space.lookup(keys)
            assert (hit.blocks, hit.reason, hit.pending) == (1, MissReason.PENDING, 2)

    def test_not_written(self, space: Space) -> None:
        keys = chain(space, 2)
        with space.reserve(keys) as slots:
            slots.commit([True, False])
        hit = space.lookup(keys)
        assert (hit.blocks, hit.reason) == (1, MissReason.NOT_WRITTEN)

    def test_cleared(self, rig: Rig, space: Space) -> None:
        keys = chain(space, 2)
        store(space, keys)
        space.forget(keys[1:])
        assert space.lookup(keys).reason is MissReason.CLEARED
        rig.cache.clear()
        hit = space.lookup(keys)
        assert (hit.blocks, hit.reason) == (0, MissReason.CLEARED)

    def test_tier_down_and_up_again(self, rig: Rig, space: Space) -> None:
        keys = chain(space, 3)
        store(space, keys)
        rig.cache.drain()
        space_memory = keys[:1]
        rig.cache.clear(tier="memory")
        store(space, space_memory)
        assert rig.faulty is not None
        rig.faulty.faults = (Fault(kind=FaultKind.ERROR),)
        for _ in range(3):
            space.get(keys)
        hit = space.lookup(keys)
        assert (hit.blocks, hit.reason, hit.by_tier) == (1, MissReason.TIER_DOWN, {"memory": 1})
        rig.faulty.heal()
        rig.clock.advance(60)
        hit = space.lookup(keys)
        assert (hit.blocks, hit.by_tier) == (3, {"memory": 1, "disk": 2})

    def test_the_state_that_is_missing_is_named(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        space = space_of(rig, full(), state())
        keys = chain(space, 4)
        store(space, keys, [[0, 1], [0], [0, 1], [0]])
        hit = space.lookup(keys)
        assert (hit.boundaries, hit.reason) == ((1, 3), MissReason.NEVER_STORED)


def test_a_hit_crosses_the_wire(rig: Rig) -> None:
    space = rig.space()
    reply = rig.core.call(Lookup(space.frame.space, chain(space, 2)))
    assert isinstance(reply, HitReply)


def test_by_tier_counts_every_block_of_a_run_once(make_rig: MakeRig) -> None:
    for groups in LAYOUTS:
        rig = make_rig(below="dict")
        space = space_of(rig, *groups)
        keys = chain(space, 5)
        store(space, keys)
        rig.cache.drain()
        rig.cache.clear(tier="memory")
        store(space, keys[:2])
        hit = space.lookup(keys)
        assert sum(hit.by_tier.values()) == hit.blocks == 5
        assert list(hit.by_tier) == ["memory", "disk"]


@pytest.mark.parametrize("below", ["none", "dict"])
def test_blocks_before_the_window_count_too(make_rig: MakeRig, below: str) -> None:
    """A layout that needs only the last blocks of a chain: those before are part of the run all the same."""
    rig = make_rig(below=below)
    space = space_of(rig, sliding(2))
    keys = chain(space, 6)
    with space.reserve(keys[4:], parent=UNKNOWN) as slots:
        slots.commit()
    rig.cache.drain()
    if below == "dict":
        rig.cache.clear(tier="memory")
    hit = space.lookup(keys)
    assert (hit.blocks, sum(hit.by_tier.values())) == (6, 6)
    with space.acquire(keys) as lease:
        assert lease.count == 6
    stats = rig.cache.stats()
    assert (stats.blocks_asked, sum(stats.hits_by_tier.values())) == (6, 6)
