"""A vLLM engine in a process of its own, driven by JSON lines: python -m tests.engines.vllm.engine SETTINGS

SETTINGS is a JSON object: `model` (a folder), `block_size`, `cache` (kv_connector_extra_config; null: vLLM alone),
`faults` (what the disk tier meets) and `engine` (more arguments of `vllm.LLM`). Each line on standard input is
`{"do": NAME, ...}`; the answer is one line on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvcairn.testing.faulty import Fault, FaultKind, FaultyTier
from tests.engines.vllm.kit import ENVIRONMENT, faulty_disk


class Engine:
    """The engine and what the tests ask of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.faulty: FaultyTier | None = None
        self._open = ExitStack()
        transfer = None
        if settings.get("cache"):
            if settings.get("faults"):
                faults = [_fault(each) for each in settings["faults"]]
                self.faulty = self._open.enter_context(faulty_disk(settings["cache"], *faults))
            door = _tier if settings.get("door") == "tier" else _connector
            transfer = KVTransferConfig(
                kv_role="kv_both", kv_load_failure_policy="recompute", **door(settings["cache"])
            )
        arguments = {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 28,
            "max_model_len": 4096,
            "disable_log_stats": False,
            "skip_tokenizer_init": True,
        }
        self.llm = LLM(
            model=settings["model"],
            block_size=settings["block_size"],
            kv_transfer_config=transfer,
            **arguments | settings.get("engine", {}),
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.connector = self.core.scheduler.connector

    def generate(
        self, prompts: list[list[int]], new: int = 8, params: dict[str, Any] | None = None, salt: str | None = None
    ) -> dict[str, Any]:
        """Greedy tokens of prompts that come at once, and how many tokens of each were not computed."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"kvcairn": params}} if params else None
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        inputs: list[Any] = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
        begin_s = time.perf_counter()
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        metrics = [output.metrics for output in outputs]
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "reasons": [output.outputs[0].finish_reason for output in outputs],
            "first_s": [each.first_token_latency for each in metrics if each is not None],
            "all_s": time.perf_counter() - begin_s,
        }

    def reset(self, connector: bool = False) -> bool:
        """Forget the engine's own prefix cache, with `connector` the stored blocks too."""
        self.settle()
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def idle(self) -> Any:
        """Wait for the jobs and writes of the second door; return the cache's numbers."""
        import msgspec

        while self.tier.has_pending_work():
            self.core.step_fn()
        self.tier._cache.drain(timeout_s=60)
        return msgspec.to_builtins(self.tier._cache.stats())

    @property
    def tier(self) -> Any:
        """The second door."""
        (tier,) = self.connector.connector_scheduler.manager.secondary_tiers
        return tier

    def settle(self) -> bool:
        """Wait until the copies that run have ended and are told; False after a minute."""
        from vllm.distributed.kv_transfer import has_kv_transfer_group

        while self.core.scheduler.has_requests():  # the step behind the last one; in a server it comes by itself
            self.core.step_fn()
        if not has_kv_transfer_group():  # the workers are processes of their own, and copy for a moment yet
            time.sleep(1.0)
            return bool(self.connector.cache.drain(timeout_s=60))
        worker, until_s = self.worker, time.monotonic() + 60
        while worker.open_count and time.monotonic() < until_s:
            worker.stored()
            time.sleep(0.01)
        return bool(self.connector.cache.drain(timeout_s=60))

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    def clear(self, tier: str | None = None) -> None:
        """Drop what is stored, on all tiers or one."""
        self.connector.cache.clear(tier=tier)

    def stats(self) -> Any:
        """Return the cache's numbers."""
        import msgspec

        return msgspec.to_builtins(self.connector.cache.stats())

    def open_counts(self) -> dict[str, int]:
        """Return what is still open, on either side, and in the engine."""
        stats = self.connector.cache.stats()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return {
            "lookups": self.connector.scheduler.lookups.open_count,
            "worker": self.worker.open_count,
            "leases": stats.open_leases,
            "reservations": stats.open_reservations,
            "jobs": stats.open_jobs,
            "used_pages": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(self.core.scheduler.requests),
        }

    def space(self) -> Any:
        """Return the name of the layout and the weights of the space."""
        descriptor = self.connector.scheduler._spaces[0].descriptor
        return {"layout": descriptor.layout.name, "weights": descriptor.weights, "model": descriptor.model}

    def keys(self, ids: list[int]) -> list[str]:
        """Return the keys of the full blocks of a prompt."""
        return [key.hex() for key in self.connector.scheduler._spaces[0].keys(ids)]

    def faults(self) -> dict[str, int]:
        """Return how often each fault has befallen the disk tier."""
        return {kind.value: count for kind, count in self.faulty.injected.items()} if self.faulty else {}

    def close(self) -> None:
        """End the engine as it ends by itself."""
        self.llm.llm_engine.engine_core.shutdown()
        self._open.close()


def _connector(cache: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's transfer settings for the first door."""
    return {
        "kv_connector": "KVCairnConnector",
        "kv_connector_module_path": "kvcairn.adapters.vllm",
        "kv_connector_extra_config": cache,
    }


def _tier(cache: dict[str, Any]) -> dict[str, Any]:
    """The same for the second: vLLM's own offloading, with ours behind it."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.engines.vllm.host_spec",
            "cpu_bytes_to_use": 1 << 26,
            "secondary_tiers": [{"type": "KVCairnTier", "module_path": "kvcairn.adapters.vllm"} | cache],
        },
    }


def _fault(given: dict[str, Any]) -> Fault:
    calls = given.get("calls")
    return Fault(
        kind=FaultKind(given["kind"]),
        ops=frozenset(given["ops"]),
        calls=None if calls is None else frozenset(range(calls[0], calls[1])),
        delay_s=given.get("delay_s", 0.0),
    )


def main() -> None:
    # What the engine prints goes to standard error: standard output carries answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(ENVIRONMENT)
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        act: Callable[..., Any] = getattr(engine, command.pop("do"))
        print(json.dumps(act(**command)), file=answers, flush=True)
    answers.close()


if __name__ == "__main__":
    main()
