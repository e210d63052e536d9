"""The connector under vLLM's own Scheduler, with a model that needs no weights: every state a request can be in."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

import kvcairn as kv
from kvcairn.keys import block_keys
from kvcairn.testing.faulty import Fault, FaultKind
from tests.engines.vllm.kit import BLOCK, cache, faulty_disk, prompt
from tests.engines.vllm.scheduler_kit import Engine, engine, expected

OVERLAPPED = pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
HANG = Fault(kind=FaultKind.HANG, ops=frozenset(["read"]))


def until(engine: Engine, done: Callable[[], bool]) -> None:
    """Step until something is so."""
    for _ in range(2000):
        if done():
            return
        engine.step()
        time.sleep(0.001)
    raise AssertionError("it does not come")


# --- what is found


@OVERLAPPED
def test_a_hit_is_loaded_and_answers_the_same(overlapped: bool) -> None:
    ids = prompt(700, 1)
    wanted = expected(ids)
    with engine(cache(), overlapped=overlapped) as e:
        assert e.answer("cold", ids) == wanted
        e.reset()
        assert e.answer("warm", ids) == wanted
        assert e.cached == {"cold": 0, "warm": 2 * BLOCK}
        e.assert_nothing_is_open()


@OVERLAPPED
def test_a_partial_hit_is_computed_from_where_it_ends(overlapped: bool) -> None:
    ids, other = prompt(700, 2), prompt(700, 3)
    mixed = ids[:600] + other[:300]
    with engine(cache(), overlapped=overlapped) as e:
        e.answer("first", ids)
        e.reset()
        assert e.answer("second", mixed) == expected(mixed)
        assert e.cached["second"] == 2 * BLOCK
        e.reset()
        assert e.answer("third", mixed) == expected(mixed)
        assert e.cached["third"] == 3 * BLOCK
        e.assert_nothing_is_open()


def test_behind_what_the_engine_has_itself_only_the_rest_is_loaded() -> None:
    """The engine's pages are smaller than a block: a load begins in the middle of one, and leaves its pages alone."""
    ids = prompt(700, 4)
    with engine(cache(), pages=40) as e:
        e.answer("first", ids)
        e.reset()
        e.answer("beginning", ids[:100])  # 3 pages of its own
        e.add("whole", ids)
        e.step()
        (load,) = [load for load in [e.scheduler.requests["whole"]] if load.status.name == "WAITING_FOR_REMOTE_KVS"]
        assert load.num_computed_tokens == 2 * BLOCK
        e.run()
        assert e.answers["whole"] == expected(ids)
        stats = [s.connector_prefix_cache_stats for s in e.stats if s.connector_prefix_cache_stats]
        assert sum(each.hits for each in stats) == 2 * BLOCK - 96
        e.assert_nothing_is_open()


@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257, 287, 288, 289, 511, 512, 513, 768, 769])
def test_lengths_around_the_boundaries(length: int) -> None:
    ids = prompt(length, 5)
    with engine(cache()) as e:
        first = e.answer("first", ids)
        e.reset()
        assert e.answer("second", ids) == first == expected(ids)
        # Of a prompt that ends with a block vLLM computes the last token once more, to know what comes next.
        assert e.cached["second"] == length // BLOCK * BLOCK
        e.assert_nothing_is_open()


@OVERLAPPED
@pytest.mark.parametrize("full", [True, False], ids=["beside full attention", "alone"])
@pytest.mark.parametrize("window", [48, 300])
def test_sliding_windows(window: int, full: bool, overlapped: bool) -> None:
    """Pages leave the window while a block fills, in long steps and in short ones."""
    how: dict[str, Any] = {"window": window, "full": full, "overlapped": overlapped, "pages": 128}
    for budget in 128, 2048:
        prompts = [prompt(length, 500 + length) for length in (256, 500, 1000)]
        with engine(cache(), budget=budget, **how) as e:
            for round_ in "cold", "warm":
                for i, ids in enumerate(prompts):
                    e.add(f"{round_} {i}", ids, new=20)
                e.run()
                for i, ids in enumerate(prompts):
                    assert e.answers[f"{round_} {i}"] == expected(ids, new=20, budget=budget, **how)
                e.reset()
            if budget > 128 or window > 256:
                assert e.cached["warm 2"] == 3 * BLOCK
            e.assert_nothing_is_open()


def test_generated_blocks_are_stored_too() -> None:
    ids = prompt(200, 6)
    with engine(cache()) as e:
        said = e.answer("first", ids, new=120)
        e.reset()
        longer = ids + said
        assert e.answer("second", longer) == expected(longer)
        assert e.cached["second"] == BLOCK
        e.assert_nothing_is_open()


@OVERLAPPED
def test_the_last_generated_block_is_stored_when_a_request_ends(overlapped: bool) -> None:
    """Its last token is known only when the request is over, and its pages are free at once."""
    ids = prompt(250, 7)
    with engine(cache(), overlapped=overlapped) as e:
        said = e.answer("first", ids, new=7)  # the KV of 256 tokens is computed: the 257th has none
        e.reset()
        assert e.answer("second", ids + said) == expected(ids + said)
        assert e.cached["second"] == BLOCK
        e.assert_nothing_is_open()


def test_prompts_alone_are_stored_where_that_is_set() -> None:
    ids = prompt(300, 8)
    with engine(cache(store_generated=False)) as e:
        said = e.answer("first", ids, new=300)
        e.reset()
        e.answer("second", ids + said)
        assert e.cached["second"] == BLOCK
        e.assert_nothing_is_open()


@OVERLAPPED
def test_two_prompts_that_share_a_prefix_at_once(overlapped: bool) -> None:
    shared = prompt(600, 9)
    one, two = shared + prompt(100, 10), shared + prompt(150, 11)
    with engine(cache(), overlapped=overlapped) as e:
        for round_ in "cold", "warm":
            e.add(f"{round_} one", one)
            e.add(f"{round_} two", two)
            e.run()
            assert e.answers[f"{round_} one"] == expected(one)
            assert e.answers[f"{round_} two"] == expected(two)
            e.reset()
        assert e.cached["warm one"] >= 2 * BLOCK <= e.cached["warm two"]
        assert e.connector.cache.stats().tiers["memory"].blocks == 2
        e.assert_nothing_is_open()


def test_blocks_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def count(tokens: list[int], *arguments: Any, **more: Any) -> list[bytes]:
        hashed.append(len(tokens))
        return block_keys(tokens, *arguments, **more)

    monkeypatch.setattr("kvcairn.adapters.vllm.chain.block_keys", count)
    with engine(cache()) as e:
        e.answer("first", prompt(1100, 12), new=250)
        assert sum(hashed) == 5 * BLOCK  # of 1,350 tokens
        assert len(hashed) == 2  # the prompt at once, and the block that became full later


# --- tiers


def test_a_hit_on_a_slower_tier_is_asked_for_again_until_it_is_here(tmp_path: Path) -> None:
    ids, settings = prompt(700, 20), cache(tmp_path / "disk")
    with faulty_disk(settings) as disk, engine(settings) as e:
        e.answer("cold", ids)
        e.reset()
        e.connector.cache.clear(tier="memory")
        disk.faults = (HANG,)
        e.add("warm", ids)
        for _ in range(5):
            assert e.step().total_num_scheduled_tokens == 0
        assert e.status("warm") is RequestStatus.WAITING  # no pages are held meanwhile
        assert e.connector.cache.stats().open_jobs == 1
        e.add("other", prompt(100, 21))
        until(e, lambda: "other" in e.reasons)  # others go on
        disk.release()
        e.run()
        assert e.answers["warm"] == expected(ids)
        assert e.cached["warm"] == 2 * BLOCK
        e.assert_nothing_is_open()


def test_after_its_time_a_request_starts_with_what_has_come(tmp_path: Path) -> None:
    ids = prompt(700, 22)
    settings = cache(tmp_path / "disk", prefetch={"policy": "timeout", "base": "50 ms", "per_1024_tokens": "0 ms"})
    with faulty_disk(settings) as disk, engine(settings) as e:
        e.answer("cold", ids)
        e.reset()
        e.connector.cache.clear(tier="memory")
        disk.faults = (HANG,)
        assert e.answer("warm", ids) == expected(ids)
        assert e.cached["warm"] == 0
        disk.heal()
        e.assert_nothing_is_open()


def test_hits_are_reported_by_tier(tmp_path: Path) -> None:
    ids = prompt(700, 23)
    with engine(cache(tmp_path / "disk")) as e:
        e.answer("cold", ids)
        e.reset()
        e.answer("memory", ids)
        e.reset()
        e.connector.cache.clear(tier="memory")
        e.answer("disk", ids)
        sources: dict[CacheHitSource, int] = {}
        for stats in e.stats:
            if stats.connector_prefix_cache_stats:
                for source, tokens in (stats.connector_prefix_cache_stats.hits_by_source or {}).items():
                    sources[source] = sources.get(source, 0) + tokens
        assert sources == {CacheHitSource.HOST: 512, CacheHitSource.DISK: 512}
        counted: dict[str, int] = {}
        for stats in e.stats:
            for name, count in (stats.kv_connector_stats or {}).items():
                counted[name] = counted.get(name, 0) + count
        block_bytes = e.worker.worker.transfers.space.block_bytes
        assert counted == {
            "hit_tokens:memory": 512, "hit_tokens:disk": 512, "stored_blocks": 2, "stored_bytes": 2 * block_bytes,
            "loaded_blocks": 4, "loaded_bytes": 4 * block_bytes,
        }  # fmt: skip


def test_a_chain_longer_than_memory_is_loaded_in_windows(tmp_path: Path) -> None:
    ids = prompt(2700, 24)
    block_bytes = 2 * BLOCK * 32
    settings = cache(tmp_path / "disk", memory=f"{64 * block_bytes}")
    with engine(settings, pages=128) as e:
        e.answer("cold", ids)
    small = settings | {"tiers": [{"type": "memory", "capacity": 8 * block_bytes}, settings["tiers"][1]]}
    with engine(small, pages=128) as e:
        assert e.answer("warm", ids) == expected(ids, pages=128)
        assert e.cached["warm"] == 10 * BLOCK
        assert not any((s.kv_connector_stats or {}).get("failed_blocks") for s in e.stats)
        assert e.connector.cache.stats().hits_by_tier == {"disk": 10}
        e.assert_nothing_is_open()


def test_events_name_tier_parent_and_tokens(tmp_path: Path) -> None:
    ids, block_bytes = prompt(600, 25), 2 * BLOCK * 32
    with engine(cache(tmp_path / "disk", memory=str(4 * block_bytes)), events=True) as e:
        said = e.answer("first", ids, new=200)
        e.settle()
        e.answer("other", prompt(1000, 26))  # takes the room of the first
        e.settle()
        e.step()
        ours = [event for event in e.events if event.ownership is not None]
        keys = e.connector.scheduler._spaces[0].keys(ids + said)
        for tier, medium in ("memory", "CPU"), ("disk", "STORAGE"):
            stored = [x for x in ours if type(x).__name__ == "BlockStored" and x.ownership == tier]
            first = [x for x in stored if x.block_hashes[0] in keys]
            assert [x.block_hashes for x in first] == [[key] for key in keys[:3]]
            assert [x.parent_block_hash for x in first] == [None, *keys[:2]]
            assert [x.token_ids for x in first] == [(ids + said)[i * BLOCK : (i + 1) * BLOCK] for i in range(3)]
            assert {(x.medium, x.block_size) for x in first} == {(medium, BLOCK)}
        removed = [x for x in ours if type(x).__name__ == "BlockRemoved"]
        assert {x.ownership for x in removed} == {"memory"}
        assert {x.block_hashes[0] for x in removed} & set(keys)
        e.assert_nothing_is_open()


# --- what goes wrong


def evict_promised(e: Engine, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Blocks from number `at` on go between the promise and the lease."""
    lookups = e.connector.scheduler.lookups
    real = lookups.load

    def load(chain: Any, pages: Any) -> Any:
        lookups._spaces[0].forget(chain.keys[at:])
        return real(chain, pages)

    monkeypatch.setattr(lookups, "load", load)


@OVERLAPPED
@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_block_is_computed(at: int, overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(700, 30)
    with engine(cache(), overlapped=overlapped) as e:
        e.answer("cold", ids)
        e.reset()
        evict_promised(e, monkeypatch, at)
        assert e.answer("warm", ids) == expected(ids)
        assert e.reasons["warm"] == "length"
        assert sum(s.kv_connector_stats.get("failed_blocks", 0) for s in e.stats if s.kv_connector_stats) == 2 - at
        monkeypatch.undo()
        e.reset()
        assert e.answer("again", ids) == expected(ids)
        assert e.cached["again"] == 2 * BLOCK
        e.assert_nothing_is_open()


def test_a_failed_block_of_several_layer_groups_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(700, 31)
    with engine(cache(), window=48) as e:
        e.answer("cold", ids)
        e.reset()
        evict_promised(e, monkeypatch, 1)
        assert e.answer("warm", ids) == expected(ids, window=48)
        e.assert_nothing_is_open()


def test_a_damaged_block_on_disk_is_computed(tmp_path: Path) -> None:
    ids, settings = prompt(900, 32), cache(tmp_path / "disk")
    with faulty_disk(settings) as disk, engine(settings) as e:
        e.answer("cold", ids)
        e.reset()
        e.connector.cache.clear(tier="memory")
        key = e.connector.scheduler._spaces[0].keys(ids)[1]
        disk.faults = (Fault(kind=FaultKind.ALTERED, ops=frozenset(["read"]), keys=frozenset([key])),)
        assert e.answer("warm", ids) == expected(ids)
        assert e.cached["warm"] == BLOCK
        assert e.connector.cache.stats().misses_by_reason == {"never_stored": 3, "corrupt": 2}
        e.assert_nothing_is_open()


def test_a_closed_cache_costs_its_blocks_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    ids = prompt(700, 33)
    with engine(cache()) as e:
        e.answer("cold", ids)
        e.reset()
        e.connector.cache._link.close()
        with caplog.at_level(logging.WARNING, "kvcairn"):
            assert e.answer("warm", ids) == expected(ids)
        assert e.cached["warm"] == 0
        assert "closed" in caplog.text


def test_a_load_that_does_not_come_in_time_is_computed(tmp_path: Path) -> None:
    """More than memory holds is promised while it is on disk; the disk hangs in the middle."""
    ids = prompt(2700, 34)
    block_bytes = 2 * BLOCK * 32
    settings = cache(tmp_path / "disk", load_timeout="200 ms")
    with engine(settings, pages=128) as e:
        e.answer("cold", ids)
    settings["tiers"][0]["capacity"] = 8 * block_bytes
    with faulty_disk(settings) as disk, engine(settings, pages=128) as e:
        e.add("warm", ids)
        until(e, lambda: e.status("warm") is RequestStatus.WAITING_FOR_REMOTE_KVS)
        disk.faults = (HANG,)
        e.run()
        assert e.answers["warm"] == expected(ids, pages=128)
        disk.heal()
        e.assert_nothing_is_open()


# --- aborts, preemption, reset


STATES: dict[str, Callable[[Engine], Any]] = {
    "arrived": lambda e: True,
    "prefetching": lambda e: e.step() and e.status("doomed") is RequestStatus.WAITING,
    "loading": lambda e: e.step() and e.status("doomed") is RequestStatus.WAITING_FOR_REMOTE_KVS,
    "loaded": lambda e: e.step() and e.worker.worker.open_count == 0 and not e.connector.scheduler.lookups._prefetches,
    "computing": lambda e: e.step() and e.status("doomed") is RequestStatus.RUNNING,
    "generating": lambda e: e.step() and len(e.answers["doomed"]) >= 2,
}


@OVERLAPPED
@pytest.mark.parametrize("state", list(STATES))
def test_an_abort_in_each_state(state: str, overlapped: bool, tmp_path: Path) -> None:
    ids, settings = prompt(900, 40), cache(tmp_path / "disk")
    with faulty_disk(settings) as disk, engine(settings, overlapped=overlapped, budget=256) as e:
        e.answer("cold", ids)
        e.reset()
        e.connector.cache.clear(tier="memory")
        if state == "prefetching":
            disk.faults = (HANG,)
        e.add("doomed", ids, new=50)
        reached = STATES[state]
        for _ in range(1000):
            if reached(e):
                break
            time.sleep(0.001)
        else:
            raise AssertionError("the state is not reached")
        e.scheduler.finish_requests("doomed", RequestStatus.FINISHED_ABORTED)
        e.run()
        disk.heal()
        assert e.answer("next", ids) == expected(ids)
        e.assert_nothing_is_open()


def test_an_abort_while_a_load_runs_ends_when_the_load_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late completion: the pages stay the load's until its workers are done."""
    ids = prompt(700, 41)
    with engine(cache()) as e:
        e.answer("cold", ids)
        e.reset()
        gate = Gate(e, monkeypatch)
        e.add("doomed", ids)
        e.step()
        e.scheduler.finish_requests("doomed", RequestStatus.FINISHED_ABORTED)
        for _ in range(3):
            e.step()
        pool = e.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() < pool.num_gpu_blocks - 1
        assert e.connector.cache.stats().open_leases == 1
        gate.open()
        e.run()
        e.assert_nothing_is_open()


class Gate:
    """Holds every copy into pages until it is opened."""

    def __init__(self, e: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._event = threading.Event()
        real = e.worker.worker.transfers._copy_out

        def copy_out(*arguments: Any) -> None:
            assert self._event.wait(60)
            real(*arguments)

        monkeypatch.setattr(e.worker.worker.transfers, "_copy_out", copy_out)

    def open(self) -> None:
        self._event.set()


@OVERLAPPED
def test_preempted_requests_come_back_through_the_cache(overlapped: bool) -> None:
    """Three long answers do not fit into the engine's memory: it throws out, and loads again."""
    prompts = {name: prompt(300, 50 + i) for i, name in enumerate("abc")}
    with engine(cache(), pages=34, overlapped=overlapped) as e:
        for name, ids in prompts.items():
            e.add(name, ids, new=250)
        e.run()
        assert sum(len(s.kv_connector_stats or {}) for s in e.stats)
        for name, ids in prompts.items():
            assert e.answers[name] == expected(ids, new=250), name
        assert e.connector.cache.stats().hits_by_tier.get("memory", 0) > 0
        e.assert_nothing_is_open()


@OVERLAPPED
def test_a_page_that_is_being_copied_is_not_overwritten(overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow stores, few pages: the engine takes pages again before their copy has ended, and waits."""
    with engine(cache(), pages=26, overlapped=overlapped) as e:
        real = e.worker.worker.transfers.memories[0].store
        fenced: list[set[int]] = []

        def slow(*arguments: Any) -> None:
            time.sleep(0.05)
            real(*arguments)

        monkeypatch.setattr(e.worker.worker.transfers.memories[0], "store", slow)
        begin = e.worker.worker.begin

        def note(plan: Any) -> None:
            fenced.append(plan.fence)
            begin(plan)

        monkeypatch.setattr(e.worker.worker, "begin", note)
        prompts = [prompt(760, 60 + i) for i in range(4)]
        for i, ids in enumerate(prompts):
            e.add(str(i), ids, new=2)
        e.run()
        assert any(fenced)
        e.reset()
        for i, ids in enumerate(prompts):
            assert e.answer(f"again {i}", ids, new=2) == expected(ids, new=2)
            assert e.cached[f"again {i}"] == 2 * BLOCK
            e.reset()
        e.assert_nothing_is_open()


def test_stores_that_do_not_keep_up_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcairn.adapters.vllm.worker.MOST_WAITING_BLOCKS", 3)
    with engine(cache(), pages=128) as e:
        memory = e.worker.worker.transfers.memories[0]
        real, gate = memory.store, threading.Event()

        def slow(*arguments: Any) -> None:
            assert gate.wait(60)
            real(*arguments)

        monkeypatch.setattr(memory, "store", slow)
        prompts = [prompt(600, 75 + i) for i in range(3)]
        for i, ids in enumerate(prompts):
            e.answer(str(i), ids)
        gate.set()
        e.settle()
        assert e.connector.cache.stats().tiers["memory"].blocks == 2
        assert sum((s.kv_connector_stats or {}).get("not_stored_blocks", 0) for s in e.stats) == 4
        e.assert_nothing_is_open()


def test_reset_forgets_what_is_stored_and_stores_again() -> None:
    ids = prompt(300, 70)
    with engine(cache()) as e:
        e.add("long", ids, new=300)
        until(e, lambda: len(e.answers["long"]) > 20)
        e.settle()
        assert e.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert e.connector.cache.stats().tiers["memory"].blocks == 0
        e.run()
        assert e.answers["long"] == expected(ids, new=300)
        e.reset()
        e.answer("again", ids)
        assert e.cached["again"] == BLOCK
        e.assert_nothing_is_open()


# --- what is kept apart


def test_salts_adapters_and_images_are_kept_apart(tmp_path: Path) -> None:
    ids = prompt(700, 80)
    adapters: list[LoRARequest] = []
    for name, weights in (("one", b"a"), ("two", b"b"), ("same", b"a")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(weights * 100)
        adapters.append(LoRARequest(name, len(adapters) + 1, str(folder)))
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "salt": {"salt": "alice"},
        "other salt": {"salt": "bob"},
        "adapter": {"lora": adapters[0]},
        "other adapter": {"lora": adapters[1]},
        "image": {"image": ("cat", 20, 30)},
        "other image": {"image": ("dog", 20, 30)},
        "image elsewhere": {"image": ("cat", 21, 30)},
    }
    with engine(cache()) as e:
        keys = {}
        for name, how in kinds.items():
            e.add(name, ids, **how)
            keys[name] = tuple(e.connector.scheduler.stores.get(name).chain.keys)
            e.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        e.add("same weights", ids, lora=adapters[2])
        assert tuple(e.connector.scheduler.stores.get("same weights").chain.keys) == keys["adapter"]
        e.scheduler.finish_requests("same weights", RequestStatus.FINISHED_ABORTED)
        for one, two in itertools.combinations(keys, 2):
            assert set(keys[one]).isdisjoint(keys[two]), (one, two)
        assert keys["plain"] == tuple(e.connector.scheduler._spaces[0].keys(ids))
        e.run()


def test_an_image_later_in_the_prompt_leaves_the_blocks_before_it_alone() -> None:
    ids = prompt(700, 81)
    with engine(cache()) as e:
        e.add("plain", ids)
        e.add("image", ids, image=("cat", 300, 30))
        plain, image = (e.connector.scheduler.stores.get(name).chain.keys for name in ("plain", "image"))
        assert plain[0] == image[0]
        assert plain[1] != image[1]
        e.scheduler.finish_requests(["plain", "image"], RequestStatus.FINISHED_ABORTED)
        e.run()


# --- what a request asks


def test_controls_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    ids = prompt(900, 90)
    with engine(cache()) as e:
        e.answer("not stored", ids, params={"store": False})
        e.reset()
        e.answer("stored", ids)
        assert e.cached["stored"] == 0
        e.reset()
        e.answer("not loaded", ids, params={"load": False})
        assert e.cached["not loaded"] == 0
        e.reset()
        for most, loaded in (0, 0), (255, 0), (256, 256), (600, 512), (10_000, 768):
            assert e.answer(f"at most {most}", ids, params={"max_load_tokens": most}) == expected(ids)
            assert e.cached[f"at most {most}"] == loaded
            e.reset()
        e.reset()
        with caplog.at_level(logging.WARNING, "kvcairn"):
            e.answer("wrong", ids, params={"priority": 1000})
        assert e.cached["wrong"] == 768
        assert "kv_transfer_params['kvcairn'] ignored" in caplog.text
        e.assert_nothing_is_open()


def test_at_most_so_many_tokens_of_a_model_with_windows() -> None:
    ids = prompt(900, 92)
    with engine(cache(), window=48, pages=128) as e:
        e.answer("stored", ids)
        e.reset()
        assert e.answer("some", ids, params={"max_load_tokens": 600}) == expected(ids, window=48, pages=128)
        assert e.cached["some"] == 512
        assert not any((s.kv_connector_stats or {}).get("failed_blocks") for s in e.stats)
        e.assert_nothing_is_open()


def test_hints_reach_the_cache() -> None:
    ids = prompt(700, 91)
    with engine(cache()) as e:
        e.answer("short", ids, params={"ttl_s": 0.0})
        e.reset()
        e.answer("again", ids)
        assert e.cached["again"] == 0  # expired at once


# --- start


def refused() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    return {
        "policy": ({}, {"policy": "fail"}, 'add "kv_load_failure_policy": "recompute"'),
        "block size": ({"block_tokens": 100}, {}, "no multiple of the engine's block size of 32"),
        "unknown": ({"block_token": 256}, {}, "did you mean 'block_tokens'"),
        "tier": ({"tiers": [{"type": "memory", "capacity": "1 EiB"}]}, {}, "tiers\\[0\\].capacity"),
        "none": ({"tiers": None}, {}, "one of config, connect and tiers is needed"),
        "two": ({"connect": "unix:/tmp/x"}, {}, "got connect and tiers"),
    }


@pytest.mark.parametrize("name", list(refused()))
def test_what_does_not_fit_is_refused_at_start(name: str) -> None:
    changed, how, why = refused()[name]
    with pytest.raises(kv.KVCairnError, match=why):
        Engine({name: value for name, value in (cache() | changed).items() if value is not None}, **how)


def test_settings_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "kvcairn.toml").write_text('[[tiers]]\ntype = "memory"\ncapacity = "64 MiB"\n')
    ids = prompt(300, 95)
    with engine({"config": str(tmp_path / "kvcairn.toml")}) as e:
        e.answer("first", ids)
        e.reset()
        e.answer("second", ids)
        assert e.cached["second"] == BLOCK
