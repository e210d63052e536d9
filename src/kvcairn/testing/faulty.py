"""A tier that fails as it is told to: seeded, countable, and around any real tier."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, cast

from kvcairn.errors import TierError, TierUnavailable
from kvcairn.tiers.base import BlockRef, Delete, Outcome, Read, Stored, Tier, Write
from kvcairn.types import MissReason

T = TypeVar("T")
Item = TypeVar("Item", Write, Read)


class FaultKind(StrEnum):
    """What can go wrong with one call. The first six fit any call, the others calls that move blocks."""

    DELAY = "delay"  # the call starts late
    HANG = "hang"  # the call starts when `release` is called: it completes long after its deadline
    HANG_FAIL = "hang_fail"  # the call fails when `release` is called
    ERROR = "error"  # a TierError instead of the call
    LATE_ERROR = "late_error"  # a TierError after the call has done its work: a lost acknowledgement
    BUG = "bug"  # an OSError, which no tier may raise
    BLOCK_ERROR = "block_error"  # some blocks fail and are left out, the others are done
    VANISHED = "vanished"  # some blocks are said to be gone
    CORRUPT = "corrupt"  # some blocks are said to be damaged
    SHORT = "short"  # some blocks arrive with their second half missing, and are reported done
    ALTERED = "altered"  # some blocks arrive with one byte changed, and are reported done
    SWAPPED = "swapped"  # some blocks arrive with the bytes of their neighbour in the call, and are reported done
    LOST_ACK = "lost_ack"  # some blocks are done and reported failed
    FALSE_ACK = "false_ack"  # some blocks are not done and reported done
    NO_OUTCOMES = "no_outcomes"  # done, with None for a list of outcomes
    EMPTY_OUTCOMES = "empty_outcomes"  # done, with an empty list of outcomes
    MANY_OUTCOMES = "many_outcomes"  # done, with one outcome too many


_WHOLE_CALL = frozenset(
    (FaultKind.DELAY, FaultKind.HANG, FaultKind.HANG_FAIL, FaultKind.ERROR, FaultKind.LATE_ERROR, FaultKind.BUG)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, and when.

    Attributes:
        kind: what goes wrong.
        ops: names of the methods concerned.
        calls: numbers of the calls concerned, counted from 1 for each method; None for any.
        rate: share of those calls that it befalls.
        keys: keys of the blocks concerned, for kinds that befall single blocks; None for a draw.
        block_rate: share of the blocks of such a call that a draw befalls, one at least.
        delay_s: for `delay`.
        error: class of the error raised or reported.
    """

    kind: FaultKind
    ops: frozenset[str] = frozenset(("read", "write"))
    calls: frozenset[int] | None = None
    rate: float = 1.0
    keys: frozenset[bytes] | None = None
    block_rate: float = 1.0
    delay_s: float = 0.0
    error: type[TierError] = TierUnavailable


class FaultyTier(Tier):
    """Passes every call on to `inner`, but for the faults that befall it. Any thread.

    `faults` may be replaced at any time; an empty tuple heals the tier. `calls` counts calls by method and `injected`
    the faults by kind. A hanging call waits until `release`.

    Args:
        inner: the tier that does the work.
        faults: each call meets the first of them that concerns it and that its draw chooses.
        seed: of all draws; the same calls in the same order meet the same faults.
    """

    def __init__(self, inner: Tier, faults: Sequence[Fault] = (), seed: int = 0) -> None:
        self.name = inner.name
        self.inner = inner
        self.faults = tuple(faults)
        self.calls: Counter[str] = Counter()
        self.injected: Counter[FaultKind] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._released = threading.Event()
        _copy_constants(self, inner)

    def release(self) -> None:
        """Let every hanging and delayed call go on, now and from now on until `hold`."""
        self._released.set()

    def hold(self) -> None:
        """Let calls hang again after `release`."""
        self._released.clear()

    def heal(self) -> None:
        """Stop all faults and let hanging calls go on."""
        self.faults = ()
        self.release()

    def open(self) -> Iterable[Stored]:
        """Open the inner tier, or fail."""
        try:
            return self._call("open", self.inner.open)
        finally:
            _copy_constants(self, self.inner)

    def check(self) -> None:
        """Check the inner tier, or fail."""
        self._call("check", lambda: self.inner.check())

    def scan(self, segment: int) -> Iterable[Stored]:
        """Scan a segment of the inner tier, or fail."""
        return self._call("scan", lambda: self.inner.scan(segment))

    def write(self, writes: Sequence[Write]) -> list[Outcome]:
        """Write through the inner tier, or fail."""
        fault = self._meet("write")
        if fault is None or fault.kind in _WHOLE_CALL:
            return self._run("write", fault, lambda: self.inner.write(writes))
        hit = self._choose(fault, writes)
        sent = [_damaged(writes, i, fault.kind) if i in hit else write for i, write in enumerate(writes)]
        return self._move("write", fault, sent, hit, self.inner.write)

    def read(self, reads: Sequence[Read]) -> list[Outcome]:
        """Read through the inner tier, or fail."""
        fault = self._meet("read")
        if fault is None or fault.kind in _WHOLE_CALL:
            return self._run("read", fault, lambda: self.inner.read(reads))
        hit = self._choose(fault, reads)
        outcomes = self._move("read", fault, list(reads), hit, self.inner.read)
        for i in hit:
            _spoil(reads, i, fault.kind)
        return outcomes

    def delete(self, deletes: Sequence[Delete]) -> None:
        """Delete from the inner tier, or fail."""
        self._call("delete", lambda: self.inner.delete(deletes))

    def clear(self, space_id: bytes, generation: int) -> None:
        """Clear the inner tier, or fail."""
        self._call("clear", lambda: self.inner.clear(space_id, generation))

    def retire(self, segments: Sequence[int]) -> None:
        """Retire from the inner tier, or fail."""
        self._call("retire", lambda: self.inner.retire(segments))

    def probe(self, blocks: Sequence[BlockRef]) -> list[bool]:
        """Probe the inner tier, or fail."""
        return self._call("probe", lambda: self.inner.probe(blocks))

    def close(self) -> None:
        """Let hanging calls go and close the inner tier."""
        self.release()
        self.inner.close()

    # -- whole calls

    def _call(self, op: str, work: Callable[[], T]) -> T:
        return self._run(op, self._meet(op), work)

    def _meet(self, op: str) -> Fault | None:
        with self._lock:
            self.calls[op] += 1
            for fault in self.faults:
                concerned = op in fault.ops and (fault.calls is None or self.calls[op] in fault.calls)
                if concerned and (fault.rate >= 1 or self._random.random() < fault.rate):
                    self.injected[fault.kind] += 1
                    return fault
        return None

    def _run(self, op: str, fault: Fault | None, work: Callable[[], T]) -> T:
        kind = None if fault is None else fault.kind
        if fault is None or kind not in _WHOLE_CALL:
            return work()
        if kind is FaultKind.BUG:
            raise OSError(f"injected into {op}")
        if kind is FaultKind.DELAY:
            self._released.wait(fault.delay_s)
        if kind in (FaultKind.HANG, FaultKind.HANG_FAIL):
            self._released.wait()
        if kind in (FaultKind.ERROR, FaultKind.HANG_FAIL):
            raise fault.error(self.name, op, "injected")
        result = work()
        if kind is FaultKind.LATE_ERROR:
            raise fault.error(self.name, op, "injected after the work was done")
        return result

    # -- single blocks

    def _choose(self, fault: Fault, items: Sequence[Item]) -> frozenset[int]:
        if fault.keys is not None:
            return frozenset(i for i, item in enumerate(items) if item.block.key in fault.keys)
        count = len(items)
        with self._lock:
            hit = {i for i in range(count) if self._random.random() < fault.block_rate}
            return frozenset(hit or {self._random.randrange(count)}) if count else frozenset()

    def _move(
        self,
        op: str,
        fault: Fault,
        items: list[Item],
        hit: frozenset[int],
        work: Callable[[Sequence[Item]], list[Outcome]],
    ) -> list[Outcome]:
        kind = fault.kind
        left_out = hit if kind in _NOT_DONE else frozenset[int]()
        kept = [i for i in range(len(items)) if i not in left_out]
        done: dict[int, Outcome] = dict(zip(kept, work([items[i] for i in kept]), strict=True))
        # The types forbid what these three do on purpose.
        if kind is FaultKind.NO_OUTCOMES:
            return cast(list[Outcome], None)
        if kind is FaultKind.EMPTY_OUTCOMES:
            return []
        if kind is FaultKind.MANY_OUTCOMES:
            return [*done.values(), None]
        told: dict[FaultKind, Outcome] = {
            FaultKind.BLOCK_ERROR: fault.error(self.name, op, "injected"),
            FaultKind.LOST_ACK: fault.error(self.name, op, "injected after the block was done"),
            FaultKind.VANISHED: MissReason.VANISHED,
            FaultKind.CORRUPT: MissReason.CORRUPT,
            FaultKind.FALSE_ACK: None,
        }
        return [told[kind] if i in hit and kind in told else done[i] for i in range(len(items))]


_NOT_DONE = frozenset((FaultKind.BLOCK_ERROR, FaultKind.VANISHED, FaultKind.FALSE_ACK, FaultKind.CORRUPT))


def _damaged(writes: Sequence[Write], at: int, kind: FaultKind) -> Write:
    """Return the write as a failing device would carry it out: other bytes under the same checksum."""
    write = writes[at]
    data = bytearray(write.data)
    if kind is FaultKind.SWAPPED:
        other = writes[(at + 1) % len(writes)].data
        data[: other.nbytes] = bytes(other)[: len(data)]
    elif kind in (FaultKind.SHORT, FaultKind.ALTERED):
        _spoil_bytes(data, kind)
    else:
        return write
    return Write(write.block, write.parent, write.slot, memoryview(bytes(data)), write.checksum)


def _spoil(reads: Sequence[Read], at: int, kind: FaultKind) -> None:
    """Change what has arrived in one buffer."""
    out = reads[at].out.cast("B")
    if kind is FaultKind.SWAPPED:
        other = reads[(at + 1) % len(reads)].out.cast("B")
        n = min(out.nbytes, other.nbytes)
        out[:n] = bytes(other[:n])
    elif kind in (FaultKind.SHORT, FaultKind.ALTERED):
        _spoil_bytes(out, kind)


def _spoil_bytes(data: bytearray | memoryview, kind: FaultKind) -> None:
    if kind is FaultKind.ALTERED:
        data[len(data) // 3] ^= 0x40
    else:
        half = len(data) // 2
        data[half:] = bytes(len(data) - half)


def _copy_constants(outer: Any, inner: Tier) -> None:
    """Give the wrapper everything beside methods that the contract names, whether the core reads it yet or not."""
    for name in Tier.__annotations__:
        if hasattr(inner, name):  # `options` is for tiers that settings can name
            setattr(outer, name, getattr(inner, name))
