"""`kvcairn bench engine --engine sglang`, in small."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvcairn.bench import run_sglang


def test_the_bench_yields_its_figures(tmp_path: Path) -> None:
    figures = list(run_sglang(tmp_path, layers=2, tokens=256, pairs=2, known=8192))
    assert [figure.name for figure in figures] == [
        "l3_write", "l3_read", "l3_write_device", "l3_read_device", "l2_store", "l2_load", "batch_exists_4096",
    ]  # fmt: skip
    assert {figure.bench for figure in figures} == {"engine"}
    assert all(figure.value > 0 and figure.ratio for figure in figures)
    assert not list(tmp_path.iterdir())
    assert {"bench", "name", "value", "unit", "reference", "ratio", "runs"} <= set(
        msgspec.json.decode(msgspec.json.encode(figures[0]))
    )
