"""Small decoder-only models with random weights, and caches to put before them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import kvcairn as kv
from kvcairn.core.link import Loopback
from kvcairn.core.open import open_core
from kvcairn.testing.faulty import Fault, FaultyTier
from kvcairn.tiers.base import Tier

BLOCK_TOKENS = 16
VOCABULARY = 300
PAD = 0
# Logits far apart: a wrong byte in the KV shows in the tokens, and rounding does not.
_COMMON = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD,
}


def llama(**settings: Any) -> Any:
    shape = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(_COMMON | shape | settings)))


def gpt2() -> Any:
    config = transformers.GPT2Config(**_COMMON, n_embd=64, n_layer=2, n_head=4, n_positions=2048)
    return transformers.GPT2LMHeadModel(config)


def qwen2() -> Any:
    config = transformers.Qwen2Config(
        **_COMMON, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=1,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


def deepseek_v3() -> Any:
    """Multi-head latent attention, a mixture of experts, and values narrower than keys."""
    config = transformers.DeepseekV3Config(
        **_COMMON, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=24,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2, "deepseek_v3": deepseek_v3}


def build(make: Callable[[], Any], dtype: torch.dtype = torch.float32, seed: int = 7) -> Any:
    """Make a model whose weights follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype).eval()


def prompt(length: int, seed: int) -> torch.Tensor:
    """Token ids of shape (1, length), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, length), generator=generator)


def padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put prompts into one batch, padded on the left; return ids and attention mask."""
    width = max(p.shape[1] for p in prompts)
    ids = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, p in enumerate(prompts):
        ids[row, width - p.shape[1] :] = p[0]
        mask[row, width - p.shape[1] :] = 1
    return ids, mask


def open_cache(disk: Path | None = None, memory: str = "64 MiB") -> kv.Cache:
    return kv.Cache.open(_config(disk, memory))


def open_with_faults(disk: Path, *faults: Fault) -> tuple[kv.Cache, FaultyTier]:
    """Open a cache whose disk tier meets `faults`, and whose every call is serialised on its way to the core."""
    config = _config(disk, "64 MiB")
    wrapped: list[FaultyTier] = []

    def wrap(tier: Tier) -> Tier:
        wrapped.append(FaultyTier(tier, faults))
        return wrapped[0]

    return kv.Cache(Loopback(open_core(config, wrap=wrap)), config), wrapped[0]


def _config(disk: Path | None, memory: str) -> kv.Config:
    tiers: list[dict[str, object]] = [{"name": "memory", "type": "memory", "capacity": memory}]
    if disk:
        disk.mkdir(exist_ok=True)
        tiers.append({"name": "disk", "type": "disk", "path": str(disk), "capacity": "256 MiB"})
    return kv.Config.from_dict({"tiers": tiers})


def greedy(model: Any, ids: torch.Tensor, new: int = 24, **settings: Any) -> torch.Tensor:
    """Generate without sampling, by a model or a `CachedModel`."""
    result: torch.Tensor = model.generate(ids, max_new_tokens=new, do_sample=False, **settings)
    return result
