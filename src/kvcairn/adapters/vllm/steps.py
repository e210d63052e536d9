"""What the scheduler side tells the worker sides of one step, and what they answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcairn.layout import SpaceDescriptor
from kvcairn.types import Hints

Pages = tuple[list[int], ...]
"""For each layer group the page numbers of some blocks, one behind the other; 0 where a page is to be left alone."""


@dataclass
class Load:
    """Blocks to be copied into pages that a request waits for.

    Attributes:
        request: its id.
        parent: key of the block before the first one.
        keys: of the blocks, in order.
        pages: where they go.
        tickets: for each rank the lease of those that are in memory, from the first one on.
    """

    request: str
    parent: bytes | None
    keys: list[bytes]
    pages: Pages
    tickets: list[bytes]


@dataclass
class Store:
    """Full blocks to be copied out of pages.

    Attributes:
        number: counts all stores of a scheduler.
        parent: key of the block before the first one.
        keys: of the blocks, in order.
        pages: where they are.
        hints: what their request says about their future.
    """

    number: int
    parent: bytes | None
    keys: list[bytes]
    pages: Pages
    hints: Hints | None = None


@dataclass
class StepPlan(KVConnectorMetadata):
    """One step.

    Attributes:
        stores: of what earlier steps computed; they begin before this step.
        fence: numbers of stores whose pages this step overwrites; it waits for them.
        loads: begin in this step.
    """

    stores: list[Store] = field(default_factory=list)
    fence: set[int] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What ended in one or more workers since their last report.

    Attributes:
        stored: numbers of stores, with how many workers have done them.
        taken: requests whose lease was taken over, with how many workers have theirs.
        failed: requests whose load did not bring everything.
    """

    stored: Counter[int] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another worker's report to this one."""
        assert isinstance(other, StepReport)
        return StepReport(self.stored + other.stored, self.taken + other.taken, self.failed | other.failed)


@dataclass
class SpaceOffer(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once its memory is there: the space of its blocks."""

    descriptor: SpaceDescriptor
