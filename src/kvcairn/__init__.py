"""A tiered KV cache for LLM serving: one prefix index over any tiers, shared by any engine on the host."""

from kvcairn.cache import Cache, EventStream
from kvcairn.config import Config
from kvcairn.errors import (
    ClosedError,
    ConfigError,
    CorruptBlock,
    KVCairnError,
    LayoutError,
    LeaseError,
    TierError,
    TierFull,
    TierTimeout,
    TierUnavailable,
    UnsupportedError,
)
from kvcairn.layout import KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.memory.lease import Lease, Reservation
from kvcairn.ranks import acquire_all, lookup_all
from kvcairn.space import Space
from kvcairn.transfer.job import CopyJob, Job
from kvcairn.types import (
    UNKNOWN,
    BlockRemoved,
    BlockStored,
    Hints,
    Hit,
    JobState,
    MissReason,
    RankSlice,
    Stats,
    TierStats,
)

__version__ = "0.1.0"

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "Cache",
    "ClosedError",
    "Config",
    "ConfigError",
    "CopyJob",
    "CorruptBlock",
    "EventStream",
    "Hints",
    "Hit",
    "Job",
    "JobState",
    "KVCairnError",
    "KVLayout",
    "LayerGroup",
    "LayoutError",
    "Lease",
    "LeaseError",
    "MissReason",
    "RankSlice",
    "Reservation",
    "Space",
    "SpaceDescriptor",
    "Stats",
    "TierError",
    "TierFull",
    "TierStats",
    "TierTimeout",
    "TierUnavailable",
    "UNKNOWN",
    "UnsupportedError",
    "acquire_all",
    "lookup_all",
]
