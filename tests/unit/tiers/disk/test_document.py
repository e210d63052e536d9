"""A second reader of the disk format, made from `docs/concepts/disk-format.md` and nothing else."""

from __future__ import annotations

import json
import re
import sqlite3
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

from kvcairn.tiers.base import ALL_SPACES, Write
from kvcairn.tiers.disk import index
from tests.unit.tiers.disk import kit

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Copy:
    space_id: bytes
    key: bytes
    parent: bytes | None
    group: int
    generation: int
    segment: int
    offset: int
    slot_bytes: int
    segment_bytes: int
    payload: bytes


def read_folder(folder: Path) -> dict[str, int]:
    line, digest, rest = (folder / "folder").read_text().split("\n")
    assert rest == ""
    assert xxhash.xxh3_128_hexdigest(line.encode()) == digest
    fields: dict[str, int] = json.loads(line)
    return fields


def read_epochs(folder: Path) -> dict[bytes, int]:
    """The generation up to which all copies of each space are dead, those cleared longest ago first."""
    path = folder / "epochs"
    if not path.exists():
        return {}
    content = path.read_bytes()
    records, digest = content[:-16], content[-16:]
    if len(records) % 40 or xxhash.xxh3_128(records, seed=0).digest() != digest:
        return {}
    found: dict[bytes, int] = {}
    for at in range(0, len(records), 40):
        space_id, generation = struct.unpack_from("<32sQ", records, at)
        assert space_id not in found
        found[space_id] = generation
    assert len(found) <= 102
    return found


def number(header: bytes, offset: int, nbytes: int) -> int:
    value: int = struct.unpack_from("<I" if nbytes == 4 else "<q", header, offset)[0]
    return value


def read_slot(content: bytes, segment: int, offset: int) -> Copy | None:
    header = content[offset : offset + PAGE_BYTES]
    if header[:8] != b"KVCAIRN\0" or number(header, 8, 4) != 1 or number(header, 12, 4) != PAGE_BYTES:
        return None
    if xxhash.xxh3_128(header[:4080], seed=0).digest() != header[4080:]:
        return None
    if (number(header, 136, 8), number(header, 144, 8)) != (segment, offset):
        return None
    flags = number(header, 112, 4)
    assert flags in (0, 1)
    assert not any(header[184:4080])
    assert flags or not any(header[80:112])
    payload_bytes = number(header, 120, 8)
    payload = content[offset + PAGE_BYTES : offset + PAGE_BYTES + payload_bytes]
    if xxhash.xxh3_128_digest(payload) != header[168:184]:
        return None
    padding = content[offset + PAGE_BYTES + payload_bytes : offset + PAGE_BYTES + -(-payload_bytes // 4096) * 4096]
    assert not any(padding)
    return Copy(
        space_id=header[16:48],
        key=header[48:80],
        parent=header[80:112] if flags else None,
        group=number(header, 116, 4),
        generation=number(header, 128, 8),
        segment=segment,
        offset=offset,
        slot_bytes=number(header, 152, 8),
        segment_bytes=number(header, 160, 8),
        payload=payload,
    )


def read_segments(folder: Path) -> list[Copy]:
    copies: list[Copy] = []
    epochs = read_epochs(folder)
    for path in folder.iterdir():
        match = re.fullmatch(r"seg-(0|[1-9][0-9]*)\.kv", path.name)
        if match:
            content = path.read_bytes()
            pages = range(0, len(content), PAGE_BYTES)
            found = [c for at in pages if (c := read_slot(content, int(match[1]), at)) is not None]
            copies += [c for c in found if c.generation > max(epochs.get(each, -1) for each in (c.space_id, bytes(32)))]
            assert all(c.segment_bytes == len(content) for c in copies if c.segment == int(match[1]))
    return sorted(copies, key=lambda c: (c.segment, c.offset))


def make(folder: Path) -> list[Write]:
    """A folder with copies in all sizes, some deleted, some slots used twice."""
    maker = kit.slots()
    writes = [
        kit.block(maker.cut(nbytes), n, nbytes, n % 3) for n, nbytes in enumerate([1, 4095, 4096, 4097, 70_000] * 5)
    ]
    with kit.opened(folder) as tier:
        assert tier.write(writes) == [None] * 25
        kit.drop(tier, writes[3:6])
        again = [kit.block(maker.reuse(w.slot), 50 + n, w.data.nbytes) for n, w in enumerate(writes[5:9]) if w.slot]
        assert tier.write(again) == [None] * 4
    return [*writes[:3], *again, *writes[9:]]


def expected(writes: list[Write]) -> list[Copy]:
    copies = []
    for w in writes:
        assert w.slot is not None
        at = (w.slot.generation, w.slot.segment, w.slot.offset_bytes, w.slot.slot_bytes, w.slot.segment_bytes)
        copies.append(Copy(w.block.space_id, w.block.key, w.parent, w.block.group, *at, bytes(w.data)))
    return sorted(copies, key=lambda c: (c.segment, c.offset))


def test_another_program_reads_the_segments(tmp_path: Path) -> None:
    writes = make(tmp_path)
    assert read_segments(tmp_path) == expected(writes)


def test_another_program_reads_what_was_cleared(tmp_path: Path) -> None:
    spaces = [bytes([number + 1]) * 32 for number in range(110)]
    assert read_epochs(tmp_path) == {}
    with kit.opened(tmp_path) as tier:
        for generation, space_id in enumerate(spaces):
            tier.clear(space_id, generation)
        tier.clear(spaces[50], 999)
    expected = {space_id: generation for generation, space_id in enumerate(spaces)}
    del expected[spaces[50]]
    expected[spaces[50]] = 999
    assert list(read_epochs(tmp_path).items()) == list(expected.items())[-102:]
    with kit.opened(tmp_path) as tier:
        tier.clear(ALL_SPACES, 500)
    assert read_epochs(tmp_path) == {spaces[50]: 999, bytes(32): 500}, "older ones say nothing any more"
    content = (tmp_path / "epochs").read_bytes()
    (tmp_path / "epochs").write_bytes(content[:40] + b"\x01" + content[41:])
    assert read_epochs(tmp_path) == {}


@pytest.mark.parametrize("cleared", [kit.SPACE, ALL_SPACES])
def test_another_program_passes_over_what_was_cleared(tmp_path: Path, cleared: bytes) -> None:
    maker = kit.slots()
    old, new = kit.blocks(maker, range(5)), kit.blocks(maker, range(5, 12))
    assert old[-1].slot is not None
    with kit.opened(tmp_path) as tier:
        assert tier.write(old) == [None] * 5
        tier.clear(cleared, old[-1].slot.generation)
        assert tier.write(new) == [None] * 7
    assert read_segments(tmp_path) == expected(new)


def test_another_program_reads_the_description(tmp_path: Path) -> None:
    make(tmp_path)
    assert read_folder(tmp_path) == {"format_version": 1, "region_bytes": kit.MiB}


def test_another_program_reads_the_index(tmp_path: Path) -> None:
    writes = make(tmp_path)
    db = sqlite3.connect(tmp_path / "index.sqlite")
    assert db.execute("PRAGMA application_id").fetchone() == (0x6B764361,)
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    rows = db.execute(
        "SELECT space_id, key, parent, layer_group, generation, segment, offset_bytes, slot_bytes, segment_bytes,"
        " nbytes, checksum FROM copies ORDER BY segment, offset_bytes"
    ).fetchall()
    db.close()
    assert rows == [
        (
            c.space_id, c.key, c.parent, c.group, c.generation, c.segment, c.offset, c.slot_bytes, c.segment_bytes,
            len(c.payload), xxhash.xxh3_128_digest(c.payload),
        )
        for c in expected(writes)
    ]  # fmt: skip


def test_the_document_has_the_table_that_is_made() -> None:
    document = (Path(__file__).parents[4] / "docs/concepts/disk-format.md").read_text()
    (sql,) = re.findall(r"```sql\n(.*?)```", document, re.DOTALL)
    db = sqlite3.connect(":memory:")
    db.execute(sql)
    theirs = sqlite3.connect(":memory:")
    theirs.execute(index._SCHEMA)
    columns = "SELECT * FROM pragma_table_info('copies')"
    assert db.execute(columns).fetchall() == theirs.execute(columns).fetchall()
    db.close()
    theirs.close()
