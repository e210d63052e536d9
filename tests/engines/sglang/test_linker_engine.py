"""The whole engine with the linker and no host pool: prompts come from us, and nothing differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.engines.sglang.engine import PAGE_SIZE, arguments
from tests.engines.sglang.linker_kit import linker_settings
from tests.engines.sglang.test_engine import OTHER, PROMPT, model, run, same

__all__ = ["model"]  # the fixture

LONGER = [*OTHER, *np.random.default_rng(5).integers(3, 1000, 300).tolist()]


def linked(model: str, folder: Path, **more: Any) -> dict[str, Any]:
    return arguments(
        model,
        None,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "KVCairnLinker",
            "linker_module_path": "kvcairn.adapters.sglang",
            "linker_extra_config": linker_settings(folder, model=None, weights=None, **more),
        },
    )


def full(tokens: list[int]) -> int:
    return (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE


def test_prompts_come_from_our_memory_and_in_a_new_process_from_disk(tmp_path: Path, model: str) -> None:
    plain = run(tmp_path, arguments(model, None), PROMPT, OTHER, LONGER)
    assert len(set(plain[0]["tokens"])) > 5, "else equal output would prove nothing"
    steps = (PROMPT, "settle", "flush", PROMPT, OTHER, "settle", "flush", LONGER, "settle")
    cold, flushed, warm, other, _, longer = run(tmp_path, linked(model, tmp_path / "disk"), *steps)
    assert flushed
    assert [each["cached"] for each in (cold, warm, other)] == [0, full(PROMPT), 0]
    assert longer["cached"] == len(OTHER), "the shared beginning, to the page"
    again = run(tmp_path, linked(model, tmp_path / "disk"), PROMPT, OTHER, LONGER)
    assert [again[0]["cached"], again[2]["cached"]] == [full(PROMPT), full(LONGER)]
    reference = (plain[0], plain[0], plain[1], plain[2], *plain)
    for each, expected in zip((cold, warm, other, longer, *again), reference, strict=True):
        assert same(each, expected)
    third = run(tmp_path, linked(model, tmp_path / "disk", tenant="another"), PROMPT)
    assert third[0]["cached"] == 0 and same(third[0], plain[0])
