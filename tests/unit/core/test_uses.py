from __future__ import annotations

import pytest

from kvcairn.policy.eviction.arc import ARC
from kvcairn.policy.eviction.lfu import LFU
from kvcairn.policy.eviction.s3fifo import S3FIFO
from kvcairn.space import Space
from kvcairn.testing.rig import Rig
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, rows_of, store

pytestmark = pytest.mark.filterwarnings("ignore:eviction 'lfu'")


def uses(rig: Rig, space: Space, keys: list[bytes], level: int = 0) -> list[int]:
    """Count what the policy of a tier has noted of each block beyond its coming."""
    policy = rig.core.state.levels[level].residency.policy
    rows = rows_of(rig.core, space, keys)
    if isinstance(policy, S3FIFO):
        return [int(count) for count in policy._uses[rows]]
    assert isinstance(policy, LFU | ARC)
    return [int(queue) for queue in policy._queues.queue_of(rows)]


def request(space: Space, keys: list[bytes]) -> None:
    """Do what an engine does for one request: load what is there, store the rest, let go."""
    with space.acquire(keys, deadline_s=0) as lease, space.reserve(keys, start=lease.count) as slots:
        slots.commit()


@pytest.mark.parametrize("eviction", ["lfu", "arc", "s3fifo"])
def test_a_request_is_one_use_of_each_block_it_finds_and_of_none_that_it_brings(
    make_rig: MakeRig, eviction: str
) -> None:
    rig = make_rig(eviction=eviction)
    space = rig.space()
    keys = chain(space, 6)
    request(space, keys[:3])
    assert uses(rig, space, keys[:3]) == [0, 0, 0]
    request(space, keys)
    assert uses(rig, space, keys) == [1, 1, 1, 0, 0, 0]


def test_each_further_request_is_one_more(make_rig: MakeRig) -> None:
    rig = make_rig(eviction="lfu")
    space = rig.space()
    keys = chain(space, 4)
    for _ in range(5):
        request(space, keys)
    assert uses(rig, space, keys) == [4, 4, 4, 4]


def test_storing_what_is_there_and_touching_it_are_uses(make_rig: MakeRig) -> None:
    rig = make_rig(eviction="lfu")
    space = rig.space()
    keys = chain(space, 3)
    store(space, keys)
    store(space, keys)
    space.touch(keys[:2])
    assert uses(rig, space, keys) == [2, 2, 1]


def test_a_use_counts_on_every_tier_that_has_the_block(make_rig: MakeRig) -> None:
    rig = make_rig(eviction="lfu", below="dict", lower_tiers=2)
    space = rig.space()
    keys = chain(space, 2)
    store(space, keys)
    rig.cache.drain()
    request(space, keys)
    assert [uses(rig, space, keys, level) for level in range(3)] == [[1, 1]] * 3


def test_looking_is_no_use(make_rig: MakeRig) -> None:
    rig = make_rig(eviction="lfu")
    space = rig.space()
    keys = chain(space, 2)
    store(space, keys)
    assert space.lookup(keys).blocks == space.contains(keys) == 2
    assert uses(rig, space, keys) == [0, 0]
