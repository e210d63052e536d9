from __future__ import annotations

import os
import random
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcairn import requests as rq
from kvcairn.cache import Cache
from kvcairn.config import Config
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.daemon.server import Server
from kvcairn.errors import (
    ConfigError,
    CorruptBlock,
    KVCairnError,
    LeaseError,
    TierError,
    TierFull,
    TierTimeout,
    TierUnavailable,
    UnsupportedError,
)
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.ranks import acquire_all, lookup_all
from kvcairn.remote.link import Remote
from kvcairn.remote.protocol import MOST_BYTES, PROTOCOL, Hello
from kvcairn.types import MissReason, RankSlice

DESCRIPTOR = SpaceDescriptor(
    model="toy", weights="0", layout=KVLayout.full(layers=1, kv_heads=1, head_dim=32, dtype="float16"), block_tokens=4
)
LONG_S = 60.0
FUZZED = 2_000
FUZZED_LONG = 1_000_000


class Daemon:
    """A daemon in this process."""

    def __init__(self, folder: Path) -> None:
        config = Config.from_dict({"tiers": [{"type": "memory", "capacity": "4 MiB", "prefault": False}]})
        self.core = open_core(config)
        self.direct = Direct(self.core)
        self.path = folder / "socket"
        self.server = Server(self.direct, self.path)
        self.server.start()

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def raw(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(LONG_S)
        sock.connect(str(self.path))
        return sock


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.server.close()
    made.direct.close()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def hello(protocol: int = PROTOCOL) -> bytes:
    return frame(msgspec.msgpack.encode(Hello(protocol, "test")))


def read_frame(sock: socket.socket) -> list[object]:
    head = sock.recv(4, socket.MSG_WAITALL)
    body = sock.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)
    decoded: list[object] = msgspec.msgpack.decode(body)
    return decoded


def is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_only_its_user_may_connect(daemon: Daemon) -> None:
    assert stat.S_IMODE(daemon.path.stat().st_mode) == 0o600


def test_two_clients_see_the_same_blocks(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as one, Cache.connect(daemon.address) as other:
        first, second = one.space(DESCRIPTOR), other.space(DESCRIPTOR)
        keys = first.keys(range(16))
        content = [bytes([n]) * first.block_bytes for n in range(4)]
        assert all(first.put(keys, content))
        assert second.get(keys) == content
        assert other.stats().tiers["memory"].blocks == 4


def test_a_client_that_leaves_does_not_end_the_cache(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as one:
        space = one.space(DESCRIPTOR)
        keys = space.keys(range(8))
        space.put(keys, [bytes(space.block_bytes)] * 2)
    with Cache.connect(daemon.address) as other:
        assert other.space(DESCRIPTOR).contains(keys) == 2
    assert daemon.server.sessions() == []


def test_a_ticket_is_good_in_another_session_and_both_hold(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as one, Cache.connect(daemon.address) as other:
        space, twin = one.space(DESCRIPTOR), other.space(DESCRIPTOR)
        keys = space.keys(range(8))
        space.put(keys, [bytes([7]) * space.block_bytes] * 2)
        lease = space.acquire(keys)
        shared = other.adopt(lease.ticket())
        lease.release()
        assert one.stats().open_leases == 1
        assert bytes(shared[0]) == bytes([7]) * twin.block_bytes  # type: ignore[index]
        shared.release()  # type: ignore[union-attr]  # told, not asked: an answer on that connection comes behind it
        assert other.stats().open_leases == 0


def test_all_ranks_are_asked_in_one_round_trip_and_end_with_their_process(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cache.connect(daemon.address) as cache:
        spaces = [
            cache.space(msgspec.structs.replace(DESCRIPTOR, rank=RankSlice(tp=rank, tp_size=4))) for rank in range(4)
        ]
        keys = spaces[0].keys(range(16))
        for rank, space in enumerate(spaces):
            space.put(keys[: 4 - rank % 2], [bytes([rank]) * space.block_bytes] * (4 - rank % 2))
        asked: list[object] = []
        call = Remote.call

        def note(link: Remote, request: object) -> object:
            asked.append(request)
            return call(link, request)

        monkeypatch.setattr(Remote, "call", note)
        assert lookup_all(spaces, keys).blocks == 3
        leases = acquire_all(spaces, keys)
        assert [type(request) for request in asked] == [rq.LookupAll, rq.AcquireAll]
        assert [lease.count for lease in leases] == [3] * 4
        assert [bytes(lease[2]) for lease in leases] == [bytes([rank]) * spaces[0].block_bytes for rank in range(4)]
        (session,) = daemon.server.sessions()
        assert session.end() == 4
        assert daemon.direct.call(rq.GetStats()).stats.open_leases == 0


def test_what_all_ranks_share_is_written_once_by_any(daemon: Daemon) -> None:
    shared = msgspec.structs.replace(DESCRIPTOR, rank="replicated")
    with Cache.connect(daemon.address) as one, Cache.connect(daemon.address) as other:
        first, second = one.space(shared), other.space(shared)
        keys = first.keys(range(16))
        with first.reserve(keys[:2]) as mine, second.reserve(keys) as theirs:
            assert (mine.keys, theirs.keys, theirs.in_flight) == (keys[:2], keys[2:], keys[:2])
            for slots, value in ((mine, 1), (theirs, 2)):
                for view in (slots[0], slots[1]):
                    view[:] = bytes([value]) * first.block_bytes
                slots.commit()
        assert second.reserve(keys).keys == []
        assert [block[0] for block in first.get(keys)] == [1, 1, 2, 2]
        assert one.stats().tiers["memory"].blocks == 4


def test_what_is_anothers_cannot_be_ended(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as one:
        space = one.space(DESCRIPTOR)
        keys = space.keys(range(8))
        space.put(keys[:1], [bytes(space.block_bytes)])
        stranger = Remote(daemon.address)
        with space.acquire(keys[:1]), space.reserve(keys) as slots:
            numbers = [hold.number for hold in daemon.core.state.ledger.open_holds()]
            for number in numbers:
                for request in (rq.Release(number), rq.Abort(number), rq.JobClose(number)):
                    stranger.call(request)
                with pytest.raises(LeaseError):
                    stranger.call(rq.Commit(number))
            assert (one.stats().open_leases, one.stats().open_reservations) == (1, 1)
            slots.commit()
        stranger.close()


def test_leases_left_open_at_close_stay_until_the_process_ends(daemon: Daemon) -> None:
    cache = Cache.connect(daemon.address)
    space = cache.space(DESCRIPTOR)
    keys = space.keys(range(4))
    space.put(keys, [bytes([9]) * space.block_bytes])
    view = space.acquire(keys)[0]
    cache.close()
    assert bytes(view) == bytes([9]) * len(view)
    (session,) = daemon.server.sessions()
    assert daemon.direct.call(rq.GetStats()).stats.open_leases == 1
    assert session.end() == 1
    assert daemon.direct.call(rq.GetStats()).stats.open_leases == 0


def test_jobs_that_end_wake_their_own_client(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as one, Cache.connect(daemon.address) as other:
        space = one.space(DESCRIPTOR)
        keys = space.keys(range(4))
        space.put(keys, [bytes(space.block_bytes)])
        with space.prefetch(keys) as job:
            assert job.wait(LONG_S)
            ended = one.poll()
            while not ended:
                ended = one.poll()
            assert ended == [job]
            assert other.poll() == []


def test_another_version_is_refused_with_both_numbers(daemon: Daemon) -> None:
    with daemon.raw() as sock:
        sock.sendall(hello(PROTOCOL + 1))
        _, _, reply = read_frame(sock)
        assert isinstance(reply, dict)
        assert f"version {PROTOCOL}" in reply["message"]
        assert f"version {PROTOCOL + 1}" in reply["message"]
        assert is_closed(sock)


def test_a_session_cannot_be_joined_without_its_secret(daemon: Daemon) -> None:
    with Cache.connect(daemon.address), daemon.raw() as sock:
        (session,) = daemon.server.sessions()
        sock.sendall(frame(msgspec.msgpack.encode(Hello(PROTOCOL, "test", session.number, bytes(16)))))
        _, _, reply = read_frame(sock)
        assert isinstance(reply, dict)
        assert reply["type"] == "Refused"
        assert is_closed(sock)


def test_a_frame_of_any_size_is_not_waited_for(daemon: Daemon) -> None:
    with daemon.raw() as sock:
        sock.sendall(hello())
        read_frame(sock)
        sock.sendall(struct.pack("<I", MOST_BYTES + 1))
        assert is_closed(sock)


@pytest.mark.parametrize(
    "request_",
    [
        rq.Lookup(99, [bytes(32)]),
        rq.Lookup(-1, [bytes(32)]),
        rq.Lookup(0, [b"short"]),
        rq.Lookup(0, [bytes(32)], start=5),
        rq.Lookup(0, [bytes(32)], start=-1),
        rq.Acquire(0, [bytes(32)], 0, b"parent"),
        rq.Acquire(0, [bytes(32)], 0, None, float("nan")),
        rq.Reserve(0, [bytes(32)], 0, None, [[5]]),
        rq.Reserve(0, [bytes(32)], 0, None, []),
        rq.JobLease(1, -1),
        rq.Clear(99),
        rq.WriteBack(-1),
        rq.LookupAll([], [bytes(32)]),
        rq.LookupAll([0, 99], [bytes(32)]),
        rq.LookupAll([0] * 1000, [bytes(32)]),
        rq.AcquireAll([0, -1], [bytes(32)]),
        rq.AcquireAll([0], [b"short"]),
        rq.ReportPrefill(99, 1, 1.0),
        rq.ReportPrefill(0, -1, 1.0),
        rq.ReportPrefill(0, 1, float("inf")),
    ],
)
def test_what_no_client_sends_ends_its_connection_and_no_other(daemon: Daemon, request_: rq.Request) -> None:
    with Cache.connect(daemon.address) as cache, daemon.raw() as sock:
        space = cache.space(DESCRIPTOR)
        sock.sendall(hello())
        read_frame(sock)
        sock.sendall(frame(msgspec.msgpack.encode(request_)))
        assert is_closed(sock)
        keys = space.keys(range(4))
        assert space.put(keys, [bytes(space.block_bytes)]) == [True]
        daemon.core.check()


def test_memory_of_a_client_is_never_read_into(daemon: Daemon) -> None:
    link = Remote(daemon.address)
    link.call(rq.OpenSpace(DESCRIPTOR))
    with pytest.raises(UnsupportedError):
        link.call(rq.ReadInto(0, [bytes(32)], 0, None, [4096]))
    link.close()


def test_errors_come_as_what_they_are(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        with pytest.raises(ConfigError, match="no such tier") as caught:
            cache.drain("nowhere")
        assert caught.value.path == "tier"


@pytest.mark.parametrize("kind", [TierError, TierUnavailable, TierTimeout, TierFull, CorruptBlock])
def test_errors_of_tiers_arrive_with_their_fields(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, kind: type[TierError]
) -> None:
    def fail(request: object) -> None:
        raise kind("disk", "open", "no room", bytes(32))

    with Cache.connect(daemon.address) as cache:
        monkeypatch.setitem(daemon.core._handlers, rq.IsIdle, fail)
        with pytest.raises(kind, match="no room") as caught:
            cache.drain()
        error = caught.value
        assert (type(error), error.tier, error.op, error.key) == (kind, "disk", "open", bytes(32))
        assert daemon.server.counts.failures == 0


def test_a_request_that_fails_unexpectedly_is_an_error_and_its_connection_goes_on(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: object) -> None:
        raise IndexError("out of range")

    with Cache.connect(daemon.address) as cache:
        with monkeypatch.context() as patch:
            patch.setitem(daemon.core._handlers, rq.IsIdle, fail)
            with pytest.raises(KVCairnError, match="out of range"):
                cache.drain()
        assert daemon.server.counts.failures == 1
        assert "IsIdle of client" in caplog.text
        assert cache.drain()


def fuzzed(rng: random.Random) -> bytes:
    """Draw bytes: noise, or a message of ours with some bytes changed."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randrange(64))
    kinds: list[object] = [
        rq.Lookup(0, [rng.randbytes(32)]),
        rq.Acquire(0, [rng.randbytes(32)], 0, None, 0.0),
        rq.Reserve(0, [rng.randbytes(32)], 0, None, [[0]]),
        rq.Commit(rng.randrange(9), [True], [[bytes(16)]]),
        rq.Release(rng.randrange(9)),
        rq.Damaged(rng.randrange(9), rng.randrange(-2, 3)),
        rq.JobLease(rng.randrange(9), rng.randrange(3)),
        rq.Adopt(rng.randbytes(20)),
        rq.Prefetch(0, [rng.randbytes(32)]),
        rq.Clear(rng.randrange(-2, 3), rng.choice([None, "memory", "x"])),
    ]
    body = bytearray(msgspec.msgpack.encode(rng.choice(kinds)))
    for _ in range(rng.randrange(4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return frame(bytes(body)) if rng.random() < 0.9 else bytes(body)


@pytest.mark.slow
def test_hostile_bytes_end_their_connection_and_nothing_else(
    daemon: Daemon, seed: int, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(seed)
    left = FUZZED_LONG if request.config.getoption("--long") else FUZZED
    with Cache.connect(daemon.address) as cache:
        space = cache.space(DESCRIPTOR)
        while left:
            with daemon.raw() as sock:
                if rng.random() < 0.95:
                    sock.sendall(hello())
                    read_frame(sock)
                try:
                    for _ in range(rng.randrange(1, 64)):
                        left = max(0, left - 1)
                        sock.sendall(fuzzed(rng))
                except (BrokenPipeError, ConnectionResetError):
                    continue
        keys = space.keys(range(8))
        assert space.put(keys, [bytes(space.block_bytes)] * 2) == [True, True]
        assert space.get(keys) == [bytes(space.block_bytes)] * 2
        daemon.core.check()


def test_one_socket_has_one_daemon_and_a_stale_one_is_replaced(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another daemon"):
        Server(daemon.direct, daemon.path)
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    second = Server(daemon.direct, stale)
    second.start()
    with Cache.connect(f"unix:{stale}") as cache:
        assert cache.stats().open_leases == 0
    second.close()


def test_serving_goes_on_as_misses_when_the_daemon_is_gone(daemon: Daemon) -> None:
    cache = Cache.connect(daemon.address)
    space = cache.space(DESCRIPTOR)
    keys = space.keys(range(8))
    block = bytes([3]) * space.block_bytes
    space.put(keys, [block] * 2)
    lease, slots = space.acquire(keys), space.reserve(space.keys(range(100, 104)))
    daemon.server.close()
    assert space.lookup(keys).reason is MissReason.TIER_DOWN
    assert space.get(keys) == []
    assert space.put(keys, [block] * 2) == [False, False]
    assert space.prefetch(keys).error == "the daemon is gone"
    assert space.contains(keys) == 0
    assert bytes(lease[1]) == block, "what was leased stays readable"
    slots.commit()
    lease.release()
    with pytest.raises(KVCairnError, match="gone"):
        cache.stats()
    cache.close()


def test_a_fork_has_no_part_in_the_session(daemon: Daemon) -> None:
    cache = Cache.connect(daemon.address)
    space = cache.space(DESCRIPTOR)
    keys = space.keys(range(4))
    space.put(keys, [bytes(space.block_bytes)])
    lease = space.acquire(keys)
    child = os.fork()
    if child == 0:
        try:
            space.lookup(keys)
        except KVCairnError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert cache.stats().open_leases == 1
    lease.release()
    cache.close()
