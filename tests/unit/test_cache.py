from __future__ import annotations

import select
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcairn.cache import Cache
from kvcairn.config import Config
from kvcairn.errors import ClosedError, ConfigError, UnsupportedError
from kvcairn.ranks import acquire_all, lookup_all
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import Rig
from kvcairn.types import MissReason, RankSlice
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, space_of, state, store

LONG_S = 60.0


def settings(capacity: str = "1 MiB", **more: Any) -> Config:
    return Config.from_dict({"tiers": [{"type": "memory", "capacity": capacity}]} | more)


class TestOpen:
    def test_equal_settings_are_one_cache(self) -> None:
        with Cache.open(settings()) as one, Cache.open(settings("1024 KiB")) as two:
            assert one is two
            with Cache.open(settings("2 MiB")) as other:
                assert other is not one

    def test_it_closes_with_its_last_user(self) -> None:
        one, two = Cache.open(settings()), Cache.open(settings())
        one.close()
        two.stats()
        two.close()
        with pytest.raises(ClosedError):
            one.stats()
        with Cache.open(settings()) as fresh:
            assert fresh is not one
            fresh.stats()

    def test_closing_once_too_often_closes_nobody_elses(self) -> None:
        old = Cache.open(settings())
        old.close()
        with Cache.open(settings()) as fresh:
            old.close()
            old.close()
            fresh.stats()

    def test_opened_by_many_threads_at_once_it_is_one(self) -> None:
        opened: list[Cache] = []
        threads = [threading.Thread(target=lambda: opened.append(Cache.open(settings("3 MiB")))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(cache) for cache in opened}) == 1
        for cache in opened:
            cache.stats()
            cache.close()
        with pytest.raises(ClosedError):
            opened[0].stats()

    def test_what_cannot_be_opened_leaves_nothing_behind(self, tmp_path: Path) -> None:
        tiers = [
            {"type": "memory", "capacity": "1 MiB"},
            {"type": "disk", "path": str(tmp_path), "capacity": "4 MiB"},
        ]
        config = Config.from_dict({"tiers": tiers})
        other = Config.from_dict({"tiers": tiers, "verify_memory": "always"})
        with Cache.open(config), pytest.raises(ConfigError):
            Cache.open(other)  # the folder has an owner
        with Cache.open(other) as cache:
            assert list(cache.stats().tiers) == ["memory", "disk"]

    @pytest.mark.parametrize("address", ["unix:/nowhere", "unix:", "tcp://127.0.0.1:1", "/nowhere"])
    def test_where_no_daemon_is_connecting_says_so(self, address: str) -> None:
        with pytest.raises(ConfigError, match="address"):
            Cache.connect(address)

    def test_tokens_are_refused_rather_than_ignored(self) -> None:
        with pytest.raises(UnsupportedError, match="token"):
            Cache.connect("unix:/nowhere", token="secret")


def test_a_space_is_one_object(rig: Rig) -> None:
    assert rig.space() is rig.space()
    assert rig.space("other") is not rig.space()


def test_drain_says_whether_everything_is_written(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", threads=True)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.HANG, ops=frozenset(["write"])),)
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 2))
    assert not rig.cache.drain(timeout_s=0)
    assert not rig.cache.drain("disk", timeout_s=0.01)
    assert rig.cache.drain("memory", timeout_s=0)
    rig.faulty.heal()
    assert rig.cache.drain(timeout_s=LONG_S)
    assert rig.cache.stats().tiers["disk"].blocks == 2


def test_closing_writes_what_is_left_over(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", threads=True)
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 200))
    rig.cache.close()
    assert len(rig.content.slots) == 200


def test_closing_without_drain_drops_what_is_queued(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 200))
    rig.cache.close(drain=False)
    assert rig.content.slots == {}


@pytest.mark.parametrize("what", ["all", "space", "tier", "both"])
def test_clear_drops_exactly_what_was_named(make_rig: MakeRig, what: str) -> None:
    rig = make_rig(below="dict")
    one, two = Blocks(rig, "one"), Blocks(rig, "two")
    keys = one.keys(1, 2)
    for blocks in (one, two):
        blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(one.space if what in ("space", "both") else None, "disk" if what in ("tier", "both") else None)
    left = {
        "all": ({}, {}), "space": ({}, {"memory": 2}), "tier": ({"memory": 2}, {"memory": 2}),
        "both": ({"memory": 2}, {"memory": 2}),
    }[what]  # fmt: skip
    assert (one.space.lookup(keys).by_tier, two.space.lookup(keys).by_tier) == left
    blocks_below = {"all": 0, "space": 2, "tier": 0, "both": 2}[what]
    rig.cache.drain()
    assert rig.cache.stats().tiers["disk"].blocks == blocks_below
    assert_idle(rig)


def test_the_eventfd_is_readable_when_a_job_has_ended(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", threads=True)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    job = blocks.space.prefetch(keys)
    readable, _, _ = select.select([rig.cache.fileno()], [], [], LONG_S)
    assert readable
    assert rig.cache.poll() == [job]
    assert select.select([rig.cache.fileno()], [], [], 0)[0] == []
    job.close()
    assert_idle(rig)


class TestRanks:
    """One chain over the spaces of several ranks."""

    def spaces(self, rig: Rig, count: int = 3) -> list[Any]:
        descriptor = rig.setup.descriptor()
        ranks = [RankSlice(tp=rank, tp_size=count) for rank in range(count)]
        return [rig.cache.space(type(descriptor)(**{**as_dict(descriptor), "rank": rank})) for rank in ranks]

    def test_the_common_length_counts(self, rig: Rig) -> None:
        spaces = self.spaces(rig)
        keys = chain(spaces[0], 5)
        for space, length in zip(spaces, (5, 2, 4), strict=True):
            store(space, keys[:length])
        hit = lookup_all(spaces, keys)
        assert (hit.blocks, hit.boundaries, hit.reason) == (2, (1, 2), MissReason.NEVER_STORED)
        assert lookup_all(spaces, keys, start=2).blocks == 0
        assert lookup_all(spaces, keys[:2]).reason is None
        leases = acquire_all(spaces, keys)
        assert [lease.count for lease in leases] == [2, 2, 2]
        for lease in leases:
            lease.release()
        assert_idle(rig)

    def test_boundaries_intersect(self, rig: Rig) -> None:
        spaces = [space_of(rig, full(), state(), tenant=tenant) for tenant in "ab"]
        keys = chain(spaces[0], 6)
        for space, ends in zip(spaces, ((1, 3, 6), (3, 5)), strict=True):
            store(space, keys, [[0, 1] if i + 1 in ends else [0] for i in range(6)])
        assert [space.lookup(keys).boundaries for space in spaces] == [(1, 3, 6), (3, 5)]
        assert lookup_all(spaces, keys).boundaries == (3,)
        leases = acquire_all(spaces, keys)
        assert [lease.count for lease in leases] == [3, 3]
        for lease in leases:
            lease.release()
        assert_idle(rig)

    def test_nothing_in_common_is_nothing(self, rig: Rig) -> None:
        spaces = self.spaces(rig, 2)
        keys = chain(spaces[0], 2)
        store(spaces[0], keys)
        assert lookup_all(spaces, keys).blocks == 0
        leases = acquire_all(spaces, keys, deadline_s=0)
        assert [lease.count for lease in leases] == [0, 0]
        for lease in leases:
            lease.release()
        assert_idle(rig)

    def test_no_space_is_refused(self, rig: Rig) -> None:
        for call in (lookup_all, acquire_all):
            with pytest.raises(ValueError, match="at least one"):
                call([], [])

    def test_when_one_rank_loses_a_block_all_are_shorter(self, make_rig: MakeRig) -> None:
        rig = make_rig(below="dict")
        spaces = self.spaces(rig, 2)
        keys = chain(spaces[0], 4)
        for space in spaces:
            store(space, keys)
        rig.cache.drain()
        rig.cache.clear(tier="memory")
        lost = spaces[1].descriptor.space_id
        for place, (stored, _) in list(rig.content.slots.items()):
            if (stored.block.space_id, stored.block.key) == (lost, keys[2]):
                del rig.content.slots[place]
        leases = acquire_all(spaces, keys, deadline_s=5.0)
        assert [lease.count for lease in leases] == [2, 2]
        for lease in leases:
            lease.release()
        assert_idle(rig)

    def test_a_lease_for_all_says_why_it_is_short(self, rig: Rig) -> None:
        spaces = self.spaces(rig, 2)
        keys = chain(spaces[0], 3)
        for space in spaces:
            store(space, keys[:1])
        leases = acquire_all(spaces, keys)
        assert [lease.reason for lease in leases] == [MissReason.NEVER_STORED] * 2
        for lease in leases:
            lease.release()


def as_dict(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


class TestMistakes:
    """What is handed in by mistake is named, and nothing has happened."""

    def test_a_name_in_place_of_a_space(self, rig: Rig) -> None:
        wrong: Any = "my-model"
        with pytest.raises(TypeError, match=r"expected kvcairn\.Space, as from cache\.space, got 'my-model'"):
            rig.cache.clear(wrong)

    def test_options_of_a_tier_that_are_no_table(self, rig: Rig) -> None:
        wrong: Any = "disk"
        with pytest.raises(ConfigError, match="tier: expected a table"):
            rig.cache.add_tier(wrong)

    @pytest.mark.parametrize("timeout_s", ["1 s", float("nan"), True])
    def test_times_that_are_no_number_of_seconds(self, rig: Rig, timeout_s: Any) -> None:
        job = rig.space().prefetch([])
        for call in (lambda: rig.cache.drain(timeout_s=timeout_s), lambda: rig.cache.events(timeout_s)):
            with pytest.raises(ValueError, match="timeout_s must be a number of seconds, got "):
                call()
        with pytest.raises(ValueError, match="timeout_s must be a number of seconds, got "):
            job.wait(timeout_s)

    def test_a_start_that_is_no_whole_number(self, rig: Rig) -> None:
        wrong: Any = 1.5
        with pytest.raises(ValueError, match=r"start must be 0 to 0, the number of keys, got 1\.5"):
            rig.space().lookup([], start=wrong)

    def test_a_setting_without_effect(self, rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = tmp_path / "added"
        folder.mkdir()
        rig.cache.add_tier({"type": "disk", "name": "ssd", "path": str(folder), "capacity": "1 MiB", "min_touches": 3})
        assert "tier.min_touches: has no effect with write_policy = 'through'" in caplog.text
