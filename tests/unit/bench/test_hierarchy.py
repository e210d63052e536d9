from __future__ import annotations

from kvcairn.bench.hierarchy import run_hierarchy


def test_a_figure_for_each_policy() -> None:
    figures = list(run_hierarchy(stores=40, pairs=2))
    assert [figure.name for figure in figures] == ["store_tier_stopped_back", "store_tier_stopped_through"]
    assert all(figure.value > 0 and figure.ratio for figure in figures)
