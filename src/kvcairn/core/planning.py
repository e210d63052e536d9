"""Applies the planner: cuts what was found where loading more would end later than computing it.

Nothing is cut while the speed of the engine is not known.
"""

from __future__ import annotations

import numpy as np

from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.core.walk import Walk
from kvcairn.policy.planner import PrefillSpeed, patience_s, plan
from kvcairn.types import MissReason, TooSlow

NEVER_S = float("inf")


def note_prefill(space: SpaceInfo, tokens: int, seconds: float) -> None:
    """An engine has computed tokens of a space."""
    space.prefill = space.prefill or PrefillSpeed()
    space.prefill.note(tokens, seconds)


def worth_loading(state: State, space: SpaceInfo, walk: Walk) -> Walk:
    """Return the part of a walk that is worth loading."""
    prefill = space.prefill
    if prefill is None or state.config.planner == "off" or not walk.levels.tobytes().strip(b"\x01"):
        return walk  # nothing is known, or all is in memory
    assert space.descriptor is not None
    lengths = np.array([0, *(walk.sparse or range(1, walk.length + 1))], dtype=np.intp)
    reads = {}
    for number in np.unique(walk.levels[walk.levels > 1]).tolist():
        level = state.levels[number - 1]
        blocks = np.concatenate([[0], np.cumsum(walk.levels == number)])[lengths]
        reads[level.name] = level.speed, blocks * float(space.chain_bytes)
    chosen = plan(lengths, reads, prefill.compute_s(space.descriptor.block_tokens), state.now())
    if chosen is None:
        return walk
    left_out = walk.length - chosen.length
    too_slow = TooSlow(tier=chosen.tier, blocks=left_out, load_s=chosen.load_s, compute_s=chosen.compute_s)
    return walk.cut(chosen.length, MissReason.TOO_SLOW, too_slow)


def worth_prefetching(state: State, space: SpaceInfo, walk: Walk, is_awaited: bool) -> Walk:
    """Return what of a walk a prefetch brings: nothing from slower tiers where that is below the threshold."""
    if is_awaited:
        walk = worth_loading(state, space, walk)
    assert space.descriptor is not None
    lengths = state.walker.in_memory(space, walk.rows[: walk.length], state.now())
    here = lengths[-1] if lengths else 0
    if 0 < (walk.length - here) * space.descriptor.block_tokens < state.config.prefetch.min_tokens:
        return walk.cut(here, MissReason.TOO_SLOW)
    return walk


def longest_wait_s(state: State, space: SpaceInfo, blocks: int) -> float:
    """Return how long a load of so many blocks is waited for, whatever was expected of it."""
    if space.prefill is None or state.config.planner == "off" or space.descriptor is None:
        return NEVER_S
    return patience_s(space.prefill.compute_s(blocks * space.descriptor.block_tokens))
