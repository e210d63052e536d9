"""The connector's scheduler side: what is loaded for which request, and what is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvcairn.adapters.vllm.chain import Chain, LoraNames, is_cacheable
from kvcairn.adapters.vllm.controls import Controls, read_controls
from kvcairn.adapters.vllm.lookups import Lookups
from kvcairn.adapters.vllm.steps import Load, StepPlan, StepReport
from kvcairn.adapters.vllm.stores import Stores
from kvcairn.cache import Cache
from kvcairn.errors import KVCairnError
from kvcairn.space import Space
from kvcairn.types import Hints

logger = logging.getLogger(__name__)


class Scheduler:
    """Follows the engine's requests. The engine's scheduling thread only; only `reset` waits.

    Attributes:
        lookups: loads.
        stores: stores.
    """

    def __init__(
        self, cache: Cache, spaces: list[Space], lookups: Lookups, stores: Stores, *, loads: bool, saves: bool
    ) -> None:
        """Serve from the spaces of all ranks; `loads` and `saves` say what this engine may do."""
        self._cache, self._spaces, self._loads, self._saves = cache, spaces, loads, saves
        self.lookups, self.stores = lookups, stores
        self._block_tokens = spaces[0].descriptor.block_tokens
        self._controls: dict[str, Controls] = {}
        self._planned: list[Load] = []
        self._lora = LoraNames()

    def arrive(self, request: Any, computed_tokens: Callable[[], int]) -> Chain | None:
        """A request came; return its keys, None where it is not served.

        Args:
            request: the engine's.
            computed_tokens: says how many of its tokens the engine has itself; asked only where it matters.
        """
        if not is_cacheable(request):
            return None
        controls = read_controls(request, loads=self._loads, saves=self._saves)
        chain = Chain(request, self._block_tokens, self._lora.identity(request.lora_request))
        self._controls[request.request_id] = controls
        self.stores.begin(chain, controls)
        if controls.load and chain.keys:
            self._hint(chain.keys, controls.hints)
            self.lookups.arrive(chain, computed_tokens, controls)
        return chain

    def match(self, request: Any, computed_tokens: int) -> int | None:
        """Return how many tokens behind the engine's own can be loaded; None: ask again."""
        progress = self.stores.get(request.request_id)
        if progress is None or not self._controls[request.request_id].load:
            return 0
        return self.lookups.match(progress.chain, computed_tokens, self._controls[request.request_id])

    def allocated(self, request: Any, tables: tuple[list[int], ...], tokens: int) -> None:
        """The engine has pages for a request, `tokens` of them to be loaded."""
        rid = request.request_id
        promise, progress = self.lookups.promised(rid), self.stores.get(rid)
        if promise is None or progress is None:
            return
        if not tokens or promise.is_empty:
            self.lookups.miss(progress.chain)
            return
        end_token = promise.computed_tokens + tokens

        def pages(start: int, end: int) -> tuple[list[int], ...]:
            return self.stores.pages(tables, start, end, promise.computed_tokens)

        self._planned.append(self.lookups.load(progress.chain, pages))
        self.stores.skip(rid, end_token // self._block_tokens)

    def plan(self, output: Any) -> StepPlan:
        """Return what workers do in this step."""
        loads, self._planned = self._planned, []
        stores, fence = self.stores.plan(output, [load.pages for load in loads])
        return StepPlan(stores, fence, loads)

    def report(self, report: StepReport | None, loaded: set[str]) -> None:
        """Workers have done a step; `loaded` are requests whose load has ended in all of them."""
        report = report or StepReport()
        self.stores.done(report.stored)
        self.lookups.handover.taken(report.taken)
        for rid in report.failed:
            self.lookups.fail(rid)
        for rid in loaded:
            self.lookups.handover.end(rid)

    def finish(self, request: Any) -> None:
        """A request is over, for whatever reason."""
        rid = request.request_id
        controls, progress = self._controls.pop(rid, None), self.stores.finish(rid)
        self.lookups.forget(rid)
        if controls is not None and progress is not None and controls.ends_session:
            self._hint(progress.chain.extend(), controls.hints)

    def reset(self) -> bool:
        """Forget everything that is stored, for good; return whether that was possible. Waits for the disks."""
        try:
            gone = [self._cache.clear(space) for space in self._spaces]
        except KVCairnError as error:
            logger.warning("not reset: %s", error)
            return False
        self.stores.start_again()
        return all(gone)

    def close(self) -> None:
        """Let go of everything."""
        self.lookups.close()

    def _hint(self, keys: list[bytes], hints: Hints | None) -> None:
        if hints is None:
            return
        try:
            for space in self._spaces:
                space.hint(keys, hints)
        except KVCairnError as error:
            logger.warning("hints not given: %s", error)
