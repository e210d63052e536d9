"""X1: more memory than the machine or its control group has is refused at start, with the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvcairn as kv
from kvcairn.config import ConfigReader
from kvcairn.host import Host

GIB = 1 << 30


def host(tmp_path: Path, memory: int, group: int | None) -> Host:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {memory // 1024} kB\nMemAvailable: {memory // 1024} kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    if group is not None:
        (groups / "memory.max").write_text(f"{group}\n")
    return Host(proc, groups)


@pytest.mark.parametrize(("memory", "group"), [(2048 * GIB, None), (8192 * GIB, 2048 * GIB)])
def test_more_than_there_is(tmp_path: Path, memory: int, group: int | None) -> None:
    reader = ConfigReader({}, host(tmp_path, memory, group))
    with pytest.raises(kv.ConfigError) as caught:
        reader.read({"tiers": [{"type": "memory", "capacity": 8 * 512 * GIB}]})
    assert caught.value.path == "tiers[0].capacity"
    assert "4 TiB" in str(caught.value) and "2 TiB" in str(caught.value)


def test_what_fits_is_accepted(tmp_path: Path) -> None:
    reader = ConfigReader({}, host(tmp_path, 2048 * GIB, None))
    assert reader.read({"tiers": [{"type": "memory", "capacity": 512 * GIB}]}).memory.capacity_bytes == 512 * GIB
