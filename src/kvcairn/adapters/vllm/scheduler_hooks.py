"""The hooks that vLLM's scheduler calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcairn.adapters.vllm.events import Events
from kvcairn.adapters.vllm.held import Held
from kvcairn.adapters.vllm.identity import one_spec
from kvcairn.adapters.vllm.lookups import Lookups
from kvcairn.adapters.vllm.metrics import HIT, Counts
from kvcairn.adapters.vllm.pace import Pace
from kvcairn.adapters.vllm.scheduler import Scheduler
from kvcairn.adapters.vllm.settings import ConnectorOptions, Settings
from kvcairn.adapters.vllm.steps import SpaceOffer, StepPlan, StepReport
from kvcairn.adapters.vllm.stores import Stores
from kvcairn.cache import Cache
from kvcairn.config import DiskTierOptions, PrefetchOptions
from kvcairn.space import Space


class SchedulerHooks(KVConnectorBase_V1, SupportsHMA):
    """Turns hooks into calls of `Scheduler`, which exists once the workers have told their spaces."""

    _settings: Settings[ConnectorOptions]
    cache: Cache
    _counts: Counts
    _scheduler: Scheduler | None = None
    _pace: Pace | None = None
    _events: Events | None = None
    _sources: dict[str, CacheHitSource]

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the spaces of all workers; called once, before the first request."""
        offers = [metadata[rank] for rank in sorted(metadata)]
        spaces = [self.cache.space(offer.descriptor) for offer in offers if isinstance(offer, SpaceOffer)]
        block_tokens, transfer = self._settings.options.block_tokens, self._kv_transfer_config
        page_tokens = tuple(one_spec(g.kv_cache_spec).block_size for g in self._kv_cache_config.kv_cache_groups)
        config = self._settings.config
        tiers = list(self.cache.stats().tiers)
        disks = {tier.name for tier in config.tiers if isinstance(tier, DiskTierOptions)} if config else set()
        self._sources = dict.fromkeys(disks, CacheHitSource.DISK) | {tiers[0]: CacheHitSource.HOST}
        lookups = Lookups(spaces, tiers[0], config.prefetch if config else PrefetchOptions())
        events = self._kv_events(spaces[0], tiers[0])
        stores = Stores(
            block_tokens,
            page_tokens,
            len(spaces),
            self._settings.options.store_generated,
            note=events.note if events else lambda chain, start: None,
            held=Held() if spaces[0].write_policy == "back" else None,
        )
        self._scheduler = Scheduler(
            self.cache, spaces, lookups, stores, loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer
        )
        self._events, self._pace = events, Pace(spaces)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler side, behind these hooks."""
        assert self._scheduler is not None, "no worker has told its space yet"
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        """A request came: begin to bring what can be loaded for it from slower tiers."""
        chain = self.scheduler.arrive(request, lambda: self._own_tokens(request))
        if chain is not None and self._events is not None:
            self._events.note(chain)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the engine's own can be loaded, always beside a step; None: ask again."""
        tokens = self.scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has pages for a request."""
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
        if num_external_tokens:
            for tier, tokens in self.scheduler.lookups.sources(request.request_id, num_external_tokens).items():
                self._counts.add(f"{HIT}{tier}", tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Split the tokens of a load by the tier that had them when the request came."""
        by_source: dict[CacheHitSource, int] = {}
        for tier, tokens in self.scheduler.lookups.sources(request.request_id, num_external_tokens).items():
            source = self._sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            by_source[source] = by_source.get(source, 0) + tokens
        return by_source

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Return what workers do in this step."""
        if self._pace is not None:
            self._pace.begin(scheduler_output.total_num_scheduled_tokens)
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what workers have done."""
        if self._pace is not None:
            self._pace.end()
        report = connector_output.kv_connector_worker_meta
        loaded = connector_output.finished_recving or set()
        self.scheduler.report(report if isinstance(report, StepReport) else None, loaded)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; its pages may go at once."""
        self.scheduler.finish(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether a step is needed to store the last blocks of what has finished."""
        return self._scheduler is not None and self._scheduler.stores.is_due

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what was stored and removed, by tier."""
        return () if self._events is None else self._events.take()

    def reset_cache(self) -> bool:
        """Drop all stored blocks of this model."""
        return self.scheduler.reset()

    def close_scheduler(self) -> None:
        """Let go of prefetches and leases."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._events is not None:
            self._events.close()

    def _kv_events(self, space: Space, memory: str) -> Events | None:
        """Return what translates the cache's events; None where vLLM publishes none. One rank speaks for all."""
        config = self._vllm_config.kv_events_config
        if config is None or not config.enable_kv_cache_events:
            return None
        descriptor = space.descriptor
        return Events(self.cache.events(), descriptor.space_id, descriptor.block_tokens, memory)

    def _own_tokens(self, request: Any) -> int:
        """Return how many tokens of a request vLLM's own prefix cache has."""
        if self._kv_cache_manager is None or request.kv_cache_report_mode == "full":  # there the question is an event
            return 0
        return int(self._kv_cache_manager.get_computed_blocks(request)[1])
