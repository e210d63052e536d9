from __future__ import annotations

from pathlib import Path

from kvcairn.doctor import Check, examine
from kvcairn.host import Host


def found(folder: Path | None = None, host: Host | None = None) -> dict[str, Check]:
    return {check.name: check for check in examine(folder, host)}


def test_this_host_can_run_the_cache(tmp_path: Path) -> None:
    checks = found(tmp_path)
    assert {check.name for check in checks.values() if check.status == "fail"} == set()
    assert {"python", "numpy", "sqlite", "memory", "control group", "cores", "memfd", "copy core"} <= set(checks)
    assert {"sha-256", "xxh3-128", "folder", "direct I/O"} <= set(checks)
    assert list(tmp_path.iterdir()) == []


def test_whatever_is_not_good_has_a_remedy(tmp_path: Path) -> None:
    for check in found(tmp_path / "missing").values():
        assert (check.status == "ok") == (check.remedy == ""), check


def test_missing_folder_fails_with_the_command_that_makes_it(tmp_path: Path) -> None:
    check = found(tmp_path / "missing")["folder"]
    assert (check.status, check.remedy) == ("fail", f"mkdir -p {tmp_path / 'missing'}")


def test_small_and_unreadable_machines_warn(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    assert found(host=Host(proc, cgroups))["memory"].status == "warn"
    (proc / "meminfo").write_text("MemTotal: 524288 kB\nMemAvailable: 102400 kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (cgroups / "memory.max").write_text("268435456\n")
    checks = found(host=Host(proc, cgroups))
    assert (checks["memory"].status, checks["memory"].value) == ("warn", "512 MiB, 100 MiB available")
    assert (checks["control group"].status, checks["control group"].value) == ("warn", "memory limit 256 MiB")
