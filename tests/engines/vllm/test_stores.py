"""Which blocks are stored when, where vLLM's own scheduler cannot be brought to it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from kvcairn.adapters.vllm.chain import Chain
from kvcairn.adapters.vllm.controls import Controls
from kvcairn.adapters.vllm.stores import Stores

BLOCK, PAGE = 64, 32


class Requests:
    """One request, and steps of it as vLLM plans them."""

    def __init__(self, tokens: int) -> None:
        self.request: Any = SimpleNamespace(
            request_id="a", num_tokens=tokens, num_prompt_tokens=tokens, all_token_ids=list(range(1000)),
            cache_salt=None, mm_features=[],
        )  # fmt: skip
        self.stores = Stores(BLOCK, (PAGE,), workers=2, stores_generated=True)
        self.stores.begin(Chain(self.request, BLOCK, None), Controls())

    def step(self, computed: int, new: int, table: list[int] | None = None, fresh: list[int] | None = None) -> Any:
        """Plan a step that computes `new` tokens behind `computed`; with `new` 0 the request is not in it."""
        cached = SimpleNamespace(
            req_ids=["a"] if new else [], num_computed_tokens=[computed], new_block_ids=[(fresh or [],)]
        )
        cached.num_computed_tokens = cached.num_computed_tokens if new else []
        output = SimpleNamespace(
            num_scheduled_tokens={"a": new} if new else {},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda rid: (table,)),
        )
        return self.stores.plan(output, [])


def test_a_block_is_stored_a_step_after_it_is_computed() -> None:
    r = Requests(200)
    assert r.step(0, 150, table=[5, 6, 7, 8, 9]) == ([], set())
    (store,), fence = r.step(150, 1, table=[5, 6, 7, 8, 9])
    assert (store.pages, len(store.keys), store.parent, fence) == (([5, 6, 7, 8],), 2, None, set())
    assert r.step(151, 1) == ([], set())


def test_a_block_whose_tokens_are_not_told_yet_waits() -> None:
    r = Requests(60)
    r.step(0, 64, table=[5, 6])
    assert r.step(64, 1, table=[5, 6, 7]) == ([], set())
    r.request.num_tokens = 64
    (store,), _ = r.step(65, 1, table=[5, 6, 7])
    assert store.pages == ([5, 6],)


def test_pages_of_a_request_that_is_not_scheduled_are_not_trusted() -> None:
    """It may have been thrown out: by the time its tokens are told others write to its pages."""
    r = Requests(60)
    r.step(0, 64, table=[5, 6])
    r.step(64, 0)
    r.request.num_tokens = 64
    assert r.step(0, 0) == ([], set())
    assert not r.stores.is_due


def test_a_fence_holds_until_all_workers_are_done() -> None:
    r = Requests(200)
    r.step(0, 128, table=[5, 6, 7, 8])
    (store,), fence = r.step(128, 1, table=[5, 6, 7, 8], fresh=[6])
    assert fence == {store.number}
    r.stores.done(Counter([store.number]))
    assert r.step(129, 1, fresh=[8])[1] == {store.number}
    r.stores.done(Counter([store.number]))
    assert r.step(130, 1, fresh=[8])[1] == set()


def test_what_is_computed_again_is_stored_again() -> None:
    r = Requests(200)
    r.stores.skip("a", 2)  # being loaded
    r.step(64, 136, table=[1, 2, 3, 4, 5, 6, 7])  # of which only the first block came
    (store,), _ = r.step(200, 1)
    assert store.pages == ([3, 4, 5, 6],)
    assert store.parent is not None
