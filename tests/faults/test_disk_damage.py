"""Any file of a disk tier's folder may be damaged: never wrong bytes, and the tier opens with what is left."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kvcairn.errors import ConfigError
from kvcairn.tiers.base import Stored, Write
from kvcairn.tiers.disk.tier import DiskTier
from kvcairn.types import MissReason
from tests.unit.tiers.disk.kit import (
    PAGE,
    MiB,
    block,
    blocks,
    contents,
    drop,
    found,
    listed,
    opened,
    read,
    segment_files,
    slots,
    stored,
    taken_bytes,
    tier_over,
)

SLOT = 3 * PAGE  # of a block of 5,000 bytes


@pytest.fixture
def writes(tmp_path: Path) -> list[Write]:
    """Twelve blocks of an earlier run, in two segments."""
    made = blocks(slots(), range(12))
    with opened(tmp_path) as tier:
        assert tier.write(made) == [None] * 12
    return made


def patch(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


# -- segment files


@pytest.mark.parametrize("at", [0, 9, 20, 50, 90, 115, 120, 130, 150, 170, 200, 4000, 4090, PAGE, PAGE + 4999])
def test_a_flipped_bit_costs_its_own_block_alone(tmp_path: Path, writes: list[Write], at: int) -> None:
    path = tmp_path / "seg-1.kv"
    before = path.read_bytes()[3 * SLOT + at]
    patch(path, 3 * SLOT + at, bytes([before ^ 0x10]))
    with opened(tmp_path) as tier:
        outcomes = read(tier, writes)
        assert outcomes == [MissReason.CORRUPT if i == 3 else None for i in range(12)]
        assert tier.write([writes[3]]) == [None]
        assert read(tier, writes) == [None] * 12


def test_what_lies_behind_the_payload_is_nobodys(tmp_path: Path, writes: list[Write]) -> None:
    patch(tmp_path / "seg-1.kv", PAGE + 5000, b"\xff" * 100)
    with opened(tmp_path) as tier:
        assert read(tier, writes) == [None] * 12


def test_two_slots_that_changed_places_are_both_refused(tmp_path: Path, writes: list[Write]) -> None:
    path = tmp_path / "seg-1.kv"
    content = path.read_bytes()
    patch(path, 0, content[SLOT : 2 * SLOT] + content[:SLOT])
    with opened(tmp_path) as tier:
        assert read(tier, writes[:3]) == [MissReason.CORRUPT, MissReason.CORRUPT, None]


def test_two_files_that_changed_names_are_refused(tmp_path: Path, writes: list[Write]) -> None:
    one, two = tmp_path / "seg-1.kv", tmp_path / "seg-2.kv"
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with opened(tmp_path) as tier:
        assert set(read(tier, writes)) == {MissReason.CORRUPT}


@pytest.mark.parametrize("fill", [b"\x00", b"\xff", b"other people's data"])
def test_a_zeroed_or_foreign_file_of_the_same_size_is_refused(tmp_path: Path, writes: list[Write], fill: bytes) -> None:
    path = tmp_path / "seg-1.kv"
    path.write_bytes((fill * path.stat().st_size)[: path.stat().st_size])
    with opened(tmp_path) as tier:
        assert read(tier, writes) == [MissReason.CORRUPT] * 8 + [None] * 4
        assert tier.write(writes[:8]) == [None] * 8
        assert read(tier, writes) == [None] * 12


@pytest.mark.parametrize("length", [0, 1, SLOT - 1, SLOT, 4 * SLOT + 5000])
def test_a_truncated_file_keeps_what_is_whole(tmp_path: Path, writes: list[Write], length: int) -> None:
    os.truncate(tmp_path / "seg-1.kv", length)
    whole = length // SLOT
    tier = tier_over(tmp_path)
    assert listed(tier) == [stored(w) for w in writes[:whole] + writes[8:]]
    assert read(tier, writes) == [None] * whole + [MissReason.VANISHED] * (8 - whole) + [None] * 4
    assert tier.write(writes[:8]) == [None] * 8
    assert read(tier, writes) == [None] * 12
    tier.close()


@pytest.mark.parametrize("replace_by", ["nothing", "link", "pipe", "folder"])
def test_a_file_that_vanishes_while_in_use_is_a_miss(tmp_path: Path, writes: list[Write], replace_by: str) -> None:
    path = tmp_path / "seg-1.kv"
    with opened(tmp_path) as tier:
        assert read(tier, writes[:1]) == [None]
        secret = tmp_path.parent / "secret"
        path.rename(secret)
        {
            "nothing": lambda: None,
            "link": lambda: path.symlink_to(secret),
            "pipe": lambda: os.mkfifo(path),
            "folder": lambda: path.mkdir(),
        }[replace_by]()
        outcomes = read(tier, writes)
        assert outcomes[8:] == [None] * 4
        assert all(outcome is not None for outcome in outcomes[:8])
        if replace_by == "nothing":
            assert outcomes[:8] == [MissReason.VANISHED] * 8
            assert tier.write(writes[:8]) == [None] * 8
            assert read(tier, writes) == [None] * 12


def test_rows_whose_file_is_gone_and_files_without_rows_go(
    tmp_path: Path, writes: list[Write], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "seg-1.kv").rename(tmp_path / "seg-9.kv")
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path) == [stored(w) for w in writes[8:]]
    assert segment_files(tmp_path) == ["seg-2.kv"]
    assert "8 rows" in caplog.text
    assert "[9]" in caplog.text


# -- the index


def lose_index(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()


def test_a_lost_index_is_made_anew_from_the_headers(tmp_path: Path, writes: list[Write]) -> None:
    with opened(tmp_path) as tier:
        drop(tier, writes[4:6])
    lose_index(tmp_path)
    kept = [stored(w) for w in writes[:4] + writes[6:]]
    assert found(tmp_path) == kept
    assert found(tmp_path) == kept
    with opened(tmp_path) as tier:
        assert read(tier, kept) == [None] * 10


def test_a_rebuild_that_was_cut_short_begins_again(tmp_path: Path, writes: list[Write]) -> None:
    db = sqlite3.connect(tmp_path / "index.sqlite")
    db.execute("DELETE FROM copies WHERE segment = 2")
    db.execute("PRAGMA user_version = 0")
    db.commit()
    db.close()
    assert found(tmp_path) == [stored(w) for w in writes]


def test_of_two_copies_the_higher_generation_wins(tmp_path: Path, writes: list[Write]) -> None:
    maker = slots()
    for _ in range(20):
        maker.cut(5000)
    twins = [block(maker.cut(5000), n, 5000) for n in range(3)]
    with opened(tmp_path) as tier:
        tier.write(twins)
    expected = {stored(w) for w in [*writes[3:], *twins]}
    assert set(found(tmp_path)) == expected
    lose_index(tmp_path)
    assert set(found(tmp_path)) == expected


def damage_header(path: Path) -> None:
    patch(path, 0, b"not a database, but text")


def damage_zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def damage_tables(path: Path) -> None:
    patch(path, PAGE, b"\xa7" * (path.stat().st_size - PAGE))


def damage_foreign(path: Path) -> None:
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE copies (recipe TEXT)")
    db.commit()
    db.close()


def damage_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damage_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/file")


def damage_version(path: Path) -> None:
    patch(path, 60, b"\x00\x00\x00\x07")


@pytest.mark.parametrize(
    "damage",
    [
        damage_header, damage_zero, damage_empty, damage_half, damage_tables, damage_foreign, damage_folder,
        damage_link, damage_version,
    ],
)  # fmt: skip
def test_a_damaged_index_is_made_anew(tmp_path: Path, writes: list[Write], damage: Callable[[Path], None]) -> None:
    damage(tmp_path / "index.sqlite")
    with opened(tmp_path) as tier:
        assert read(tier, writes) == [None] * 12
        assert taken_bytes(tmp_path) <= 64 * MiB
        assert sorted(tier.unlisted) == sorted({w.slot.segment for w in writes if w.slot})
    assert found(tmp_path) == [stored(w) for w in writes]
    with opened(tmp_path) as tier:
        assert not tier.unlisted


@pytest.mark.parametrize(
    "change", ["nbytes = 100000", "key = x'00'", "layer_group = -1", "parent = x''", "offset_bytes = 17"]
)
def test_rows_that_nobody_can_have_written_give_the_index_away(
    tmp_path: Path, writes: list[Write], change: str
) -> None:
    db = sqlite3.connect(tmp_path / "index.sqlite")
    db.execute(f"UPDATE copies SET {change} WHERE segment = 1 AND offset_bytes = 0")
    db.commit()
    db.close()
    assert found(tmp_path) == [stored(w) for w in writes]


@pytest.mark.parametrize("change", ["slot_bytes = 8192, nbytes = 9", "segment_bytes = 1 << 40"])
def test_rows_of_another_shape_than_their_neighbours_are_dropped(
    tmp_path: Path, writes: list[Write], change: str
) -> None:
    db = sqlite3.connect(tmp_path / "index.sqlite")
    db.execute(f"UPDATE copies SET {change} WHERE segment = 1 AND offset_bytes = 0")
    db.commit()
    db.close()
    assert found(tmp_path) == [stored(w) for w in writes[1:]]


def test_a_row_that_tells_of_another_block_is_found_out_at_the_first_read(tmp_path: Path, writes: list[Write]) -> None:
    db = sqlite3.connect(tmp_path / "index.sqlite")
    db.execute("UPDATE copies SET key = randomblob(32) WHERE segment = 1 AND offset_bytes = 0")
    db.execute(f"UPDATE copies SET nbytes = 4000 WHERE segment = 1 AND offset_bytes = {SLOT}")
    db.execute(f"UPDATE copies SET generation = 999 WHERE segment = 1 AND offset_bytes = {2 * SLOT}")
    db.commit()
    db.close()
    tier = tier_over(tmp_path)
    rows: list[Stored] = listed(tier)
    assert len(rows) == 12
    assert read(tier, rows) == [MissReason.CORRUPT] * 3 + [None] * 9
    tier.close()


# -- the description, the version, the owner


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64, b'{"format_version":2,"region_bytes":1}\nbad\n'])
def test_a_damaged_description_is_made_anew(tmp_path: Path, writes: list[Write], content: bytes) -> None:
    before = (tmp_path / "folder").read_bytes()
    (tmp_path / "folder").write_bytes(content)
    assert found(tmp_path) == [stored(w) for w in writes]
    assert (tmp_path / "folder").read_bytes() == before


def test_a_later_format_is_refused_and_not_touched(tmp_path: Path, writes: list[Write]) -> None:
    line = b'{"format_version":2,"shards":["a","b"]}'
    digest = xxhash.xxh3_128_hexdigest(line).encode()
    (tmp_path / "folder").write_bytes(line + b"\n" + digest + b"\n")
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="format 2"):
            tier_over(tmp_path).open()
    assert contents(tmp_path) == before


def test_a_folder_has_one_owner(tmp_path: Path, writes: list[Write]) -> None:
    with opened(tmp_path) as tier:
        with pytest.raises(ConfigError, match="another cache owns") as refusal:
            tier_over(tmp_path).open()
        assert str(tmp_path) in str(refusal.value)
        assert "one process owns a folder" in str(refusal.value)
        assert read(tier, writes) == [None] * 12
    with opened(tmp_path) as tier:
        assert read(tier, writes) == [None] * 12


def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path, writes: list[Write]) -> None:
    tier = tier_over(tmp_path)
    tier.open()
    asleep, wake = os.pipe()
    told, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready, b"x")
        os.read(asleep, 1)
        os._exit(0)
    try:
        os.read(told, 1)
        with pytest.raises(ConfigError):
            tier_over(tmp_path).open()
        tier.close()
        assert found(tmp_path) == [stored(w) for w in writes]
    finally:
        os.write(wake, b"x")
        os.waitpid(child, 0)
        for fd in (asleep, wake, told, ready):
            os.close(fd)


def test_a_missing_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mkdir -m 700 -p"):
        tier_over(tmp_path / "absent").open()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="no such folder"):
        tier_over(tmp_path / "file").open()


# -- anything, anywhere


def damage_something(rng: random.Random, folder: Path) -> str:
    path = rng.choice(sorted(p for p in folder.iterdir() if p.name != "lock"))
    size = path.stat().st_size
    kind = rng.choice(["flip", "zero", "cut", "noise", "grow", "remove"])
    at = rng.randrange(max(1, size))
    if kind == "flip" and size:
        patch(path, at, bytes([path.read_bytes()[at] ^ (1 << rng.randrange(8))]))
    elif kind in ("zero", "noise"):
        length = min(size - at, rng.choice([1, 16, 512, 4096, 100_000]))
        patch(path, at, bytes(length) if kind == "zero" else rng.randbytes(length))
    elif kind == "cut":
        os.truncate(path, at)
    elif kind == "grow":
        with open(path, "ab") as file:
            file.write(rng.randbytes(1000))
    elif kind == "remove":
        path.unlink()
    return f"{kind} {path.name} at {at} of {size}"


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_1000_random_damages_are_survived_without_a_wrong_byte(tmp_path: Path, hundred: int, seed: int) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        survive_damage(folder, random.Random(seed + 100 * hundred + number))
        shutil.rmtree(folder)


def survive_damage(tmp_path: Path, rng: random.Random) -> None:
    maker = slots()
    made = blocks(maker, range(30), 2000)
    tier: DiskTier = tier_over(tmp_path)
    tier.open()
    tier.write(made)
    if rng.random() < 0.5:
        tier.close()
    else:  # as a killed process leaves it, with all in the log
        copy = contents(tmp_path)
        tier.close()
        for name, content in copy.items():
            (tmp_path / name).write_bytes(content)
    done = [damage_something(rng, tmp_path) for _ in range(rng.choice([1, 1, 3]))]
    tier = tier_over(tmp_path)
    rows = listed(tier)
    outcomes = read(tier, rows)  # compares the bytes of all that is served
    assert set(outcomes) <= {None, MissReason.CORRUPT, MissReason.VANISHED}, done
    again = [replace(w, slot=maker.cut(2000)) for w in made]
    assert tier.write(again) == [None] * 30, done
    assert read(tier, again) == [None] * 30
    tier.close()
    assert {stored(w) for w in again} <= set(found(tmp_path)), done


def test_no_name_of_a_block_is_in_a_file_name(tmp_path: Path, writes: list[Write]) -> None:
    hexes = {w.block.key.hex() for w in writes} | {hashlib.sha256(w.block.key).hexdigest() for w in writes}
    assert not any(h[:8] in path.name for h in hexes for path in tmp_path.iterdir())
