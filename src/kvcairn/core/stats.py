"""The numbers of one moment."""

from __future__ import annotations

from kvcairn.core.state import State
from kvcairn.types import Stats, add_to


def stats(state: State) -> Stats:
    """Return the statistics of a cache; the lock is held."""
    by_space: dict[str, int] = {}
    by_tenant: dict[str, int] = {}
    for level in state.levels:
        for (number, group), count in level.residency.counts.copies.items():
            space = state.spaces[number]
            nbytes = count * level.residency.slot_bytes(space, group)
            add_to(by_space, space.rows.space_id.hex(), nbytes)
            add_to(by_tenant, space.descriptor.tenant if space.descriptor else "", nbytes)
    now_s, levels = state.now(), state.levels
    return Stats(
        tiers={level.name: level.stats(state.spaces, now_s, levels[n + 1 :]) for n, level in enumerate(levels)},
        hits_by_tier=dict(state.served.hits),
        misses_by_reason=dict(state.served.misses),
        blocks_asked=state.served.asked,
        open_leases=state.ledger.count("lease"),
        open_reservations=state.ledger.count("reservation"),
        open_jobs=state.ledger.count("job"),
        spaces=by_space,
        tenants=by_tenant,
        prefill_tokens_per_s={
            space.rows.space_id.hex(): space.prefill.tokens / space.prefill.seconds
            for space in state.spaces
            if space.prefill is not None
        },
    )
