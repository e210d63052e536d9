"""The front of the cache: everything a client starts from."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

from kvcairn import requests as rq
from kvcairn.config import Config, PrefetchOptions
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.errors import ClosedError, ConfigError, LeaseError, UnsupportedError
from kvcairn.layout import SpaceDescriptor
from kvcairn.memory.lease import Lease, Reservation
from kvcairn.space import Space
from kvcairn.transfer.job import Job
from kvcairn.types import BlockEvent, Stats
from kvcairn.units import seconds

logger = logging.getLogger(__name__)

CLOSE_DRAIN_S = 60.0
CLEAR_S = 60.0


class Cache:
    """A tiered KV cache. All methods are thread-safe; only those that say so wait."""

    _opened: ClassVar[dict[Config, Cache]] = {}
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, link: rq.Link, config: Config | None, prefetch: PrefetchOptions | None = None) -> None:
        """Wrap a link to a core; `open` and `connect` are the usual ways, and `connect` knows no settings but these."""
        self._link, self._config = link, config
        self._prefetch = prefetch or (config.prefetch if config else PrefetchOptions())
        self._spaces: dict[bytes, Space] = {}
        self._jobs: WeakValueDictionary[int, Job] = WeakValueDictionary()
        self._users = 1
        self._guard = threading.Lock()

    @classmethod
    def open(cls, config: Config) -> Cache:
        """Open a cache inside this process; it ends with `close`, or with the `with` it is used in.

        Opened twice with equal settings in one process it is the same cache, which closes with the last user.

        Raises:
            ConfigError: a tier cannot be opened as the settings say; nothing is left open.
        """
        if not isinstance(config, Config):
            raise TypeError(f"expected kvcairn.Config, as from Config.from_dict, got {type(config).__name__}")
        with cls._opening:
            known = cls._opened.get(config)
            if known is not None and known.join():
                return known
            cache = cls(Direct(open_core(config)), config)
            cls._opened[config] = cache
            return cache

    @classmethod
    def connect(cls, address: str, token: str | None = None) -> Cache:
        """Connect to the daemon at `unix:PATH`; it has the same methods. Waits at most 5 s.

        Raises:
            ConfigError: there is no daemon at that address.
            UnsupportedError: it speaks another version of the protocol or refuses this client, or a token is given:
                this version checks who connects by the socket alone.
        """
        if token is not None:
            raise UnsupportedError("tokens are not there yet: the daemon's socket is open to its own user alone")
        from kvcairn.remote.link import Remote  # an embedded cache needs no sockets

        link = Remote(address)
        return cls(link, None, link.prefetch)

    def space(self, descriptor: SpaceDescriptor) -> Space:
        """Return the blocks of one model; the same object for an equal descriptor.

        Raises:
            LayoutError: its blocks are larger than the memory tier can hold.
        """
        if not isinstance(descriptor, SpaceDescriptor):
            raise TypeError(f"expected kvcairn.SpaceDescriptor, got {type(descriptor).__name__}")
        self._link.check_open()
        with self._guard:
            space = self._spaces.get(descriptor.space_id)
            if space is None:
                space = Space(self._link, descriptor, self._prefetch, self._jobs)
                self._spaces[descriptor.space_id] = space
            return space

    def drain(self, tier: str | None = None, timeout_s: float | None = None) -> bool:
        """Wait until background work is finished, on one tier or all; return whether it is.

        True means that every write that was asked for is acknowledged or counted as dropped, and that no index is
        being made anew.

        Raises:
            ConfigError: there is no such tier.
        """
        return self._wait_until_idle(rq.IsIdle(tier), None if timeout_s is None else seconds(timeout_s, "timeout_s"))

    def stats(self) -> Stats:
        """Return the numbers of this moment."""
        reply: rq.StatsReply = self._link.call(rq.GetStats())
        return reply.stats

    def add_tier(self, options: Mapping[str, Any]) -> None:
        """Add a tier behind the others; `options` as in the settings. May wait for the tier's storage.

        Raises:
            ConfigError: the options are refused, or the tier cannot be opened; the cache is as before.
        """
        if not isinstance(options, Mapping):
            raise ConfigError("tier", "expected a table, as a dict", options)
        self._link.call(rq.AddTier(dict(options)))

    def detach_tier(self, name: str, drain: bool = True) -> None:
        """Let a tier go, with `drain` after its writes are done. Its content stays where it is.

        Other calls go on meanwhile: nothing new is written there, and what has not been let go of yet is still found.

        Raises:
            ConfigError: there is no such tier, it is the memory tier, or it is being detached already.
            ClosedError: the cache was closed meanwhile; the tier with it.
        """
        if drain:
            self._wait_until_idle(rq.IsIdle(name, but_rebuilds=True), None)
        self._link.call(rq.DetachTier(name, drain))

    def clear(self, space: Space | None = None, tier: str | None = None) -> bool:
        """Drop everything, or one space, or what is on one tier, for good.

        All of it is gone at once. Waits until the disks have noted that, so that nothing of it comes back after a
        restart, however this process ends; False where one could not: it failed, or did not answer by its deadline.
        Leases stay readable; open reservations commit to nothing.

        Raises:
            ConfigError: there is no such tier.
            TypeError: `space` is no `Space`.
        """
        if space is not None and not isinstance(space, Space):
            raise TypeError(f"expected kvcairn.Space, as from cache.space, got {space!r}; a tier is given as tier=")
        reply: rq.Value = self._link.call(rq.Clear(None if space is None else space.frame.space, tier))
        number, outcome = int(reply.value or 0), list[bool]()

        def has_ended() -> bool:
            asked: rq.Value = self._link.call(rq.IsCleared(number))
            outcome.extend([] if asked.value is None else [bool(asked.value)])
            return bool(outcome)

        return self._link.wait(has_ended, CLEAR_S) and outcome[0]

    def events(self, timeout_s: float | None = None) -> EventStream:
        """Return an iterator over what is stored and removed from now on; see `EventStream`."""
        return EventStream(self._link, None if timeout_s is None else seconds(timeout_s, "timeout_s"))

    def adopt(self, ticket: bytes) -> Lease | Reservation | Job:
        """Share the lease, reservation or job that a ticket names; its slots stay held until all sharers let go.

        Raises:
            LeaseError: it has ended, or the ticket is of another run.
        """
        adopted: rq.Adopted = self._link.call(rq.Adopt(ticket))
        frame = next((s.frame for s in self._spaces.values() if s.frame.space == adopted.space), None)
        if frame is None:
            raise LeaseError("open the space of the ticket first, with Cache.space")
        if adopted.lease is not None:
            return Lease(frame, adopted.lease)
        if adopted.reservation is not None:
            return Reservation(frame, adopted.keys, adopted.reservation)
        assert adopted.job is not None
        return Job(frame, adopted.job, None)

    def fileno(self) -> int:
        """Return a descriptor that is readable when jobs have ended since the last `poll`: for select, poll, epoll."""
        return self._link.fileno()

    def poll(self) -> list[Job]:
        """Return the prefetch jobs that ended since the last call and are still open. Never waits."""
        if not self._link.take_ended():
            return []
        batch: rq.JobBatch = self._link.call(rq.Ended())
        ended = [self._jobs.get(status.job) for status in batch.jobs]
        return [job for job in ended if job is not None]

    def close(self, drain: bool = True) -> None:
        """End the cache, with `drain` after background writes are done (at most 60 s). Idempotent.

        A connected one leaves the daemon, which goes on writing whatever `drain` says.

        An index that is being made anew is not waited for: that starts over with the next opening.

        Every later call of anything that came from it raises `ClosedError`; views of leases stay readable.
        """
        with self._opening:
            self._users = max(0, self._users - 1)
            if self._users:
                return
            if self._config is not None and self._opened.get(self._config) is self:
                del self._opened[self._config]
        try:
            if drain and self._config is not None and not self._write_back(self._link.now() + CLOSE_DRAIN_S):
                logger.warning("closed with writes left over: a tier did not take them within %g s", CLOSE_DRAIN_S)
        except ClosedError:
            return
        self._link.close()

    def _wait_until_idle(self, question: rq.IsIdle, timeout_s: float | None) -> bool:
        def is_idle() -> bool:
            reply: rq.Value = self._link.call(question)
            return bool(reply.value)

        return self._link.wait(is_idle, timeout_s)

    def _write_back(self, until_s: float) -> bool:
        """Have written what memory alone has, piece by piece, where a tier takes what leaves it; return `drain()`."""
        begin: int | None = 0
        while begin is not None:
            begin = self._link.call(rq.WriteBack(begin)).value
            if not self._wait_until_idle(rq.IsIdle(but_rebuilds=True), max(0.0, until_s - self._link.now())):
                return False
        return True

    def __enter__(self) -> Self:
        """Return the cache.

        Raises:
            ClosedError: it is closed.
        """
        self._link.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @classmethod
    def forget_all(cls) -> None:
        """Forget every open cache without closing it: this process is a fork."""
        cls._opened, cls._opening = {}, threading.Lock()

    def join(self) -> bool:
        """Count one more user, who will `close` as well; False where the cache has ended, or is another process's.

        Called by `open`, which holds the lock.
        """
        try:
            self.stats()
        except ClosedError:
            return False
        if self._users:
            self._users += 1
        return bool(self._users)


class EventStream:
    """Iterates over events; waits for the next one, and ends when the cache closes or after `timeout_s` without one."""

    def __init__(self, link: rq.Link, timeout_s: float | None) -> None:
        """Collect from now on."""
        self._link, self._timeout_s = link, timeout_s
        self._reader = int(link.call(rq.Subscribe()).value)
        self._ready: list[BlockEvent] = []
        self._is_closed = False

    def __iter__(self) -> Self:
        """Return the stream."""
        return self

    def __next__(self) -> BlockEvent:
        """Return the next event."""
        if not self._ready:
            self._fetch()
        if not self._ready and not self._is_closed:
            self._link.wait(self._fetch, self._timeout_s)
        if not self._ready:
            raise StopIteration
        return self._ready.pop(0)

    def poll(self) -> list[BlockEvent]:
        """Return what has been collected. Never waits."""
        self._fetch()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Collect no more."""
        if not self._is_closed:
            self._is_closed = True
            self._link.call(rq.Unsubscribe(self._reader))

    def _fetch(self) -> bool:
        """Take what there is; True when there is no need to wait any longer."""
        if not self._is_closed:
            try:
                batch: rq.EventBatch = self._link.call(rq.Events(self._reader))
            except ClosedError:
                self._is_closed = True
            else:
                self._ready += batch.events
                self._is_closed = batch.closed
        return self._is_closed or bool(self._ready)


os.register_at_fork(after_in_child=Cache.forget_all)
