"""Every operation of the public surface, played on a cache with drawn parameters and compared with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcairn.errors import LeaseError
from kvcairn.testing.table import TENANTS, Chain, Draw, Held, Table, check_distinct, check_lease, must_raise, parts_of
from kvcairn.types import FINAL, Hints

POLICIES: Final = (None, "best_effort", "wait_complete", "timeout")

# -- asking


def lookup(table: Table, draw: Draw) -> None:
    """Look a chain up."""
    chain = table.chain(draw)
    table.note("lookup", chain)
    table.compare(chain, table.look(chain))


def contains(table: Table, draw: Draw) -> None:
    """Count the leading run by exact key."""
    chain = table.chain(draw, whole=True)
    table.note("contains", chain)
    found = chain.space.contains(list(chain.keys))
    assert 0 <= found <= len(chain.keys)
    assert all(table.model.may_have(chain.space_id, key) for key in chain.keys[:found])


def touch(table: Table, draw: Draw) -> None:
    """Report that the engine used blocks."""
    chain = table.chain(draw, whole=True)
    table.note("touch", chain)
    chain.space.touch(list(chain.keys))


def get(table: Table, draw: Draw) -> None:
    """Copy blocks out."""
    chain, deadline_s = table.chain(draw, whole=True), table.deadline_s(draw)
    table.note("get", chain, deadline_s)
    blocks = chain.space.get(list(chain.keys), deadline_s=deadline_s)
    assert len(blocks) in [0, *table.lengths(chain, sure=False)]
    if not table.rig.setup.hybrid:
        for key, block in zip(chain.keys, blocks, strict=False):
            table.oracle.check(block, chain.space_id, key)


def acquire(table: Table, draw: Draw) -> None:
    """Pin what is there, check its bytes, and keep the lease."""
    chain, deadline_s = table.chain(draw), table.deadline_s(draw)
    table.note("acquire", chain, deadline_s)
    before, others = table.look(chain), _is_held(table, chain)
    lease = chain.space.acquire(list(chain.keys), start=chain.start, deadline_s=deadline_s, parent=chain.parent)
    held = Held(chain, lease, chain.wanted[: lease.count])
    table.hold(table.leases, held, table.drop_lease)
    check_lease(table, held)
    assert lease.count in [0, *table.lengths(chain, sure=False)]
    if table.is_ample and deadline_s > 0 and not others:
        assert lease.count == before.blocks, f"acquired {lease.count} of {before}"
    assert (lease.reason is None) == (lease.count == len(chain.wanted)), f"{lease.count}: {lease.reason}"


def release(table: Table, draw: Draw) -> None:
    """Release an open lease; doing so again changes nothing."""
    held = table.pick(draw, table.leases)
    table.note("release", held.chain)
    table.drop_lease(held)
    held.handle.release()


# -- storing


def put(table: Table, draw: Draw) -> None:
    """Store blocks in one call."""
    chain = table.chain(draw, whole=True)
    table.note("put", chain)
    done = chain.space.put(list(chain.keys), [_block(table, chain, key) for key in chain.keys])
    assert len(done) == len(chain.keys)
    for key, is_stored in zip(chain.keys, done, strict=True):
        if is_stored:
            table.committed(chain, key, table.model.groups())
        else:
            table.model.maybe(chain.space_id, key)
    if table.is_ample and not _is_held(table, chain):
        assert all(done), f"there is room, but put says {done}"
        table.compare(chain, table.look(chain))


def reserve(table: Table, draw: Draw) -> None:
    """Take slots for what is missing and fill them; the reservation stays open."""
    chain = table.chain(draw)
    table.note("reserve", chain)
    reservation = chain.space.reserve(list(chain.keys), start=chain.start, parent=chain.parent)
    keys = tuple(reservation.keys)
    assert tuple(key for key in chain.wanted if key in set(keys)) == keys, "the keys of a reservation are in order"
    held = Held(chain, reservation, keys)
    check_distinct(table, held)
    for i, key in enumerate(keys):
        for group in parts_of(table, held, i):
            table.oracle.fill(reservation.part(i, group), chain.space_id, key, group)
    table.hold(table.reservations, held, table.abort)


def commit(table: Table, draw: Draw) -> None:
    """Publish all of a reservation or part of it; doing so again is refused."""
    held = table.pick(draw, table.reservations)
    ok = [draw.integer(0, 3) > 0 for _ in held.keys] if draw.integer(0, 1) else None
    table.note("commit", held.chain, ok)
    groups = [parts_of(table, held, i) for i in range(len(held.keys))]
    table.reservations.remove(held)
    held.handle.commit(ok)
    for i, key in enumerate(held.keys):
        if (ok is None or ok[i]) and key not in held.dead:
            table.committed(held.chain, key, groups[i])
    table.compare(held.chain, table.look(held.chain))
    must_raise(held.handle.commit, LeaseError)


def abort(table: Table, draw: Draw) -> None:
    """Leave a reservation without publishing."""
    held = table.pick(draw, table.reservations)
    table.note("abort", held.chain)
    table.abort(held)
    table.compare(held.chain, table.look(held.chain))


# -- jobs


def prefetch(table: Table, draw: Draw) -> None:
    """Start loading a chain into memory; the job stays open."""
    chain, policy = table.chain(draw), POLICIES[draw.integer(0, len(POLICIES) - 1)]
    table.note("prefetch", chain, policy)
    job = chain.space.prefetch(
        list(chain.keys), start=chain.start, policy=policy, deadline_s=table.deadline_s(draw), parent=chain.parent
    )
    assert 0 <= job.ready <= len(chain.wanted)
    table.hold(table.jobs, Held(chain, job, ()), table.close_job)


def finish_job(table: Table, draw: Draw) -> None:
    """Wait for a job, cancel it, close it, or take its lease over."""
    held = table.pick(draw, table.jobs)
    how = ("wait", "cancel", "close", "lease")[draw.integer(0, 3)]
    table.note("finish_job", held.chain, how)
    job = held.handle
    if how == "wait":
        job.wait(1.0)
        assert 0 <= job.ready <= len(held.chain.wanted)
    elif how == "cancel":
        job.cancel()
        assert job.state in FINAL, f"cancelled, but {job.state}"
    elif how == "close":
        table.close_job(held)
    else:
        _lease_job(table, held, None if draw.integer(0, 1) else draw.integer(0, len(held.chain.wanted)))


def _lease_job(table: Table, held: Held, count: int | None) -> None:
    table.jobs.remove(held)
    try:
        lease = held.handle.lease(count)
    except LeaseError:
        lived_s = table.rig.clock.now() - held.since_s
        assert lived_s >= table.rig.config.prefetch.time_to_live_s, f"the job is gone after {lived_s} s"
        return
    taken = Held(held.chain, lease, held.chain.wanted[: lease.count])
    table.hold(table.leases, taken, table.drop_lease)
    check_lease(table, taken)
    assert count is None or lease.count <= count
    assert lease.count in [0, *table.lengths(held.chain, sure=False)]


# -- the whole cache


def step(table: Table, draw: Draw) -> None:
    """Run some queued transfers."""
    count = draw.integer(1, 4)
    table.note("step", count)
    table.rig.step(count)


def forget(table: Table, draw: Draw) -> None:
    """Forget blocks."""
    chain = table.chain(draw, whole=True)
    table.note("forget", chain)
    chain.space.forget(list(chain.keys))
    table.model.forget(chain.space_id, chain.keys)
    table.kill(chain.space_id, chain.keys)


def hint(table: Table, draw: Draw) -> None:
    """Tell what is known about the future of blocks."""
    chain = table.chain(draw, whole=True)
    ttl_s = (None, 5.3, 50.3)[draw.integer(0, 2)]
    hints = Hints(priority=draw.integer(0, 100), ttl_s=ttl_s, pin=draw.integer(0, 4) == 0)
    table.note("hint", chain, hints)
    pinned = chain.space.hint(list(chain.keys), hints)
    assert 0 <= pinned <= len(chain.keys) * hints.pin
    if pinned:
        table.pinned.append(chain)
    if ttl_s is not None:
        table.model.limit(chain.space_id, chain.keys, table.rig.clock.now() + ttl_s)


def advance(table: Table, draw: Draw) -> None:
    """Let time pass."""
    by_s = float(draw.integer(1, 20))
    table.note("advance", by_s)
    table.rig.clock.advance(by_s)


def drain(table: Table, draw: Draw) -> None:
    """Let the background finish."""
    table.note("drain")
    assert table.rig.cache.drain(timeout_s=600.0), "the background does not finish"
    table.model.drained()


def clear(table: Table, draw: Draw) -> None:
    """Drop the blocks of a space, or of all."""
    tenant = (None, *TENANTS)[draw.integer(0, len(TENANTS))]
    table.note("clear", tenant)
    table.rig.cache.clear(space=None if tenant is None else table.rig.space(tenant))
    space_id = None if tenant is None else table.rig.setup.descriptor(tenant).space_id
    table.model.clear(space_id)
    table.kill(space_id, None)


def clear_tier(table: Table, draw: Draw) -> None:
    """Drop the blocks of one tier."""
    lower = table.rig.setup.lower_names
    tier = ("memory", *lower)[draw.integer(0, len(lower))]
    table.note("clear_tier", tier)
    table.rig.cache.clear(tier=tier)
    if tier == "memory":
        table.kill(None, None)
    if lower and table.rig.setup.write_policy != "none":
        table.model.doubt()
    elif tier == "memory":  # nothing lies below
        table.model.clear(None)


def exchange_tier(table: Table, draw: Draw) -> None:
    """Detach a tier of files from the running cache and add it again, the last one now; what lies there stays."""
    names = table.rig.setup.lower_names if table.rig.setup.below == "disk" else []
    if not names:
        return
    name, is_drained = names[draw.integer(0, len(names) - 1)], draw.integer(0, 2) > 0
    table.note("exchange_tier", name, is_drained)
    table.rig.cache.detach_tier(name, drain=is_drained)
    assert name not in table.rig.cache.stats().tiers
    table.rig.cache.add_tier(table.rig.tier_options(name))
    assert list(table.rig.cache.stats().tiers)[-1] == name
    table.model.restart()
    table.model.doubt()


def reopen(table: Table, draw: Draw) -> None:
    """Close the cache and open it again: what lies below memory stays, which under some policies is all of it."""
    is_drained = draw.integer(0, 2) > 0
    table.note("reopen", is_drained)
    table.let_go()
    setup = table.rig.setup
    is_kept = is_drained and setup.below != "none" and setup.write_policy in ("through", "back")
    if is_drained:
        table.rig.write_back()
        assert table.rig.cache.drain(timeout_s=600.0)
        table.model.drained()
        stats = table.rig.cache.stats()
        is_kept = is_kept and not any(sum(tier.writes_dropped.values()) for tier in stats.tiers.values())
    table.rig.reopen(drain=is_drained)
    table.model.restart()
    if setup.below == "none" or setup.write_policy == "none":
        table.model.clear(None)
    elif not is_kept:
        table.model.doubt()


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, how often the driver plays it, and which list of open handles it needs."""

    play: Callable[[Table, Draw], None]
    weight: int
    needs: str = ""

    def is_possible(self, table: Table) -> bool:
        """Return whether there is a handle to play it on."""
        return not self.needs or bool(getattr(table, self.needs))


OPERATIONS: Final = {
    "lookup": Operation(lookup, 10),
    "contains": Operation(contains, 3),
    "touch": Operation(touch, 5),
    "get": Operation(get, 6),
    "acquire": Operation(acquire, 14),
    "release": Operation(release, 8, "leases"),
    "put": Operation(put, 10),
    "reserve": Operation(reserve, 12),
    "commit": Operation(commit, 9, "reservations"),
    "abort": Operation(abort, 2, "reservations"),
    "prefetch": Operation(prefetch, 6),
    "finish_job": Operation(finish_job, 6, "jobs"),
    "step": Operation(step, 12),
    "forget": Operation(forget, 3),
    "hint": Operation(hint, 3),
    "advance": Operation(advance, 2),
    "drain": Operation(drain, 2),
    "clear": Operation(clear, 1),
    "clear_tier": Operation(clear_tier, 1),
    "exchange_tier": Operation(exchange_tier, 1),
    "reopen": Operation(reopen, 1),
}


def _block(table: Table, chain: Chain, key: bytes) -> bytes:
    """Return the parts of a block, one behind the other in group order."""
    layout, tokens = table.rig.setup.layout, table.rig.setup.block_tokens
    return b"".join(
        table.oracle.part(chain.space_id, key, group, layout.part_bytes(group, tokens))
        for group in table.model.groups()
    )


def _is_held(table: Table, chain: Chain) -> bool:
    """Return whether an open handle may write one of these keys, or keep a forgotten copy of it alive."""
    return any(
        held.chain.space_id == chain.space_id and not set(chain.keys).isdisjoint(held.chain.keys)
        for held in (*table.leases, *table.reservations, *table.jobs)
    )
