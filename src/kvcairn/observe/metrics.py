"""The statistics of a cache as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcairn.types import Stats, TierStats

_TIER_GAUGES: Final = {
    "capacity_bytes": "The bound of the tier.",
    "used_bytes": "Slots given out, headers and rounding included.",
    "leased_bytes": "Slots that a lease, job or transfer holds.",
    "quarantined_bytes": "Slots that something may still touch.",
    "rounding_bytes": "Part of the used bytes that carries no payload.",
    "unscanned_bytes": "Part of the used bytes whose content is not known yet.",
    "dirty_bytes": "Slots of copies that lie on no slower tier.",
    "blocks": "Readable copies.",
    "in_flight": "Copies being written.",
    "is_down": "Whether the breaker is open.",
    "read_latency_s": "Measured time of a read before its bytes come.",
    "read_bytes_per_s": "Measured rate of reads behind that.",
}
_UNITS: Final = {"read_latency_s": "read_latency_seconds", "read_bytes_per_s": "read_bytes_per_second"}


class CacheCollector(Collector):
    """Collects the statistics of one cache whenever it is asked; for `CollectorRegistry.register`.

    Args:
        stats: `Cache.stats`; called on the thread that asks.
    """

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Return nothing: a registry asks for no names, since a cache may be busy when it is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, of one moment."""
        stats = self._stats()
        yield from _tiers(stats.tiers)
        asked = CounterMetricFamily("kvcairn_asked_blocks", "Blocks that were asked for.")
        asked.add_metric([], stats.blocks_asked)
        yield asked
        yield _counter("hit_blocks", "Blocks served, by the tier that held them.", "tier", stats.hits_by_tier)
        yield _counter("missed_blocks", "Blocks not served, by reason.", "reason", stats.misses_by_reason)
        held = GaugeMetricFamily("kvcairn_open_holds", "Open leases, reservations and jobs.", labels=["kind"])
        held.add_metric(["lease"], stats.open_leases)
        held.add_metric(["reservation"], stats.open_reservations)
        held.add_metric(["job"], stats.open_jobs)
        yield held


def _tiers(tiers: dict[str, TierStats]) -> Iterator[Metric]:
    for field, text in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"kvcairn_tier_{_UNITS.get(field, field)}", text, labels=["tier"])
        for name, tier in tiers.items():
            gauge.add_metric([name], float(getattr(tier, field)))
        yield gauge
    for field, label, text in (
        ("writes_dropped", "reason", "Blocks whose write was given up."),
        ("errors", "error", "Failed calls."),
    ):
        counter = CounterMetricFamily(f"kvcairn_tier_{field}", text, labels=["tier", label])
        for name, tier in tiers.items():
            for value, count in getattr(tier, field).items():
                counter.add_metric([name, value], count)
        yield counter


def _counter(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    counter = CounterMetricFamily(f"kvcairn_{name}", text, labels=[label])
    for value, count in counts.items():
        counter.add_metric([value], count)
    return counter
