from __future__ import annotations

import pytest

from kvcairn.core import events
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import Rig
from kvcairn.types import BlockRemoved, BlockStored
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, space_of, state, store


def test_every_copy_that_comes_and_goes_is_told_once(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=4)
    space = rig.space()
    stream = rig.cache.events()
    keys = chain(space, 2)
    store(space, keys)
    rig.cache.drain()
    space_id = space.descriptor.space_id
    wanted = [BlockStored("memory", space_id, keys[0], None), BlockStored("memory", space_id, keys[1], keys[0])]
    wanted += [BlockStored("disk", space_id, keys[0], None), BlockStored("disk", space_id, keys[1], keys[0])]
    assert stream.poll() == wanted
    assert stream.poll() == []
    store(space, chain(space, 3, 1))
    assert BlockRemoved("memory", space_id, keys[1], keys[0]) in stream.poll()
    space.forget(keys)
    removed = {(event.tier, event.key) for event in stream.poll() if isinstance(event, BlockRemoved)}
    assert removed == {("memory", keys[0]), ("disk", keys[0]), ("disk", keys[1])}
    assert_idle(rig)


def test_what_is_never_readable_is_never_told(rig: Rig) -> None:
    space = rig.space()
    stream = rig.cache.events()
    keys = chain(space, 2)
    space.reserve(keys).abort()
    with space.reserve(keys):
        rig.cache.clear()
    assert stream.poll() == []


def test_a_block_is_told_once_for_all_its_groups(make_rig: MakeRig) -> None:
    rig = make_rig()
    space = space_of(rig, full(), state())
    stream = rig.cache.events()
    store(space, chain(space, 2))
    assert len(stream.poll()) == 2
    rig.cache.clear()
    assert len(stream.poll()) == 2


def test_readers_do_not_share(rig: Rig) -> None:
    space = rig.space()
    early = rig.cache.events()
    store(space, chain(space, 1))
    late = rig.cache.events()
    store(space, chain(space, 1, 1))
    assert (len(early.poll()), len(late.poll())) == (2, 1)
    late.close()
    late.close()
    store(space, chain(space, 1, 2))
    assert (len(early.poll()), late.poll()) == (1, [])


def test_a_reader_that_does_not_read_loses_the_oldest(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_EVENTS", 3)
    space = rig.space()
    stream = rig.cache.events()
    keys = chain(space, 5)
    store(space, keys)
    assert [event.key for event in stream.poll()] == keys[2:]


def test_iterating_waits_and_ends_with_its_time(rig: Rig) -> None:
    blocks = Blocks(rig)
    stream = rig.cache.events(timeout_s=1.0)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    assert [event.key for event in stream] == keys
    assert list(stream) == []
