"""KVCairnStorage behind SGLang's own tree, controller and host pools: what comes back is what was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs

import kvcairn as kv
from tests.engines.sglang.kit import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE_SIZES,
    Shape,
    Side,
    one_rank,
    prompt,
    settings,
)

KINDS = [("mha", layout) for layout in MHA_LAYOUTS] + [("mla", layout) for layout in MLA_LAYOUTS]
USUAL = {("mha", "layer_first", 16), ("mha", "page_first", 64), ("mha", "page_head", 1), ("mla", "page_first", 256)}


def _every_shape() -> Iterator[Any]:
    """All layouts with all page sizes; those off the diagonal only in the long run."""
    for kind, layout in KINDS:
        for page_size in PAGE_SIZES:
            marks = () if (kind, layout, page_size) in USUAL or page_size == 16 else (pytest.mark.long,)
            yield pytest.param(Shape(kind, layout, page_size), marks=marks, id=f"{kind}-{layout}-{page_size}")


@pytest.fixture(autouse=True)
def sides() -> Iterator[None]:
    with one_rank():
        yield
        for side in Side.opened:
            side.close()
        Side.opened.clear()


@pytest.mark.parametrize("is_v1", [True, False], ids=["v1", "v0"])
@pytest.mark.parametrize("shape", _every_shape())
def test_pages_come_back_from_disk_in_another_run(tmp_path: Path, shape: Shape, is_v1: bool) -> None:
    tokens = prompt(shape.tokens)
    first = Side(shape, settings(tmp_path, is_v1))
    computed = first.insert(tokens)
    first.close()
    second = Side(shape, settings(tmp_path, is_v1))
    assert second.prefetch(tokens) == shape.tokens
    assert torch.equal(second.load_back(tokens), computed)


@pytest.mark.parametrize("shape", _every_shape())
def test_both_generations_store_the_same_bytes(tmp_path: Path, shape: Shape) -> None:
    tokens = prompt(shape.tokens)
    first = Side(shape, settings(tmp_path, interface_v1=False))
    computed = first.insert(tokens)
    first.close()
    second = Side(shape, settings(tmp_path, interface_v1=True))
    assert second.prefetch(tokens) == shape.tokens
    assert torch.equal(second.load_back(tokens), computed)


@pytest.mark.parametrize("shape", _every_shape())
def test_pool_transfers_move_whole_pages(tmp_path: Path, shape: Shape) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    side = Side(shape, settings(tmp_path))
    pages = 5
    pool, size = side.host_pool, shape.page_size
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(pool.dtype))
    side.storage.register_mem_host_pool_v2(pool, PoolName.SWA)
    hashes = [f"{number:064x}" for number in range(pages)]
    places = torch.arange(pages * size)
    stored = [PoolTransfer(name, host_indices=places, keys=hashes) for name in (PoolName.KV, PoolName.SWA)]
    assert side.storage.batch_set_v2(stored) == {PoolName.KV: [True] * pages, PoolName.SWA: [True] * pages}
    before = [pool.get_data_page(page * size).clone() for page in range(pages)]
    later = places + pages * size
    wanted = PoolTransfer(PoolName.SWA, host_indices=later, keys=hashes[::-1])
    assert side.storage.batch_get_v2([wanted]) == {PoolName.SWA: [True] * pages}
    after = [pool.get_data_page((pages + page) * size) for page in range(pages)]
    assert all(torch.equal(a, b) for a, b in zip(after, before[::-1], strict=True))


@pytest.mark.parametrize("is_v1", [True, False], ids=["v1", "v0"])
@pytest.mark.parametrize("shape", _every_shape())
def test_what_fails_at_random_is_recomputed_and_never_wrong(tmp_path: Path, shape: Shape, is_v1: bool) -> None:
    tokens = prompt(shape.tokens)
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.005),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.2),
    ):
        first = Side(shape, settings(tmp_path, is_v1))
        computed = first.insert(tokens)
        first.close()
        second = Side(shape, settings(tmp_path, is_v1))
        found = 0
        for attempt in range(20):
            found = second.prefetch(tokens, f"attempt {attempt}")
            if found:
                break
    assert found % shape.page_size == 0
    if found:
        assert torch.equal(second.load_back(tokens), computed[:, :found])


DIFFERENCES: list[tuple[str, Callable[[dict[str, Any]], Any], Shape]] = [
    ("weights", lambda extra: extra["kvcairn"].update(weights="two"), Shape()),
    ("model", lambda extra: extra["kvcairn"].update(model="other"), Shape()),
    ("tenant", lambda extra: extra["kvcairn"].update(tenant="other"), Shape()),
    ("layout", lambda extra: None, Shape(layout="layer_first")),
    ("heads", lambda extra: None, Shape(heads=4, dim=8)),
    ("layers", lambda extra: None, Shape(layers=6, dim=8)),
    ("kind", lambda extra: None, Shape("mla", dim=32)),
    ("page size", lambda extra: None, Shape(page_size=32)),
]


@pytest.mark.parametrize(("change", "shape"), [each[1:] for each in DIFFERENCES], ids=[each[0] for each in DIFFERENCES])
def test_a_space_that_differs_in_one_item_never_hits(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], shape: Shape
) -> None:
    tokens = prompt(1024)
    first = Side(Shape(), settings(tmp_path))
    first.insert(tokens)
    hashes = _hashes(first, tokens)
    assert first.storage.batch_exists(hashes) == len(hashes)
    extra = settings(tmp_path)
    change(extra)
    second = Side(shape, extra)
    assert second.storage.batch_exists(hashes) == 0
    assert second.storage.batch_get_v1(hashes[:2], torch.arange(2 * shape.page_size)) == [False, False]


def test_another_rank_never_hits(tmp_path: Path) -> None:
    from kvcairn.adapters.sglang.identity import describe

    side = Side(Shape(), None)
    mla = Side(Shape("mla"), None)
    config = mla.controller._generate_storage_config("model", {})
    ranks = [_with(config, tp_rank=rank, tp_size=2, is_mla_model=False) for rank in (0, 1)]
    model = ("m", "w", "")
    assert len({describe(side.host_pool, "kv", 64, each, model).space_id for each in [config, *ranks]}) == 3
    ranks = [_with(each, is_mla_model=True) for each in ranks]
    one = {describe(mla.host_pool, "kv", 64, each, model).space_id for each in ranks}
    assert len(one) == 1, "MLA is the same on all ranks"
    stages = [_with(config, pp_rank=rank, pp_size=2) for rank in (0, 1)]
    assert len({describe(side.host_pool, "kv", 64, each, model).space_id for each in stages}) == 2


def test_what_is_stored_is_not_written_again(tmp_path: Path) -> None:
    side = Side(Shape(), settings(tmp_path))
    tokens = prompt(1024)
    side.insert(tokens)
    cache = side.storage._cache
    assert cache.drain(timeout_s=10)
    before = cache.stats().tiers["disk"].used_bytes
    hashes = _hashes(side, tokens)
    events = cache.events()
    assert side.storage.batch_set_v1(hashes, torch.arange(1024)) == [True] * len(hashes)
    assert cache.drain(timeout_s=10)
    assert not events.poll()
    assert cache.stats().tiers["disk"].used_bytes == before


def test_thousands_of_keys_in_one_call(tmp_path: Path) -> None:
    side = Side(Shape(page_size=1, tokens=4096), settings(tmp_path))
    hashes = [f"{number:064x}" for number in range(4096)]
    assert side.storage.batch_set_v1(hashes, torch.arange(4096)) == [True] * 4096
    assert side.storage.batch_exists(hashes) == 4096
    holed = [*hashes[:3000], "f" * 64, *hashes[3000:]]
    assert side.storage.batch_exists(holed) == 3000
    assert side.storage.batch_get_v1(hashes, torch.arange(4096)) == [True] * 4096


def test_names_that_are_no_hashes(tmp_path: Path) -> None:
    side = Side(Shape(), settings(tmp_path))
    assert side.storage.batch_set_v1(["a", "b"], torch.arange(32)) == [True, True]
    assert side.storage.exists("a")
    assert not side.storage.exists("ab")
    assert side.storage.batch_exists(["a", "b", "c"]) == 2


def test_nothing_raises_on_a_storage_thread(tmp_path: Path) -> None:
    side = Side(Shape(), settings(tmp_path))
    storage, hashes = side.storage, ["0" * 64, "1" * 64]
    short, page = torch.arange(16), torch.zeros(8, dtype=torch.uint8)
    assert storage.batch_set_v1(hashes, short) == [False, False]
    assert storage.batch_get_v1(hashes, short) == [False, False]
    assert storage.set("0" * 64, page) is False
    assert storage.batch_set(hashes, [page, page]) is False
    assert storage.get("0" * 64, page) is None
    assert storage.batch_get(hashes, [page, page]) == [None, None]
    assert storage.exists("0" * 64) is False
    transfer = _transfer("unknown", hashes, short)
    assert storage.batch_get_v2([transfer]) == {"unknown": [False, False]}
    assert storage.batch_set_v2([transfer]) == {"unknown": [False, False]}
    assert storage.batch_exists_v2(hashes, [transfer]).kv_hit_pages == 0
    storage.close()
    storage.close()
    places = torch.arange(32)
    assert storage.batch_exists(hashes) == 0
    assert storage.batch_exists_v2(hashes).kv_hit_pages == 0
    assert storage.batch_set_v1(hashes, places) == [False, False]
    assert storage.batch_get_v1(hashes, places) == [False, False]


def test_trailing_pages_say_which_lengths_can_be_restored(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    side = Side(Shape(), settings(tmp_path))
    storage, hashes = side.storage, [f"{number:064x}" for number in range(8)]
    storage.register_mem_host_pool_v2(side.host_pool, "swa")
    places = torch.arange(8 * 16)
    storage.batch_set_v1(hashes[:7], places[: 7 * 16])
    kept = [1, 2, 5, 6, 7]
    for page in kept:
        storage.batch_set_v2([_transfer("swa", [hashes[page]], places[:16])])
    wanted = _transfer("swa", hashes[-2:], None, PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(hashes, [wanted])
    assert found.restorable_prefix_pages == [3, 7]
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (7, {"kv": 7, "swa": 7})
    every = _transfer("swa", None, None)
    assert storage.batch_exists_v2(hashes, [every]).kv_hit_pages == 0
    assert storage.batch_exists_v2(hashes).restorable_prefix_pages == list(range(1, 8))


def test_clear_and_stats(tmp_path: Path) -> None:
    side = Side(Shape(), settings(tmp_path))
    tokens = prompt(1024)
    side.insert(tokens)
    stats = side.storage.get_stats()
    assert sum(stats.backup_pgs) == 64
    assert len(stats.backup_bandwidth) == len(stats.backup_pgs)
    assert all(gb_per_s > 0 for gb_per_s in stats.backup_bandwidth)
    assert not side.storage.get_stats().backup_pgs
    assert side.controller.clear_storage_backend()
    assert side.storage.batch_exists(_hashes(side, tokens)) == 0


def test_settings_are_checked_when_the_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(kv.ConfigError, match=r"kvcairn\.tirs: no such setting; did you mean"):
        Side(Shape(), settings(tmp_path, tirs=[]))
    with pytest.raises(kv.ConfigError, match="one of config, connect and tiers"):
        Side(Shape(), settings(tmp_path, config="/etc/kvcairn.toml"))
    extra = settings(tmp_path)
    del extra["kvcairn"]
    with pytest.raises(kv.ConfigError, match="has no such table"):
        Side(Shape(), extra)
    extra = settings(tmp_path)
    del extra["kvcairn"]["weights"]
    with pytest.raises(kv.ConfigError, match="no weight files of 'dummy' were found"):
        Side(Shape(), extra)


def test_several_ranks_need_a_daemon(tmp_path: Path) -> None:
    from kvcairn.adapters.sglang import KVCairnStorage

    side = Side(Shape(), None)
    config = side.controller._generate_storage_config("model", settings(tmp_path))
    storage = KVCairnStorage(_with(config, tp_rank=1, tp_size=2))
    with pytest.raises(kv.ConfigError, match="2 ranks cannot share a cache that lives in one of them"):
        storage.register_mem_pool_host(side.host_pool)


def test_another_release_of_sglang_is_refused_with_a_clear_message() -> None:
    from kvcairn.adapters.sglang.versions import check_version

    with pytest.raises(kv.UnsupportedError, match=r"SGLang 0\.5\.24 is not supported: .* works with SGLang >="):
        check_version("0.5.24")


def _hashes(side: Side, tokens: Any) -> list[str]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    hashes: list[str] = get_storage_hash_str(tokens, None, page_size=side.shape.page_size)
    return hashes


def _transfer(name: str, hashes: list[str] | None, places: Any, policy: Any = None) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

    return PoolTransfer(name, host_indices=places, keys=hashes, hit_policy=policy or PoolHitPolicy.ALL_PAGES)


def _with(config: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(config, **changes)
