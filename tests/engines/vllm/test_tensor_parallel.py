"""Two workers, each with half of the heads, and a scheduler: three clients of one daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcairn import Cache
from kvcairn.daemon.child import ChildDaemon
from tests.engines.vllm.kit import BLOCK, cache, engine, prompt

TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.slow
def test_two_workers_load_what_each_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory, from disk, and in an engine that was started again beside the same daemon."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")
    prompts = [prompt(700, 801), prompt(1100, 802)]
    loaded = [2 * BLOCK, 4 * BLOCK]
    with ChildDaemon(cache(tmp_path / "disk")) as daemon:
        with engine(tmp_path, cache={"connect": daemon.address}, engine=TWO) as e:
            cold = e.generate(prompts=prompts)
            assert cold["cached"] == [0, 0]
            for tier in (None, "memory"):
                assert e.reset()
                if tier is not None:
                    e.clear(tier=tier)
                warm = e.generate(prompts=prompts)
                assert (warm["tokens"], warm["cached"]) == (cold["tokens"], loaded), tier
        with engine(tmp_path, cache={"connect": daemon.address}, engine=TWO) as e:
            again = e.generate(prompts=prompts)
            assert (again["tokens"], again["cached"]) == (cold["tokens"], loaded)
        with Cache.connect(daemon.address) as seen:
            stats = seen.stats()
            assert (stats.open_leases, stats.open_reservations, stats.open_jobs) == (0, 0, 0)
            assert stats.tiers["memory"].blocks == 12, "six blocks in each of two spaces"
            assert len(stats.spaces) == 2
