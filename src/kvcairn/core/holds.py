"""Who holds which copies: leases, reservations and jobs. Each is owned, and ends once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvcairn.core.residency import Residency
from kvcairn.core.spaces import SpaceInfo
from kvcairn.errors import LeaseError
from kvcairn.index.arrays import Rows
from kvcairn.memory.slots import Addresses

Kind = Literal["lease", "reservation", "job"]


@dataclass(slots=True, eq=False)
class Hold:
    """Copies that may not go.

    Attributes:
        kind: what a client knows it as.
        space: the space of all of them.
        keys: the chain it was made for.
        start: number of the first of them that was asked for.
        pinned: rows pinned, by tier and group, with the addresses that their copies had then.
        shares: handles that refer to it: the first one, and one for each adopted ticket.
    """

    kind: Kind
    space: SpaceInfo
    keys: list[bytes]
    pinned: list[tuple[Residency, int, Rows, Addresses]] = field(default_factory=list)
    shares: int = 1
    number: int = 0
    start: int = 0


class Ledger:
    """All open holds by number."""

    def __init__(self) -> None:
        """Start empty."""
        self._open: dict[int, Hold] = {}
        self._next = 0

    def number_from(self, first: int) -> None:
        """Give out numbers above `first`, so that those of another run are told from those of this one."""
        self._next = max(self._next, first)

    def add(self, hold: Hold) -> Hold:
        """Register a hold; nothing is pinned by that."""
        self._next += 1
        hold.number = self._next
        self._open[hold.number] = hold
        return hold

    def get(self, number: int, kind: Kind) -> Hold:
        """Return an open hold.

        Raises:
            LeaseError: it has ended, or never was.
        """
        hold = self._open.get(number)
        if hold is None or hold.kind != kind:
            raise LeaseError(f"{kind} {number} is not open")
        return hold

    def find(self, number: int, kind: Kind) -> Hold | None:
        """Return an open hold, None where it has ended."""
        hold = self._open.get(number)
        return hold if hold is not None and hold.kind == kind else None

    def count(self, kind: Kind) -> int:
        """Number of open holds of a kind."""
        return sum(hold.kind == kind for hold in self._open.values())

    def pin(self, hold: Hold, residency: Residency, group: int, rows: Rows) -> None:
        """Pin READY copies on one tier for a hold."""
        if rows.size:
            residency.pin(hold.space, group, rows)
            hold.pinned.append((residency, group, rows, residency.of(group).slot[rows].copy()))

    def share(self, hold: Hold) -> None:
        """One more handle refers to the hold."""
        hold.shares += 1

    def end(self, hold: Hold) -> bool:
        """A handle is done; with the last one the hold ends and its pins go. Return whether it ended."""
        hold.shares -= 1
        if hold.shares > 0:
            return False
        del self._open[hold.number]
        self.unpin(hold)
        return True

    def unpin(self, hold: Hold) -> None:
        """Let go of everything that a hold pins."""
        pinned, hold.pinned = hold.pinned, []
        for residency, group, rows, addresses in pinned:
            residency.unpin(hold.space, group, rows, addresses)

    def open_holds(self) -> list[Hold]:
        """All open holds."""
        return list(self._open.values())


def named_by(ticket: bytes, boot_id: bytes) -> tuple[Kind, int]:
    """Return what a ticket names: the kind of hold, and its number.

    Raises:
        LeaseError: it is no ticket, or one of another run of the cache.
    """
    try:
        boot, kind, number = msgspec.msgpack.decode(ticket, type=tuple[bytes, Kind, int])
    except msgspec.MsgspecError as error:
        raise LeaseError(f"this is no ticket: {error}") from error
    if boot != boot_id:
        raise LeaseError("the ticket is of another run of the cache")
    return kind, number
