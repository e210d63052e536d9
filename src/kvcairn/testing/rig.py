"""A whole cache on a bench: chosen link, tiers and layout, a virtual clock, and transfers that run when told to."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from kvcairn import requests as rq
from kvcairn.cache import Cache
from kvcairn.clock import VirtualClock
from kvcairn.config import Config
from kvcairn.core.core import Core
from kvcairn.core.link import Direct, Loopback
from kvcairn.core.open import open_core
from kvcairn.daemon.server import Server
from kvcairn.layout import KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.memory.slots import PAGE_BYTES as PAGE_BYTES
from kvcairn.remote.link import Remote
from kvcairn.remote.pool import BROKEN
from kvcairn.requests import Link, WriteBack
from kvcairn.space import Space
from kvcairn.testing.dict_tier import DictContent, DictTier
from kvcairn.testing.faulty import Fault, FaultyTier
from kvcairn.tiers.base import Tier
from kvcairn.transfer.executor import Executor, InlineExecutor

BELOW: Final = "disk"

LinkKind = Literal["direct", "loopback", "socket"]
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
        link: a function call, every request and reply as bytes, or a daemon behind its socket.
        below: the tiers below memory: none, in a dictionary each, or files.
        lower_tiers: how many there are, where there are any; they are called disk, disk2, disk3.
        write_policy: of each of them.
        memory_write_policy: of memory.
        promotion: of each of them.
        max_write_bytes_per_day: of each of them.
        eviction: of memory and of each of them.
        memory_blocks: slots of a page in memory.
        below_blocks: slots of a page, and its header, in each tier below.
        hybrid: full, sliding and state groups instead of one full group.
        block_tokens: tokens of a block.
        threads: real threads and the real clock instead of steps and a virtual one.
        faults: what goes wrong in the tiers below; may be replaced later by `Rig.faulty`.
        settings: laid over the settings made from the above.
    """

    link: LinkKind = "direct"
    below: BelowKind = "none"
    lower_tiers: int = 1
    write_policy: str = "through"
    memory_write_policy: str = "through"
    promotion: str = "keep"
    max_write_bytes_per_day: int | None = None
    eviction: str = "lru"
    memory_blocks: int = 1024
    below_blocks: int = 4096
    hybrid: bool = False
    block_tokens: int = 4
    threads: bool = False
    faults: tuple[Fault, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def lower_names(self) -> list[str]:
        """The names of the tiers below memory, fastest first."""
        count = 0 if self.below == "none" else self.lower_tiers
        return [BELOW if number == 1 else f"{BELOW}{number}" for number in range(1, count + 1)]

    @property
    def layout(self) -> KVLayout:
        """The layout of the spaces."""
        return HYBRID if self.hybrid else PLAIN

    def descriptor(self, tenant: str = "") -> SpaceDescriptor:
        """Describe the space of a tenant."""
        return SpaceDescriptor(
            model="toy", weights="0", layout=self.layout, block_tokens=self.block_tokens, tenant=tenant
        )


class Socket(Remote):
    """A client of a daemon in this process; with the link ends the daemon.

    Args:
        direct: the link to the core that is served.
        executor: runs the client's transfers too; threads of its own where None.
    """

    def __init__(self, direct: Direct, executor: Executor | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvcairn-socket-")
        path = Path(self._folder.name, "socket")
        self._direct = direct
        self._server = Server(direct, path)
        self._server.start()
        super().__init__(f"unix:{path}", executor)

    def version(self) -> int:
        """Ask the daemon: where transfers are stepped by hand, nobody waits there for what they change."""
        self.call(rq.IsIdle())
        return super().version()

    def call(self, request: Any) -> Any:
        """Handle one request, and be done with it: tests look into the core."""
        try:
            return super().call(request)
        finally:
            with suppress(*BROKEN):
                self._runs.now.pool.settle()

    def close(self) -> None:
        """End the session, the daemon and its core."""
        super().close()
        self._server.close()
        self._direct.close()
        self._folder.cleanup()


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
        self.contents = {name: DictContent() for name in (BELOW, *setup.lower_names)}
        self.clock = VirtualClock(1000.0)
        self.core: Core
        self.cache: Cache
        self.executor: InlineExecutor | None
        self.tiers: dict[str, FaultyTier] = {}
        self._open()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        for tier in self.tiers.values():
            tier.heal()
        self.cache.close(drain=False)

    @property
    def content(self) -> DictContent:
        """What lies on the first tier below memory, where that is in a dictionary."""
        return self.contents[BELOW]

    @property
    def faulty(self) -> FaultyTier | None:
        """The first tier below memory."""
        return self.tiers.get(BELOW)

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
        tiers: list[dict[str, Any]] = [memory | {"eviction": setup.eviction, "write_policy": setup.memory_write_policy}]
        tiers += [self.tier_options(name) for name in setup.lower_names]
        settings: dict[str, Any] = {"tiers": tiers, "verify_memory": "always", "planner": "off"}
        settings |= {"max_lease_fraction": 1.0, "prefetch": {"max_memory_fraction": 1.0}}
        return Config.from_dict(settings | dict(setup.settings))

    def tier_options(self, name: str) -> dict[str, Any]:
        """The settings of one of the tiers below; the folder of the first is the rig's own where it is the only one."""
        setup = self.setup
        folder = self.folder if setup.lower_tiers == 1 else self.folder / name
        folder.mkdir(exist_ok=True)
        header = 0 if setup.below == "dict" else PAGE_BYTES
        return {
            "type": "disk",
            "name": name,
            "path": str(folder),
            "capacity": setup.below_blocks * (PAGE_BYTES + header),
            "write_policy": setup.write_policy,
            "eviction": setup.eviction,
            "promotion": setup.promotion,
            "max_write_bytes_per_day": setup.max_write_bytes_per_day,
        }

    def write_back(self) -> None:
        """Have written down what memory alone has, as the end of a cache does, and drain."""
        begin: int | None = 0
        while begin is not None:
            begin = self.core.call(WriteBack(begin)).value
            self.cache.drain(timeout_s=600.0)

    def _open(self) -> None:
        self.executor = None if self.setup.threads else InlineExecutor(self.clock)
        self.core = open_core(self.config, executor=self.executor, wrap=self._wrap)
        self.cache = Cache(self._link(), self.config)

    def _link(self) -> Link:
        if self.setup.link == "socket":
            return Socket(Direct(self.core), self.executor)
        return Direct(self.core) if self.setup.link == "direct" else Loopback(self.core)

    def _wrap(self, tier: Tier) -> Tier:
        inner = DictTier(tier.name, self.contents[tier.name]) if self.setup.below == "dict" else tier
        self.tiers[tier.name] = FaultyTier(inner, self.setup.faults)
        return self.tiers[tier.name]
