"""A whole cache on a bench: chosen link, tiers and layout, a virtual clock, and transfers that run when told to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from kvcairn.cache import Cache
from kvcairn.clock import VirtualClock
from kvcairn.config import Config
from kvcairn.core.core import Core
from kvcairn.core.link import Direct, Loopback
from kvcairn.core.open import open_core
from kvcairn.layout import KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.space import Space
from kvcairn.testing.dict_tier import DictContent, DictTier
from kvcairn.testing.faulty import Fault, FaultyTier
from kvcairn.tiers.base import Tier
from kvcairn.transfer.executor import InlineExecutor

PAGE_BYTES: Final = 4096
BELOW: Final = "disk"

LinkKind = Literal["direct", "loopback"]
BelowKind = Literal["none", "dict", "disk"]

PLAIN: Final = KVLayout(groups=(LayerGroup.full(2, 32),), dtype="float16")
HYBRID: Final = KVLayout(
    groups=(LayerGroup.full(2, 32), LayerGroup.sliding((2,), 32, window=8), LayerGroup.state((3,), 100)),
    dtype="float16",
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What to put on the bench.

    Attributes:
        link: a function call, or every request and reply as bytes.
        below: the tier below memory: none, one in a dictionary, or files.
        memory_blocks: slots of a page in memory.
        below_blocks: slots of a page, and its header, in the tier below.
        hybrid: full, sliding and state groups instead of one full group.
        block_tokens: tokens of a block.
        threads: real threads and the real clock instead of steps and a virtual one.
        faults: what goes wrong in the tier below; may be replaced later by `Rig.faulty`.
        settings: laid over the settings made from the above.
    """

    link: LinkKind = "direct"
    below: BelowKind = "none"
    memory_blocks: int = 1024
    below_blocks: int = 4096
    hybrid: bool = False
    block_tokens: int = 4
    threads: bool = False
    faults: tuple[Fault, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def layout(self) -> KVLayout:
        """The layout of the spaces."""
        return HYBRID if self.hybrid else PLAIN

    def descriptor(self, tenant: str = "") -> SpaceDescriptor:
        """Describe the space of a tenant."""
        return SpaceDescriptor(
            model="toy", weights="0", layout=self.layout, block_tokens=self.block_tokens, tenant=tenant
        )


class Rig:
    """An open cache and everything that a test wants to reach around it.

    Use as a context manager. `reopen` closes the cache and opens another over what is left below memory.

    Args:
        setup: what to put on the bench.
        folder: existing and empty; used by the tier below where it has files.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self.folder = folder
        self.content = DictContent()
        self.clock = VirtualClock(1000.0)
        self.core: Core
        self.cache: Cache
        self.executor: InlineExecutor | None
        self.faulty: FaultyTier | None = None
        self._open()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        if self.faulty is not None:
            self.faulty.heal()
        self.cache.close(drain=False)

    def space(self, tenant: str = "") -> Space:
        """Return the space of a tenant."""
        return self.cache.space(self.setup.descriptor(tenant))

    def reopen(self, drain: bool = True) -> None:
        """Close the cache and open it again."""
        self.cache.close(drain=drain)
        self._open()

    def step(self, count: int = 1) -> int:
        """Run up to `count` queued transfers; return how many there were."""
        if self.executor is None:
            return 0
        return sum(self.executor.step() for _ in range(count))

    @cached_property
    def config(self) -> Config:
        """The settings of the cache on the bench."""
        setup = self.setup
        memory = {"type": "memory", "capacity": setup.memory_blocks * PAGE_BYTES, "poison": True, "prefault": False}
        tiers: list[dict[str, Any]] = [memory]
        if setup.below != "none":
            header = 0 if setup.below == "dict" else PAGE_BYTES
            capacity = setup.below_blocks * (PAGE_BYTES + header)
            tiers.append({"type": "disk", "name": BELOW, "path": str(self.folder), "capacity": capacity})
        settings = {"tiers": tiers, "verify_memory": "always", "planner": "off", "max_lease_fraction": 1.0}
        return Config.from_dict(settings | dict(setup.settings))

    def _open(self) -> None:
        self.executor = None if self.setup.threads else InlineExecutor(self.clock)
        self.core = open_core(self.config, executor=self.executor, wrap=self._wrap)
        link = Direct if self.setup.link == "direct" else Loopback
        self.cache = Cache(link(self.core), self.config)

    def _wrap(self, tier: Tier) -> Tier:
        inner = DictTier(tier.name, self.content) if self.setup.below == "dict" else tier
        self.faulty = FaultyTier(inner, self.setup.faults)
        return self.faulty
