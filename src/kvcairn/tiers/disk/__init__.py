"""The disk tier: preallocated files of fixed slots, each with a header and checksums, and an index in SQLite."""

from kvcairn.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
