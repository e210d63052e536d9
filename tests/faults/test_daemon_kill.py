"""Clients of a daemon that die in the middle of a call: nothing they held stays, and nobody reads what they left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcairn.cache import Cache
from kvcairn.config import Config
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.daemon.server import Server
from tests.faults.daemon_client import DESCRIPTOR, content

CLIENTS, CLIENTS_LONG = 100, 1_000
LONG_S = 60.0
HERE = Path(__file__)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[Server, Direct, str]]:
    memory = {"type": "memory", "capacity": "2 MiB", "prefault": False, "poison": True}
    link = Direct(open_core(Config.from_dict({"tiers": [memory], "verify_memory": "never"})))
    server = Server(link, tmp_path / "socket")
    server.start()
    yield server, link, f"unix:{tmp_path / 'socket'}"
    server.close()
    link.close()


class Nursery:
    """Starts clients by forking one process that has loaded everything."""

    def __init__(self, address: str, wrong: Path) -> None:
        command = [sys.executable, "-m", "tests.faults.daemon_client", address, str(wrong)]
        root = HERE.parent.parent.parent
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)

    @contextmanager
    def client(self, seed: int) -> Iterator[int]:
        """Start a client and yield its number; kill it at the end."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(f"{seed}\n")
        self._parent.stdin.flush()
        pid = int(self._parent.stdout.readline())
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGKILL)
            self._parent.stdin.write("killed\n")
            self._parent.stdin.flush()

    def close(self) -> None:
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.close()
        assert self._parent.wait(LONG_S) == 0
        self._parent.stdout.close()


@pytest.fixture
def nursery(daemon: tuple[Server, Direct, str], tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(daemon[2], tmp_path / "wrong")
    yield made
    made.close()


def until(done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)


def until_it_works(link: Direct) -> None:
    before = link.core.state.version
    until(lambda: link.core.state.version > before, "the client does nothing")


def assert_nothing_held(server: Server, link: Direct) -> None:
    until(lambda: not server.sessions(), "the sessions of dead clients stay open")
    assert not link.core.state.ledger.open_holds()
    memory = link.core.state.memory.residency
    assert (memory.counts.pinned_bytes, memory.counts.in_flight, memory.orphans) == (0, 0, {})
    link.core.check()


def assert_right_bytes(address: str) -> int:
    """Read everything that can be read; return how many blocks there were."""
    found = 0
    with Cache.connect(address) as cache:
        space = cache.space(DESCRIPTOR)
        for number in range(3**6):
            prompt = [number // 3**depth % 3 for depth in range(6)]
            keys = space.keys([letter for letter in prompt for _ in range(DESCRIPTOR.block_tokens)])
            blocks = space.get(keys, deadline_s=0)
            assert blocks == [content(key) for key in keys[: len(blocks)]]
            found += len(blocks)
    return found


@pytest.mark.slow
def test_clients_killed_at_random_points_leave_nothing(
    daemon: tuple[Server, Direct, str], nursery: Nursery, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server, link, address = daemon
    rng = random.Random(seed)
    for number in range(CLIENTS_LONG if request.config.getoption("--long") else CLIENTS):
        with nursery.client(seed + number):
            until_it_works(link)
            time.sleep(rng.random() * 0.03)
    assert_nothing_held(server, link)
    assert not (tmp_path / "wrong").exists(), (tmp_path / "wrong").read_text()
    assert assert_right_bytes(address) > 0
    link.core.check()


def test_one_that_is_stopped_keeps_what_it_holds_until_it_is_killed(
    daemon: tuple[Server, Direct, str], nursery: Nursery
) -> None:
    server, link, _ = daemon
    ledger = link.core.state.ledger
    with nursery.client(1) as pid:
        for _ in range(1000):
            until(lambda: bool(server.sessions()), "the client does not connect")
            time.sleep(0.001)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.01)  # what it has sent is handled
            if ledger.open_holds():
                break
            os.kill(pid, signal.SIGCONT)
        held = {hold.number for hold in ledger.open_holds()}
        assert held
        time.sleep(0.5)
        assert {hold.number for hold in ledger.open_holds()} == held
    assert_nothing_held(server, link)


def test_one_that_closes_its_socket_and_goes_on_writing_harms_nobody(daemon: tuple[Server, Direct, str]) -> None:
    server, link, address = daemon
    script = (
        "import sys, kvcairn as kv\n"
        "from tests.faults.daemon_client import DESCRIPTOR\n"
        "cache = kv.Cache.connect(sys.argv[1]); space = cache.space(DESCRIPTOR)\n"
        "slots = space.reserve(space.keys(range(160)))\n"
        "views = [slots[n] for n in range(len(slots))]\n"
        "cache.close()\n"
        "print(len(views), flush=True)\n"
        "while True:\n"
        "    for view in views: view[:] = bytes([66]) * len(view)\n"
    )
    command = [sys.executable, "-c", script, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent.parent.parent) as writer:
        try:
            assert writer.stdout is not None
            assert int(writer.stdout.readline()) == 10
            assert len(link.core.state.ledger.open_holds()) == 1, "its slots are held while it can write to them"
            with Cache.connect(address) as cache:
                space = cache.space(DESCRIPTOR)
                for first in range(0, 10_000, 1_000):
                    keys = space.keys(range(first + 7, first + 7 + 960))
                    space.put(keys, [content(key) for key in keys])
                    blocks = space.get(keys)
                    assert blocks
                    assert blocks == [content(key) for key in keys[: len(blocks)]]
        finally:
            writer.kill()
    assert_nothing_held(server, link)


def test_a_fork_that_lives_on_does_not_keep_what_its_parent_held(daemon: tuple[Server, Direct, str]) -> None:
    server, link, address = daemon
    script = (
        "import os, sys, time, kvcairn as kv\n"
        "from tests.faults.daemon_client import DESCRIPTOR\n"
        "space = kv.Cache.connect(sys.argv[1]).space(DESCRIPTOR)\n"
        "slots = space.reserve(space.keys(range(160)))\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(600)\n"
        "print(child, flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent.parent.parent) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert link.core.state.ledger.count("reservation") == 1
        parent.kill()
        try:
            assert_nothing_held(server, link)
            os.kill(child, 0)  # it still lives
        finally:
            os.kill(child, signal.SIGKILL)
