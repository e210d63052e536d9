"""What the parts of the core share. Owner thread only."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from kvcairn.config import Config
from kvcairn.core.events import Readers
from kvcairn.core.holds import Ledger
from kvcairn.core.level import Level
from kvcairn.core.residency import Fastest
from kvcairn.core.spaces import Spaces
from kvcairn.core.walk import Levels, Walker
from kvcairn.index.tree import Tree
from kvcairn.memory.arena import Arena
from kvcairn.transfer.executor import Executor
from kvcairn.types import MissReason, add_to


@dataclass(slots=True)
class Served:
    """What was asked for and what came of it, in blocks."""

    asked: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """The index, the tiers and the books of one cache; `levels[0]` is memory."""

    config: Config
    executor: Executor
    arena: Arena
    tree: Tree
    spaces: Spaces
    fastest: Fastest
    readers: Readers
    levels: list[Level]
    walker: Walker
    ledger: Ledger
    served: Served = field(default_factory=Served)
    changed: threading.Condition = field(default_factory=threading.Condition)  # the one lock of the core
    version: int = 0
    eventfd: int = -1
    is_closing: bool = False

    @property
    def memory(self) -> Level:
        """The memory tier."""
        return self.levels[0]

    @property
    def lower(self) -> list[Level]:
        """The tiers below memory, the fastest first."""
        return self.levels[1:]

    def now(self) -> float:
        """The time in seconds."""
        return self.executor.clock.now()

    def number_from(self, first: int) -> None:
        """Have holds, readers and versions numbered above `first`, so that they are told from those of another run."""
        self.version = max(self.version, first)
        self.ledger.number_from(first)
        self.readers.number_from(first)

    def notify(self) -> None:
        """Tell those who wait that something changed; the lock is held."""
        self.version += 1
        self.memory.residency.allocator.retired.clear()  # memory has no files to give up
        self.changed.notify_all()

    def job_ended(self) -> None:
        """Make the eventfd readable."""
        if self.eventfd >= 0:
            os.eventfd_write(self.eventfd, 1)

    def count(self, asked: int, levels: Levels, reason: MissReason | None, times: int = 1) -> None:
        """Count blocks served (by the tier they came from) and missed."""
        self.served.asked += times * asked
        for name, blocks in self.walker.by_tier(levels).items():
            add_to(self.served.hits, name, times * blocks)
        add_to(self.served.misses, (reason or MissReason.UNKNOWN).value, times * (asked - levels.size))
