from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcairn.types import (
    UNKNOWN,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    CopyState,
    Hints,
    Hit,
    JobState,
    MissReason,
    Stats,
    TierStats,
    add_to,
    total,
)


def test_the_reasons_are_those_of_the_documentation() -> None:
    assert set(MissReason) == {
        "never_stored", "evicted", "expired", "corrupt", "tier_down", "too_slow", "pending", "no_room",
        "parent_missing", "not_written", "vanished", "cleared", "deadline", "unknown",
    }  # fmt: skip
    assert f"{MissReason.NO_ROOM}" == "no_room"


def test_states() -> None:
    assert [state.name for state in CopyState] == ["ABSENT", "RESERVED", "WRITING", "READY", "EVICTING"]
    assert int(CopyState.ABSENT) == 0  # arrays of states begin as zeros
    assert set(JobState) == {"queued", "asking", "loading", "ready", "cancelled", "failed"}


def test_a_dense_hit_knows_all_its_boundaries() -> None:
    hit = Hit(blocks=3, block_tokens=16)
    assert (hit.tokens, hit.boundaries, hit.reason, hit.pending) == (48, (1, 2, 3), None, 0)
    assert Hit(blocks=0, block_tokens=16).boundaries == ()


def test_a_sparse_hit_lists_its_boundaries() -> None:
    assert Hit(blocks=5, block_tokens=2, sparse=(2, 5)).boundaries == (2, 5)
    assert Hit(blocks=0, block_tokens=2, sparse=()).boundaries == ()


def test_unknown_names_itself() -> None:
    assert repr(UNKNOWN) == "kvcairn.UNKNOWN"
    assert UNKNOWN is not None


def test_values_cannot_be_changed() -> None:
    for value in (Hit(blocks=1, block_tokens=1), Hints(), BlockStored("m", b"", b"", None)):
        with pytest.raises(AttributeError):
            setattr(value, value.__struct_fields__[0], 7)


TIER = TierStats(
    capacity_bytes=1, used_bytes=1, leased_bytes=0, quarantined_bytes=0, rounding_bytes=0, blocks=1, in_flight=0,
    writes_dropped={"no_room": 1}, errors={}, is_down=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Hit(blocks=2, block_tokens=3, by_tier={"memory": 2}, reason=MissReason.EVICTED, sparse=(2,)), Hit),
        (Hints(priority=3, ttl_s=0.5, pin=True, session="s", ends_session=True), Hints),
        (BlockStored("disk", b"s", b"k", None), BlockEvent),
        (BlockRemoved("disk", b"s", b"k", b"p"), BlockEvent),
        (
            Stats(
                tiers={"memory": TIER}, hits_by_tier={"memory": 1}, misses_by_reason={}, blocks_asked=1, open_leases=0,
                open_reservations=0, open_jobs=0, spaces={"a": 1}, tenants={"": 1},
            ),
            Stats,
        ),
    ],
)  # fmt: skip
def test_values_survive_the_wire(value: Any, kind: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value


def test_counters() -> None:
    counts: dict[str, int] = {}
    add_to(counts, "a")
    add_to(counts, "a", 4)
    add_to(counts, "b", 0)
    assert counts == {"a": 5}
    assert total(counts.values()) == 5
    assert total([]) == 0
