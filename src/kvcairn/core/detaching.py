"""Takes a tier out of the index in pieces, so that no caller waits for work that grows with the tier.

While it goes on the tier is in the statistics, with fewer blocks after each piece. What the index has not dropped yet
is found and read as before; nothing new is written there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from kvcairn.core.leaving import Writes
from kvcairn.core.level import Level
from kvcairn.core.state import State
from kvcairn.errors import ConfigError
from kvcairn.types import MissReason

ROWS_AT_ONCE = 1024  # of the index, looked at under one hold of the lock
PAUSE_S = 1e-4  # between pieces: whoever gives a lock back and asks at once would mostly get it again


class Numbered(Protocol):
    """Keeps numbers of tiers."""

    def renumber(self, gone: int) -> None:
        """See `walk.renumber`."""


def begin(state: State, level: Level, writes: Writes) -> Level:
    """Write to a tier no more; the lock is held.

    What is being written stays claimed in the index, where `drop_all` finds it.

    Raises:
        ConfigError: it is the memory tier, or is being detached already. Nothing is changed then.
    """
    if level is state.memory:
        raise ConfigError("tier", "the memory tier cannot be detached", level.name)
    if level.is_leaving:
        raise ConfigError("tier", "it is being detached already", level.name)
    level.is_leaving = True
    writes.detach(level)
    return level


def drop_all(state: State, level: Level) -> None:
    """Drop what the index knows of a tier that `begin` has closed for writes; takes the lock for each piece."""
    with state.changed:
        rows = state.tree.nodes.rows  # rows made later have no copies there
    for first in range(0, rows, ROWS_AT_ONCE):
        with state.changed:
            dropped = [_drop(level, group, first) for group in range(len(level.residency.copies))]
            if any(dropped):
                state.notify()
        if any(dropped):
            time.sleep(PAUSE_S)


def _drop(level: Level, group: int, first: int) -> int:
    copies = level.residency.copies[group]
    rows = first + np.flatnonzero(copies.state[first : min(first + ROWS_AT_ONCE, copies.state.size - 1)])
    level.residency.drop(group, rows, MissReason.VANISHED)
    return rows.size


def end(state: State, level: Level, holders: Iterable[Numbered]) -> None:
    """Take an emptied tier off the list; the lock is held."""
    number = state.levels.index(level)
    for each in holders:
        each.renumber(number + 1)
    state.levels.remove(level)
    state.fastest.remove(number)
    state.notify()
