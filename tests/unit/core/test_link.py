from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcairn import requests as rq
from kvcairn.errors import ClosedError, ConfigError, LeaseError
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import Rig
from kvcairn.types import MissReason
from tests.unit.conftest import MakeRig

LONG_S = 60.0


@pytest.fixture(params=["direct", "loopback", "socket"])
def rig(make_rig: MakeRig, request: pytest.FixtureRequest) -> Rig:
    return make_rig(link=request.param, below="dict")


def test_everything_passes_both_ways_alike(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys[:3])
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert blocks.space.lookup(keys).by_tier == {"disk": 3}
    assert blocks.read(keys, deadline_s=5.0) == 3
    with blocks.space.prefetch(keys, start=1) as job:
        assert job.ready == 2
    assert rig.cache.stats().misses_by_reason == {MissReason.NEVER_STORED: 1}
    assert_idle(rig)


def test_every_call_after_close_says_so(rig: Rig) -> None:
    blocks = Blocks(rig)
    space, keys = blocks.space, blocks.keys(1, 2)
    blocks.put(keys)
    rig.cache.close()
    rig.cache.close()
    content = [bytes(space.block_bytes)] * 2
    calls: list[Callable[[], object]] = [
        lambda: space.lookup(keys), lambda: space.probe(keys), lambda: space.prefetch(keys), lambda: space.get(keys),
        lambda: space.acquire(keys), lambda: space.reserve(keys), lambda: space.put(keys, content),
        lambda: space.contains(keys), lambda: space.touch(keys), lambda: space.forget(keys), rig.cache.stats,
        rig.cache.drain, rig.cache.clear, rig.cache.poll, rig.cache.events, lambda: rig.cache.adopt(b"x"),
        lambda: rig.cache.add_tier({}), lambda: rig.cache.detach_tier("disk"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_those_who_wait_for_events_are_told_of_the_end(make_rig: MakeRig) -> None:
    rig = make_rig(threads=True)
    blocks = Blocks(rig)
    stream, seen = rig.cache.events(), list[object]()
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    blocks.put(blocks.keys(1, 3))
    rig.cache.close()
    reader.join(LONG_S)
    assert not reader.is_alive()
    assert len(seen) == 3, "what was collected before is read out"


def test_a_tier_comes_and_goes(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    folder = tmp_path / "added"
    folder.mkdir()
    options = {"type": "disk", "name": "added", "path": str(folder), "capacity": "4 MiB"}
    rig.cache.add_tier(options)
    with pytest.raises(ConfigError, match="that name"):
        rig.cache.add_tier(options)
    blocks.space.touch(keys)
    rig.cache.drain()
    assert rig.cache.stats().tiers["added"].blocks == 3
    rig.cache.clear(tier="memory")
    assert blocks.space.lookup(keys).by_tier == {"added": 3}
    rig.cache.detach_tier("added")
    assert list(rig.cache.stats().tiers) == ["memory"]
    assert blocks.space.lookup(keys).reason is MissReason.VANISHED
    rig.cache.add_tier(options)
    assert blocks.read(keys, deadline_s=5.0) == 3, "its content stayed where it was"
    assert_idle(rig)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"type": "memory", "capacity": "1 MiB"}, {"type": "disk", "name": "d", "capacity": "1 MiB"},
        {"type": "disk", "name": "d", "path": "/nowhere/at/all", "capacity": "1 MiB"}, {"type": "tape"},
    ],
)  # fmt: skip
def test_a_tier_that_cannot_be_added_changes_nothing(rig: Rig, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        rig.cache.add_tier(options)
    assert list(rig.cache.stats().tiers) == ["memory", "disk"]
    assert_idle(rig)


def test_tiers_that_there_are_not(rig: Rig) -> None:
    for call in (rig.cache.drain, rig.cache.detach_tier, lambda name: rig.cache.clear(tier=name)):
        with pytest.raises(ConfigError, match="no such tier; there are: memory, disk"):
            call("tape")
    with pytest.raises(ConfigError, match="cannot be detached"):
        rig.cache.detach_tier("memory")
    assert_idle(rig)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_tier_is_detached_while_it_works(make_rig: MakeRig, op: str) -> None:
    rig = make_rig(below="dict", threads=True)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys)
    rig.cache.drain()
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.HANG, ops=frozenset([op])),)
    if op == "read":
        rig.cache.clear(tier="memory")
        job = blocks.space.prefetch(keys)
    else:
        blocks.put(blocks.keys(2, 4))
    heal = threading.Timer(0.1, rig.faulty.heal)
    heal.start()
    rig.cache.detach_tier("disk", drain=False)
    heal.join()
    if op == "read":
        job.close()
    rig.core.check()
    assert all(blocks.put(keys))
    assert blocks.read(keys) == 4
    assert_idle(rig)


def test_detaching_with_drain_writes_everything_first(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 5)
    blocks.put(keys)
    rig.cache.detach_tier("disk")
    assert {stored.block.key for stored, _ in rig.content.slots.values()} == set(keys)
    rig.core.check()


FORK = """
import os, signal, threading
import kvcairn as kv

cache = kv.Cache.open(kv.Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}]}))
layout = kv.KVLayout.full(layers=1, kv_heads=1, head_dim=4, dtype="int8")
space = cache.space(kv.SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=2))
keys = space.keys(range(8))
space.put(keys, [bytes(space.block_bytes)] * 4)
lease, stream = space.acquire(keys), cache.events()
held, go_on = threading.Event(), threading.Event()

def hold():
    with cache._link.core.state.changed:
        held.set()
        go_on.wait()

holder = threading.Thread(target=hold)
if LOCKED:
    holder.start()
    held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    calls = {
        "stats": cache.stats, "drain": cache.drain, "lookup": lambda: space.lookup(keys),
        "get": lambda: space.get(keys),
        "put": lambda: space.put(keys, [bytes(space.block_bytes)] * 4), "events": cache.events, "poll": cache.poll,
        "load": lambda: space.load_into(keys[:1], ([0], [space.block_bytes])), "next": lambda: next(stream),
    }
    for name, call in calls.items():
        try:
            call()
        except (kv.ClosedError, StopIteration):
            continue
        print("no error:", name, flush=True)
    lease.release()
    cache.close()
    with kv.Cache.open(kv.Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}]})) as fresh:
        assert fresh is not cache
        assert fresh.space(space.descriptor).put(keys, [bytes(space.block_bytes)] * 4) == [True] * 4
    print("child done", flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
go_on.set()
if LOCKED:
    holder.join()
assert space.lookup(keys).blocks == lease.count == 4, "the parent's cache is as before"
cache.close()
print("parent done", status)
"""


@pytest.mark.parametrize("locked", [False, True], ids=["free", "lock held"])
def test_in_a_forked_child_every_call_says_so(locked: bool) -> None:
    code = f"LOCKED = {locked}\n{FORK}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert ran.stdout.splitlines() == ["child done", "parent done 0"], ran.stderr


def test_a_request_that_is_refused_changes_nothing(rig: Rig) -> None:
    before = rig.cache.stats()
    never = 1 << 61  # a daemon's numbers are large, and those below are of former runs
    for request in (
        rq.Commit(never),
        rq.JobLease(never),
        rq.Damaged(never, 0),
        rq.IsIdle("tape"),
        rq.Clear(None, "tape"),
    ):
        with pytest.raises((ConfigError, LeaseError)):
            rig.cache._link.call(request)
    assert rig.cache.stats() == before
