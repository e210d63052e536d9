"""Measures this host with the real cache; what each figure means stands in docs/benchmarks/method.md."""

from kvcairn.bench.daemon import run_daemon
from kvcairn.bench.disk import run_disk
from kvcairn.bench.engine import run_engine
from kvcairn.bench.evict import run_evict
from kvcairn.bench.figures import Figure
from kvcairn.bench.hierarchy import run_hierarchy
from kvcairn.bench.lookup import run_lookup
from kvcairn.bench.memory import run_memory
from kvcairn.bench.sglang import run_sglang

__all__ = [
    "Figure",
    "run_daemon",
    "run_disk",
    "run_engine",
    "run_evict",
    "run_hierarchy",
    "run_lookup",
    "run_memory",
    "run_sglang",
]
