"""What the connector refuses to start with, each with a sentence that says what to change."""

from __future__ import annotations

from typing import Any

from kvcairn.adapters.vllm.identity import one_spec
from kvcairn.adapters.vllm.settings import PATH, ConnectorOptions, Settings
from kvcairn.errors import ConfigError, UnsupportedError

_FAILURE_LINE = '"kv_load_failure_policy": "recompute"'


def check_engine(vllm_config: Any, kv_cache_config: Any, settings: Settings[ConnectorOptions]) -> None:
    """Refuse what would be wrong or would fail later.

    Raises:
        ConfigError: a setting does not fit, or is missing.
        UnsupportedError: the engine runs in a way that is not served.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        reason = "a block that cannot be loaded would end its request with an error"
        remedy = f"add {_FAILURE_LINE} to --kv-transfer-config"
        raise ConfigError("kv_load_failure_policy", reason, transfer.kv_load_failure_policy, remedy)
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching", "the connector builds on vLLM's own prefix cache", False, "turn it on"
        )
    _check_parallel(vllm_config.parallel_config, settings)
    _check_blocks(kv_cache_config, settings.options.block_tokens)
    if any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups):
        raise UnsupportedError(
            "the connector does not serve speculative decoding whose drafts have KV of their own yet"
        )


def _check_parallel(parallel: Any, settings: Settings[ConnectorOptions]) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"the connector does not serve {name} above 1 yet")
    if settings.connect is None and (parallel.world_size > 1 or parallel.distributed_executor_backend != "uni"):
        workers = f"{parallel.world_size} worker process" + ("es" if parallel.world_size > 1 else "")
        alone = " (without a GPU: start vLLM with VLLM_ENABLE_V1_MULTIPROCESSING=0)" if parallel.world_size == 1 else ""
        raise UnsupportedError(
            f"a cache that lives in the engine's process cannot be shared with {workers} of their own: run "
            f"'kvcairn serve', and set {PATH}.connect to its address{alone}"
        )


def _check_blocks(kv_cache_config: Any, block_tokens: int) -> None:
    for group in kv_cache_config.kv_cache_groups:
        page_tokens = one_spec(group.kv_cache_spec).block_size
        if block_tokens % page_tokens:
            reason = f"no multiple of the engine's block size of {page_tokens}"
            near = max(1, round(block_tokens / page_tokens)) * page_tokens
            raise ConfigError(f"{PATH}.block_tokens", reason, block_tokens, f"use {near}")
