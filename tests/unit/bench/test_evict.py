from __future__ import annotations

from kvcairn.bench.evict import FullMemory, run_evict
from kvcairn.config import BUILT_IN_EVICTIONS


def test_a_figure_for_each_policy() -> None:
    figures = list(run_evict(blocks=2_000, few=1_000, pairs=2))
    assert [figure.name for figure in figures] == [f"evict_32_{name}" for name in BUILT_IN_EVICTIONS]
    assert all(figure.value > 0 and figure.ratio and figure.limit == 4.0 for figure in figures)


def test_what_is_measured_lets_go_of_32_and_leaves_the_tier_full_again() -> None:
    with FullMemory("lru", 1_000) as memory:
        assert memory._free(1) == 0
        memory.run()
        assert memory._free(1) == 0
        assert memory._cache.stats().tiers["memory"].blocks > 900
