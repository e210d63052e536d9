"""The whole engine: prompts come from us after its own caches are emptied and in a new process, and nothing differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.sglang.engine import PAGE_SIZE, arguments
from tests.engines.sglang.kit import settings

ROOT = Path(__file__).parents[3]
PROMPT = np.random.default_rng(3).integers(3, 1000, 1024).tolist()
OTHER = np.random.default_rng(4).integers(3, 1000, 512).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Llama whose output varies: weights far from zero."""
    import transformers

    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=1024, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def run(folder: Path, engine: dict[str, Any], *steps: Any) -> list[Any]:
    """Run an engine in a process of its own; return what its steps gave."""
    job, results = folder / "job.json", folder / "results.json"
    results.unlink(missing_ok=True)
    job.write_text(json.dumps({"arguments": engine, "steps": steps, "settle_s": 3}))
    command = [sys.executable, "-m", "tests.engines.sglang.engine", str(job), str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    found: list[Any] = json.loads(results.read_text())
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["tokens"] == other["tokens"] and np.allclose(one["logprobs"], other["logprobs"], atol=1e-4)


def test_prompts_come_from_the_storage_and_the_output_is_that_of_an_engine_without(tmp_path: Path, model: str) -> None:
    plain = run(tmp_path, arguments(model, None), PROMPT, OTHER)
    assert len(set(plain[0]["tokens"])) > 5, "else equal output would prove nothing"
    extra = settings(tmp_path / "disk", model=None, weights=None)
    kept = (len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE
    first = run(tmp_path, arguments(model, extra), PROMPT, "settle", "flush", PROMPT, OTHER, "settle")
    cold, flushed, warm, other = first
    assert flushed
    assert (cold["cached"], warm["cached"], other["cached"]) == (0, kept, 0)
    assert warm["details"]["storage"] == kept
    assert warm["details"]["storage_backend"] == "KVCairnStorage"
    again = run(tmp_path, arguments(model, extra), PROMPT, OTHER)
    assert [each["details"]["storage"] for each in again] == [kept, (len(OTHER) - 1) // PAGE_SIZE * PAGE_SIZE]
    for each, expected in zip((cold, warm, other, *again), (plain[0], plain[0], plain[1], *plain), strict=True):
        assert same(each, expected)


@pytest.mark.long
def test_other_weights_find_nothing(tmp_path: Path, model: str) -> None:
    for weights, cached in (("one", 0), ("one", (len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE), ("two", 0)):
        extra = settings(tmp_path / "disk", weights=weights)
        assert run(tmp_path, arguments(model, extra), PROMPT, "settle")[0]["cached"] == cached
