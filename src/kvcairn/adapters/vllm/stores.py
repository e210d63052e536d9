"""Which full blocks of which requests are stored, and which pages must not be overwritten meanwhile.

A step stores what earlier steps have computed; under write policy `back`, what it is about to overwrite of that.
Pages are never held back for it: the engine frees them as it likes, and a step that overwrites a page whose copy has
not ended waits for that (the fence).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcairn.adapters.vllm.chain import Chain
from kvcairn.adapters.vllm.controls import Controls
from kvcairn.adapters.vllm.fence import Fence
from kvcairn.adapters.vllm.held import Held
from kvcairn.adapters.vllm.steps import Pages, Store
from kvcairn.types import Hints


@dataclass
class Progress:
    """One request.

    Attributes:
        chain: its keys.
        hints: what it says about the future of its blocks.
        most_tokens: leading tokens that may be stored.
        stored: leading blocks that need not be stored any more.
        computed_tokens: tokens whose KV is there once the steps planned so far are done.
        tables: its pages when that was planned, by group.
        is_over: it has finished.
    """

    chain: Chain
    hints: Hints | None
    most_tokens: float
    stored: int = 0
    computed_tokens: int = 0
    tables: Pages = field(default_factory=tuple)
    is_over: bool = False


class Stores:
    """The stores of one scheduler. Its thread only."""

    def __init__(
        self,
        block_tokens: int,
        page_tokens: tuple[int, ...],
        workers: int,
        stores_generated: bool,
        note: Callable[[Chain, int], None] = lambda chain, start: None,
        held: Held | None = None,
    ) -> None:
        """Store full blocks.

        Args:
            block_tokens: tokens of a block.
            page_tokens: tokens of a page in each layer group.
            workers: how many store each their part.
            stores_generated: whether blocks of generated tokens are stored, where a request does not say.
            note: is told which chain is stored, from which block on.
            held: where blocks wait under write policy `back`; None stores them as soon as they are full.
        """
        self._block_tokens, self._page_tokens = block_tokens, page_tokens
        self._stores_generated, self._note_chain, self._held = stores_generated, note, held
        self._requests: dict[str, Progress] = {}
        self._due: dict[str, Progress] = {}  # have blocks that are full and not stored
        self._fence = Fence(workers)

    def begin(self, chain: Chain, controls: Controls) -> None:
        """A request came."""
        generated = self._stores_generated if controls.store_generated is None else controls.store_generated
        most = math.inf if generated else chain.request.num_prompt_tokens
        progress = Progress(chain, controls.hints, most if controls.store else 0)
        self._requests[chain.request.request_id] = progress

    def get(self, rid: str) -> Progress | None:
        """Return the progress of a request that is served."""
        return self._requests.get(rid)

    def skip(self, rid: str, blocks: int) -> None:
        """The first `blocks` blocks of a request are being loaded: they are stored already."""
        self._requests[rid].stored = blocks

    def finish(self, rid: str) -> Progress | None:
        """A request is over; its last blocks are stored in the next step."""
        progress = self._requests.get(rid)
        if progress is not None:
            progress.is_over = True
            self._due[rid] = progress
        return progress

    def plan(self, output: Any, loading: Iterable[Pages]) -> tuple[list[Store], set[int]]:
        """Return the stores that a step begins with, and the numbers of those that it has to wait for.

        Args:
            output: the engine's plan of the step.
            loading: pages that loads write to.
        """
        stores = self._collect()
        self._note(output)
        fresh = _fresh_pages(output, self._page_tokens)
        fresh.update(page for pages in loading for part in pages for page in part)
        fresh.discard(0)
        if self._held is not None:
            for store in stores:
                self._held.hold(store)
            stores = self._held.due(fresh, self._fence.number)
        for store in stores:
            self._fence.begin(store)
        return stores, self._fence.around(fresh)

    def done(self, counts: Counter[int]) -> None:
        """Workers have ended stores."""
        self._fence.end(counts)

    def start_again(self) -> None:
        """Nothing is stored any more: store all blocks of running requests again."""
        if self._held is not None:
            self._held.clear()
        for progress in self._requests.values():
            progress.stored = 0

    @property
    def is_due(self) -> bool:
        """Whether a step is needed to store something."""
        return bool(self._due)

    @property
    def open_count(self) -> int:
        """Requests followed, and stores that have not ended."""
        return len(self._requests) + len(self._fence)

    def pages(self, tables: Pages, start: int, end: int, from_token: int = 0) -> Pages:
        """Return the pages of blocks [start, end) by group; 0 for those before `from_token`, or beyond the table."""
        found = []
        for table, page_tokens in zip(tables, self._page_tokens, strict=True):
            rows = self._block_tokens // page_tokens
            low, kept = start * rows, from_token // page_tokens
            part = table[low : end * rows]
            part = [0 if low + i < kept else page for i, page in enumerate(part)]
            found.append(part + [0] * ((end - start) * rows - len(part)))
        return tuple(found)

    def _collect(self) -> list[Store]:
        """Make stores of what is due. A block whose tokens the engine has not told yet stays due."""
        stores = []
        for rid, progress in list(self._due.items()):
            wanted = self._full(progress)
            full = min(wanted, progress.chain.request.num_tokens // self._block_tokens)
            if progress.tables and full > progress.stored:
                stores.append(self._store(progress, progress.stored, full))
                progress.stored = full
            if progress.is_over:
                del self._requests[rid], self._due[rid]
            elif wanted <= progress.stored:
                del self._due[rid]
        return stores

    def _store(self, progress: Progress, start: int, end: int) -> Store:
        keys = progress.chain.extend()
        self._note_chain(progress.chain, start)
        pages = self.pages(progress.tables, start, end)
        parent = keys[start - 1] if start else None
        return Store(self._fence.number(), parent, keys[start:end], pages, progress.hints)

    def _note(self, output: Any) -> None:
        """Note what this step will have computed, and where."""
        scheduled, state = output.num_scheduled_tokens, output.kv_connector_block_state
        for rid in [rid for rid in self._due if rid not in scheduled]:
            progress = self._due.pop(rid)  # its pages may go before the ids of its last tokens are known
            progress.computed_tokens = progress.stored * self._block_tokens
        for new in output.scheduled_new_reqs:
            self._advance(new.req_id, new.num_computed_tokens, scheduled[new.req_id], state)
        cached = output.scheduled_cached_reqs
        for rid, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._advance(rid, computed, scheduled[rid], state)

    def _advance(self, rid: str, computed_tokens: int, new_tokens: int, state: Any) -> None:
        progress = self._requests.get(rid)
        if progress is None:
            return
        # Less than was stored: a load failed, or the request was preempted, and it is computed again.
        progress.stored = min(progress.stored, computed_tokens // self._block_tokens)
        progress.computed_tokens = computed_tokens + new_tokens
        if self._full(progress) > progress.stored:
            progress.tables = state.get_block_ids(rid)
            self._due[rid] = progress

    def _full(self, progress: Progress) -> int:
        """Return how many blocks are computed and may be stored."""
        return int(min(progress.computed_tokens, progress.most_tokens)) // self._block_tokens


def _fresh_pages(output: Any, page_tokens: tuple[int, ...]) -> set[int]:
    """Return the pages that a step writes to for the first time."""
    fresh: set[int] = set()
    for new in output.scheduled_new_reqs:
        for table, tokens in zip(new.block_ids, page_tokens, strict=True):
            fresh.update(table[new.num_computed_tokens // tokens :])
    cached = output.scheduled_cached_reqs
    for tables in cached.new_block_ids:
        for table in tables or ():
            fresh.update(table)
    return fresh
