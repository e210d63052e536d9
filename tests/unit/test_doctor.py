from __future__ import annotations

from pathlib import Path

import pytest

from kvcairn import Cache, Config, plugins
from kvcairn.doctor import Check, examine
from kvcairn.host import Host
from tests.unit.conftest import Install


def found(folder: Path | None = None, host: Host | None = None) -> dict[str, Check]:
    return {check.name: check for check in examine(folder, host)}


def test_this_host_can_run_the_cache(tmp_path: Path) -> None:
    checks = found(tmp_path)
    assert {check.name for check in checks.values() if check.status == "fail"} == set()
    assert {"python", "numpy", "sqlite", "memory", "control group", "cores", "memfd", "copy core"} <= set(checks)
    assert {"sha-256", "xxh3-128", "folder", "folder content", "folder access", "direct I/O"} <= set(checks)
    assert list(tmp_path.iterdir()) == []


def test_whatever_is_not_good_has_a_remedy(tmp_path: Path) -> None:
    for check in found(tmp_path / "missing").values():
        assert (check.status == "ok") == (check.remedy == ""), check


def test_missing_folder_fails_with_the_command_that_makes_it(tmp_path: Path) -> None:
    check = found(tmp_path / "missing")["folder"]
    assert (check.status, check.remedy) == ("fail", f"mkdir -m 700 -p {tmp_path / 'missing'}")


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


def config_in(folder: Path) -> Config:
    disk = {"type": "disk", "path": str(folder), "capacity": "16 MiB"}
    return Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}, disk]})


def test_a_folder_that_a_cache_owns_is_not_called_free(tmp_path: Path) -> None:
    with Cache.open(config_in(tmp_path)):
        check = found(tmp_path)["folder content"]
        assert (check.status, check.value) == ("warn", "a running cache owns it")
    check = found(tmp_path)["folder content"]
    assert (check.status, check.value) == ("ok", "a disk tier")
    with Cache.open(config_in(tmp_path)):
        pass  # to look took nothing


def test_files_of_something_else_are_named(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir(mode=0o700)
    with Cache.open(config_in(mine)):
        pass
    for folder in (mine, theirs):
        (folder / "thesis.pdf").touch()
    assert found(mine)["folder content"].status == "warn"
    assert found(mine)["folder content"].value == "a disk tier, and other files: thesis.pdf"
    check = found(theirs)["folder content"]
    assert (check.status, check.value) == ("warn", "files of something else: thesis.pdf")
    assert str(theirs / "kvcairn") in check.remedy


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [(0o700, "ok", "this user alone"), (0o755, "warn", "can see"), (0o777, "warn", "can replace")],
)
def test_who_else_can_get_at_a_folder(tmp_path: Path, mode: int, status: str, said: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    folder.chmod(mode)
    check = found(folder)["folder access"]
    assert (check.status, said in check.value) == (status, True)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = found(tmp_path / "file")["folder"]
    assert (check.status, check.value) == ("fail", f"{tmp_path / 'file'}: a file, not a folder")
    assert "mkdir" not in check.remedy


def test_plug_ins_are_listed_with_their_packages(install: Install) -> None:
    good = "from kvcairn.policy.eviction.lru import LRU\nclass Newest(LRU): pass"
    install("kvd_good", good, plugins.POLICIES, "newest = kvd_good:Newest")
    install("kvd_same", good, plugins.POLICIES, "lru = kvd_same:Newest")
    install("kvd_broken", "import nothing_is_called_so", plugins.TIERS, "shelf = kvd_broken:Shelf")
    checks = found()
    assert checks["plug-in eviction policy newest"] == Check(
        "plug-in eviction policy newest", "ok", "from kvd_good (kvd_good:Newest)"
    )
    assert checks["plug-in eviction policy lru"].status == "warn"
    broken = checks["plug-in tier shelf"]
    assert broken.status == "fail"
    assert "package kvd_broken" in broken.value
    assert "No module named 'nothing_is_called_so'" in broken.value
    assert broken.remedy
