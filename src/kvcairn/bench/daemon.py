"""Bench `daemon`: the cache of another process, beside a plain copy and a plain message to another process."""

from __future__ import annotations

import contextlib
import functools
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from kvcairn.bench.figures import Contender, Figure, Pairs, Time, measure, quartiles, rate, timed
from kvcairn.bench.memory import BLOCK_TOKENS, RUN_BLOCKS, TIER_BLOCKS, Traffic
from kvcairn.cache import Cache
from kvcairn.daemon.child import ChildDaemon
from kvcairn.errors import KVCairnError
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.space import Space

CALLS: Final = 2_000
BYTES_PAIRS: Final = 15
CLIENTS: Final = 2
LIMITS_US: Final = {1: 150.0, 64: 400.0}
LEAST_RATIO: Final = 0.85
_BENCH: Final = "daemon"
_CLIENT: Final = "from kvcairn.bench.daemon import be_client; be_client()"
_ECHO: Final = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as sock:
    while data := sock.recv(65536):
        sock.sendall(data)
"""


def run_daemon(block_tokens: int = BLOCK_TOKENS, pairs: int = BYTES_PAIRS, calls: int = CALLS) -> Iterator[Figure]:
    """Yield the figures of a cache in another process, as they are measured.

    Blocks for about a minute; takes 2.5 GiB with blocks of 256 tokens.
    """
    nbytes = _descriptor("", block_tokens).layout.part_bytes(0, block_tokens)
    capacity = (CLIENTS + 1) * TIER_BLOCKS * nbytes
    # One region, as in a large arena, where a region holds tens of blocks; in a small one they would be one block each.
    memory = {"type": "memory", "capacity": capacity, "region": capacity}
    with ChildDaemon({"tiers": [memory]}) as daemon:
        yield from _latencies(daemon.address, calls)
        with Cache.connect(daemon.address) as cache:
            traffic = Traffic(cache.space(_descriptor("alone", block_tokens)), nbytes)
            for _ in range(CLIENTS + 1):
                traffic.warm_up()
            yield _share("store", nbytes, measure(traffic.store, traffic.copy_in, pairs=pairs))
            yield _share("load", nbytes, measure(traffic.load(), traffic.copy_out, pairs=pairs))
        del traffic
        with contextlib.ExitStack() as stack:
            crowd = [stack.enter_context(_client(daemon.address, n, block_tokens)) for n in range(CLIENTS)]
            for name, plain in (("store", "copy_in"), ("load", "copy_out")):
                _together(crowd, f"prepare_{name}")
                ours, theirs = (functools.partial(_together, crowd, act) for act in (name, plain))
                yield _share(f"{name}_two_clients", CLIENTS * nbytes, measure(ours, theirs, pairs=pairs))


def be_client() -> None:
    """Be one of several clients: for each line on standard input do what it names, and say how long it took."""
    address, tenant, block_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    descriptor = _descriptor(tenant, block_tokens)
    with Cache.connect(address) as cache:
        traffic = Traffic(cache.space(descriptor), descriptor.layout.part_bytes(0, block_tokens))
        acts: dict[str, Contender] = {
            "store": traffic.store,
            "copy_in": traffic.copy_in,
            "copy_out": traffic.copy_out,
            "prepare_store": lambda: timed(traffic.warm_up),
        }
        for line in sys.stdin:
            name = line.strip()
            if name == "prepare_load":
                acts["load"] = traffic.load()
                time = acts["load"]()
            else:
                time = acts[name]()
            sys.stdout.write(msgspec.json.encode(time).decode() + "\n")
            sys.stdout.flush()


def _latencies(address: str, calls: int) -> Iterator[Figure]:
    """Acquire and release blocks that are in memory, beside as many messages to a process that sends them back."""
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=64, dtype="float16")
    descriptor = SpaceDescriptor(model="bench", weights="none", layout=layout, block_tokens=16)
    with Cache.connect(address) as cache, _echo() as message:
        space = cache.space(descriptor)
        keys = space.keys(range(16 * max(LIMITS_US)))
        if not all(space.put(keys, [bytes(space.block_bytes)] * len(keys))):
            raise KVCairnError("the blocks to be acquired do not fit into memory")
        for blocks, limit_us in LIMITS_US.items():
            wanted = keys[:blocks]

            def once(wanted: list[bytes] = wanted) -> Time:
                return timed(lambda: _acquire(space, wanted))

            def twice() -> Time:
                return timed(lambda: (message(), message()))

            for _ in range(calls // 10):
                once(), twice()
            yield _latency(f"acquire_{blocks}", limit_us, measure(once, twice, pairs=calls)[1])


def _acquire(space: Space, keys: list[bytes]) -> None:
    with space.acquire(keys, deadline_s=0) as lease:
        if lease.count != len(keys):
            raise KVCairnError(f"{len(keys)} blocks were stored, {lease.count} are there: {lease.reason}")


@contextlib.contextmanager
def _echo() -> Iterator[Callable[[], Any]]:
    """A process that sends back what it gets, and a call that sends it something and waits for that."""
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen([sys.executable, "-c", _ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]):
        theirs.close()

        def message() -> bytes:
            ours.sendall(bytes(64))
            return ours.recv(1 << 16)

        yield message
        ours.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _client(address: str, number: int, block_tokens: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _CLIENT, address, f"client-{number}", str(block_tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _together(crowd: list[subprocess.Popen[str]], act: str) -> Time:
    """Have all clients do the same at once; return how long the slowest took."""
    for client in crowd:
        assert client.stdin is not None
        client.stdin.write(f"{act}\n")
        client.stdin.flush()
    times = []
    for client in crowd:
        assert client.stdout is not None
        line = client.stdout.readline()
        if not line:
            raise KVCairnError(f"a client ended in {act}")
        times.append(msgspec.json.decode(line, type=Time))
    return Time(max(time.cpu_ns for time in times), max(time.wall_ns for time in times))


def _share(name: str, nbytes: int, measured: tuple[Pairs, Pairs]) -> Figure:
    return rate(_BENCH, name, RUN_BLOCKS * nbytes, LEAST_RATIO, measured)


def _latency(name: str, limit_us: float, walls: Pairs) -> Figure:
    """Return the figure of a call to another process, by the clock on the wall: CPU time would leave out the wait."""
    low, value, high = quartiles(walls.ours)
    return Figure(
        bench=_BENCH, name=name, value=value / 1e3, unit="us", reference=statistics.median(walls.reference) / 1e3,
        ratio=statistics.median(walls.ratios), runs=len(walls.ours), limit=limit_us, low=low / 1e3, high=high / 1e3,
        spread=walls.spread, p99=statistics.quantiles(walls.ours, n=100)[98] / 1e3, attempts=walls.attempts,
        noisy=walls.is_void,
    )  # fmt: skip


def _descriptor(tenant: str, block_tokens: int) -> SpaceDescriptor:
    layout = KVLayout.full(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    return SpaceDescriptor(model="bench", weights="none", layout=layout, block_tokens=block_tokens, tenant=tenant)
