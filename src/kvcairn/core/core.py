"""The core: one handler for each request, under one short lock. No I/O happens here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcairn import requests as rq
from kvcairn.core import detaching, planning, ranks, uses
from kvcairn.core.direct import DirectReads
from kvcairn.core.drops import Drops
from kvcairn.core.hints import Pins
from kvcairn.core.holds import named_by
from kvcairn.core.lease import Leases
from kvcairn.core.leaving import Writes
from kvcairn.core.level import Level
from kvcairn.core.load import Loads
from kvcairn.core.rebuild import Rebuild
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.core.stats import stats
from kvcairn.core.store import Store
from kvcairn.errors import ConfigError
from kvcairn.types import JobState, MissReason

NEVER_S = float("inf")
ACQUIRE_PRIORITY, PREFETCH_PRIORITY = 0, 50
MOST_URGENT, LEAST_URGENT = 1, 99  # of a prefetch: never before an acquire, nor behind a write
ACQUIRE_GRACE_S = 60.0  # a caller that never comes for its lease is forgotten after that


class Core:
    """Owns the state of one cache and decides for every request.

    `call` may come from any thread; it takes the one lock and never waits for I/O.
    """

    def __init__(self, state: State) -> None:
        """Serve that state."""
        self.state = state
        self.boot_id = os.urandom(16)
        self.drops = Drops(state, Pins(state))
        self._leases = Leases(state, self.drops)
        self._loads = Loads(state, self._leases, self.drops)
        self._direct = DirectReads(state, self.drops)
        self._store = Store(state, self.drops)
        self._writes = Writes(state, self.drops)
        self._rebuilds: dict[str, Rebuild] = {}
        self._handlers: dict[type, Callable[[Any], Any]] = _handlers(self)

    def call(self, request: Any) -> Any:
        """Handle one request and return its reply.

        Raises:
            LeaseError: it names a lease, reservation or job that is not open.
            LayoutError: it opens a space whose blocks no tier can hold.
            ConfigError: it names a tier that there is not.
        """
        with self.state.changed:
            return self._handlers[type(request)](request)

    def tick(self, now_s: float) -> float | None:
        """Do what is due by time; return when to be called again."""
        with self.state.changed:
            due_s = self._loads.expire(now_s)
            pumped: list[Writes | Rebuild] = [self._writes, *self._rebuilds.values()]
            for each in pumped:
                each.pump()
            return due_s

    def attach(self, level: Level, rebuild: Rebuild) -> None:
        """Take up a tier that is open, behind the others; what it could not list yet is found from here on."""
        self.state.levels.append(level)
        self._writes.attach(level)
        self.state.fastest.set_levels([each.residency for each in self.state.levels])
        self._rebuilds[level.name] = rebuild
        rebuild.pump()

    def detach(self, name: str) -> Level | None:
        """Let a tier go, with what the index knows of it, in pieces; its content stays where it is.

        Takes the lock itself, once for each piece. None where the cache was closed meanwhile, and the tier with it.
        """
        state = self.state
        with state.changed:
            level = detaching.begin(state, self.level(name), self._writes)
            del self._rebuilds[name]
        detaching.drop_all(state, level)
        with state.changed:
            is_over = state.is_closing
            if not is_over:
                self._loads.cancel_all()
                detaching.end(state, level, (self._loads, self._leases, self._direct))
        return None if is_over else level

    def forget(self, level: Level) -> None:
        """Give up the columns of a tier that was detached, unless a hung call still refers to them."""
        with self.state.changed:
            for copies in level.residency.copies:
                if not copies.state.any():
                    self.state.tree.drop_copies(copies)

    def level(self, name: str) -> Level:
        """Return a tier by name.

        Raises:
            ConfigError: there is none.
        """
        for level in self.state.levels:
            if level.name == name:
                return level
        names = ", ".join(level.name for level in self.state.levels)
        raise ConfigError("tier", f"there is no such tier; there are: {names}", name)

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. For tests; slow."""
        with self.state.changed:
            self.state.tree.check()
            for level in self.state.levels:
                level.residency.check()
            self._store.check()

    # --- handlers ----------------------------------------------------------------------------------------------

    def _open_space(self, request: rq.OpenSpace) -> rq.SpaceOpened:
        state = self.state
        space = state.spaces.open(request.descriptor, state.memory.residency.allocator.largest_slot_bytes())
        for level in state.levels:
            for group in space.part_bytes:
                level.residency.of(group)
        return rq.SpaceOpened(space.number, state.config.verify_memory, state.memory.write_policy)

    def _lookup(self, request: rq.Chain) -> rq.HitReply:
        space, keys = self._wanted(request)
        walk = self.state.walker.walk(space, keys, self.state.now())
        return rq.HitReply(self.state.walker.hit(space, planning.worth_loading(self.state, space, walk)))

    def _acquire(self, request: rq.Acquire) -> rq.Leased:
        state = self.state
        space, keys = self._wanted(request)
        look = state.walker.walk_ahead if request.wait_s > 0 else state.walker.walk
        walk = look(space, keys, state.now())
        if request.wait_s > 0:
            walk = planning.worth_loading(self.state, space, walk)
        uses.named(self.state, self._writes, walk.rows[: walk.length])
        lengths = state.walker.in_memory(space, walk.rows[: walk.length], state.now())
        here = lengths[-1] if lengths else 0
        if request.wait_s > 0 and walk.length > here:
            lives_s = request.wait_s + ACQUIRE_GRACE_S
            job = self._loads.start(
                space,
                keys,
                walk,
                priority=ACQUIRE_PRIORITY,
                lives_s=lives_s,
                deadline_s=planning.longest_wait_s(state, space, walk.length - here),
                is_announced=False,
                late=MissReason.TOO_SLOW,
            )
            state.executor.wake()
            return rq.Leased(0, 0, None, [], None, job.hold.number)
        reason = MissReason.DEADLINE if walk.length > here else walk.reason
        leased = self._leases.make(space, keys, walk.rows, lengths, reason)
        asked = len(keys) if request.counts_rest else leased.count
        self._leases.count(leased, asked, np.ones(leased.count, dtype=np.uint8))
        return leased

    def _prefetch(self, request: rq.Prefetch) -> rq.JobStatus:
        state = self.state
        space, keys = self._wanted(request)
        found = state.walker.walk_ahead(space, keys, state.now())
        walk = planning.worth_prefetching(state, space, found, request.is_awaited)
        uses.named(self.state, self._writes, walk.rows[: walk.length])
        job = self._loads.start(
            space,
            keys,
            walk,
            priority=min(LEAST_URGENT, max(MOST_URGENT, PREFETCH_PRIORITY - request.priority)),
            lives_s=state.config.prefetch.time_to_live_s,
            deadline_s=NEVER_S if request.deadline_s is None else request.deadline_s,
            is_announced=True,
        )
        state.executor.wake()
        return self._loads.status(job)

    def _reserve(self, request: rq.Reserve) -> rq.Reserved:
        return self._store.reserve(request)

    def _commit(self, request: rq.Commit) -> rq.Value:
        hold = self.state.ledger.get(request.reservation, "reservation")
        published = self._store.commit(request)
        uses.stored(self.state, self._writes, hold, published)
        return self._changed(published.size)

    def _abort(self, request: rq.Abort) -> rq.Value:
        self._store.abort(request.reservation)
        return self._changed()

    def _release(self, request: rq.Release) -> rq.Value:
        self._leases.release(request.lease)
        self._loads.advance_stalled()
        self.state.notify()
        return rq.Value(None)

    def _damaged(self, request: rq.Damaged) -> rq.Value:
        self._leases.damaged(request.lease, request.block)
        return self._changed()

    def _job_info(self, request: rq.JobInfo) -> rq.JobStatus:
        if self.state.ledger.find(request.job, "job") is None:
            return rq.JobStatus(request.job, JobState.CANCELLED, 0, 0)
        return self._loads.status(self._loads.get(request.job))

    def _job_lease(self, request: rq.JobLease) -> rq.Leased:
        leased = self._loads.lease(self._loads.get(request.job), request.count, request.reason or MissReason.PENDING)
        self.state.notify()
        return leased

    def _job_cancel(self, request: rq.JobCancel) -> rq.Value:
        self._loads.cancel(request.job)
        return self._changed()

    def _job_close(self, request: rq.JobClose) -> rq.Value:
        self._loads.close(request.job)
        return self._changed()

    def _read_into(self, request: rq.ReadInto) -> rq.JobStatus:
        space, keys = self._wanted(request)
        return self._direct.start(space, keys, request)

    def _read_status(self, request: rq.ReadStatus) -> rq.JobStatus:
        return self._direct.status(request.read)

    def _read_cancel(self, request: rq.ReadCancel) -> rq.Value:
        self._direct.cancel(request.read)
        return rq.Value(None)

    def _contains(self, request: rq.Chain) -> rq.Value:
        space, _ = self._wanted(request)
        full = [group for group in range(len(space.groups)) if space.is_full(group)]
        flags = self._there(request, full or list(range(len(space.groups))))
        return rq.Value(flags.index(False) if False in flags else len(flags))

    def _readable(self, request: rq.Chain) -> rq.Flags:
        return rq.Flags(self._there(request, list(range(len(self.state.spaces[request.space].groups)))))

    def _there(self, request: rq.Chain, groups: list[int]) -> list[bool]:
        """Say for each key whether all of these groups are readable somewhere."""
        space, keys = self._wanted(request)
        rows = self.state.tree.find(space.rows, keys)
        usable = [self.state.walker.usable(group, rows, self.state.now()) > 0 for group in groups]
        flags: list[bool] = np.all(usable, axis=0).tolist()
        return flags

    def _touch(self, request: rq.Touch) -> rq.Value:
        space, keys = self._wanted(request)
        uses.named(self.state, self._writes, self.state.tree.find(space.rows, keys))
        return rq.Value(None)

    def _forget(self, request: rq.Forget) -> rq.Value:
        self.drops.forget(*self._wanted(request))
        return self._changed()

    def _hint(self, request: rq.Hint) -> rq.Value:
        space, keys = self._wanted(request)
        self.drops.expired(space, keys)
        rows = self.state.tree.find(space.rows, keys)
        return rq.Value(self.drops.pins.hint(space, rows[rows >= 0], request.hints))

    def _report_prefill(self, request: rq.ReportPrefill) -> rq.Value:
        planning.note_prefill(self.state.spaces[request.space], request.tokens, request.seconds)
        return rq.Value(None)

    def _clear(self, request: rq.Clear) -> rq.Value:
        levels = self.state.levels if request.tier is None else [self.level(request.tier)]
        space = None if request.space is None else self.state.spaces[request.space]
        return self._changed(self.drops.clear(space, levels))

    def _is_cleared(self, request: rq.IsCleared) -> rq.Value:
        return rq.Value(self.drops.is_cleared(request.number))

    def _stats(self, _: rq.GetStats) -> rq.StatsReply:
        return rq.StatsReply(stats(self.state))

    def _write_back(self, request: rq.WriteBack) -> rq.Value:
        return rq.Value(self._writes.write_back(request.begin))

    def _is_idle(self, request: rq.IsIdle) -> rq.Value:
        levels = self.state.levels if request.tier is None else [self.level(request.tier)]
        return rq.Value(
            self._writes.is_idle(levels) and not any(level.is_busy(request.but_rebuilds) for level in levels)
        )

    def _subscribe(self, _: rq.Subscribe) -> rq.Value:
        return rq.Value(self.state.readers.add())

    def _unsubscribe(self, request: rq.Unsubscribe) -> rq.Value:
        self.state.readers.remove(request.reader)
        return rq.Value(None)

    def _events(self, request: rq.Events) -> rq.EventBatch:
        return rq.EventBatch(self.state.readers.take(request.reader), self.state.is_closing)

    def _ended(self, _: rq.Ended) -> rq.JobBatch:
        return rq.JobBatch(self._loads.take_ended())

    def _adopt(self, request: rq.Adopt) -> rq.Adopted:
        kind, number = named_by(request.ticket, self.boot_id)
        hold = self.state.ledger.get(number, kind)
        self.state.ledger.share(hold)
        reply: dict[str, Any] = {"kind": kind, "space": hold.space.number, "keys": hold.keys}
        if kind == "lease":
            reply["lease"] = self._leases.describe(hold)
        elif kind == "reservation":
            reply["reservation"] = self._store.describe(hold)
        else:
            reply["job"] = self._loads.status(self._loads.get(number))
        return rq.Adopted(**reply)

    # --- what handlers share -----------------------------------------------------------------------------------

    def _wanted(self, request: rq.Chain) -> tuple[SpaceInfo, list[bytes]]:
        keys = request.keys[request.start :] if request.start else request.keys
        return self.state.spaces[request.space], keys

    def _changed(self, reply: Any = None) -> rq.Value:
        self._loads.advance_all()
        self.state.notify()
        return rq.Value(reply)


def _handlers(core: Core) -> dict[type, Callable[[Any], Any]]:
    """Return the handler of each request type: the method of its name in lower case, or made of such."""
    names = {
        rq.OpenSpace: "open_space", rq.Lookup: "lookup", rq.Probe: "lookup", rq.Acquire: "acquire",
        rq.Prefetch: "prefetch", rq.Reserve: "reserve", rq.Commit: "commit", rq.Abort: "abort",
        rq.Release: "release", rq.Damaged: "damaged", rq.JobInfo: "job_info", rq.JobLease: "job_lease",
        rq.JobCancel: "job_cancel", rq.JobClose: "job_close", rq.ReadInto: "read_into",
        rq.ReadStatus: "read_status", rq.ReadCancel: "read_cancel", rq.Contains: "contains", rq.Readable: "readable",
        rq.Touch: "touch", rq.Forget: "forget", rq.Hint: "hint", rq.GetStats: "stats", rq.IsIdle: "is_idle",
        rq.WriteBack: "write_back", rq.Clear: "clear", rq.IsCleared: "is_cleared",
        rq.Subscribe: "subscribe", rq.Unsubscribe: "unsubscribe", rq.Events: "events",
        rq.Ended: "ended", rq.Adopt: "adopt", rq.ReportPrefill: "report_prefill",
    }  # fmt: skip
    handlers: dict[type, Callable[[Any], Any]] = {kind: getattr(core, f"_{name}") for kind, name in names.items()}
    lookup, acquire = handlers[rq.Lookup], handlers[rq.Acquire]
    handlers[rq.LookupAll] = lambda request: rq.HitReply(ranks.lookup_all(request, lookup))
    handlers[rq.AcquireAll] = lambda request: ranks.acquire_all(request, lookup, acquire)
    return handlers
