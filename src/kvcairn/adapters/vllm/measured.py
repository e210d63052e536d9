"""A vLLM engine that is measured: a program that `kvcairn bench engine` runs, one line of JSON a command and an answer.

python -m kvcairn.adapters.vllm.measured SETTINGS

SETTINGS is a JSON object: `model` (a folder, or null for random weights in `folder`), `cache`
(kv_connector_extra_config, or null for vLLM alone), `pages` of the engine's memory (or as many as `kv_bytes` hold).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvcairn.adapters.vllm.transfers import Transfers

# SmolLM2-135M: what is timed does not depend on the values of weights.
_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "hidden_act": "silu",
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip
_SCHEDULER_HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "get_external_cache_hit_sources",
    "build_connector_meta", "update_connector_output", "request_finished_all_groups", "take_events",
    "get_kv_connector_stats", "has_pending_push_work",
)  # fmt: skip
_WORKER_HOOKS = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats",
    "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip
COPY_BLOCKS = 8


class Stopwatch:
    """Time spent in calls that it was put around."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self.seconds = 0.0

    def around(self, owner: Any, name: str) -> None:
        """Time a method of one object from now on."""
        method = getattr(owner, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return method(*arguments, **more)
            finally:
                self.seconds += time.perf_counter() - begin_s

        setattr(owner, name, timed)


class MeasuredEngine:
    """What the benchmark asks of an engine in the scheduler's own process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Start vLLM, with the connector where a cache is given."""
        transfer = None
        if settings["cache"] is not None:
            transfer = KVTransferConfig(
                kv_connector="KVCairnConnector",
                kv_connector_module_path="kvcairn.adapters.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=settings["cache"],
            )
        model, more = settings["model"], {}
        if model is None:
            model, more = settings["folder"], {"load_format": "dummy"}
            (Path(model) / "config.json").write_text(json.dumps(_SHAPE))
        self._llm = LLM(
            model=model,
            dtype=settings["dtype"],
            block_size=settings["block_size"],
            kv_cache_memory_bytes=settings["kv_bytes"],
            num_gpu_blocks_override=settings.get("pages"),
            max_model_len=4096,
            disable_log_stats=False,
            enforce_eager=True,
            skip_tokenizer_init=True,
            kv_transfer_config=transfer,
            **more,
        )
        self._vocabulary = self._llm.llm_engine.model_config.get_vocab_size()
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._connector = self._core.scheduler.connector
        self._hooks, self._steps = Stopwatch(), Stopwatch()
        self._steps.around(self._core, "step_fn")
        if self._connector is not None:
            for name in _SCHEDULER_HOOKS:
                self._hooks.around(self._connector, name)
            for name in _WORKER_HOOKS:
                self._hooks.around(get_kv_transfer_group(), name)

    def run(self, tokens: int, seed: int, new: int) -> dict[str, Any]:
        """Run a prompt that follows from `seed`; return times, and what it cost until all of it was stored."""
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        ids = np.random.default_rng(seed).integers(3, self._vocabulary, tokens).tolist()
        cpu_s, hooks_s, steps_s = time.process_time(), self._hooks.seconds, self._steps.seconds
        (output,) = self._llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        self.settle()
        return {
            "first_s": output.metrics.first_token_latency,
            "cached": output.num_cached_tokens,
            "cpu_s": time.process_time() - cpu_s,
            "hooks_s": self._hooks.seconds - hooks_s,
            "steps_s": self._steps.seconds - steps_s,
        }

    def copied(self) -> int:
        """Return the bytes that were copied out of the engine's memory since the start."""
        transfers: Transfers = get_kv_transfer_group().worker.transfers
        return transfers.copied_bytes

    def settle(self) -> None:
        """Wait until all is stored and written."""
        while self._core.scheduler.has_requests():  # the step behind the last one; in a server it comes by itself
            self._core.step_fn()
        if self._connector is not None:
            while get_kv_transfer_group().worker.open_count:
                get_kv_transfer_group().worker.stored()
                time.sleep(0.001)
            self._connector.cache.drain()

    def forget(self, tier: str | None = None) -> None:
        """Forget the engine's own prefix cache, and what is on one tier."""
        self.settle()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM does not let go of its prefix cache")
        if tier is not None:
            self._connector.cache.clear(tier=tier)

    def copy(self, runs: int) -> dict[str, Any]:
        """Time copies of blocks between the engine's pages and the cache, and plain ones of as many bytes."""
        transfers: Transfers = get_kv_transfer_group().worker.transfers
        memory, space = transfers.memories[0], transfers.space
        source, target = (np.ones(COPY_BLOCKS * space.block_bytes, dtype=np.uint8) for _ in range(2))
        keys = space.keys(np.arange(COPY_BLOCKS * space.descriptor.block_tokens))
        pages = np.random.default_rng(0).permutation(memory.page_count - 1)[: COPY_BLOCKS * memory.pages_per_block] + 1
        table = pages.astype(np.int64).reshape(COPY_BLOCKS, -1)
        with space.reserve(keys) as slots:
            where = slots.arena, slots.offsets(), table
            ways: dict[str, Callable[[], None]] = {
                "store": lambda: memory.store(*where),
                "load": lambda: memory.load(*where),
                "plain": lambda: np.copyto(target, source),
            }
            times: dict[str, list[int]] = {name: [] for name in ways}
            for number in range(runs + 1):
                for name, way in ways.items():
                    begin_ns = time.perf_counter_ns()
                    way()
                    times[name] += [time.perf_counter_ns() - begin_ns] if number else []  # the first touches memory
        return {"bytes": COPY_BLOCKS * space.block_bytes, "ns": times}

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    """Answer commands until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to standard error
    engine = MeasuredEngine(json.loads(sys.argv[1]))
    print(json.dumps(None), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        act: Callable[..., Any] = getattr(engine, command.pop("do"))
        print(json.dumps(act(**command)), file=answers, flush=True)


if __name__ == "__main__":
    main()
