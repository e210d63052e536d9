from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcairn.host import Host, folder_bytes, free_bytes


def make_host(root: Path, groups: str, limits: dict[str, str], mem_kib: int = 1 << 20) -> Host:
    """Describe a machine by files, as the kernel shows them."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {mem_kib} kB\nMemFree: 1 kB\nMemAvailable: {mem_kib // 2} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    for name, limit in limits.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(limit)
    return Host(proc, cgroups)


def test_memory(tmp_path: Path) -> None:
    host = make_host(tmp_path, "", {}, mem_kib=2048)
    assert host.memory_bytes() == 2 << 20
    assert host.available_bytes() == 1 << 20
    assert host.cgroup_limit_bytes() is None


@pytest.mark.parametrize(
    ("groups", "limits", "limit_bytes"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "4096\n"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "8192\n"}, 8192),
        ("0::/a/b\n", {"a/b/memory.max": "9000\n", "a/memory.max": "8192\n"}, 8192),
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, None),
        ("0::/../../outer\n", {"memory.max": "4096\n"}, 4096),
        ("5:cpu:/\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:memory:/outer\n", {"memory/memory.limit_in_bytes": "5000\n"}, 5000),
        ("4:hugetlb,memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("4:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "4096\n"}, None),
        ("", {}, None),
    ],
)
def test_cgroup_limit(tmp_path: Path, groups: str, limits: dict[str, str], limit_bytes: int | None) -> None:
    assert make_host(tmp_path, groups, limits).cgroup_limit_bytes() == limit_bytes


def test_unreadable_host_knows_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path / "no", tmp_path / "no")
    assert (host.memory_bytes(), host.available_bytes(), host.cgroup_limit_bytes()) == (None, None, None)


def test_this_host() -> None:
    memory, available = Host().memory_bytes(), Host().available_bytes()
    assert memory is not None
    assert available is not None
    assert 0 < available <= memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_folder_bytes_counts_what_is_on_disk(tmp_path: Path) -> None:
    assert folder_bytes(tmp_path) == 0
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub" / "file").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
    assert folder_bytes(tmp_path) >= 1 << 20
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert folder_bytes(tmp_path) < 1 << 30


def test_free_bytes(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0
