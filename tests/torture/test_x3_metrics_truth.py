"""X3: a script with a known answer, and statistics that give it."""

from __future__ import annotations

from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import BelowKind, LinkKind
from tests.torture.support import MakeRig


def test_known_answer(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below)
    blocks = Blocks(rig)
    keys, absent = blocks.keys(1, 8), blocks.keys(2, 4)
    assert blocks.read(keys) == 0  # 8 misses
    assert all(blocks.put(keys[:6]))
    assert blocks.read(keys) == 6  # 6 hits, 2 misses
    assert blocks.read(keys, start=2) == 4  # 4 hits, 2 misses
    assert blocks.read(absent) == 0  # 4 misses
    blocks.space.lookup(keys)  # a look counts nothing
    blocks.space.contains(keys)
    assert blocks.space.get(keys[:3]) == [blocks.content(key) for key in keys[:3]]  # 3 hits
    stats = assert_idle(rig)
    assert stats.hits_by_tier == {"memory": 13}
    assert stats.misses_by_reason == {"never_stored": 16}
    assert stats.blocks_asked == 29
    assert stats.tiers["memory"].blocks == 6
    if below == "disk":
        assert stats.tiers["disk"].blocks == 6


def test_hits_by_tier_add_up(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 8)
    assert all(blocks.put(keys))
    rig.reopen()
    assert blocks.read(keys[:3], deadline_s=10.0) == 3
    assert blocks.space.lookup(keys).by_tier == {"memory": 3, "disk": 5}
    assert blocks.read(keys, deadline_s=10.0) == 8
    stats = assert_idle(rig)
    assert stats.hits_by_tier == {"memory": 3, "disk": 8}
    assert stats.misses_by_reason == {}


def test_dropped_loads_are_not_credited(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 8)
    assert all(blocks.put(keys))
    rig.reopen()
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.CORRUPT, ops=frozenset(["read"]), keys=frozenset(keys[5:6])),)
    assert blocks.read(keys, deadline_s=10.0) == 5
    stats = assert_idle(rig)
    assert stats.hits_by_tier == {"disk": 5}
    assert stats.misses_by_reason == {"corrupt": 3}
    assert stats.blocks_asked == 8
