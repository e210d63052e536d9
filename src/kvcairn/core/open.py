"""Puts a core together from settings: arena, tiers, executor, and what an earlier run left behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvcairn.config import Config, TierOptions
from kvcairn.core.budget import BudgetFile
from kvcairn.core.core import Core
from kvcairn.core.events import Readers
from kvcairn.core.holds import Ledger
from kvcairn.core.level import Level
from kvcairn.core.rebuild import Rebuild
from kvcairn.core.residency import Fastest, Residency
from kvcairn.core.restore import restore
from kvcairn.core.spaces import Spaces
from kvcairn.core.state import State
from kvcairn.core.walk import Walker
from kvcairn.errors import ConfigError, TierError
from kvcairn.index.facts import NodeFacts
from kvcairn.index.tree import Tree
from kvcairn.memory.arena import Arena
from kvcairn.memory.slots import PAGE_BYTES, Addresses, SlotAllocator
from kvcairn.policy import eviction
from kvcairn.tiers import registry
from kvcairn.tiers.base import Delete, Tier, TierContext
from kvcairn.tiers.inventory import Inventory
from kvcairn.transfer.executor import Executor, ThreadExecutor
from kvcairn.transfer.task import Task

logger = logging.getLogger(__name__)

PREFAULT_STEP_BYTES = 64 << 20
NEVER_S = float("inf")

Wrap = Callable[[Tier], Tier]


def open_core(config: Config, *, executor: Executor | None = None, wrap: Wrap | None = None) -> Core:
    """Return a running core.

    Args:
        config: checked settings, memory first.
        executor: who runs transfers; threads unless given.
        wrap: put around each tier below memory, for tests.

    Raises:
        ConfigError: a tier cannot be opened as the settings say. Nothing is left open then.
    """
    executor = executor or ThreadExecutor()
    options = config.memory
    capacity = options.capacity_bytes // PAGE_BYTES * PAGE_BYTES
    if not capacity:
        raise ConfigError("tiers[0].capacity", f"a slot takes at least {PAGE_BYTES} bytes", options.capacity_bytes)
    try:
        allocator = SlotAllocator(capacity, options.region_bytes)
    except ValueError as error:
        raise ConfigError("tiers[0].region", str(error), options.region_bytes) from error
    arena = Arena(capacity)
    tree = Tree()
    fastest, readers, spaces = Fastest(tree), Readers(tree), Spaces(tree)
    policy = eviction.create(options.eviction, NodeFacts(tree), "tiers[0].eviction")
    memory = Residency(options.name, tree, allocator, policy, fastest, readers)
    levels = [
        Level(
            options.name,
            memory,
            write_policy=options.write_policy,
            min_touches=options.min_touches,
            capacity_bytes=options.capacity_bytes,
        )
    ]
    fastest.set_levels([memory])
    walker = Walker(tree, fastest, levels)
    state = State(config, executor, arena, tree, spaces, fastest, readers, levels, walker, Ledger())
    state.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if hasattr(os, "eventfd") else -1
    if options.poison:
        allocator.on_free = lambda addresses: _poison(arena, allocator, addresses)
    core = Core(state)
    with ExitStack() as on_failure:
        on_failure.callback(close_core, core)
        for number, each in enumerate(config.tiers[1:], start=1):
            add_tier(core, each, f"tiers[{number}]", wrap)
        on_failure.pop_all()
    executor.start(core.tick)
    if options.prefault:
        executor.submit(_prefault(state, options.name))
    return core


def add_tier(core: Core, options: TierOptions, path: str, wrap: Wrap | None = None) -> None:
    """Open a tier and attach it behind the others. Does I/O, so it runs outside of the core's lock.

    Raises:
        ConfigError: it cannot be opened; the core is as before.
    """
    tier = registry.create(options, TierContext(core.state.executor.clock, path), path)
    tier = wrap(tier) if wrap else tier
    try:
        found = Inventory.of(tier.open())
    except TierError as error:
        raise ConfigError(path, str(error)) from error
    with ExitStack() as on_failure:
        on_failure.callback(tier.close)
        level = _level(core.state, tier, options, path)
        with core.state.changed:
            left = restore(core.state, level, found)
            rebuild = Rebuild(core.state, level, core.drops)
        _make_fit(level, left, path)
        with core.state.changed:
            core.attach(level, rebuild)
        on_failure.pop_all()


def _make_fit(level: Level, left: list[Delete], path: str) -> None:
    """Give the space of what finds no place back, before anything new is stored."""
    allocator, tier = level.residency.allocator, level.tier
    assert tier is not None
    retired, allocator.retired = allocator.retired, []
    try:
        tier.retire(retired)
        tier.delete(left)
    except TierError as error:
        raise ConfigError(f"{path}.capacity", f"the tier holds more, and cannot be trimmed: {error}") from error


def close_core(core: Core) -> None:
    """Stop transfers, then let go of tiers and arena. What is queued is dropped: drain before."""
    state = core.state
    with state.changed:
        state.is_closing = True
        state.notify()
    state.executor.close()
    for level in state.lower:
        if level.tier is not None:
            with suppress(TierError):  # what was given up in the index must not take the place of the rest at opening
                level.tier.retire(level.residency.allocator.retired)
            level.tier.close()
    state.arena.close()
    with state.changed:
        eventfd, state.eventfd = state.eventfd, -1
    if eventfd >= 0:
        os.close(eventfd)


def _level(state: State, tier: Tier, options: TierOptions, path: str) -> Level:
    given: dict[str, Any] = {name: getattr(options, name) for name in options.__struct_fields__}
    registry.check_capacity(tier, options, path)
    allocator = SlotAllocator(given["capacity_bytes"] - tier.overhead_bytes, tier.region_bytes)
    allocator.go_on_from(tier.last_generation)
    policy = eviction.create(given.get("eviction", "lru"), NodeFacts(state.tree), f"{path}.eviction")
    residency = Residency(options.name, state.tree, allocator, policy, state.fastest, state.readers)
    residency.header_bytes = tier.header_bytes
    level = Level(
        options.name,
        residency,
        tier,
        write_policy=given.get("write_policy", "through"),
        min_touches=given.get("min_touches", 2),
        promotion=given.get("promotion", "keep"),
        timeout_s=given.get("deadline_s", 5.0),
        capacity_bytes=given["capacity_bytes"],
    )
    level.budget.limit_bytes = given.get("max_write_bytes_per_day")
    if level.budget.limit_bytes is not None and "path" in given:
        level.budget_file = BudgetFile(Path(given["path"]))
        level.budget_file.load(level.budget)
    for space in state.spaces:
        for group in space.part_bytes:
            residency.of(group)
    return level


def _poison(arena: Arena, allocator: SlotAllocator, addresses: Addresses) -> None:
    for address in addresses.tolist():
        arena.poison(address * PAGE_BYTES, allocator.locate(address)[0].slot_bytes)


def _prefault(state: State, tier: str) -> Task:
    def touch_all() -> None:
        for begin in range(0, state.arena.capacity_bytes, PREFAULT_STEP_BYTES):
            if state.is_closing:
                return
            state.arena.prefault(begin, min(PREFAULT_STEP_BYTES, state.arena.capacity_bytes - begin))

    return Task(tier, "prefault", touch_all, lambda value, error: None, lambda: None, timeout_s=NEVER_S)
