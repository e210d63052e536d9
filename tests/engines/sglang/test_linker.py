"""KVCairnLinker behind SGLang's own tree and device pools: what is promised lands, byte for byte."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import kvcairn.adapters.sglang as doors
from kvcairn import cache as front
from kvcairn.adapters.sglang import versions
from kvcairn.adapters.sglang.devicepages import DevicePages
from kvcairn.adapters.sglang.store import PlacedStore
from kvcairn.core.open import open_core
from kvcairn.errors import ConfigError, UnsupportedError
from kvcairn.testing import Fault, FaultKind, FaultyTier
from kvcairn.tiers.base import Tier
from tests.engines.sglang.kit import PAGE_SIZES, Shape, one_rank, prompt
from tests.engines.sglang.linker_kit import LinkerSide, linker_settings

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def rank() -> Iterator[None]:
    with one_rank():
        yield
        for side in LinkerSide.opened:
            side.close()
        LinkerSide.opened.clear()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultyTier]]:
    """Every disk tier that is opened, with faults to be set."""
    tiers: list[FaultyTier] = []

    def wrap(tier: Tier) -> FaultyTier:
        tiers.append(FaultyTier(tier))
        return tiers[-1]

    monkeypatch.setattr(front, "open_core", lambda config: open_core(config, wrap=wrap))
    yield tiers
    for tier in tiers:
        tier.heal()


def on_disk_only(side: LinkerSide) -> None:
    assert side.linker.cache.drain(timeout_s=30)
    side.linker.cache.clear(tier="memory")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_what_was_offloaded_lands_from_memory_and_from_disk(tmp_path: Path, kind: str, page_size: int) -> None:
    shape = Shape(kind=kind, page_size=page_size)
    tokens = prompt(512)
    side = LinkerSide(shape, linker_settings(tmp_path))
    stored = side.insert(tokens)
    side.tree.reset()
    assert side.match(tokens) == 512
    assert torch.equal(cast(torch.Tensor, side.load(tokens)), stored)
    on_disk_only(side)
    assert side.match(tokens, "other") == 512
    assert torch.equal(cast(torch.Tensor, side.load(tokens, "other")), stored)
    side.close()
    again = LinkerSide(shape, linker_settings(tmp_path))
    assert again.match(tokens) == 512
    assert torch.equal(cast(torch.Tensor, again.load(tokens)), stored)


def test_only_the_common_beginning_is_promised(tmp_path: Path) -> None:
    side = LinkerSide(Shape(), linker_settings(tmp_path))
    tokens = prompt(256)
    side.insert(tokens)
    side.tree.reset()
    other = tokens[:200] + prompt(56, seed=9)
    assert side.match(other) == 192
    assert side.linker.lookup("r", [side.transfer(other)]) == list(range(1, 13))
    assert side.linker.lookup("r", [side.transfer(prompt(64, seed=8))]) == []


def test_a_promise_is_kept_when_memory_needs_room_and_the_disk_is_lost(tmp_path: Path) -> None:
    """2 MiB of memory; the promised pages stay while ten times as much is stored."""
    memory = {"type": "memory", "capacity": "2 MiB"}
    side = LinkerSide(Shape(tokens=65536), linker_settings(tmp_path, tiers=[memory]))
    tokens = prompt(512)
    stored = side.insert(tokens)
    side.tree.reset()
    assert side.match(tokens) == 512
    for seed in range(2, 22):
        side.insert(prompt(2048, seed), seed)
    assert torch.equal(cast(torch.Tensor, side.load(tokens)), stored)
    side.tree.reset()
    assert side.match(prompt(2048, 2)) == 0, "what nobody was promised made room"


def test_what_is_no_longer_there_is_computed_and_not_promised(tmp_path: Path) -> None:
    side = LinkerSide(Shape(), linker_settings(tmp_path))
    tokens = prompt(256)
    side.insert(tokens)
    side.tree.reset()
    side.linker.cache.clear()
    assert side.match(tokens) == 0
    assert side.load(tokens) is None
    assert side.linker.start_layer_wise_loading() == -1


def test_a_load_can_be_taken_back_and_leaves_nothing_pinned(tmp_path: Path) -> None:
    side = LinkerSide(Shape(), linker_settings(tmp_path))
    tokens = prompt(256)
    side.insert(tokens)
    side.tree.reset()
    assert side.match(tokens, "one") == 256
    assert side.linker.cache.stats().open_leases == 1
    assert side.linker.load("one", [side.transfer(tokens, side.places(256))])
    assert side.linker.cancel_queued_load("one")
    assert not side.linker.cancel_queued_load("one")
    for number in range(200):
        assert side.match(tokens, str(number)) == 256, "abandoned promises do not use up what may be pinned"
    side.tree.reset()
    assert side.linker.cache.stats().open_leases == 0


def test_a_load_that_stops_is_reported_and_leaves_nothing_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = LinkerSide(Shape(), linker_settings(tmp_path))
    tokens = prompt(256)
    side.insert(tokens)
    side.tree.reset()
    fill = DevicePages.fill

    def stop(self: DevicePages, layer: int, *more: Any) -> None:
        if layer == 1:
            raise RuntimeError("the device is gone")
        fill(self, layer, *more)

    monkeypatch.setattr(DevicePages, "fill", stop)
    assert side.match(tokens) == 256
    assert side.load(tokens) is None
    monkeypatch.undo()
    assert side.load(tokens) is not None, "the thread lives on"
    assert side.linker.cache.stats().open_leases == 0


@pytest.mark.parametrize("kind", [FaultKind.ALTERED, FaultKind.SHORT, FaultKind.SWAPPED, FaultKind.BLOCK_ERROR])
def test_a_damaged_page_ends_what_is_promised(tmp_path: Path, faulty: list[FaultyTier], kind: FaultKind) -> None:
    side = LinkerSide(Shape(), linker_settings(tmp_path))
    tokens = prompt(256)
    stored = side.insert(tokens)
    side.tree.reset()
    on_disk_only(side)
    keys = frozenset(bytes.fromhex(each) for each in side.transfer(tokens).keys[3:5])
    faulty[0].faults = (Fault(kind=kind, ops=frozenset(["read"]), keys=keys),)
    assert side.match(tokens) == 48
    assert torch.equal(cast(torch.Tensor, side.load(tokens[:48])), stored[:, :48])


def test_a_disk_that_hangs_costs_a_lookup_its_time_and_memory_still_serves(
    tmp_path: Path, faulty: list[FaultyTier]
) -> None:
    side = LinkerSide(Shape(), linker_settings(tmp_path, lookup_wait=0.1))
    cold, warm = prompt(256), prompt(256, seed=2)
    side.insert(cold)
    on_disk_only(side)
    faulty[0].faults = (Fault(kind=FaultKind.HANG, ops=frozenset(["read", "write"])),)
    stored = side.insert(warm, seed=2)
    side.tree.reset()
    assert side.match(cold, "cold") == 0
    assert side.match(warm, "warm") == 256
    assert torch.equal(cast(torch.Tensor, side.load(warm, "warm")), stored)


def test_random_delays_and_failures_never_give_a_wrong_byte(tmp_path: Path, faulty: list[FaultyTier]) -> None:
    memory = {"type": "memory", "capacity": "2 MiB"}
    disk = {"type": "disk", "path": str(tmp_path), "capacity": "64 MiB", "reserve": "1 MiB"}
    side = LinkerSide(Shape(tokens=65536), linker_settings(tmp_path, tiers=[memory, disk], lookup_wait=0.2))
    ops = frozenset(["read", "write"])
    faulty[0].faults = (
        Fault(kind=FaultKind.ERROR, ops=ops, rate=0.1),
        Fault(kind=FaultKind.DELAY, ops=ops, rate=0.3, delay_s=0.01),
        Fault(kind=FaultKind.ALTERED, ops=frozenset(["read"]), rate=0.2),
    )
    stored = {seed: side.insert(prompt(512, seed), seed) for seed in range(12)}
    side.tree.reset()
    hits = 0
    for number in range(36):
        seed = number % 12
        promised = side.match(prompt(512, seed), str(number))
        if promised:
            loaded = side.load(prompt(512, seed)[:promised], str(number))
            assert loaded is not None, "what is promised lands"
            assert torch.equal(loaded, stored[seed][:, :promised])
            hits += 1
    assert hits


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "two"},
        {"model": "other"},
        {"tenant": "another"},
        Shape(layers=4),
        Shape(heads=4),
        Shape(dim=32),
        Shape(page_size=32),
    ],
    ids=str,
)
def test_a_space_that_differs_in_one_item_never_hits(tmp_path: Path, change: dict[str, Any] | Shape) -> None:
    tokens = prompt(256)
    side = LinkerSide(Shape(), linker_settings(tmp_path))
    side.insert(tokens)
    side.close()
    other = (Shape(), change) if isinstance(change, dict) else (change, {})
    assert LinkerSide(other[0], linker_settings(tmp_path, **other[1])).match(tokens) == 0
    LinkerSide.opened[-1].close()
    assert LinkerSide(Shape(), linker_settings(tmp_path)).match(tokens) == 256


def test_pages_of_one_process_are_read_by_another(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from tests.engines.sglang.kit import *\n"
        "from tests.engines.sglang.linker_kit import *\n"
        "with one_rank():\n"
        f"    side = LinkerSide(Shape(), linker_settings(Path({str(tmp_path)!r})))\n"
        "    side.insert(prompt(256), seed=7)\n"
        "    side.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    side = LinkerSide(Shape(), linker_settings(tmp_path))
    assert side.match(prompt(256)) == 256
    loaded = side.load(prompt(256))
    here = LinkerSide(Shape(), linker_settings(tmp_path / "elsewhere"))
    assert torch.equal(cast(torch.Tensor, loaded), here.insert(prompt(256), seed=7))


def test_pages_that_go_through_staging_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU needs, on a device that happens to be the CPU; each way reads what the other stored."""
    original = DevicePages.__init__
    tokens = prompt(256)
    for first, second in ((False, True), (True, False)):
        for by_address, is_first in ((first, True), (second, False)):
            monkeypatch.setattr(
                DevicePages, "__init__", lambda self, *a, by=by_address: original(self, *a, by_address=by)
            )
            side = LinkerSide(Shape(), linker_settings(tmp_path / str(first)))
            if is_first:
                stored = side.insert(tokens)
            else:
                assert side.match(tokens) == 256
                assert torch.equal(cast(torch.Tensor, side.load(tokens)), stored)
            side.close()


def test_offloads_are_told_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = LinkerSide(Shape(), linker_settings(tmp_path))
    gate = threading.Event()
    save = PlacedStore.store_from
    monkeypatch.setattr(PlacedStore, "store_from", lambda *a: gate.wait(30) and save(*a))
    for seed in (1, 2):
        assert side.linker.offload([side.transfer(prompt(64, seed), side.places(64))])
    assert side.linker.num_completed_offloads() == 0
    gate.set()
    while side.linker.num_completed_offloads() < 2:
        pass
    assert [side.linker.pop_completed_offload() for _ in range(2)] == [True, True]


def test_without_a_memory_tier_it_says_so(tmp_path: Path) -> None:
    disk = {"type": "disk", "path": str(tmp_path), "capacity": "64 MiB"}
    with pytest.raises(ConfigError, match="memory tier"):
        LinkerSide(Shape(), linker_settings(tmp_path, tiers=[disk]))


def test_other_versions_give_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.5.22", "0.5.24", "0.6.0"):
        monkeypatch.setattr(versions, "installed_version", lambda version=version: version)
        with pytest.raises(UnsupportedError, match=f"SGLang {version} is not supported.*>=0.5.23,<0.5.24"):
            _ = doors.KVCairnLinker
