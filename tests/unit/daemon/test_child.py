from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvcairn.cache import Cache
from kvcairn.daemon.child import ChildDaemon
from kvcairn.errors import ConfigError
from kvcairn.layout import KVLayout, SpaceDescriptor

DESCRIPTOR = SpaceDescriptor(
    model="toy", weights="0", layout=KVLayout.full(layers=1, kv_heads=1, head_dim=32, dtype="float16"), block_tokens=4
)
MEMORY = {"type": "memory", "capacity": "4 MiB", "prefault": False}
LONG_S = 60.0
ENGINE = """
import json, sys, time
from kvcairn.daemon.child import ChildDaemon
daemon = ChildDaemon(json.loads(sys.argv[1]))
print(daemon.pid, daemon.address, flush=True)
time.sleep(600)
"""
WORKER = """
import sys, kvcairn as kv
from tests.unit.daemon.test_child import DESCRIPTOR
space = kv.Cache.connect(sys.argv[1]).space(DESCRIPTOR)
keys = space.keys(range(16))
if sys.argv[2] == "store":
    assert all(space.put(keys, [bytes([n]) * space.block_bytes for n in range(4)]))
    sys.stdin.read()
else:
    assert [block[0] for block in space.get(keys)] == list(range(4))
"""


def worker(address: str, act: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).parent.parent.parent.parent
    return subprocess.Popen([sys.executable, "-c", WORKER, address, act], stdin=subprocess.PIPE, cwd=root)


def test_it_outlives_its_workers_and_one_finds_what_another_stored() -> None:
    with ChildDaemon({"tiers": [MEMORY]}) as daemon, Cache.connect(daemon.address) as cache:
        with worker(daemon.address, "store") as first:
            while cache.stats().tiers["memory"].blocks != 4:
                assert first.poll() is None
            first.kill()
        with worker(daemon.address, "get") as second:
            assert second.wait(LONG_S) == 0
    assert not Path(daemon.address.removeprefix("unix:")).parent.exists()


def test_it_ends_with_the_process_that_started_it_however_that_ends(tmp_path: Path) -> None:
    disk = {"type": "disk", "name": "disk", "path": str(tmp_path), "capacity": "16 MiB"}
    command = [sys.executable, "-c", ENGINE, json.dumps({"tiers": [MEMORY, disk]})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid, address = engine.stdout.readline().split()
        pidfd = os.pidfd_open(int(pid))
        with Cache.connect(address) as cache:
            space = cache.space(DESCRIPTOR)
            keys = space.keys(range(16))
            assert all(space.put(keys, [bytes(space.block_bytes)] * 4))
        engine.kill()
    assert select.select([pidfd], [], [], LONG_S)[0] == [pidfd], "it lives on"
    os.close(pidfd)
    assert not Path(address.removeprefix("unix:")).parent.exists()
    with ChildDaemon({"tiers": [MEMORY, disk]}) as again, Cache.connect(again.address) as cache:
        assert cache.space(DESCRIPTOR).contains(keys) == 4, "what was to be written down is written"


@pytest.mark.parametrize("settings", [{"tires": []}, {"tiers": [MEMORY | {"capacity": "1 TiB"}]}])
def test_settings_that_are_refused_are_refused_here(settings: dict[str, object]) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError):
        ChildDaemon(settings)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_tier_that_cannot_be_opened_is_refused_here_too(tmp_path: Path) -> None:
    disk = {"type": "disk", "name": "disk", "path": str(tmp_path), "capacity": "16 MiB"}
    with ChildDaemon({"tiers": [MEMORY, disk]}), pytest.raises(ConfigError, match="another cache owns"):
        ChildDaemon({"tiers": [MEMORY, disk]})
