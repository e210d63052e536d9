"""`clear` says whether what it dropped stays away after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcairn.errors import TierUnavailable
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import LinkKind
from tests.unit.conftest import MakeRig

CLEAR = frozenset(["clear"])


@pytest.mark.parametrize("link", ["direct", "loopback", "socket"])
@pytest.mark.parametrize("below", ["none", "dict", "disk"])
def test_it_lasts(make_rig: MakeRig, link: LinkKind, below: str) -> None:
    rig = make_rig(below=below, link=link)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 5)
    assert all(blocks.put(keys))
    assert rig.cache.clear()
    assert blocks.space.lookup(keys).reason == "cleared"
    assert all(blocks.put(keys))
    assert rig.cache.clear(blocks.space, tier="memory")
    assert_idle(rig)


def test_a_tier_that_cannot_note_it_makes_it_false(make_rig: MakeRig) -> None:
    rig = make_rig(below="disk")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 5)
    assert all(blocks.put(keys))
    rig.cache.drain()
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.ERROR, ops=CLEAR, error=TierUnavailable),)
    assert not rig.cache.clear()
    assert blocks.space.contains(keys) == 0, "it is gone all the same"
    assert rig.cache.stats().tiers["disk"].errors == {"TierUnavailable": 1}
    rig.faulty.heal()
    assert rig.cache.clear()
    rig.reopen()
    assert Blocks(rig).space.contains(keys) == 0
    assert_idle(rig)


def test_a_tier_that_hangs_holds_it_up_no_longer_than_its_deadline(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = tmp_path / "hangs"
    folder.mkdir()
    disk = {"type": "disk", "path": str(folder), "capacity": "8 MiB", "deadline": 0.2}
    tiers = [{"type": "memory", "capacity": "4 MiB"}, disk]
    hangs = (Fault(kind=FaultKind.HANG, ops=CLEAR),)
    rig = make_rig(below="disk", threads=True, faults=hangs, settings=(("tiers", tiers),))
    blocks = Blocks(rig)
    assert all(blocks.put(blocks.keys(1, 5)))
    assert not rig.cache.clear()
    assert blocks.space.contains(blocks.keys(1, 5)) == 0
    assert rig.cache.stats().tiers["disk"].errors == {"TierTimeout": 1}
