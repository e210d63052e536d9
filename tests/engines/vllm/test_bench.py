"""`kvcairn bench engine` with a small model: that it measures all it says, not how fast that is."""

from __future__ import annotations

import pytest

from kvcairn.bench import run_engine
from tests.engines.vllm.kit import MODELS


@pytest.mark.slow
def test_every_figure_is_measured() -> None:
    figures = {figure.name: figure for figure in run_engine("vllm", str(MODELS / "tiny"), pairs=2)}
    assert list(figures) == [
        "ttft_recompute", "ttft_memory", "ttft_disk", "ttft_disk_new_process", "copy", "copy_back",
        "cpu_no_hit", "hooks", "copied_through", "copied_selective", "copied_back",
    ]  # fmt: skip
    # Eight prompts of four blocks. Three of them come twice; two are still the engine's alone at the end.
    blocks = {
        name: round(f.value / figures["copied_through"].value * 32) for name, f in figures.items() if "ied_" in name
    }
    assert blocks == {"copied_through": 32, "copied_selective": 12, "copied_back": 24}
    assert all(figure.bench == "engine" and figure.value > 0 for figure in figures.values())
    assert figures["ttft_recompute"].ratio == 1
    assert {name: f.limit for name, f in figures.items() if f.limit} == {
        "ttft_memory": 0.1, "ttft_disk": 0.15, "copy": 0.9, "copy_back": 0.9, "cpu_no_hit": 1.05, "hooks": 2.0,
    }  # fmt: skip
