"""Leases on their way from the scheduler to the workers: a ticket for each rank, held until all have taken theirs."""

from __future__ import annotations

from collections import Counter

from kvcairn.memory.lease import Lease


class Handover:
    """Leases of one scheduler that its workers take over. The scheduler's thread only."""

    def __init__(self, workers: int) -> None:
        """Hand over to so many workers."""
        self._workers = workers
        self._leases: dict[str, list[Lease]] = {}
        self._taken: Counter[str] = Counter()

    def give(self, rid: str, leases: list[Lease]) -> list[bytes]:
        """Hold the leases of a request, one for each rank; return their tickets."""
        self._leases[rid] = leases
        return [lease.ticket() for lease in leases]

    def taken(self, counts: Counter[str]) -> None:
        """Workers have taken leases over; with the last one they are theirs alone."""
        self._taken += counts
        for rid in [rid for rid, count in self._taken.items() if count >= self._workers]:
            self.end(rid)

    def end(self, rid: str) -> None:
        """All workers are done with a load."""
        self._taken.pop(rid, None)
        for lease in self._leases.pop(rid, ()):
            lease.release()

    def close(self) -> None:
        """Let go of everything."""
        for rid in list(self._leases):
            self.end(rid)

    def __len__(self) -> int:
        """Loads whose leases are held here."""
        return len(self._leases)
