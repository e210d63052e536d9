"""The settings of tiers and of prefetching, as types. Layer 1; `config` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

Bytes = Annotated[int, Meta(ge=1, extra={"unit": "bytes"}, extra_json_schema={"x-unit": "bytes"})]
Seconds = Annotated[float, Meta(ge=0, extra={"unit": "seconds"}, extra_json_schema={"x-unit": "seconds"})]
PositiveSeconds = Annotated[float, Meta(gt=0, extra={"unit": "seconds"}, extra_json_schema={"x-unit": "seconds"})]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
# `built` names the values that this version carries out; the others are refused, not ignored.
Preset = Annotated[Literal["unified", "hicache", "lmcache"], Meta(extra={"built": ("unified",)})]
WritePolicy = Literal["through", "selective", "back", "none"]


class TierOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Settings of one tier. A kind of tier derives from it and sets `tag` to its `type`.

    Attributes:
        name: The tier's name in statistics, events and errors; unique in a cache.
    """

    name: Name


class MemoryTierOptions(TierOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="memory"):
    """Settings of the memory tier.

    Attributes:
        capacity_bytes: Most memory the arena takes (setting `capacity`).
        write_policy: When a block that an engine has is stored here.
        min_touches: Sights of a block before `selective` stores it.
        eviction: Name of the eviction policy.
        region_bytes: Size of the arena's regions (setting `region`); None lets the arena choose.
        prefault: Whether the arena's pages are touched after opening, in the background.
        poison: Whether freed slots are overwritten, so that a late reader is found (for tests).
    """

    name: Name = "memory"
    capacity_bytes: Bytes = field(name="capacity")
    write_policy: WritePolicy = "through"
    min_touches: Annotated[int, Meta(ge=1, le=255)] = 2
    eviction: str = "lru"
    region_bytes: Bytes | None = field(default=None, name="region")
    prefault: bool = True
    poison: bool = False


class ManagedTierOptions(TierOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a managed tier below memory, whatever it stores to. The core carries them out, not the tier.

    Attributes:
        capacity_bytes: Most bytes that its slots take together, with what the tier needs itself (setting `capacity`).
        write_policy: When a block is written here.
        min_touches: Sights of a block before `selective` writes it.
        max_write_bytes_per_day: Most bytes written here in a day of the calendar (UTC); None for no limit.
        promotion: What becomes of a copy here that is loaded into memory: it stays (keep), goes (move), or
            stays while the one in memory goes with the last that holds it (bypass).
        eviction: Name of the eviction policy.
        deadline_s: Longest time one read or write may take (setting `deadline`).
    """

    capacity_bytes: Bytes = field(name="capacity")
    write_policy: WritePolicy = "through"
    min_touches: Annotated[int, Meta(ge=1, le=255)] = 2
    max_write_bytes_per_day: Bytes | None = None
    promotion: Literal["keep", "move", "bypass"] = "keep"
    eviction: str = "lru"
    deadline_s: PositiveSeconds = field(default=5.0, name="deadline")


class DiskTierOptions(ManagedTierOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="disk"):
    """Settings of a disk tier.

    Attributes:
        path: Existing folder that this tier owns.
        durability: What an acknowledged block survives: the process (none), power loss (data), and
            power loss with changed folders (full).
        reserve_bytes: Bytes of the file system that are left free (setting `reserve`); unless given, a twentieth of
            it, at most 1 GiB.
    """

    name: Name = "disk"
    path: str
    durability: Literal["none", "data", "full"] = "none"
    reserve_bytes: Bytes | None = field(default=None, name="reserve")


class PrefetchOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of prefetching from slower tiers into memory.

    Attributes:
        policy: What a start of the engine waits for: nothing more (best_effort), all (wait_complete), or
            all within a time (timeout).
        base_s: The time of `timeout` for any request (setting `base`).
        per_1024_tokens_s: What each 1,024 tokens add to it (setting `per_1024_tokens`).
        cap_s: The longest time of `timeout`, however long the request (setting `cap`).
        min_tokens: A prefetch that would bring fewer tokens from slower tiers brings none.
        max_memory_fraction: Most of the memory tier that blocks brought by open prefetches take, all together.
        time_to_live_s: How long a finished job holds its blocks unclaimed (setting `time_to_live`).
    """

    policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    base_s: Seconds = field(default=1.0, name="base")
    per_1024_tokens_s: Seconds = field(default=0.25, name="per_1024_tokens")
    cap_s: Seconds = field(default=30.0, name="cap")
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    max_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.25
    time_to_live_s: Seconds = field(default=30.0, name="time_to_live")

    def wait_s(self, policy: str | None, tokens: int) -> float | None:
        """Return how long a start may wait for so many tokens; None: as long as it takes."""
        policy = policy or self.policy
        if policy not in ("best_effort", "wait_complete", "timeout"):
            raise ValueError(f"unknown prefetch policy {policy!r}; there are best_effort, wait_complete, timeout")
        if policy == "timeout":
            return min(self.cap_s, self.base_s + self.per_1024_tokens_s * tokens / 1024)
        return 0.0 if policy == "best_effort" else None


BUILT_IN_TIERS: Final[Mapping[str, type[TierOptions]]] = MappingProxyType(
    {"memory": MemoryTierOptions, "disk": DiskTierOptions}
)
BUILT_IN_EVICTIONS: Final = ("arc", "fifo", "lfu", "lru", "priority", "s3fifo", "session")
