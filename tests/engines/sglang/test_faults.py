"""KVCairnStorage on tiers that hang, fail and lie: a call ends in time, and the host pool never gets a wrong byte."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvcairn import cache as front
from kvcairn.core.open import open_core
from kvcairn.testing import Fault, FaultKind, FaultyTier
from kvcairn.tiers.base import Read, Tier
from tests.engines.sglang.kit import Shape, Side, one_rank, settings

HASHES = [f"{number:064x}" for number in range(8)]
PLACES = torch.arange(8 * 16)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultyTier]]:
    """Every disk tier that is opened, with faults to be set."""
    tiers: list[FaultyTier] = []

    def wrap(tier: Tier) -> FaultyTier:
        tiers.append(FaultyTier(tier))
        return tiers[-1]

    monkeypatch.setattr(front, "open_core", lambda config: open_core(config, wrap=wrap))
    with one_rank():
        yield tiers
        for tier in tiers:
            tier.heal()
        for side in Side.opened:
            side.close()
        Side.opened.clear()


def on_disk_only(folder: Path, **more: Any) -> Side:
    """Pages that are on disk and no longer in memory."""
    side = Side(Shape(), settings(folder, **more))
    side.host_pool.kv_buffer.copy_(torch.randn(side.host_pool.kv_buffer.shape).to(torch.bfloat16))
    assert side.storage.batch_set_v1(HASHES, PLACES) == [True] * 8
    cache = side.storage._cache
    assert cache.drain(timeout_s=10)
    cache.clear(tier="memory")
    return side


def test_a_tier_that_hangs_ends_the_call_and_never_writes_to_the_pool(tmp_path: Path, faulty: list[FaultyTier]) -> None:
    side = on_disk_only(tmp_path, timeout_base=0.2)
    faulty[0].faults = (Fault(kind=FaultKind.HANG, ops=frozenset(["read"])),)
    side.host_pool.kv_buffer.zero_()
    assert side.storage.batch_get_v1(HASHES, PLACES) == [False] * 8
    returned, inner = threading.Event(), cast(Any, faulty[0].inner)
    read = inner.read

    def recorded(reads: Sequence[Read]) -> Any:
        outcomes = read(reads)
        returned.set()
        return outcomes

    inner.read = recorded
    faulty[0].heal()
    assert returned.wait(60), "the call did go on"
    assert not side.host_pool.kv_buffer.any(), "SGLang has given these pages to somebody else by then"


@pytest.mark.parametrize("kind", [FaultKind.ALTERED, FaultKind.SHORT, FaultKind.SWAPPED, FaultKind.BLOCK_ERROR])
def test_a_damaged_page_ends_the_run_and_does_not_reach_the_pool(
    tmp_path: Path, faulty: list[FaultyTier], kind: FaultKind
) -> None:
    side = on_disk_only(tmp_path)
    keys = frozenset(bytes.fromhex(each) for each in HASHES[3:5])
    faulty[0].faults = (Fault(kind=kind, ops=frozenset(["read"]), keys=keys),)
    before = side.host_pool.kv_buffer.clone()
    side.host_pool.kv_buffer[:, : 8 * 16] = 0
    assert side.storage.batch_get_v1(HASHES, PLACES) == [True] * 3 + [False] * 5
    assert torch.equal(side.host_pool.kv_buffer[:, : 3 * 16], before[:, : 3 * 16])
    assert not side.host_pool.kv_buffer[:, 3 * 16 : 8 * 16].any()


def test_a_disk_that_fails_loses_pages_and_nothing_else(tmp_path: Path, faulty: list[FaultyTier]) -> None:
    side = Side(Shape(), settings(tmp_path))
    faulty[0].faults = (Fault(kind=FaultKind.ERROR, ops=frozenset(["read", "write"])),)
    assert side.storage.batch_set_v1(HASHES, PLACES) == [True] * 8, "they are in memory"
    cache = side.storage._cache
    assert cache.drain(timeout_s=10)
    cache.clear(tier="memory")
    assert side.storage.batch_exists(HASHES) == 0
    assert side.storage.batch_get_v1(HASHES, PLACES) == [False] * 8


def test_a_slow_disk_holds_stores_back_and_loses_none(tmp_path: Path, faulty: list[FaultyTier]) -> None:
    """The write buffer is far smaller than what is stored."""
    side = Side(Shape(page_size=1, tokens=20_000), settings(tmp_path))
    faulty[0].faults = (Fault(kind=FaultKind.DELAY, ops=frozenset(["write"]), delay_s=0.02),)
    hashes = [f"{number:064x}" for number in range(20_000)]
    assert side.storage._cache.stats().tiers["memory"].capacity_bytes < 20_000 * 4096
    for begin in range(0, 20_000, 4_000):
        part = hashes[begin : begin + 4_000]
        assert side.storage.batch_set_v1(part, torch.arange(begin, begin + 4_000)) == [True] * 4_000
    cache = side.storage._cache
    assert cache.drain(timeout_s=60)
    cache.clear(tier="memory")
    assert side.storage.batch_exists(hashes) == 20_000
    assert cache.stats().tiers["disk"].writes_dropped == {}


def test_a_disk_that_takes_nothing_makes_stores_fail_in_time(tmp_path: Path, faulty: list[FaultyTier]) -> None:
    side = Side(Shape(page_size=1, tokens=20_000), settings(tmp_path, timeout_base=0.3, timeout_per_1024_tokens=0))
    faulty[0].faults = (Fault(kind=FaultKind.HANG, ops=frozenset(["write"])),)
    hashes = [f"{number:064x}" for number in range(20_000)]
    ok = side.storage.batch_set_v1(hashes, torch.arange(20_000))
    assert ok[0] and not ok[-1]
    assert ok == sorted(ok, reverse=True)
