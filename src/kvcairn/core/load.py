"""Jobs: bring blocks from slower tiers into memory, hold them, and hand them over as a lease."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcairn.core.drops import Drops
from kvcairn.core.holds import Hold
from kvcairn.core.lease import Leases
from kvcairn.core.promote import Promotion, Promotions
from kvcairn.core.residency import ABSENT, EVICTING, READY, RESERVED, WRITING
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.core.walk import Walk, renumber
from kvcairn.index.arrays import Rows
from kvcairn.requests import JobStatus, Leased
from kvcairn.types import FINAL, JobState, MissReason

NEVER_S = float("inf")


@dataclass(slots=True, eq=False)
class Job:
    """One chain on its way into memory; blocks are counted from the first one wanted.

    Attributes:
        hold: pins what has arrived.
        walk: what was found when the job began.
        asked: blocks the caller asked for.
        priority: of its reads; the lower goes first.
        lives_s: how long it holds what it brought, unclaimed, once nothing more arrives.
        deadline_s: when it asks for no more.
        needs: for each group the blocks needed, [from, to).
        have: for each group which blocks are in memory and pinned.
        serials: of the rows when the job began; another serial means that the row is another block now.
        brought_bytes: of the blocks that its own reads bring.
        limit: blocks that can still arrive; what lies behind a block that was lost is not waited for.
    """

    hold: Hold
    walk: Walk
    asked: int
    priority: int
    lives_s: float
    deadline_s: float
    needs: list[tuple[int, int]]
    have: list[npt.NDArray[np.bool_]]
    serials: npt.NDArray[np.uint32]
    limit: int
    state: JobState = JobState.QUEUED
    reason: MissReason | None = None
    expires_s: float = NEVER_S
    is_stalled: bool = False
    is_late: bool = False
    late: MissReason = MissReason.DEADLINE
    let_go_seen: int = -1
    is_announced: bool = True
    brought_bytes: int = 0
    promotions: list[Promotion] = field(default_factory=list)

    @property
    def ready(self) -> int:
        """Leading blocks that are in memory, in every group that needs them."""
        ready = self.limit
        for (low, high), have in zip(self.needs, self.have, strict=True):
            missing = np.flatnonzero(~have[low : min(high, self.limit)])
            ready = min(ready, low + int(missing[0])) if missing.size else ready
        return ready


class Loads:
    """All open jobs. `advance` is the one place that decides what a job does next."""

    def __init__(self, state: State, leases: Leases, drops: Drops) -> None:
        """Work on that state."""
        self._state, self._leases = state, leases
        self._promotions = Promotions(state, drops, self._lost, self.advance_all)
        self._jobs: dict[int, Job] = {}
        self._ended: dict[int, None] = {}  # not yet told to `poll`

    def start(
        self,
        space: SpaceInfo,
        keys: list[bytes],
        walk: Walk,
        *,
        priority: int,
        lives_s: float,
        deadline_s: float,
        is_announced: bool,
        late: MissReason = MissReason.DEADLINE,
    ) -> Job:
        """Begin to load what a walk found.

        Args:
            space: of the chain.
            keys: the blocks wanted.
            walk: what there is of them.
            priority: of the reads; the lower goes first.
            lives_s: how long it holds what it brought, unclaimed, once nothing more arrives.
            deadline_s: from now; no more is asked for after that.
            is_announced: whether `poll` tells of its end.
            late: why what has not come by the deadline is a miss.
        """
        needs = space.ranges(walk.length)
        job = Job(
            hold=self._state.ledger.add(Hold("job", space, keys)),
            walk=walk,
            asked=len(keys),
            priority=priority,
            lives_s=lives_s,
            deadline_s=self._state.now() + deadline_s,
            needs=needs,
            have=[np.zeros(walk.length, dtype=np.bool_) for _ in needs],
            serials=self._state.tree.nodes.serial[walk.rows],
            limit=walk.length,
            reason=walk.reason,
            is_announced=is_announced,
            late=late,
        )
        for other in self._jobs.values():  # what a less urgent one is reading must not hold this one up
            if other.priority > priority and other.state not in FINAL:
                self._promotions.hurry(other.promotions, walk.rows[: walk.length], priority)
        self._jobs[job.hold.number] = job
        self._hold_sources(job)
        self._advance(job)
        return job

    def get(self, number: int) -> Job:
        """Return an open job.

        Raises:
            LeaseError: it has ended, or never was.
        """
        self._state.ledger.get(number, "job")
        return self._jobs[number]

    def status(self, job: Job) -> JobStatus:
        """Return a job as the public value."""
        number, error = job.hold.number, job.reason.value if job.state is JobState.FAILED and job.reason else None
        return JobStatus(number, job.state, job.ready, job.asked, error, None, job.is_stalled)

    def lease(self, job: Job, count: int | None, late: MissReason) -> Leased:
        """End a job and return a lease of what it brought, at most `count` blocks; `late` is why it waits no more."""
        self._cut_stale(job)
        ready = job.ready
        have = ready if count is None else min(ready, count)
        why = job.reason
        if have < ready:
            why = None  # the caller wants no more
        elif ready < job.limit:
            why = MissReason.NO_ROOM if job.is_stalled else job.late if job.is_late else late
        space, keys, rows = job.hold.space, job.hold.keys, job.walk.rows
        lengths = self._state.walker.in_memory(space, rows[:have], self._state.now())
        if have and (not lengths or lengths[-1] < have):
            why = why or MissReason.PENDING
        leased = self._leases.make(space, keys, rows, lengths, why, exempt=job.hold)
        asked = job.asked if count is None else min(count, job.asked)
        self._leases.count(leased, asked, job.walk.levels[: leased.count])
        self.close(job.hold.number)
        return leased

    def cancel(self, number: int) -> None:
        """Ask for nothing more. Reads that run are let finish; their blocks stay in memory, unheld."""
        job = self._jobs.get(number)
        if job is not None and job.state not in FINAL:
            self._end(job, JobState.CANCELLED)
            self._promotions.cancel(job.promotions)

    def renumber(self, gone: int) -> None:
        """A tier was taken away; see `walk.renumber`."""
        for job in self._jobs.values():
            renumber(job.walk.levels, gone)

    def cancel_all(self) -> None:
        """Cancel every job: the tiers change under them."""
        for number in list(self._jobs):
            self.cancel(number)

    def close(self, number: int) -> None:
        """Let go of everything that a job holds. Idempotent."""
        hold = self._state.ledger.find(number, "job")
        if hold is not None and self._state.ledger.end(hold):
            job = self._jobs.pop(number)
            self._ended.pop(number, None)
            if job.state not in FINAL:
                self._promotions.cancel(job.promotions)
            self._promotions.moves.settle()
            self.advance_all()

    def advance_all(self) -> None:
        """Something changed: blocks arrived, were lost, or room was made."""
        for job in self._in_order():
            if job.state not in FINAL:
                self._advance(job)

    def advance_stalled(self) -> None:
        """Room was made: jobs that wait for nothing else, in order, until one still finds none."""
        self._promotions.moves.settle()
        for job in self._in_order():
            if job.is_stalled:
                self._advance(job)
                if job.is_stalled:
                    return

    def expire(self, now_s: float) -> float | None:
        """Stop jobs past their deadline, close those that nobody took over; return when to look again."""
        late = [j for j in self._jobs.values() if j.deadline_s <= now_s and j.state not in FINAL]
        for job in late:
            job.is_late = True
            self.cancel(job.hold.number)
        over = [j for j in self._jobs.values() if j.expires_s <= now_s]
        for job in over:
            job.hold.shares = 1
            self.close(job.hold.number)
        if late or over:
            self.advance_all()
            self._state.notify()
        times = [j.expires_s if j.state in FINAL else min(j.expires_s, j.deadline_s) for j in self._jobs.values()]
        return min(times, default=None)

    def take_ended(self) -> list[JobStatus]:
        """Return the jobs that ended since the last call and are still open."""
        ended, self._ended = self._ended, {}
        return [self.status(self._jobs[n]) for n in ended if n in self._jobs]

    def _in_order(self) -> list[Job]:
        """Return the jobs as they are served: the most urgent first, of those the oldest."""
        return sorted(self._jobs.values(), key=lambda job: job.priority)

    def _advance(self, job: Job) -> None:
        """Pin what has arrived, ask for what is missing, and see whether the job is done. Idempotent."""
        self._cut_stale(job)
        waits, reads, others = False, False, False
        for group, (low, high) in enumerate(job.needs):
            high = min(high, job.limit)
            todo = low + np.flatnonzero(~job.have[group][low:high])
            states = self._state.memory.residency.of(group).state[job.walk.rows[todo]]
            arrived = self._affordable(job, group, todo[states == READY])
            self._state.ledger.pin(job.hold, self._state.memory.residency, group, job.walk.rows[arrived])
            job.have[group][arrived] = True
            reads = bool((states == WRITING).any()) or reads
            others = bool(((states == RESERVED) | (states == EVICTING)).any()) or others
            absent = todo[states == ABSENT]
            reads = (self._promote(job, group, absent) > 0 if absent.size else False) or reads
            waits = waits or bool((~job.have[group][low : min(high, job.limit)]).any())
        job.is_stalled = waits and not reads and not others
        if not waits:
            self._end(job, JobState.READY if job.limit or not job.asked else JobState.FAILED)
            return
        if reads:
            job.expires_s = NEVER_S
        elif job.expires_s == NEVER_S:  # nothing arrives until somebody else lets go
            job.expires_s = self._state.now() + job.lives_s
        if not job.is_stalled:
            job.state = JobState.LOADING

    def _cut_stale(self, job: Job) -> None:
        """Cut a job before the first row that is another block by now."""
        stale = np.flatnonzero(self._state.tree.nodes.serial[job.walk.rows[: job.limit]] != job.serials[: job.limit])
        if stale.size:
            self._cut(job, 0, int(stale[0]))

    def _hold_sources(self, job: Job) -> None:
        """Pin what is to be read on the slower tiers, so that nothing of the chain leaves while it loads."""
        for group, (low, high) in enumerate(job.needs):
            rows = job.walk.rows[low:high]
            rows = rows[self._state.memory.residency.of(group).state[rows] != READY]
            for level in self._state.lower:
                copies = level.residency.of(group)
                self._state.ledger.pin(job.hold, level.residency, group, rows[copies.state[rows] == READY])

    def _promote(self, job: Job, group: int, absent: Rows) -> int:
        """Ask for absent blocks; a job that found no room asks again only after something was let go."""
        let_go = self._state.memory.residency.counts.let_go
        if job.is_stalled and job.let_go_seen == let_go:
            return 0
        job.let_go_seen = let_go
        rows = job.walk.rows[absent]
        sources = self._state.walker.usable(group, rows, self._state.now())
        lost = absent[sources == 0]
        if lost.size:
            self._cut(job, group, int(lost[0]))
            absent, sources = absent[absent < job.limit], sources[absent < job.limit]
        affordable = self._affordable(job, group, absent)
        affordable = affordable[: self._share_left(job, group)]
        rows = job.walk.rows[affordable]
        started = self._promotions.start(job.hold.space, group, rows, sources[: rows.size], job.priority)
        slot_bytes = self._state.memory.residency.slot_bytes(job.hold.space, group)
        job.brought_bytes += slot_bytes * sum(promotion.rows.size for promotion in started)
        job.promotions.extend(started)
        return len(started)

    def _share_left(self, job: Job, group: int) -> int | None:
        """Return how many more blocks a prefetch may bring; one in any case while none has brought any."""
        if not job.is_announced:  # an acquire
            return None
        memory = self._state.memory
        taken = sum(each.brought_bytes for each in self._jobs.values() if each.is_announced)
        share = int(self._state.config.prefetch.max_memory_fraction * memory.capacity_bytes)
        left: int = (share - taken) // memory.residency.slot_bytes(job.hold.space, group)
        return max(left, 0 if taken else 1)

    def _affordable(self, job: Job, group: int, blocks: Rows) -> Rows:
        """Return the leading blocks that the cap on leases still allows to be pinned."""
        return self._leases.within_cap(job.hold.space, group, blocks, job.walk.rows)

    def _lost(self, rows: Rows, group: int, reason: MissReason) -> None:
        """A read failed: no job waits for these rows any more."""
        for job in self._jobs.values():
            if job.state in FINAL:
                continue
            low, high = job.needs[group][0], min(job.needs[group][1], job.limit)
            hit = np.flatnonzero(np.isin(job.walk.rows[low:high], rows) & ~job.have[group][low:high])
            if hit.size:
                self._cut(job, group, low + int(hit[0]), reason)

    def _cut(self, job: Job, group: int, at: int, reason: MissReason | None = None) -> None:
        if at < job.limit:
            job.limit = at
            space, key = job.hold.space, job.hold.keys[at]
            row = int(self._state.tree.find(space.rows, [key])[0])
            job.reason = reason or self._state.walker.reason_of(space, key, row, group, self._state.now())

    def _end(self, job: Job, state: JobState) -> None:
        job.state, job.is_stalled = state, False
        job.expires_s = self._state.now() + job.lives_s
        if job.is_announced and job.hold.number not in self._ended:
            self._ended[job.hold.number] = None
            self._state.job_ended()
