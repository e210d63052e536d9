"""A cache, a plain model beside it, and what is open between them: what the operations of a random test share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvcairn.errors import KVCairnError
from kvcairn.layout import SpaceDescriptor
from kvcairn.space import Space
from kvcairn.testing.oracle import ByteOracle
from kvcairn.testing.plain_model import PlainModel
from kvcairn.testing.rig import Rig
from kvcairn.types import UNKNOWN, Hints, Hit, Parent

TENANTS: Final = ("", "b")
_LOG_LINES: Final = 40
_MOST_OPEN: Final = 5


class Draw(Protocol):
    """Where an operation takes its parameters from."""

    def integer(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`, both included."""
        ...


@dataclass(frozen=True, slots=True)
class Chain:
    """The keys of one call.

    Attributes:
        space: of the tenant that calls.
        descriptor: of that space.
        keys: as handed in.
        parent: as handed in: None where the keys begin at the root.
        start: number of the first block wanted.
        text: the prompt for people.
    """

    space: Space
    descriptor: SpaceDescriptor
    keys: tuple[bytes, ...]
    parent: Parent
    start: int
    text: str

    @property
    def space_id(self) -> bytes:
        """Id of the space."""
        return self.descriptor.space_id

    @property
    def wanted(self) -> tuple[bytes, ...]:
        """The keys from `start` on."""
        return self.keys[self.start :]


@dataclass(slots=True)
class Held:
    """An open lease, reservation or job.

    Attributes:
        chain: the call that it came from.
        handle: the object itself.
        keys: what it holds.
        since_s: when it was opened.
        dead: keys of a reservation that were forgotten meanwhile: committing them publishes nothing.
    """

    chain: Chain
    handle: Any
    keys: tuple[bytes, ...]
    since_s: float = 0.0
    dead: set[bytes] = field(default_factory=set)


class Table:
    """The cache on the bench, the model, the oracle, and every open handle. One thread.

    Args:
        rig: the cache.
        letters: size of the alphabet that prompts are made of; a block is one letter.
        depth: most blocks of a prompt.
        is_ample: all that the alphabet can give fits into every tier, so that answers are exact.
    """

    def __init__(self, rig: Rig, letters: int = 2, depth: int = 6, is_ample: bool = True) -> None:
        self.rig = rig
        self.is_ample = is_ample
        self.oracle = ByteOracle(1)
        self.model = PlainModel(rig.setup.layout, rig.setup.block_tokens)
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.leases: list[Held] = []
        self.reservations: list[Held] = []
        self.jobs: list[Held] = []
        self.pinned: list[Chain] = []
        self._alphabet = (letters, depth)

    # -- drawing

    def chain(self, draw: Draw, whole: bool = False) -> Chain:
        """Draw a prompt, and a way of naming a part of it; `whole` for calls without `start` and `parent`."""
        letters, depth = self._alphabet
        prompt = [draw.integer(0, letters - 1) for _ in range(draw.integer(1, depth))]
        tenant = TENANTS[draw.integer(0, 7) == 0]
        descriptor, space = self.rig.setup.descriptor(tenant), self.rig.space(tenant)
        keys = space.keys([letter for letter in prompt for _ in range(self.rig.setup.block_tokens)])
        first, parent, start = 0, None, 0
        if not whole:
            start = draw.integer(0, len(keys)) if draw.integer(0, 3) == 0 else 0
            if draw.integer(0, 3) == 0:
                first = draw.integer(0, len(keys) - 1)
                start = min(start, len(keys) - first)
            parent = self._parent(draw, keys, first)
        text = f"{tenant}{prompt}[{first}:] from {start}" + (" floating" if parent is UNKNOWN else "")
        return Chain(space, descriptor, tuple(keys[first:]), parent, start, text)

    def deadline_s(self, draw: Draw) -> float:
        """Draw how long to wait."""
        return (0.0, 1.0)[draw.integer(0, 1)]

    def pick(self, draw: Draw, held: list[Held]) -> Held:
        """Draw one of the open handles."""
        return held[draw.integer(0, len(held) - 1)]

    def note(self, *what: object) -> None:
        """Remember what is about to be done, for the report of a failure; what expired before it stays expired."""
        self.model.pass_time(self.rig.clock.now())
        self.log.append(" ".join(part.text if isinstance(part, Chain) else str(part) for part in what))

    def _parent(self, draw: Draw, keys: Sequence[bytes], first: int) -> Parent:
        if draw.integer(0, 7) == 0:
            return UNKNOWN
        return keys[first - 1] if first else None

    # -- the model

    def lengths(self, chain: Chain, sure: bool) -> list[int]:
        """Return the restorable lengths that must be (`sure`) or may be there now."""
        self.model.pass_time(self.rig.clock.now())
        return self.model.boundaries(chain.space_id, chain.keys, chain.start, sure)

    def compare(self, chain: Chain, hit: Hit) -> None:
        """Compare an answer with the model."""
        found, allowed = set(hit.boundaries), set(self.lengths(chain, sure=False))
        assert found <= allowed, f"{chain.text}: found {sorted(found)}, but at most {sorted(allowed)} can be there"
        if self.is_ample:
            needed = set(self.lengths(chain, sure=True))
            assert needed <= found, f"{chain.text}: found {sorted(found)}, but {sorted(needed)} must be there"
        wanted = len(chain.wanted)
        assert hit.blocks == max(found, default=0)
        assert hit.tokens == hit.blocks * self.rig.setup.block_tokens
        assert sum(hit.by_tier.values()) == hit.blocks, f"{hit} does not add up"
        assert (hit.reason is None) == (hit.blocks == wanted), f"{hit} of {wanted} blocks"
        assert 0 <= hit.pending <= wanted - hit.blocks

    def look(self, chain: Chain) -> Hit:
        """Look a chain up, and see that looking changes nothing."""
        hit = chain.space.lookup(list(chain.keys), start=chain.start, parent=chain.parent)
        assert hit == chain.space.lookup(list(chain.keys), start=chain.start, parent=chain.parent)
        return hit

    def committed(self, chain: Chain, key: bytes, groups: Sequence[int]) -> None:
        """These copies have just been published."""
        self.model.commit(chain.space_id, key, groups)

    # -- open handles

    def hold(self, where: list[Held], held: Held, drop: Callable[[Held], None]) -> None:
        """Keep a handle open; beyond a few the oldest is dropped."""
        held.since_s = self.rig.clock.now()
        where.append(held)
        if len(where) > _MOST_OPEN:
            drop(where[0])

    def kill(self, space_id: bytes | None, keys: Sequence[bytes] | None) -> None:
        """These blocks are forgotten: open reservations of theirs publish nothing."""
        for held in self.reservations:
            if space_id in (None, held.chain.space_id):
                held.dead.update(held.keys if keys is None else set(keys).intersection(held.keys))

    def drop_lease(self, held: Held) -> None:
        """Check and release a lease."""
        check_lease(self, held)
        self.leases.remove(held)
        held.handle.release()

    def abort(self, held: Held) -> None:
        """Leave a reservation without publishing anything."""
        self.reservations.remove(held)
        with held.handle:
            pass

    def close_job(self, held: Held) -> None:
        """Close a job."""
        self.jobs.remove(held)
        held.handle.close()

    def let_go(self) -> None:
        """Release, abort, close and unpin all that is held."""
        for where, drop in (
            (self.leases, self.drop_lease), (self.reservations, self.abort), (self.jobs, self.close_job),
        ):  # fmt: skip
            for held in list(where):
                drop(held)
        for chain in self.pinned:
            chain.space.hint(list(chain.keys), Hints(pin=False))
        self.pinned.clear()


def check(table: Table, every_lease: bool = True) -> None:
    """Check what must hold after every step: the books, the bounds, and the bytes of what is held.

    Raises:
        AssertionError: something does not hold.
    """
    table.rig.core.check()
    stats = table.rig.cache.stats()
    for name, tier in stats.tiers.items():
        assert 0 <= tier.used_bytes <= tier.capacity_bytes, f"{name} holds more than it may: {tier}"
        assert 0 <= tier.leased_bytes <= tier.used_bytes, f"{name}: {tier}"
        assert 0 <= tier.dirty_bytes <= tier.used_bytes, f"{name}: {tier}"
        assert min(tier.quarantined_bytes, tier.rounding_bytes, tier.blocks, tier.in_flight) >= 0, f"{name}: {tier}"
    counted = sum(stats.hits_by_tier.values()) + sum(stats.misses_by_reason.values())
    assert counted == stats.blocks_asked, f"{counted} hits and misses of {stats.blocks_asked} blocks asked for"
    assert min((*stats.hits_by_tier.values(), *stats.misses_by_reason.values()), default=0) >= 0
    assert stats.open_leases == len(table.leases), f"{stats.open_leases} leases are open, not {len(table.leases)}"
    assert stats.open_reservations == len(table.reservations)
    for held in table.leases if every_lease else table.leases[-1:]:
        check_lease(table, held)


def finish(table: Table) -> None:
    """Let go of everything and check that nothing is held or under way.

    Raises:
        AssertionError: something is.
    """
    table.let_go()
    assert table.rig.cache.drain(timeout_s=600.0), "the background does not finish"
    check(table)
    stats = table.rig.cache.stats()
    assert stats.open_jobs == 0
    for name, tier in stats.tiers.items():
        busy = (tier.leased_bytes, tier.quarantined_bytes, tier.in_flight)
        assert busy == (0, 0, 0), f"{name} is idle, but leased, quarantined, in flight are {busy}"


def check_lease(table: Table, held: Held) -> None:
    """Check every byte that a lease shows."""
    lease, chain = held.handle, held.chain
    assert lease.count == len(held.keys)
    for group in table.model.groups():
        offsets = lease.offsets(group)
        assert len(offsets) == lease.count
        for i, key in enumerate(held.keys):
            if offsets[i] >= 0:
                table.oracle.check(lease.part(i, group), chain.space_id, key, group)
    needed = table.model.needed(lease.count)
    for group, first in needed:
        assert (lease.offsets(group)[first:] >= 0).all(), f"group {group} of a lease lacks blocks from {first} on"


def parts_of(table: Table, held: Held, i: int) -> list[int]:
    """Return the groups for which a reservation holds a slot of its block `i`."""
    return [group for group in table.model.groups() if held.handle.offsets(group)[i] >= 0]


def check_distinct(table: Table, held: Held) -> None:
    """Check that a reservation shares no byte with anything else that is open."""
    mine = [int(o) for g in table.model.groups() for o in held.handle.offsets(g) if o >= 0]
    assert len(set(mine)) == len(mine), "a reservation holds a slot twice"
    for other in (*table.leases, *table.reservations):
        if other is not held:
            theirs = {int(o) for g in table.model.groups() for o in other.handle.offsets(g) if o >= 0}
            assert not theirs & set(mine), f"{held.chain.text} shares a slot with {other.chain.text}"


def must_raise(what: Callable[[], object], error: type[KVCairnError]) -> None:
    """Call, and expect that error."""
    try:
        what()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")
