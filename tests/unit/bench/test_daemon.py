from __future__ import annotations

from kvcairn.bench.daemon import LEAST_RATIO, LIMITS_US, run_daemon


def test_a_figure_for_each_promise() -> None:
    figures = {figure.name: figure for figure in run_daemon(block_tokens=4, pairs=3, calls=20)}
    assert list(figures) == ["acquire_1", "acquire_64", "store", "load", "store_two_clients", "load_two_clients"]
    for blocks, limit_us in LIMITS_US.items():
        figure = figures[f"acquire_{blocks}"]
        assert (figure.unit, figure.limit, figure.runs) == ("us", limit_us, 20)
        assert figure.p99 is not None
        assert 0 < figure.value <= figure.p99
    for name in list(figures)[2:]:
        assert (figures[name].unit, figures[name].limit) == ("GB/s", LEAST_RATIO)
        assert figures[name].ratio
