"""The budget of a day: what exceeds it is dropped and counted, and a restart does not give it anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcairn.core.budget import BudgetFile
from kvcairn.policy.admission import DAY_S, DayBudget
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import PAGE_BYTES
from kvcairn.tiers.base import BUDGET_NAME
from tests.unit.conftest import MakeRig

DAY = 20_000


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present in seconds since 1970; may be changed."""
    now = [DAY * DAY_S + 100.0]
    monkeypatch.setattr("kvcairn.core.writes.time.time", lambda: now[0])
    return now


def test_what_exceeds_it_is_dropped_and_comes_another_day(make_rig: MakeRig, today: list[float]) -> None:
    rig = make_rig(below="dict")
    level = rig.core.state.levels[1]
    level.budget.limit_bytes = 5 * PAGE_BYTES
    blocks = Blocks(rig)
    keys = blocks.keys(1, 8)
    blocks.put(keys)
    rig.cache.drain()
    disk = rig.cache.stats().tiers["disk"]
    assert (disk.blocks, disk.writes_dropped) == (5, {"budget": 1, "parent_missing": 2})
    rig.clock.advance(10.0)
    today[0] += DAY_S
    blocks.space.touch(keys)
    rig.cache.drain()
    assert assert_idle(rig).tiers["disk"].blocks == 8
    assert level.budget.used_bytes == 3 * PAGE_BYTES


def test_it_survives_a_restart(make_rig: MakeRig, today: list[float]) -> None:
    rig = make_rig(below="disk", max_write_bytes_per_day=8 * 2 * PAGE_BYTES)
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 6))
    rig.cache.drain()
    assert json.loads((rig.folder / BUDGET_NAME).read_text()) == {"day": DAY, "bytes": 12 * PAGE_BYTES}
    rig.reopen()
    blocks.put(blocks.keys(2, 6))
    rig.cache.drain()
    disk = rig.cache.stats().tiers["disk"]
    assert (disk.blocks, disk.writes_dropped["budget"]) == (8, 1)
    assert_idle(rig)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"day": null, "bytes": 1}', "\udcff"])
def test_a_damaged_file_counts_from_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / BUDGET_NAME).write_bytes(text.encode(errors="surrogateescape"))
    budget = DayBudget(10)
    BudgetFile(tmp_path).load(budget)
    assert budget.used_bytes == 0


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    BudgetFile(tmp_path / "gone").save(DayBudget(10))
