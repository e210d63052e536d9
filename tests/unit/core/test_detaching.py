"""A tier goes in pieces: between two of them every caller is served, and what he sees is right."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcairn.core import detaching
from kvcairn.errors import ClosedError, ConfigError
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import Rig
from kvcairn.types import CopyState, JobState
from tests.unit.conftest import MakeRig

PIECE = 16
BLOCKS = 200

Between = Callable[[Callable[[], None]], None]


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    """Call something between two pieces, on a thread of its own: where the lock is held that would never end."""
    monkeypatch.setattr(detaching, "ROWS_AT_ONCE", PIECE)

    def arrange(call: Callable[[], None]) -> None:
        def pause(_: float) -> None:
            thread = ThreadPoolExecutor(1)
            thread.submit(call).result(60.0)  # TimeoutError where the lock is held: the thread is not waited for then
            thread.shutdown()

        monkeypatch.setattr(detaching, "time", SimpleNamespace(sleep=pause))

    return arrange


def check(is_right: bool) -> None:
    assert is_right


def assert_fastest_is_right(rig: Rig) -> None:
    fastest = rig.core.state.fastest
    rows = np.flatnonzero(rig.core.state.tree.nodes.space[:-1] >= 0)
    kept = fastest.of(0)[rows].copy()
    fastest.recount(0, rows)
    assert (kept == fastest.of(0)[rows]).all()


def filled(make_rig: MakeRig, **setup: Any) -> tuple[Rig, Blocks, list[bytes]]:
    rig = make_rig(below="dict", **setup)
    blocks = Blocks(rig)
    keys = blocks.keys(1, BLOCKS)
    assert all(blocks.put(keys))
    assert rig.cache.drain()
    rig.cache.clear(tier="memory")
    return rig, blocks, keys


@pytest.mark.parametrize(("tiers", "name"), [(1, "disk"), (3, "disk"), (3, "disk2"), (3, "disk3")])
def test_callers_get_in_between(make_rig: MakeRig, between: Between, tiers: int, name: str) -> None:
    rig, blocks, keys = filled(make_rig, lower_tiers=tiers)
    left = [BLOCKS]

    def look() -> None:
        left.append(rig.cache.stats().tiers[name].blocks)
        hit = blocks.space.lookup(keys)
        assert hit.blocks <= left[-1] if tiers == 1 else hit.blocks == BLOCKS
        assert blocks.read(keys, deadline_s=5.0) == hit.blocks
        rig.core.check()

    between(look)
    rig.cache.detach_tier(name)
    assert_fastest_is_right(rig)
    assert len(left) > BLOCKS // PIECE
    assert all(0 < before - after <= PIECE for before, after in pairwise(left)), left
    assert left[-1] == 0
    assert name not in rig.cache.stats().tiers
    rig.cache.clear(tier="memory")
    nearest = [each for each in rig.setup.lower_names if each != name][:1]
    assert blocks.space.lookup(keys).by_tier == dict.fromkeys(nearest, BLOCKS)
    rig.core.check()
    assert_idle(rig)


@pytest.mark.parametrize("name", ["disk", "disk2", "disk3"])
def test_the_tiers_behind_it_move_up(make_rig: MakeRig, name: str) -> None:
    rig, blocks, keys = filled(make_rig, lower_tiers=3)
    nearest = next(each for each in rig.setup.lower_names if each != name)
    rig.cache.detach_tier(name)
    assert_fastest_is_right(rig)
    assert blocks.space.lookup(keys).by_tier == {nearest: BLOCKS}
    assert blocks.read(keys, deadline_s=5.0) == BLOCKS
    assert rig.cache.stats().hits_by_tier == {nearest: BLOCKS}
    assert_idle(rig)


def test_what_memory_has_no_room_for_meanwhile_is_not_meant_for_it(make_rig: MakeRig, between: Between) -> None:
    rig, blocks, keys = filled(make_rig, lower_tiers=2, memory_blocks=256)
    for level in rig.core.state.lower:
        level.write_policy = "back"
    assert blocks.read(keys, deadline_s=5.0) == BLOCKS
    prompts = iter(range(2, BLOCKS))
    between(lambda: check(all(blocks.put(blocks.keys(next(prompts), 20)))))
    before = len(rig.contents["disk"].slots)
    rig.cache.detach_tier("disk")
    rig.cache.drain()
    stats = rig.cache.stats()
    assert len(rig.contents["disk"].slots) == before
    assert len(list(prompts)) < BLOCKS - 14, "more was stored than memory holds"
    assert stats.tiers["disk2"].blocks > BLOCKS, "what left went to the next tier"
    rig.core.check()
    assert_idle(rig)


def test_loads_are_cancelled(make_rig: MakeRig) -> None:
    rig, blocks, keys = filled(make_rig, lower_tiers=2)
    with blocks.space.prefetch(keys) as job:
        rig.cache.detach_tier("disk", drain=False)
        assert job.state == JobState.CANCELLED
    rig.core.check()
    assert_idle(rig)


@pytest.mark.parametrize("policy", ["through", "selective", "back"])
def test_what_is_stored_meanwhile_is_not_written_there(make_rig: MakeRig, between: Between, policy: str) -> None:
    rig, blocks, _ = filled(make_rig, write_policy="through", lower_tiers=2)
    for level in rig.core.state.lower:
        level.write_policy = policy
    prompts = iter(range(2, BLOCKS))
    stored: list[bytes] = []

    def store() -> None:
        keys = blocks.keys(next(prompts), 3)
        assert all(blocks.put(keys))
        blocks.space.touch(keys)
        rig.step(100)
        stored.extend(keys)

    between(store)
    rig.cache.detach_tier("disk")
    assert stored
    assert not set(stored) & {each.block.key for each, _ in rig.contents["disk"].slots.values()}
    rig.write_back()
    assert rig.cache.drain()
    written = {each.block.key for each, _ in rig.contents["disk2"].slots.values()}
    assert set(stored) <= written, "the other tier got them"
    rig.core.check()
    assert_idle(rig)


def test_writes_under_way_are_not_published(make_rig: MakeRig, between: Between) -> None:
    rig, blocks, _ = filled(make_rig)
    level = rig.core.state.lower[0]
    keys = blocks.keys(2, 40)
    assert all(blocks.put(keys))
    assert (level.residency.of(0).state == CopyState.WRITING).any()
    between(lambda: check(rig.step(1) <= 1))
    rig.cache.detach_tier("disk", drain=False)
    assert level.tasks == level.residency.counts.blocks == level.residency.counts.in_flight == 0
    assert blocks.read(keys) == len(keys)
    rig.core.check()
    assert_idle(rig)


def test_an_index_that_is_made_anew_is_not_taken_up_any_more(make_rig: MakeRig, between: Between) -> None:
    rig = make_rig(below="disk", lower_tiers=1)
    blocks = Blocks(rig)
    for prompt in range(13):  # several segments
        assert all(blocks.put(blocks.keys(prompt, 16)))
    rig.cache.close()
    for file in rig.folder.glob("index.sqlite*"):
        file.unlink()
    rig.reopen()
    level = rig.core.state.lower[0]
    while not level.residency.counts.blocks:
        assert rig.step()
    assert level.unscanned.nbytes, "only a part is known"
    known = level.residency.counts.blocks
    seen: list[int] = []

    def step() -> None:
        rig.step(100)
        seen.append(level.residency.counts.blocks)

    between(step)
    rig.cache.detach_tier("disk", drain=False)
    rig.step(100)
    assert seen == sorted(seen, reverse=True) and seen[0] < known, "it becomes less with every piece, never more"
    assert level.residency.counts.blocks == 0
    rig.core.check()
    assert_idle(rig)


def test_one_detaches_and_no_tier_takes_its_name_meanwhile(make_rig: MakeRig, between: Between) -> None:
    rig, _, _ = filled(make_rig)

    def ask() -> None:
        with pytest.raises(ConfigError, match="being detached already"):
            rig.cache.detach_tier("disk", drain=False)
        with pytest.raises(ConfigError, match="there is a tier of that name"):
            rig.cache.add_tier(rig.tier_options("disk"))

    between(ask)
    rig.cache.detach_tier("disk")
    rig.cache.add_tier(rig.tier_options("disk"))
    assert list(rig.cache.stats().tiers) == ["memory", "disk"]
    assert_idle(rig)


def test_the_cache_is_closed_meanwhile(make_rig: MakeRig, between: Between) -> None:
    rig, _, keys = filled(make_rig)
    between(lambda: rig.cache.close(drain=False))
    with pytest.raises(ClosedError, match="closed"):
        rig.cache.detach_tier("disk")
    rig.reopen()
    assert Blocks(rig).space.lookup(keys).by_tier == {"disk": BLOCKS}, "its content stays"
