"""What is passed to the adapter by mistake is named in one sentence, and leaves no report of an earlier call behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch

import kvcairn as kv
from kvcairn.adapters.transformers import CachedModel, Reuse
from tests.engines.transformers_kit import BLOCK_TOKENS, build, llama, open_cache, prompt

pytestmark = pytest.mark.model

EMPTY = torch.zeros((1, 0), dtype=torch.long)


@pytest.fixture
def cache() -> Iterator[kv.Cache]:
    with open_cache() as opened:
        yield opened


@pytest.fixture(scope="module")
def small() -> Any:
    return build(llama)


def test_what_a_model_is_wrapped_with_is_checked(small: Any, cache: kv.Cache) -> None:
    wrap: Any = CachedModel
    with pytest.raises(TypeError, match=r"the model comes first: CachedModel\(model, cache\)"):
        wrap(cache, small)
    with pytest.raises(TypeError, match=r"needs an open kvcairn\.Cache, got str"):
        wrap(small, "kvcairn.toml")
    with pytest.raises(TypeError, match="needs a transformers model, got Linear"):
        wrap(torch.nn.Linear(2, 2), cache)
    with pytest.raises(TypeError, match=r"naming is a Naming\(model="):
        wrap(small, cache, naming="my-model")
    with pytest.raises(ValueError, match="load_timeout_s must be a number of seconds, got '10'"):
        wrap(small, cache, load_timeout_s="10")
    with pytest.raises(kv.LayoutError, match="block_tokens must be a positive whole number"):
        wrap(small, cache, block_tokens=0)


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        (EMPTY, ValueError, "the prompt is empty"),
        ([[1, 2]], TypeError, r"a tensor of shape \(batch, length\), got list"),
        (torch.tensor([1, 2]), ValueError, r"give ids\[None\]"),
    ],
    ids=["empty", "list", "flat"],
)
def test_a_prompt_that_is_none_is_named(
    small: Any, cache: kv.Cache, ids: Any, error: type[Exception], said: str
) -> None:
    model = CachedModel(small, cache, block_tokens=BLOCK_TOKENS)
    model.generate(prompt(4 * BLOCK_TOKENS, seed=3), max_new_tokens=2)
    assert model.last_reuse.prompt_tokens == 4 * BLOCK_TOKENS
    for given in ({"inputs": ids}, {"input_ids": ids}):
        with pytest.raises(error, match=said):
            model.generate(**given, max_new_tokens=2)
        assert model.last_reuse == Reuse(), "that of the call before is nobody's now"


@pytest.mark.parametrize("ids", ["text", [1.5, 2.0], torch.ones(3)], ids=["text", "floats", "float tensor"])
def test_tokens_of_a_loop_are_whole_numbers(small: Any, cache: kv.Cache, ids: Any) -> None:
    model = CachedModel(small, cache, block_tokens=BLOCK_TOKENS)
    with pytest.raises(ValueError, match="token ids"):
        model.load(ids)


def test_an_empty_sequence_is_a_hit_of_nothing(small: Any, cache: kv.Cache) -> None:
    past, reuse = CachedModel(small, cache, block_tokens=BLOCK_TOKENS).load([])
    assert (past.get_seq_length(), reuse.tokens) == (0, 0)


def test_a_tensor_is_no_block_and_no_buffer(cache: kv.Cache) -> None:
    layout = kv.KVLayout.full(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
    space = cache.space(kv.SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=4))
    block: Any = torch.ones(space.block_bytes // 2, dtype=torch.bfloat16)
    keys = space.keys(range(4))
    with pytest.raises(kv.LayoutError, match=r"block 0 is a torch.Tensor, .*\.view\(torch.uint8\)\.cpu\(\)\.numpy\(\)"):
        space.put(keys, [block])
    assert space.put(keys, [block.contiguous().view(torch.uint8).cpu().numpy()]) == [True]  # as the error advises
    mistakes: list[Any] = [block, [block], ([block], [space.block_bytes]), (block, block)]
    for buffers in mistakes:
        for move in (space.store_from, space.load_into):
            with pytest.raises(kv.LayoutError, match=r"buffers are .*addresses and sizes"):
                move(keys, buffers)
