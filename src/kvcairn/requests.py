"""Every public call as a request and a reply value, and the link that carries them to the core.

The same structs serve the embedded cache (passed by reference), the serialising loopback of the tests and the
daemon's socket. Spaces, leases, reservations and jobs are named by number. Addresses in replies are bytes from the
start of the arena, -1 where a group has no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from kvcairn.layout import SpaceDescriptor
from kvcairn.types import BlockEvent, Completion, Hints, Hit, JobState, MissReason, Stats


class Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all requests."""


class Chain(Request, frozen=True, tag=True, array_like=True):
    """Keys of one chain in one space; `start` is the first block wanted. `parent` is b"" where it is unknown."""

    space: int
    keys: list[bytes]
    start: int = 0
    parent: bytes | None = None


class OpenSpace(Request, frozen=True):
    """Make a space known."""

    descriptor: SpaceDescriptor


class Lookup(Chain, frozen=True):
    """Ask the index."""


class LookupAll(Request, frozen=True):
    """Ask the index for the same chain in several rank spaces: what all of them have."""

    spaces: list[int]
    keys: list[bytes]
    start: int = 0


class AcquireAll(Request, frozen=True):
    """Acquire the longest length that all of several rank spaces can restore, in each of them."""

    spaces: list[int]
    keys: list[bytes]
    start: int = 0
    wait_s: float = 0.0


class Probe(Chain, frozen=True):
    """Ask the index, and foreign tiers."""

    deadline_s: float = 0.1


class Acquire(Chain, frozen=True):
    """Lease what is in memory; where more could be loaded and `wait_s` is not 0, start a job for it instead."""

    wait_s: float = 0.0
    counts_rest: bool = True  # False: the caller asks again for what is not leased, so it is not counted as missed


class Prefetch(Chain, frozen=True):
    """Start a job that brings blocks into memory."""

    priority: int = 0
    deadline_s: float | None = None
    is_awaited: bool = True  # somebody waits for it, so what would take longer than computing is left out


class Reserve(Chain, frozen=True):
    """Take slots for blocks that are not in memory; `parts` names the groups wanted of each key behind start.

    `is_again`: the same call has asked for them before, which is no further sight of them.
    """

    parts: list[list[int]] | None = None
    is_again: bool = False


class Commit(Request, frozen=True):
    """Publish reserved blocks; `ok` says which, `checksums` are xxh3-128 of each group where they were computed."""

    reservation: int
    ok: list[bool] | None = None
    checksums: list[list[bytes]] | None = None


class Abort(Request, frozen=True):
    """Give reserved slots back."""

    reservation: int


class Release(Request, frozen=True):
    """End a lease."""

    lease: int


class Damaged(Request, frozen=True):
    """A leased block does not match its checksum: drop the copy, and undo the lease with all that it counted."""

    lease: int
    block: int


class JobInfo(Request, frozen=True):
    """Ask how far a job is."""

    job: int


class JobLease(Request, frozen=True):
    """Turn what a job has brought into a lease, and end the job."""

    job: int
    count: int | None = None
    reason: MissReason | None = None


class JobCancel(Request, frozen=True):
    """Bring nothing more; what has arrived stays owned."""

    job: int


class JobClose(Request, frozen=True):
    """End a job and let go of what it owns."""

    job: int


class ReadInto(Chain, frozen=True):
    """Read the leading blocks of `keys[start:]` that are on slower tiers only, each to its address.

    Only for a core in the client's own process. Counts what was read, not what was not.
    """

    addresses: list[int] = []


class ReadStatus(Request, frozen=True):
    """Ask how far a direct read is; once it has ended it is forgotten with the answer."""

    read: int


class ReadCancel(Request, frozen=True):
    """Take back what of a direct read has not begun, and count none of it."""

    read: int


class Contains(Chain, frozen=True):
    """Count the leading keys that are readable anywhere, by exact key."""


class Readable(Chain, frozen=True):
    """Ask for each key whether a copy is readable anywhere, whatever is before it."""


class Touch(Chain, frozen=True):
    """Note a use."""


class Forget(Chain, frozen=True):
    """Drop all copies of these keys."""


class Hint(Chain, frozen=True):
    """Tell what is known about the future of these keys."""

    hints: Hints = Hints()


class GetStats(Request, frozen=True):
    """Ask for statistics."""


class IsIdle(Request, frozen=True):
    """Ask whether background work is finished, on one tier or all; `but_rebuilds` leaves out what can go on later."""

    tier: str | None = None
    but_rebuilds: bool = False


class WriteBack(Request, frozen=True):
    """Ask for what memory alone has to be written down, of one piece of the index; reply: where the next begins."""

    begin: int = 0


class AddTier(Request, frozen=True):
    """Add a tier behind the others."""

    options: dict[str, Any]


class DetachTier(Request, frozen=True):
    """Take a tier away; with `drain` only once it is idle."""

    tier: str
    drain: bool = True


class ReportPrefill(Request, frozen=True):
    """An engine has computed so many tokens of a space in so many seconds."""

    space: int
    tokens: int
    seconds: float


class Clear(Request, frozen=True):
    """Drop everything, or one space, or one tier; the reply is a number for `IsCleared`."""

    space: int | None = None
    tier: str | None = None


class IsCleared(Request, frozen=True):
    """Ask, once, whether what was cleared stays away after a restart; None while that is being made so."""

    number: int


class Subscribe(Request, frozen=True):
    """Start to collect events for one reader."""


class Unsubscribe(Request, frozen=True):
    """Stop to collect events for a reader."""

    reader: int


class Events(Request, frozen=True):
    """Take the events collected for a reader."""

    reader: int


class Ended(Request, frozen=True):
    """Take the jobs that ended since the last call."""


class Adopt(Request, frozen=True):
    """Share what a ticket names."""

    ticket: bytes


# --- replies ---------------------------------------------------------------------------------------------------


class SpaceOpened(msgspec.Struct, frozen=True, tag=True):
    """A space and its number; `verify` is the setting `verify_memory`, `write_policy` that of the memory tier."""

    space: int
    verify: str
    write_policy: str


class Leased(msgspec.Struct, frozen=True, tag=True):
    """A lease of `count` blocks, or a job to wait for.

    `offsets[group][i]` is the address of block i; `checksums[group][i]` is b"" where it is not to be verified.
    """

    lease: int
    count: int
    reason: MissReason | None
    offsets: list[list[int]]
    checksums: list[list[bytes]] | None = None
    job: int | None = None


class LeasedAll(msgspec.Struct, frozen=True, tag=True):
    """A lease, or a job to wait for, in each of several spaces, and why there are no more blocks."""

    leases: list[Leased]
    reason: MissReason | None


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """A reservation: `keys[j]` is block `blocks[j]` of the call; `in_flight` are blocks that another is writing.

    `is_final` says that a short one stays so: nothing else holds room that could be waited for.
    """

    reservation: int
    blocks: list[int]
    offsets: list[list[int]]
    in_flight: list[int]
    reason: MissReason | None = None
    is_final: bool = False


class JobStatus(msgspec.Struct, frozen=True, tag=True):
    """How far a job is; `stalled` says that nothing more can arrive until something else lets go."""

    job: int
    state: JobState
    ready: int
    total: int
    error: str | None = None
    ok: list[bool] | None = None
    stalled: bool = False


class Adopted(msgspec.Struct, frozen=True, tag=True):
    """What a ticket named."""

    kind: Literal["lease", "reservation", "job"]
    space: int
    keys: list[bytes]
    lease: Leased | None = None
    reservation: Reserved | None = None
    job: JobStatus | None = None


class Value(msgspec.Struct, frozen=True, tag=True):
    """A plain answer."""

    value: bool | int | None = None


class Flags(msgspec.Struct, frozen=True, tag=True):
    """An answer for each key."""

    flags: list[bool]


class EventBatch(msgspec.Struct, frozen=True, tag=True):
    """Events in order; `closed` says that none will follow."""

    events: list[BlockEvent]
    closed: bool = False


class JobBatch(msgspec.Struct, frozen=True, tag=True):
    """Jobs that ended."""

    jobs: list[JobStatus]


class HitReply(msgspec.Struct, frozen=True, tag=True):
    """A hit."""

    hit: Hit


class StatsReply(msgspec.Struct, frozen=True, tag=True):
    """Statistics."""

    stats: Stats


AnyRequest = (
    OpenSpace | Lookup | Probe | Acquire | Prefetch | Reserve | Commit | Abort | Release | Damaged | JobInfo | JobLease
    | JobCancel | JobClose | ReadInto | ReadStatus | ReadCancel | Contains | Readable | Touch | Forget | Hint
    | GetStats | IsIdle | WriteBack | AddTier | DetachTier | Clear | IsCleared | Subscribe | Unsubscribe | Events
    | Ended | Adopt | ReportPrefill | LookupAll | AcquireAll
)  # fmt: skip
AnyReply = (
    SpaceOpened | Leased | LeasedAll | Reserved | JobStatus | Adopted | Value | Flags | EventBatch | JobBatch | HitReply
    | StatsReply
)  # fmt: skip


class Memory(Protocol):
    """An arena, as far as handles need it."""

    view: memoryview

    def read(self, offset_bytes: int, nbytes: int, /) -> bytes:
        """Return a copy of bytes; does not hold the GIL while it copies.

        Raises:
            ClosedError: the cache is closed.
        """
        ...


class Link(Protocol):
    """Carries requests to the core and back. Any thread."""

    def memory(self, hold: int = 0) -> Memory:
        """Return the arena that a lease or reservation, by its number, has its slots in; 0 is the present one.

        Raises:
            ClosedError: the cache is closed.
            LeaseError: it was of another run of the daemon, whose arena nobody here refers to any more.
        """
        ...

    @property
    def boot_id(self) -> bytes:
        """Names this run of the core."""
        ...

    def reads_into_buffers(self) -> bool:
        """Whether `ReadInto` is served: tiers can read into memory of this process."""
        ...

    def has_lower_tiers(self) -> bool:
        """Whether there is a tier below memory now."""
        ...

    def check_open(self) -> None:
        """Do nothing where the cache is open, in this very process.

        Raises:
            ClosedError: it is not.
        """
        ...

    def call(self, request: Any) -> Any:
        """Handle one request; waits only for one short lock.

        Raises:
            ClosedError: the cache is closed, or this process is a fork of the one that opened it.
        """
        ...

    def wait(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `done()` (asked again whenever something changed) or the timeout; return its last answer."""
        ...

    def run(self, work: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Run `work` on a transfer thread; `failed(why)` is called where it raised or never ran."""
        ...

    def version(self) -> int:
        """Grows with every change that somebody may wait for."""
        ...

    def notify(self) -> None:
        """Have those who wait ask again."""
        ...

    def when(self, event: Completion, then: Callable[[], None]) -> None:
        """Call `then` once, from a background thread, after `event.query()` has become true.

        Where `query` raises, `then` is never called: what waits for it stays held.
        """
        ...

    def fileno(self) -> int:
        """A descriptor that becomes readable when jobs end."""
        ...

    def take_ended(self) -> bool:
        """Return whether it was readable, and make it not so."""
        ...

    def now(self) -> float:
        """The core's time in seconds."""
        ...

    def close(self) -> None:
        """End the core. Idempotent."""
        ...
