"""What becomes of a block that was loaded: promotion `keep`, `move` and `bypass`."""

from __future__ import annotations

import pytest

from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import Rig
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import states


def loaded(make_rig: MakeRig, promotion: str, length: int = 4) -> tuple[Rig, Blocks, list[bytes]]:
    """Return a cache with a prompt on the tier below alone."""
    rig = make_rig(below="dict", write_policy="back", promotion=promotion, memory_blocks=64)
    blocks = Blocks(rig)
    keys = blocks.keys(1, length)
    blocks.put(keys)
    rig.reopen()
    assert blocks.space.lookup(keys).by_tier == {"disk": length}
    return rig, blocks, keys


@pytest.mark.parametrize(
    ("promotion", "memory", "disk"),
    [("keep", "READY", "READY"), ("move", "READY", "ABSENT"), ("bypass", "ABSENT", "READY")],
)
@pytest.mark.parametrize("length", [1, 4, 40])
def test_after_a_load(make_rig: MakeRig, promotion: str, memory: str, disk: str, length: int) -> None:
    rig, blocks, keys = loaded(make_rig, promotion, length)
    with blocks.space.acquire(keys) as lease:
        assert lease.count == length
        assert states(rig.core, blocks.space, keys) == ["READY"] * length
        blocks.oracle.check(lease[0], blocks.descriptor, keys[0])
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys) == [memory] * length
    assert states(rig.core, blocks.space, keys, 1) == [disk] * length
    assert blocks.read(keys) == length
    assert_idle(rig)


def test_what_was_moved_is_written_back_and_survives(make_rig: MakeRig) -> None:
    rig, blocks, keys = loaded(make_rig, "move")
    assert blocks.read(keys) == 4
    rig.cache.drain()
    assert rig.content.slots == {}
    rig.reopen()
    assert blocks.read(keys) == 4


@pytest.mark.parametrize("promotion", ["move", "bypass"])
def test_a_lease_holds_what_lies_in_memory(make_rig: MakeRig, promotion: str) -> None:
    rig, blocks, keys = loaded(make_rig, promotion)
    with blocks.space.acquire(keys) as whole:
        assert blocks.read(keys[:2]) == 2
        assert states(rig.core, blocks.space, keys) == ["READY"] * 4
        assert states(rig.core, blocks.space, keys, 1) == ["READY" if promotion == "bypass" else "ABSENT"] * 4
        assert whole.count == 4
    with blocks.space.acquire(keys[:2]) as part:
        assert part.count == 2
    rig.cache.drain()
    assert_idle(rig)
    assert blocks.read(keys) == 4


def test_move_takes_the_end_of_a_prompt_only_as_far_as_it_was_loaded(make_rig: MakeRig) -> None:
    rig, blocks, keys = loaded(make_rig, "move")
    assert blocks.read(keys[:2]) == 2
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys, 1) == ["READY"] * 4, "the rest stands on it"
    assert states(rig.core, blocks.space, keys) == ["READY", "READY", "ABSENT", "ABSENT"]
    assert blocks.read(keys) == 4
    assert_idle(rig)


def test_prefetched_and_never_taken_over(make_rig: MakeRig) -> None:
    rig, blocks, keys = loaded(make_rig, "bypass")
    with blocks.space.prefetch(keys) as job:
        job.wait(1.0)
        assert job.ready == 4
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys) == ["ABSENT"] * 4
    assert blocks.space.contains(keys) == 4
    assert_idle(rig)


def test_another_tier_decides_for_itself(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", lower_tiers=2)
    rig.core.state.levels[2].promotion = "bypass"
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert blocks.read(keys) == 3
    assert states(rig.core, blocks.space, keys) == ["READY"] * 3, "read from the first tier, which keeps"
    assert_idle(rig)
