"""Frozen value types that every layer shares: reasons, states, hits, events, statistics."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Final, Protocol

import msgspec


class MissReason(StrEnum):
    """Why a block was not served. One of these stands behind every miss."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    TIER_DOWN = "tier_down"
    TOO_SLOW = "too_slow"
    PENDING = "pending"
    NO_ROOM = "no_room"
    PARENT_MISSING = "parent_missing"
    NOT_WRITTEN = "not_written"
    VANISHED = "vanished"
    CLEARED = "cleared"
    DEADLINE = "deadline"
    UNKNOWN = "unknown"


class CopyState(IntEnum):
    """State of one copy, that is of (key, group, tier). Only READY is ever read."""

    ABSENT = 0
    RESERVED = 1  # a client writes to it
    WRITING = 2  # a transfer writes to it
    READY = 3
    EVICTING = 4  # forgotten while somebody still reads or writes it; freed with the last hold


class JobState(StrEnum):
    """State of one asynchronous transfer; `ready`, `cancelled` and `failed` are final."""

    QUEUED = "queued"
    ASKING = "asking"
    LOADING = "loading"
    READY = "ready"
    CANCELLED = "cancelled"
    FAILED = "failed"


FINAL: Final = frozenset({JobState.READY, JobState.CANCELLED, JobState.FAILED})
"""States that a transfer does not leave."""


class _Unknown:
    """The type of `UNKNOWN`."""

    def __repr__(self) -> str:
        return "kvcairn.UNKNOWN"


UNKNOWN: Final = _Unknown()
"""`parent=UNKNOWN`: the chain is a floating segment, found by exact key until its parent is known."""

Parent = bytes | _Unknown | None


class TooSlow(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that are there and not worth loading.

    Attributes:
        tier: the slowest tier that they would come from.
        blocks: how many.
        load_s: how long loading the whole hit would take.
        compute_s: how long computing these blocks takes.
    """

    tier: str
    blocks: int
    load_s: float
    compute_s: float


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """What a lookup found. Every number is counted from `start`, in blocks unless named otherwise.

    Attributes:
        blocks: length of the longest restorable run; the last of `boundaries`.
        block_tokens: tokens of one block.
        by_tier: blocks of the run by the fastest tier that holds them.
        pending: blocks right behind the run that are being written now, or of which a foreign tier
            has not been asked yet.
        reason: why the run ended, None where all that was asked for is there.
        sparse: the restorable lengths where they are not all of 1..blocks.
        too_slow: what the planner left out, and why; None where it left out nothing.
    """

    blocks: int
    block_tokens: int
    by_tier: dict[str, int] = {}
    pending: int = 0
    reason: MissReason | None = None
    sparse: tuple[int, ...] | None = None
    too_slow: TooSlow | None = None

    @property
    def tokens(self) -> int:
        """Length of the run in tokens."""
        return self.blocks * self.block_tokens

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Every restorable length, ascending, in blocks."""
        return tuple(range(1, self.blocks + 1)) if self.sparse is None else self.sparse


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller knows about the future of blocks.

    Attributes:
        priority: 0 (first to go) to 100.
        ttl_s: seconds after which the blocks are misses (`expired`); None for no limit.
        pin: keep the blocks from eviction, under a cap; not the same as a lease, which pins for use.
        session: id of the conversation that the blocks belong to.
        ends_session: this was the last request of the session.
    """

    priority: int = 50
    ttl_s: float | None = None
    pin: bool = False
    session: str | None = None
    ends_session: bool = False

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or not 0 <= self.priority <= 100:
            raise ValueError(f"priority must be a whole number from 0 to 100, got {self.priority!r}")
        if self.ttl_s is not None and not (isinstance(self.ttl_s, int | float) and self.ttl_s >= 0):
            raise ValueError(f"ttl_s must be seconds from 0 up, or None, got {self.ttl_s!r}")
        if not isinstance(self.pin, bool) or not isinstance(self.ends_session, bool):
            raise ValueError(f"pin and ends_session are True or False, got {self.pin!r} and {self.ends_session!r}")
        if self.session is not None and not isinstance(self.session, str):
            raise ValueError(f"session must be a text or None, got {self.session!r}")


class RankSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of the model a rank holds: parallel ranks and sizes, its layers and heads."""

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    cp: int = 0
    cp_size: int = 1
    layers: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse a rank that is none of its group."""
        for name in ("tp", "pp", "cp"):
            rank, size = getattr(self, name), getattr(self, f"{name}_size")
            if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
                raise ValueError(f"{name} must be 0 to {name}_size - 1, got {rank!r} of {size!r}")


class BlockStored(msgspec.Struct, frozen=True, tag="stored"):
    """A copy became readable on a tier (on disk: acknowledged)."""

    tier: str
    space: bytes
    key: bytes
    parent: bytes | None


class BlockRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """A copy left a tier."""

    tier: str
    space: bytes
    key: bytes
    parent: bytes | None


BlockEvent = BlockStored | BlockRemoved


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier at one moment; bytes are whole slots, headers and rounding included.

    Attributes:
        capacity_bytes: the bound; `used_bytes` never exceeds it.
        used_bytes: slots given out, whatever their state; a disk keeps up to 4 % of its capacity for its index besides.
        leased_bytes: slots that a lease, job or transfer holds.
        quarantined_bytes: slots that something may still touch, not to be given out.
        rounding_bytes: part of `used_bytes` that carries no payload.
        blocks: readable copies.
        in_flight: copies being written.
        dirty_bytes: slots of readable copies that lie on no slower tier; 0 on the slowest.
        writes_dropped: blocks whose write was given up, by reason.
        errors: failed calls, by error class.
        is_down: the breaker is open.
        read_latency_s: measured time of a read before its bytes come; 0 while nothing was read.
        read_bytes_per_s: measured rate of reads behind that, the queue counted; 0 while nothing was read.
        unscanned_bytes: of files whose content is not known yet, as the index was lost and is being made anew; part
            of `used_bytes`.
    """

    capacity_bytes: int
    used_bytes: int
    leased_bytes: int
    quarantined_bytes: int
    rounding_bytes: int
    blocks: int
    in_flight: int
    writes_dropped: dict[str, int]
    errors: dict[str, int]
    is_down: bool = False
    unscanned_bytes: int = 0
    dirty_bytes: int = 0
    read_latency_s: float = 0.0
    read_bytes_per_s: float = 0.0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The cache at one moment.

    `hits_by_tier` and `misses_by_reason` count blocks and add up to `blocks_asked`: the blocks that `acquire`,
    `get` and `load_into` were asked for. Blocks behind the first miss carry its reason. A lookup counts nothing.
    """

    tiers: dict[str, TierStats]
    hits_by_tier: dict[str, int]
    misses_by_reason: dict[str, int]
    blocks_asked: int
    open_leases: int
    open_reservations: int
    open_jobs: int
    spaces: dict[str, int] = {}
    tenants: dict[str, int] = {}
    prefill_tokens_per_s: dict[str, float] = {}


class Completion(Protocol):
    """Something that ends by itself, such as a CUDA event or a `Job`."""

    def query(self) -> bool:
        """Return whether it has ended; any thread, never blocks."""
        ...


def add_to(counts: dict[str, int], name: str, n: int = 1) -> None:
    """Add `n` to the counter `name`, which need not exist yet."""
    if n:
        counts[name] = counts.get(name, 0) + n


def total(counts: Iterable[int]) -> int:
    """Sum of counters, as a plain int."""
    return int(sum(counts))
