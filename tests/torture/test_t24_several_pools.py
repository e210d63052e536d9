"""T24: a hybrid entry is restored only up to a length at which every group has what it needs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kvcairn as kv
from kvcairn.layout import KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.engine import FakeEngine
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import BelowKind, LinkKind
from tests.torture.support import MakeRig

FULL, SLIDING, STATE = 0, 1, 2
BLOCKS = 8


def store(blocks: Blocks, keys: list[bytes], parts: list[list[int]]) -> None:
    with blocks.space.reserve(keys, parts=parts) as reservation:
        for i, key in enumerate(reservation.keys):
            for group in range(3):
                if reservation.offsets(group)[i] >= 0:
                    blocks.oracle.fill(reservation.part(i, group), blocks.descriptor, key, group)
        reservation.commit()


def expected(parts: list[list[int]]) -> tuple[int, ...]:
    """The restorable lengths, by the definition: the window of the sliding group is two blocks."""
    have = [[group in chosen for chosen in parts] for group in range(3)]
    return tuple(
        b
        for b in range(1, len(parts) + 1)
        if all(have[FULL][:b]) and all(have[SLIDING][max(0, b - 2) : b]) and have[STATE][b - 1]
    )


@pytest.mark.parametrize(
    "parts",
    [
        [[0, 1, 2]] * BLOCKS,
        [[0, 1, 2] if b % 3 == 2 else [0, 1] for b in range(BLOCKS)],  # a state at each third boundary only
        [[0, 1]] * BLOCKS,  # no state at all
        [[0, 2]] * 5 + [[0, 1, 2]] * 3,  # the window has gone where no boundary needs it
        [[0, 1, 2]] * 4 + [[1, 2]] + [[0, 1, 2]] * 3,  # one hole in the full group
        [[0, 1, 2]] * 6 + [[0, 2]] + [[0, 1, 2]],
    ],
)
def test_boundaries(make_rig: MakeRig, link: LinkKind, below: BelowKind, parts: list[list[int]]) -> None:
    rig = make_rig(link=link, below=below, hybrid=True)
    blocks = Blocks(rig)
    keys = blocks.keys(1, BLOCKS)
    store(blocks, keys, parts)
    for turn in range(2):
        hit = blocks.space.lookup(keys)
        if turn == 0:
            assert hit.boundaries == expected(parts)
        assert set(hit.boundaries) <= set(expected(parts)), (
            "a restart may drop what lies behind a hole, and adds nothing"
        )
        assert hit.blocks == max(hit.boundaries, default=0)
        assert blocks.read(keys, deadline_s=10.0) == hit.blocks
        assert_idle(rig)
        if below == "disk":
            rig.reopen()


def test_one_pool_fails(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk", hybrid=True)
    blocks = Blocks(rig)
    keys = blocks.keys(1, BLOCKS)
    store(blocks, keys, [[0, 1, 2]] * BLOCKS)
    for kind, at in itertools.product((FaultKind.CORRUPT, FaultKind.VANISHED, FaultKind.BLOCK_ERROR), (0, 4, 7)):
        rig.reopen()
        assert rig.faulty is not None
        rig.faulty.faults = (Fault(kind=kind, ops=frozenset(["read"]), keys=frozenset([keys[at]])),)
        with blocks.space.acquire(keys, deadline_s=10.0) as lease:
            assert lease.count in (0, *range(1, at + 1))
            for group, i in itertools.product(range(3), range(lease.count)):
                if lease.offsets(group)[i] >= 0:
                    blocks.oracle.check(lease.part(i, group), blocks.descriptor, keys[i], group)
            needed_from = [0, max(0, lease.count - 2), max(0, lease.count - 1)]
            for group, first in enumerate(needed_from):
                assert (np.asarray(lease.offsets(group))[first:] >= 0).all()
        rig.faulty.heal()
        store(blocks, keys, [[0, 1, 2]] * BLOCKS)
        assert blocks.space.lookup(keys).blocks == BLOCKS, "the hole is filled, and what lay behind it counts again"
        assert_idle(rig)


@pytest.mark.parametrize("state_every", [1, 3])
def test_tokens_of_a_hybrid_model(make_rig: MakeRig, link: LinkKind, below: BelowKind, state_every: int) -> None:
    rig = make_rig(link=link, below=below, hybrid=True)
    layout, tokens = rig.setup.layout, rig.setup.block_tokens
    plain = FakeEngine(None, layout, tokens, page_tokens=2)
    prompts = [[prompt % 3, *range(20 + prompt)] for prompt in range(6)]
    wanted = [plain.generate(prompt, 5).tokens for prompt in prompts]
    reused = 0
    for turn in range(3):
        engine = FakeEngine(rig.space(), layout, tokens, page_tokens=2, state_every=state_every)
        for prompt, good in zip(prompts, wanted, strict=True):
            got = engine.generate(prompt, 5, deadline_s=10.0, prefetch=turn == 1)
            assert got.tokens == good
            assert got.reused_tokens % (tokens * state_every) == 0
            reused += got.reused_tokens
        assert_idle(rig)
        if below == "disk":
            rig.reopen()
    assert reused > 0


def test_bytes_are_the_sum_of_the_shapes(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk", hybrid=True)
    blocks = Blocks(rig)
    store(blocks, blocks.keys(1, BLOCKS), [[0, 1, 2]] * BLOCKS)
    stats = assert_idle(rig)
    payload = sum(blocks.space.part_bytes(group) for group in range(3)) * BLOCKS
    assert blocks.space.block_bytes * BLOCKS == payload
    for name, slots in (("memory", 4096), ("disk", 8192)):
        tier = stats.tiers[name]
        assert tier.used_bytes == 3 * BLOCKS * slots
        assert tier.used_bytes - tier.rounding_bytes == payload


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVLayout(groups=(), dtype="float16"),
        lambda: KVLayout(groups=(LayerGroup.full(2, 32),), dtype="float17"),
        lambda: LayerGroup(kind="round", layers=(0,), bytes_per_token=2),  # type: ignore[arg-type]
        lambda: KVLayout(groups=(LayerGroup.full(2, 32), LayerGroup.full(2, 32)), dtype="float16"),
        lambda: LayerGroup.full(2, -1),
        lambda: LayerGroup.sliding(2, 32, window=0),
        lambda: KVLayout.full(layers=0, kv_heads=1, head_dim=1, dtype="float16"),
        lambda: SpaceDescriptor(
            model="m", weights="w", layout=KVLayout(groups=(LayerGroup.full(1, 2),), dtype="int8"), block_tokens=0
        ),
    ],
)
def test_unknown_layouts_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(kv.LayoutError):
        make()


def test_a_block_larger_than_memory_is_refused(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, memory_blocks=4)
    layout = KVLayout(groups=(LayerGroup.full(1, 1 << 20),), dtype="int8")
    with pytest.raises(kv.LayoutError, match="holds slots of at most"):
        rig.cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=4))
