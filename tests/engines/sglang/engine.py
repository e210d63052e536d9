"""A whole SGLang engine on the CPU, in a process of its own: what it generates, and what it took from where."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PAGE_SIZE = 16
NEW_TOKENS = 24


def arguments(model: str, extra: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Return the engine's arguments; with `extra` HiCache is on, with a storage that it configures."""
    hicache = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
    return {
        "model_path": model,
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "page_size": PAGE_SIZE,
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "context_length": 2048,
        "mem_fraction_static": 0.2,
        "log_level": "warning",
        "disable_overlap_schedule": True,
        "random_seed": 1,
        "enable_cache_report": True,
        "disable_cuda_graph": True,
        **(hicache if extra is not None else {}),
        **more,
    }


def generate(engine: Any, prompt: list[int]) -> dict[str, Any]:
    """Generate greedily; return tokens, their log probabilities, and how many prompt tokens came from where."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    out = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)
    meta = out["meta_info"]
    return {
        "tokens": out["output_ids"],
        "logprobs": [each[0] for each in meta["output_token_logprobs"]],
        "cached": meta["cached_tokens"],
        "details": meta.get("cached_tokens_details"),
    }


def main() -> None:
    """Read a job from the first argument, write what happened to the second.

    The job has the engine's arguments and steps: a prompt to generate from, "flush", or "settle".
    """
    import sglang

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(**job["arguments"])
    results: list[Any] = []
    for step in job["steps"]:
        if step == "flush":
            results.append(_flush(engine))
        elif step == "settle":
            time.sleep(job["settle_s"])
        else:
            results.append(generate(engine, step))
    engine.shutdown()
    Path(sys.argv[2]).write_text(json.dumps(results))


def _flush(engine: Any) -> bool:
    """Empty the engine's own caches, as soon as nothing runs."""
    for _ in range(100):
        answer = engine.flush_cache()
        if getattr(answer, "success", answer):
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
