"""A daemon that goes away and comes back, and clients that live on."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcairn import UNKNOWN
from kvcairn import requests as rq
from kvcairn.cache import Cache
from kvcairn.config import Config
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.daemon.server import Server
from kvcairn.errors import KVCairnError, LeaseError
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.ranks import acquire_all, lookup_all
from kvcairn.types import JobState, MissReason

LAYOUT = KVLayout.full(layers=1, kv_heads=1, head_dim=32, dtype="float16")
LONG_S = 60.0


def descriptor(tenant: str = "") -> SpaceDescriptor:
    return SpaceDescriptor(model="toy", weights="0", layout=LAYOUT, block_tokens=4, tenant=tenant)


class Daemon:
    """A daemon in this process, over a disk, that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self.path, self._disk = folder / "socket", folder / "disk"
        self._disk.mkdir()
        self.start()

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def start(self) -> None:
        memory = {"type": "memory", "capacity": "4 MiB", "prefault": False}
        disk = {"type": "disk", "name": "disk", "path": str(self._disk), "capacity": "16 MiB"}
        self.direct = Direct(open_core(Config.from_dict({"tiers": [memory, disk]})))
        self.server = Server(self.direct, self.path)
        self.server.start()

    def stop(self) -> None:
        self.server.close()
        self.direct.wait(lambda: bool(self.direct.call(rq.IsIdle()).value), LONG_S)
        self.direct.close()

    def cut(self) -> None:
        """End all connections; the daemon goes on."""
        for channel in list(self.server._channels):
            channel.sock.shutdown(socket.SHUT_RDWR)

    def holds(self) -> int:
        return len(self.direct.core.state.ledger.open_holds())


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.stop()


def until(done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)


def works(cache: Cache) -> bool:
    try:
        cache.stats()
    except KVCairnError:
        return False
    return True


def test_after_a_restart_the_same_handles_of_spaces_find_what_is_on_disk(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        for tenant in "abc":  # the next run gives these spaces other numbers
            cache.space(descriptor(tenant))
        space, second = cache.space(descriptor()), cache.space(descriptor("c"))
        keys, block = space.keys(range(16)), [bytes([n]) * space.block_bytes for n in range(4)]
        assert all(space.put(keys, block))
        assert all(second.put(keys[:1], [bytes([9]) * space.block_bytes]))
        daemon.stop()
        assert space.lookup(keys).reason is MissReason.TIER_DOWN
        assert space.get(keys) == []
        assert not works(cache)
        daemon.start()
        with Cache.connect(daemon.address) as other:
            other.space(descriptor("first"))
        until(lambda: works(cache), "the client does not come back")
        assert space.get(keys, deadline_s=LONG_S) == block
        assert second.get(keys, deadline_s=LONG_S) == [bytes([9]) * space.block_bytes]
        assert cache.space(descriptor()) is space


def test_a_call_while_the_daemon_is_gone_waits_for_nothing(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        space = cache.space(descriptor())
        keys = space.keys(range(16))
        daemon.stop()
        space.lookup(keys)  # this one notices
        assert lookup_all([space, space], keys).reason is MissReason.TIER_DOWN
        assert [lease.count for lease in acquire_all([space, space], keys, deadline_s=LONG_S)] == [0, 0]
        begin_s = time.thread_time()
        for _ in range(100):
            assert space.acquire(keys, deadline_s=LONG_S).reason is MissReason.TIER_DOWN
            assert space.put(keys, [bytes(space.block_bytes)] * 4, deadline_s=0.0) == [False] * 4
        assert time.thread_time() - begin_s < LONG_S
        daemon.start()
        until(lambda: works(cache), "the client does not come back")


def test_old_leases_stay_readable_and_their_end_does_nothing(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        space = cache.space(descriptor())
        keys = space.keys(range(8))
        space.put(keys, [bytes([7]) * space.block_bytes] * 2)
        lease, begin = space.acquire(keys), space.acquire(keys)
        ticket = begin.ticket()
        daemon.stop()
        daemon.start()
        space.lookup(keys)
        until(lambda: works(cache), "the client does not come back")
        others = space.keys(range(100, 140))
        assert all(space.put(others, [bytes([8]) * space.block_bytes] * 10))
        assert bytes(lease[0]) == lease.copy(1) == bytes([7]) * space.block_bytes
        at = int(lease.offsets()[1])
        assert bytes(lease.arena[at : at + space.block_bytes]) == bytes([7]) * space.block_bytes
        with pytest.raises(LeaseError):
            cache.adopt(ticket)
        with space.acquire(others) as held:
            number = held._number
            assert number > lease._number, "no hold of one run has a number of another"
            lease.release()
            begin.release()
            assert cache.stats().open_leases == 1
        assert daemon.server.counts.lost_commits == 0


def test_open_reservations_commit_to_nothing_and_are_counted(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        space = cache.space(descriptor())
        keys = space.keys(range(16))
        early, late, given_up = (space.reserve(keys[n : n + 1], parent=UNKNOWN) for n in range(3))
        early[0][:] = late[0][:] = bytes([5]) * space.block_bytes
        daemon.stop()
        space.lookup(keys)
        early.commit()
        daemon.start()
        until(lambda: works(cache), "the client does not come back")
        late[0][:] = bytes([6]) * space.block_bytes  # the mapping is still there
        late.commit()
        given_up.abort()
        assert cache.stats().tiers["memory"].blocks == 0
        until(lambda: daemon.server.counts.lost_commits == 2, "they are not counted")
        assert daemon.holds() == 0


def test_jobs_fail_and_poll_tells_so(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        space = cache.space(descriptor())
        keys = space.keys(range(8))
        ready = cache.fileno()
        space.put(keys, [bytes(space.block_bytes)] * 2)
        job = space.prefetch(keys)
        job.wait(LONG_S)
        until(lambda: cache.poll() == [job], "its end is not told")
        daemon.stop()
        assert space.contains(keys) == 0
        assert job.state is JobState.FAILED
        assert select.select([ready], [], [], LONG_S)[0] == [ready], "who waits for jobs is woken"
        daemon.start()
        until(lambda: works(cache), "the client does not come back")
        cache.poll()
        with space.prefetch(keys) as again:
            assert again.wait(LONG_S)
            assert select.select([ready], [], [], LONG_S)[0] == [ready], "the descriptor is the same"
            until(lambda: cache.poll() == [again], "its end is not told")


def test_events_end_with_the_run_they_are_of(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        space = cache.space(descriptor())
        keys = space.keys(range(8))
        events = cache.events(timeout_s=LONG_S)
        daemon.stop()
        space.lookup(keys)
        daemon.start()
        until(lambda: works(cache), "the client does not come back")
        more = cache.events(timeout_s=LONG_S)
        space.put(keys, [bytes(space.block_bytes)] * 2)
        assert list(events) == []
        assert next(more).key == keys[0]


def test_a_connection_that_breaks_ends_nothing_and_what_ended_meanwhile_is_ended_then(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        space = cache.space(descriptor())
        keys = space.keys(range(16))
        space.put(keys[:2], [bytes([4]) * space.block_bytes] * 2)
        lease, slots = space.acquire(keys[:2]), space.reserve(keys)
        daemon.cut()
        assert space.lookup(keys).reason is MissReason.TIER_DOWN
        assert daemon.holds() == 2, "it may still touch them"
        for view in (slots[0], slots[1]):
            view[:] = bytes([3]) * space.block_bytes
        slots.commit()
        lease.release()
        until(lambda: works(cache), "the client does not come back")
        until(lambda: daemon.holds() == 0, "its holds stay")
        assert space.get(keys) == [bytes([n]) * space.block_bytes for n in (4, 4, 3, 3)]
        assert len(daemon.server.sessions()) == 1


def test_nothing_of_an_old_run_stays_open_in_the_client(daemon: Daemon) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Cache.connect(daemon.address) as cache:
        space = cache.space(descriptor())
        for _ in range(3):
            daemon.stop()
            space.contains(space.keys(range(4)))
            daemon.start()
            until(lambda: works(cache), "the client does not come back")
    until(lambda: not daemon.server.sessions(), "the session stays open")
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors are left")
