"""Greedy tokens are the same with the cache off, cold, warm, from disk, after damage; and reuse is what it says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers

import kvcairn as kv
from kvcairn.adapters.transformers import CachedModel, Naming
from kvcairn.adapters.transformers.fingerprint import fingerprint
from kvcairn.demo.damage import flip_bit
from kvcairn.testing.faulty import Fault, FaultKind
from tests.engines.transformers_kit import (
    BLOCK_TOKENS,
    MODELS,
    build,
    gpt2,
    greedy,
    llama,
    open_cache,
    open_with_faults,
    padded,
    prompt,
)  # fmt: skip

pytestmark = pytest.mark.model

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture
def cache() -> Iterator[kv.Cache]:
    with open_cache() as opened:
        yield opened
        assert opened.stats().open_leases == 0
        assert opened.stats().open_reservations == 0


@pytest.fixture(scope="module")
def small() -> Any:
    return build(llama)


def wrap(model: Any, cache: kv.Cache, **settings: Any) -> CachedModel:
    return CachedModel(model, cache, block_tokens=BLOCK_TOKENS, **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_same_cold_warm_and_from_disk_after_restart(name: str, dtype: str, tmp_path: Path) -> None:
    model, ids = build(MODELS[name], getattr(torch, dtype)), prompt(200, seed=1)
    expected = greedy(model, ids)
    with open_cache(tmp_path / "disk") as cache:
        cached = wrap(model, cache)
        assert torch.equal(greedy(cached, ids), expected)
        assert cached.last_reuse.by_tier == {}
        assert cached.last_reuse.rows[0].reason == kv.MissReason.NEVER_STORED
        assert cached.last_reuse.rows[0].stored_blocks == (expected.shape[1] - 1) // BLOCK_TOKENS
        assert torch.equal(greedy(cached, ids), expected)
        assert cached.last_reuse.by_tier == {"memory": 192}
        assert cached.last_reuse.rows[0].reason is None
        assert cached.last_reuse.rows[0].stored_blocks == 0
        assert cache.drain(timeout_s=30)
    with open_cache(tmp_path / "disk") as cache:
        cached = wrap(model, cache)
        assert torch.equal(greedy(cached, ids), expected)
        assert cached.last_reuse.by_tier == {"disk": 192}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_loaded_is_bit_for_bit_what_was_computed(dtype: str, tmp_path: Path) -> None:
    model, ids = build(llama, getattr(torch, dtype)), prompt(200, seed=2)
    past = transformers.DynamicCache(config=model.config)
    model.generate(ids, max_new_tokens=1, do_sample=False, cache=past)
    with open_cache(tmp_path / "disk") as cache:
        assert wrap(model, cache).store(ids, past) == 12
        cache.drain()
    for tier in ("disk", "memory"):
        with open_cache(tmp_path / "disk") as cache:
            cached = wrap(model, cache)
            if tier == "memory":
                cached.load(ids)
            loaded, reuse = cached.load(ids)
            assert reuse.by_tier == {tier: 192}
            assert loaded.get_seq_length() == 192
            for got, computed in zip(loaded.layers, past.layers, strict=True):
                assert torch.equal(got.keys, computed.keys[:, :, :192])
                assert torch.equal(got.values, computed.values[:, :, :192])
                assert got.keys.is_contiguous()


@pytest.mark.parametrize("damaged", [0, 5, 11])
def test_a_damaged_block_and_what_follows_is_computed_again(small: Any, tmp_path: Path, damaged: int) -> None:
    ids = prompt(200, seed=3)
    with open_cache(tmp_path / "disk") as cache:
        cached = wrap(small, cache)
        expected = greedy(cached, ids)
        keys = cached.space.keys(ids[0].tolist())
        cache.drain()
    flip_bit(tmp_path / "disk", keys[damaged])
    with open_cache(tmp_path / "disk") as cache:
        cached = wrap(small, cache)
        assert torch.equal(greedy(cached, ids), expected)
        assert cached.last_reuse.tokens == damaged * BLOCK_TOKENS
        assert cached.last_reuse.rows[0].reason == kv.MissReason.CORRUPT
        assert cache.stats().misses_by_reason[kv.MissReason.CORRUPT] > 0
        assert torch.equal(greedy(cached, ids), expected)
        assert cached.last_reuse.tokens == 192


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("read", FaultKind.ERROR),
        ("read", FaultKind.HANG),
        ("read", FaultKind.VANISHED),
        ("read", FaultKind.BLOCK_ERROR),
        ("write", FaultKind.ERROR),
        ("write", FaultKind.ALTERED),
        ("write", FaultKind.SWAPPED),
        ("write", FaultKind.FALSE_ACK),
    ],
)
def test_a_failing_or_lying_disk_costs_its_blocks_and_nothing_else(
    small: Any, tmp_path: Path, op: str, kind: FaultKind
) -> None:
    ids = prompt(200, seed=8)
    expected = greedy(small, ids)
    fault = Fault(kind=kind, ops=frozenset((op,)), block_rate=0.5)
    injected = 0
    for turn in ("write", "read"):
        cache, tier = open_with_faults(tmp_path / "disk", *([fault] if turn == op else []))
        with cache:
            cached = wrap(small, cache, load_timeout_s=2.0)
            assert torch.equal(greedy(cached, ids), expected)
            lost = cached.last_reuse.rows[0]
            cache.drain(timeout_s=10)
            injected += tier.injected[kind]
            tier.heal()
            assert torch.equal(greedy(cached, ids), expected)
            assert cached.last_reuse.tokens == 192
    assert injected > 0
    assert lost.tokens < 192
    assert lost.reason is not None


def test_generated_tokens_are_reused_in_the_next_turn(small: Any, cache: kv.Cache) -> None:
    cached = wrap(small, cache)
    first = greedy(cached, prompt(50, seed=4), new=60)
    turn = torch.cat([first, prompt(7, seed=5)], dim=1)
    assert torch.equal(greedy(cached, turn), greedy(small, turn))
    # the last generated token had no KV yet: 109 of 110 tokens were there, in 6 full blocks
    assert cached.last_reuse.by_tier == {"memory": 96}


def test_generated_tokens_are_not_stored_when_not_wanted(small: Any, cache: kv.Cache) -> None:
    cached = wrap(small, cache, store_generated=False)
    first = greedy(cached, prompt(50, seed=4), new=60)
    assert cached.last_reuse.rows[0].stored_blocks == 3
    greedy(cached, first)
    assert cached.last_reuse.tokens == 48


def test_nothing_behind_an_end_token_is_stored(small: Any, cache: kv.Cache) -> None:
    ids, cached = prompt(40, seed=6), wrap(small, cache)
    end = int(greedy(small, ids)[0, 44])
    out = greedy(cached, ids, eos_token_id=[end, 299], new=200)
    length = out.shape[1]
    assert int(out[0, -1]) == end
    assert cached.last_reuse.rows[0].stored_blocks == (length - 1) // BLOCK_TOKENS


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_at_least_one_token_is_computed(small: Any, cache: kv.Cache, length: int) -> None:
    ids, cached = prompt(length, seed=7), wrap(small, cache)
    expected = greedy(small, ids)
    for reused in (0, (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS):
        assert torch.equal(greedy(cached, ids), expected)
        assert cached.last_reuse.tokens == reused


@pytest.mark.parametrize("name", MODELS)
def test_each_row_of_a_padded_batch_has_its_own_hit(name: str, cache: kv.Cache) -> None:
    model = build(MODELS[name])
    rows = [prompt(130, 10), prompt(200, 11), prompt(77, 12), prompt(9, 13), prompt(200, 14)]
    ids, mask = padded(rows)
    expected = greedy(model, ids, attention_mask=mask)
    cached = wrap(model, cache)
    for known in (1, 2):
        cached.generate(rows[known], max_new_tokens=1, do_sample=False)
    assert torch.equal(greedy(cached, ids, attention_mask=mask), expected)
    assert [row.tokens for row in cached.last_reuse.rows] == [0, 192, 64, 0, 0]
    assert [row.prompt_tokens for row in cached.last_reuse.rows] == [130, 200, 77, 9, 200]
    assert torch.equal(greedy(cached, ids, attention_mask=mask), expected)
    assert [row.tokens for row in cached.last_reuse.rows] == [128, 192, 64, 0, 192]
    # a row that was computed in a padded batch is found again by itself
    assert torch.equal(greedy(cached, rows[0]), greedy(model, rows[0]))
    assert cached.last_reuse.by_tier == {"memory": 128}


def test_the_mask_that_transformers_infers_is_used(small: Any, cache: kv.Cache) -> None:
    ids, mask = padded([prompt(90, 15), prompt(70, 16)])
    cached = wrap(small, cache)
    assert torch.equal(greedy(cached, ids), greedy(small, ids, attention_mask=mask))
    assert [row.prompt_tokens for row in cached.last_reuse.rows] == [90, 70]
    assert torch.equal(cached.generate(input_ids=ids, max_new_tokens=24, do_sample=False), greedy(small, ids))
    assert [row.tokens for row in cached.last_reuse.rows] == [80, 64]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_other_ways_to_generate(small: Any, cache: kv.Cache, settings: dict[str, Any]) -> None:
    ids, mask = padded([prompt(130, 20), prompt(75, 21)])
    cached = wrap(small, cache)
    arguments = {"attention_mask": mask, "max_new_tokens": 20, **settings}
    results = []
    for model in (small, cached, cached):
        torch.manual_seed(3)
        results.append(model.generate(ids, **arguments))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert [row.tokens for row in cached.last_reuse.rows] == [128, 64]


def test_the_result_and_the_stream_are_those_of_the_model(small: Any, cache: kv.Cache) -> None:
    class Collect:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    ids, cached = prompt(100, 22), wrap(small, cache)
    arguments = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = small.generate(ids, **arguments)
    for _ in range(2):
        stream = Collect()
        result = cached.generate(ids, streamer=stream, **arguments)
        assert stream.tokens == [*expected.sequences[0].tolist(), -1]
        assert torch.equal(result.sequences, expected.sequences)
        for got, wanted in zip(result.logits, expected.logits, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"use_cache": False}, "another KV cache"),
        ({"cache_implementation": "static"}, "another KV cache"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"position_ids": torch.arange(5, 45)[None]}, "position_ids"),
        ({"attention_mask": torch.tensor([[1] * 20 + [0] * 2 + [1] * 18])}, "gaps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_cache_cannot_serve_is_handed_through(
    small: Any, cache: kv.Cache, arguments: dict[str, Any], why: str
) -> None:
    ids, cached = prompt(40, 23), wrap(small, cache)
    cached.generate(ids, max_new_tokens=1, do_sample=False)
    result, expected = (m.generate(ids, max_new_tokens=5, do_sample=False, **arguments) for m in (cached, small))
    if not isinstance(result, torch.Tensor):
        result, expected = result.sequences, expected.sequences
    assert torch.equal(result, expected)
    assert cached.last_reuse.tokens == 0
    assert why in str(cached.last_reuse.rows[0].reason)


def test_embeddings_and_a_training_model_are_handed_through(cache: kv.Cache) -> None:
    model, ids = build(llama), prompt(40, 24)
    cached = wrap(model, cache)
    embeddings = model.get_input_embeddings()(ids)
    arguments = {"inputs_embeds": embeddings, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(cached.generate(**arguments), model.generate(**arguments))
    model.train()
    greedy(cached, ids)
    assert cached.last_reuse.rows[0].reason == "the model is in training mode"
    assert cache.stats().tiers["memory"].blocks == 0


def test_many_sequences_in_flight(small: Any, tmp_path: Path) -> None:
    shared = prompt(96, 30)
    prompts = [torch.cat([shared, prompt(20 + 9 * i, 31 + i)], dim=1) for i in range(6)]
    expected = [greedy(small, p) for p in prompts]
    start = threading.Barrier(4)
    with open_cache(tmp_path / "disk") as cache:
        cached = wrap(small, cache)

        def work(number: int) -> list[int]:
            start.wait(timeout=60)
            tokens = []
            for i in range(12):
                which = (number * 5 + i) % len(prompts)
                assert torch.equal(greedy(cached, prompts[which]), expected[which])
                assert cached.last_reuse.prompt_tokens == prompts[which].shape[1]
                tokens.append(cached.last_reuse.tokens)
            return tokens

        with ThreadPoolExecutor(4) as pool:
            reused = list(pool.map(work, range(4)))
        # by the second time round each thread finds its prompts whole
        for number, tokens in enumerate(reused):
            lengths = [prompts[(number * 5 + i) % len(prompts)].shape[1] for i in range(6, 12)]
            assert tokens[6:] == [(n - 1) // BLOCK_TOKENS * BLOCK_TOKENS for n in lengths]
        stats = cache.stats()
        assert (stats.open_leases, stats.open_reservations) == (0, 0)


def test_a_chain_longer_than_the_memory_tier_comes_from_disk_in_windows(tmp_path: Path) -> None:
    model = build(lambda: llama(hidden_size=256, num_key_value_heads=4))
    ids = prompt(1800, 40)  # 6 KiB a token: 11 MiB of KV
    expected = greedy(model, ids)
    with open_cache(tmp_path / "disk") as cache:
        greedy(wrap(model, cache), ids)
        cache.drain()
    with open_cache(tmp_path / "disk", memory="8 MiB") as cache:
        cached = wrap(model, cache)
        assert torch.equal(greedy(cached, ids), expected)
        assert cached.last_reuse.by_tier == {"disk": 1792}


def test_a_loop_of_ones_own(small: Any, cache: kv.Cache) -> None:
    ids, cached = prompt(100, 50), wrap(small, cache)
    expected = greedy(small, ids, new=10)
    for reused in (0, 96):
        past, reuse = cached.load(ids)
        assert reuse.tokens == past.get_seq_length() == reused
        tokens, step = ids, ids[:, reused:]
        with torch.no_grad():
            for _ in range(10):
                logits = small(input_ids=step, cache=past, use_cache=True).logits
                step = logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, step], dim=1)
        assert torch.equal(tokens, expected)
        assert cached.store(tokens[0, :-1], past) == (6 if not reused else 0)


def test_a_cache_of_another_shape_is_not_stored(small: Any, cache: kv.Cache) -> None:
    cached, ids = wrap(small, cache), prompt(40, 51)
    past, _ = cached.load(ids)
    with pytest.raises(kv.LayoutError, match="layer 0 is empty"):
        cached.store(ids, past)
    other = build(gpt2)
    foreign = transformers.DynamicCache(config=other.config)
    other.generate(ids, max_new_tokens=1, do_sample=False, cache=foreign)
    with pytest.raises(kv.LayoutError, match="not a DynamicCache with full attention in 3 layers"):
        cached.store(ids, foreign)
    own = transformers.DynamicCache(config=small.config)
    small.generate(ids, max_new_tokens=1, do_sample=False, cache=own)
    with pytest.raises(kv.LayoutError, match="41 tokens given, but the cache holds 40"):
        cached.store(torch.cat([ids, ids[:, :1]], dim=1), own)
    with pytest.raises(ValueError, match="one sequence"):
        cached.store(torch.cat([ids, ids]), own)
    assert cache.stats().tiers["memory"].blocks == 0


def test_a_closed_cache_costs_its_blocks_and_nothing_else(small: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids = prompt(100, 52)
    with open_cache() as cache:
        cached = wrap(small, cache)
        expected = greedy(cached, ids)
    assert torch.equal(greedy(cached, ids), expected)
    assert cached.last_reuse.tokens == 0
    assert "closed" in caplog.text


def test_other_weights_and_other_settings_find_nothing(small: Any, cache: kv.Cache) -> None:
    ids = prompt(100, 53)
    greedy(wrap(small, cache), ids)
    changed = build(llama)
    with torch.no_grad():
        changed.model.layers[2].mlp.down_proj.weight *= 1.01
    others = {
        "weights": wrap(changed, cache),
        "rope": wrap(build(lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})), cache),
        "dtype": wrap(build(llama, torch.bfloat16), cache),
        "tenant": wrap(small, cache, naming=Naming(tenant="another")),
    }
    for name, cached in others.items():
        assert cached.load(ids)[1].tokens == 0, name
    assert wrap(build(llama), cache).load(ids)[1].tokens == 96


def test_fingerprint_depends_on_files_and_memory(tmp_path: Path) -> None:
    build(llama).save_pretrained(tmp_path / "one")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "one")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "one")
    assert fingerprint(loaded) == fingerprint(again)
    with torch.no_grad():  # a merged adapter changes whole matrices
        again.model.layers[0].self_attn.q_proj.weight += 0.001
    assert fingerprint(loaded) != fingerprint(again)
    files = fingerprint(loaded)
    with next((tmp_path / "one").glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert fingerprint(loaded) != files


def refused() -> dict[str, tuple[Any, str]]:
    t, small = transformers, {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    long_rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return {
        "sliding": (
            lambda: t.MistralForCausalLM(
                t.MistralConfig(**small, intermediate_size=64, num_key_value_heads=2, sliding_window=64)
            ),
            "DynamicSlidingWindowLayer",
        ),
        "state": (
            lambda: t.MambaForCausalLM(t.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2)),
            "not full attention",
        ),
        "encoder-decoder": (
            lambda: t.T5ForConditionalGeneration(
                t.T5Config(vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
            ),
            "encoder-decoder",
        ),
        "rope by length": (lambda: llama(rope_parameters=long_rope), "rope_type='dynamic'"),
        "looks ahead": (
            lambda: t.BertLMHeadModel(t.BertConfig(**small, intermediate_size=64, is_decoder=False)),
            "changes with the tokens behind it",
        ),
    }


@pytest.mark.parametrize("name", ["sliding", "state", "encoder-decoder", "rope by length", "looks ahead"])
def test_models_whose_prefixes_cannot_be_reused_are_refused(name: str, cache: kv.Cache) -> None:
    make, why = refused()[name]
    with pytest.raises(kv.UnsupportedError, match=why):
        wrap(build(make), cache)


def test_a_model_that_looks_ahead_is_refused_by_what_it_computes(cache: kv.Cache) -> None:
    model = build(llama)
    forward = model.model.layers[0].forward
    model.model.layers[0].forward = lambda hidden, **k: forward(hidden + hidden.mean(1, keepdim=True), **k)
    with pytest.raises(kv.UnsupportedError, match="changes with the tokens behind it"):
        wrap(model, cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cuda_device(dtype: str, tmp_path: Path) -> None:
    model = build(llama, getattr(torch, dtype)).to("cuda")
    ids, mask = (t.to("cuda") for t in padded([prompt(200, 60), prompt(150, 61)]))
    expected = greedy(model, ids, attention_mask=mask)
    with open_cache(tmp_path / "disk") as cache:
        cached = wrap(model, cache)
        assert torch.equal(greedy(cached, ids, attention_mask=mask), expected)
        assert torch.equal(greedy(cached, ids, attention_mask=mask), expected)
        assert [row.by_tier for row in cached.last_reuse.rows] == [{"memory": 192}, {"memory": 144}]
        cache.drain()
    with open_cache(tmp_path / "disk") as cache:
        cached = wrap(model, cache)
        assert torch.equal(greedy(cached, ids, attention_mask=mask), expected)
        assert [row.by_tier for row in cached.last_reuse.rows] == [{"disk": 192}, {"disk": 144}]


def test_the_cache_learns_how_fast_the_model_computes(cache: kv.Cache, small: Any) -> None:
    cached = wrap(small, cache)
    cached.generate(prompt(BLOCK_TOKENS // 2, seed=71), max_new_tokens=4)
    assert cache.stats().prefill_tokens_per_s == {}, "few tokens are no measurement"
    cached.generate(prompt(200, seed=72), max_new_tokens=4)
    (rate,) = cache.stats().prefill_tokens_per_s.values()
    assert rate > 0
    assert not small._forward_hooks and not small._forward_pre_hooks


def test_what_a_slow_tier_has_is_computed(small: Any, tmp_path: Path) -> None:
    """The model computes in milliseconds what the disk needs seconds for: from then on it is left where it is."""
    opened, _ = open_with_faults(tmp_path, Fault(kind=FaultKind.DELAY, ops=frozenset(["read"]), delay_s=1.0))
    with opened:
        cached, ids = wrap(small, opened), prompt(200, seed=73)
        wanted = cached.generate(ids, max_new_tokens=4)
        opened.drain()
        for turn in range(3):
            opened.clear(tier="memory")
            assert torch.equal(cached.generate(ids, max_new_tokens=4), wanted)
            if turn:
                assert cached.last_reuse.tokens == 0
        assert opened.stats().misses_by_reason["too_slow"] > 0
