"""Looking at a folder from outside: what lies in it, and whether it can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcairn.cli import app
from kvcairn.errors import ConfigError
from kvcairn.tiers.disk.inspect import list_spaces, scrub
from tests.unit.tiers.disk.kit import PAGE, SPACE, blocks, drop, found, opened, slots, stored


def test_a_list_tells_blocks_and_bytes_of_each_space_while_the_owner_runs(tmp_path: Path) -> None:
    writes = blocks(slots(), range(12))
    with opened(tmp_path) as tier:
        tier.write(writes)
        drop(tier, writes[:2])
        (row,) = list_spaces(tmp_path)
    assert (row.space, row.blocks) == (SPACE.hex(), 10)
    assert (row.payload_bytes, row.slot_bytes) == (50_000, 10 * 3 * PAGE)
    assert row.written_s >= 0


def test_a_cleared_space_is_not_listed(tmp_path: Path) -> None:
    writes = blocks(slots(), range(4))
    with opened(tmp_path) as tier:
        tier.write(writes)
        tier.clear(SPACE, 4)
    assert list_spaces(tmp_path) == []


def test_a_scrub_drops_what_is_damaged_and_nothing_else(tmp_path: Path) -> None:
    writes = blocks(slots(), range(12))
    with opened(tmp_path) as tier:
        tier.write(writes)
    with open(tmp_path / "seg-1.kv", "r+b") as file:
        file.seek(3 * 3 * PAGE + PAGE + 77)
        file.write(b"\xff\xff\xff")
    result = scrub(tmp_path)
    assert (result.checked, result.checked_bytes, result.dropped, result.failed) == (12, 60_000, 1, 0)
    assert found(tmp_path) == [stored(w) for i, w in enumerate(writes) if i != 3]
    assert scrub(tmp_path).dropped == 0


def test_a_scrub_needs_the_folder_for_itself(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="another cache owns"):
        scrub(tmp_path)


@pytest.mark.parametrize("command", ["ls", "scrub"])
def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path, command: str) -> None:
    done = CliRunner().invoke(app, [command, str(tmp_path)])
    assert done.exit_code == 2
    assert "no disk tier lies here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_commands_print_json_lines_and_say_whether_all_is_well(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.write(blocks(slots(), range(4)))
    listed = CliRunner().invoke(app, ["ls", str(tmp_path), "--json"])
    assert json.loads(listed.stdout)["blocks"] == 4
    whole = CliRunner().invoke(app, ["scrub", str(tmp_path), "--json"])
    assert (whole.exit_code, json.loads(whole.stdout)["checked"]) == (0, 4)
    content = bytearray((tmp_path / "seg-1.kv").read_bytes())
    content[PAGE] ^= 1
    (tmp_path / "seg-1.kv").write_bytes(content)
    damaged = CliRunner().invoke(app, ["scrub", str(tmp_path)])
    assert damaged.exit_code == 1
    assert "dropped" in damaged.stdout
