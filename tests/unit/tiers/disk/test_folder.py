"""Whose folder it is: refusals before anything in it is changed, and who else can read what lies there."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from kvcairn import Cache, Config, ConfigError, KVLayout, SpaceDescriptor
from kvcairn.tiers.disk.folder import INDEX_NAME, Lock
from tests.unit.tiers.disk.kit import opened, tier_over


def config(folder: Path, **disk: object) -> Config:
    tier = {"type": "disk", "name": "ssd", "path": str(folder), "capacity": "16 MiB", **disk}
    return Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}, tier]})


def test_a_folder_of_something_else_is_warned_of_and_what_lies_there_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "thesis.pdf").write_text("my life")
    (tmp_path / "photos").mkdir()
    Cache.open(config(tmp_path)).close()
    (warning,) = [record.message for record in caplog.records if "something else" in record.message]
    assert warning.startswith("tiers[1].path: something else lies in this folder: photos, thesis.pdf; ")
    assert f"mkdir -m 700 -p {tmp_path / 'kvcairn'}" in warning
    assert (tmp_path / "thesis.pdf").read_text() == "my life"
    caplog.clear()
    Cache.open(config(tmp_path)).close()
    assert "something else" not in caplog.text, "it is ours by now"


def test_a_fresh_file_system_is_no_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".nfs0001").touch()
    with opened(tmp_path):
        pass


@pytest.mark.parametrize("lost", ["folder", INDEX_NAME, "lock"])
def test_a_folder_of_ours_is_known_whatever_it_lost(tmp_path: Path, lost: str) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / lost).unlink()
    (tmp_path / "notes.txt").touch()  # came later: it counts against the capacity
    with opened(tmp_path):
        pass


def test_a_second_owner_is_told_which_setting_is_meant(tmp_path: Path) -> None:
    with (
        Cache.open(config(tmp_path)),
        pytest.raises(ConfigError, match="another cache owns this folder") as caught,
    ):
        Cache.open(config(tmp_path, capacity="17 MiB"))
    assert caught.value.path == "tiers[1].path"


def test_a_tier_that_is_added_later_is_named_too(tmp_path: Path) -> None:
    with opened(tmp_path), Cache.open(Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}]})) as cache:
        with pytest.raises(ConfigError, match="another cache owns this folder") as caught:
            cache.add_tier({"type": "disk", "path": str(tmp_path), "capacity": "16 MiB"})
        assert caught.value.path == "tier.path"


def test_nobody_else_can_read_what_is_written(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with Cache.open(config(tmp_path, max_write_bytes_per_day="1 GiB")) as cache:
            layout = KVLayout.full(layers=1, kv_heads=1, head_dim=8, dtype="float32")
            space = cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=4))
            keys = space.keys(range(8))
            space.put(keys, [bytes(space.block_bytes)] * 2)
            assert cache.drain(timeout_s=60.0)
            cache.clear(space=space)
            modes = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in os.listdir(tmp_path)}
    finally:
        os.umask(before)
    assert {INDEX_NAME, INDEX_NAME + "-wal", "folder", "lock", "epochs", "written-today.json"} <= modes.keys()
    assert any(name.startswith("seg-") for name in modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o600} == {}


def test_an_index_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    index = tmp_path / INDEX_NAME
    index.chmod(0o644)
    with opened(tmp_path):
        assert stat.S_IMODE(index.stat().st_mode) == 0o600
    with sqlite3.connect(index) as db:
        assert db.execute("PRAGMA quick_check").fetchone() == ("ok",)
    db.close()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no such folder"):
        tier_over(tmp_path / "file").open()


def test_a_released_folder_is_free_though_a_child_still_has_the_file(tmp_path: Path) -> None:
    """Another thread has forked, to run a program: until it runs, the child has all files of its parent open."""
    lock = Lock("tiers[1].path", tmp_path)
    childs = os.dup(lock._fd)
    lock.release()
    Lock("tiers[1].path", tmp_path).release()
    os.close(childs)


def test_a_fork_that_ends_leaves_its_parent_the_folder(tmp_path: Path) -> None:
    lock = Lock("tiers[1].path", tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0 if not Lock._held else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(ConfigError, match="another cache owns this folder"):
        Lock("tiers[1].path", tmp_path)
    lock.release()
