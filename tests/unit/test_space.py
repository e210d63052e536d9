from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvcairn.errors import LayoutError
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.space import Space
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.types import UNKNOWN, MissReason
from tests.unit.conftest import MakeRig


@pytest.fixture
def space(rig: Rig) -> Space:
    return rig.space()


def test_sizes_are_those_of_the_layout(make_rig: MakeRig) -> None:
    rig = make_rig(hybrid=True)
    space = rig.space()
    layout, tokens = space.descriptor.layout, space.descriptor.block_tokens
    parts = [layout.part_bytes(group, tokens) for group in range(3)]
    assert [space.part_bytes(group) for group in range(3)] == parts
    assert space.block_bytes == sum(parts)
    assert space.layer_range(1) == (parts[0] // 2, parts[0] // 2)
    assert space.layer_range(3, group=2) == (0, parts[2])
    for group in (3, -1):
        with pytest.raises(LayoutError):
            space.part_bytes(group)
    with pytest.raises(LayoutError):
        space.layer_range(9)


def test_a_block_larger_than_memory_is_refused_at_the_door(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=4096, dtype="int8")
    fits = SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=2)
    assert rig.cache.space(fits).block_bytes == 4 * PAGE_BYTES
    with pytest.raises(LayoutError, match="slots of at most"):
        rig.cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=3))
    assert_idle(rig)


def test_a_block_as_large_as_memory(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=4096, dtype="int8")
    space = rig.cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=2))
    keys = space.keys(range(4))
    content = [bytes([i]) * space.block_bytes for i in (1, 2)]
    assert space.put(keys[:1], content[:1]) == [True]
    assert space.get(keys) == content[:1]
    rig.cache.clear()
    assert space.put(keys[1:], content[1:]) == [True]
    assert_idle(rig)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, "array", "strided", "floats"])
def test_blocks_come_as_any_kind_of_buffer(space: Space, kind: Any) -> None:
    content = bytes(range(space.block_bytes % 256)) * 99
    content = content[: space.block_bytes].ljust(space.block_bytes, b"x")
    block: Any
    if kind == "array":
        block = np.frombuffer(content, dtype=np.uint8).reshape(2, -1)
    elif kind == "strided":
        block = np.frombuffer(content, dtype=np.uint8).repeat(2)[::2]
    elif kind == "floats":
        block = np.frombuffer(content, dtype=np.float16).reshape(-1, 2)
    else:
        block = kind(content)
    keys = space.keys(range(4))
    assert space.put(keys, [block]) == [True]
    assert space.get(keys) == [content]


def test_put_says_what_is_stored_now(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=3)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 5)
    assert blocks.put(keys, deadline_s=0) == [True, True, True, False, False]
    assert blocks.put(keys[:3]) == [True] * 3
    assert blocks.put([]) == []
    with blocks.space.acquire(keys[:3]):
        assert blocks.put(blocks.keys(2, 1), deadline_s=0) == [False]
    assert_idle(rig)


def test_put_does_not_write_again_what_is_there(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    blocks.put(keys)
    wrong = [bytes(blocks.space.block_bytes)] * 2
    assert blocks.space.put(keys, wrong) == [True, True]
    assert blocks.read(keys) == 2


@pytest.mark.parametrize("change", ["shorter", "longer", "fewer", "more", "none"])
def test_put_of_wrong_sizes_stores_nothing(rig: Rig, change: str) -> None:
    space = rig.space()
    keys = space.keys(range(8))
    blocks: list[bytes] = [bytes(space.block_bytes)] * 2
    if change in ("shorter", "longer"):
        blocks[1] = bytes(space.block_bytes + (1 if change == "longer" else -1))
    else:
        blocks = blocks * 2 if change == "more" else blocks[: 1 if change == "fewer" else 0]
    with pytest.raises(LayoutError):
        space.put(keys, blocks)
    assert space.contains(keys) == 0
    assert_idle(rig)


def test_put_waits_for_the_block_that_another_writes(make_rig: MakeRig) -> None:
    rig = make_rig(threads=True)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    slots = blocks.space.reserve(keys)
    done: list[list[bool]] = []
    putter = threading.Thread(target=lambda: done.append(blocks.put(keys, deadline_s=60.0)))
    putter.start()
    for at, key in enumerate(slots.keys):
        slots[at][:] = blocks.content(key)
    slots.commit([True, False])
    putter.join(60.0)
    assert done == [[True, True]], "what the other did not write it writes itself"
    assert blocks.read(keys) == 2
    assert_idle(rig)


def test_put_gives_up_at_its_deadline(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    with blocks.space.reserve(keys[:1]):
        assert blocks.put(keys, deadline_s=2.0) == [False, True]
    assert_idle(rig)


def test_get_is_as_long_as_what_there_is(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys[:2])
    blocks.put(keys[3:])
    assert blocks.space.get(keys) == [blocks.content(key) for key in keys[:2]]
    assert blocks.space.get([]) == []
    assert blocks.space.get(blocks.keys(5, 1)) == []


def test_a_decoded_chain_goes_on_where_the_prompt_ended(rig: Rig) -> None:
    blocks = Blocks(rig)
    space, tokens = blocks.space, blocks.rig.setup.block_tokens
    whole = space.keys(range(6 * tokens))
    prompt = space.keys(range(2 * tokens))
    more = space.keys(range(2 * tokens, 6 * tokens), parent=prompt[-1])
    assert prompt + more == whole
    blocks.put(prompt)
    assert space.put(more, [blocks.content(key) for key in more], parent=prompt[-1]) == [True] * 4
    assert blocks.read(whole) == 6
    assert_idle(rig)


def test_contains_goes_by_key_and_lookup_by_chain(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    blocks.space.forget(keys[:1])
    assert (blocks.space.contains(keys), blocks.space.contains(keys[1:])) == (0, 2)
    assert blocks.space.lookup(keys).blocks == 0
    assert blocks.space.lookup(keys, start=1).blocks == 2


@pytest.mark.parametrize("start", [-1, 5, 99])
def test_a_start_outside_the_chain_is_refused(rig: Rig, start: int) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys)
    calls = (blocks.space.lookup, blocks.space.acquire, blocks.space.reserve, blocks.space.prefetch)
    for call in calls:
        with pytest.raises(ValueError, match="start must be 0 to 4"):
            call(keys, start=start)
    assert blocks.space.lookup(keys, start=4).blocks == 0
    assert_idle(rig)


def test_unknown_parents_are_not_the_root(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    blocks.space.put(keys[1:], [blocks.content(keys[1])], parent=UNKNOWN)
    assert blocks.space.lookup(keys).reason is MissReason.NEVER_STORED
    assert blocks.space.lookup(keys[1:]).blocks == 1
    assert_idle(rig)


def test_two_tenants_never_share(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    one, two = Blocks(rig, "one"), Blocks(rig, "two")
    keys = one.keys(1, 3)
    assert two.keys(1, 3) == keys
    one.put(keys)
    assert (one.space.contains(keys), two.space.contains(keys)) == (3, 0)
    assert two.space.lookup(keys).reason is MissReason.NEVER_STORED
    two.put(keys[:2])
    rig.cache.drain()
    two.space.forget(keys)
    rig.cache.clear(tier="memory")
    assert (one.read(keys), two.read(keys)) == (3, 0)
    two.put(keys)
    rig.cache.clear(one.space)
    assert (one.read(keys), two.read(keys)) == (0, 3)
    rig.reopen()
    assert (one.read(keys), two.read(keys)) == (0, 3)
    stats = assert_idle(rig)
    assert stats.tenants["two"] == 3 * 2 * PAGE_BYTES


def live(blocks: Blocks, prompts: list[list[bytes]], draw: np.random.Generator) -> None:
    """One of the things that a client does, chosen at random; every byte that is read is compared."""
    keys = prompts[int(draw.integers(len(prompts)))][: int(draw.integers(1, 9))]
    choice = draw.random()
    if choice < 0.4:
        blocks.put(keys, deadline_s=0.05)
    elif choice < 0.8:
        blocks.read(keys, deadline_s=0.05 if choice < 0.6 else 0)
    elif choice < 0.85:
        blocks.space.forget(keys[-2:])
    elif choice < 0.95:
        with blocks.space.prefetch(keys) as job:
            job.wait(0.01)
            with job.lease() as lease:
                for i in range(lease.count):
                    blocks.oracle.check(lease[i], blocks.descriptor, keys[i])
    else:
        blocks.space.touch(keys)
        blocks.rig.cache.stats()


def test_one_cache_from_eight_threads(make_rig: MakeRig, seed: int) -> None:
    rig = make_rig(below="dict", threads=True, memory_blocks=48, below_blocks=96)
    blocks = Blocks(rig)
    prompts = [blocks.keys(prompt, 8) for prompt in range(6)]

    def work(number: int) -> None:
        draw = np.random.default_rng([seed, number])
        for _ in range(60):
            live(blocks, prompts, draw)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result(120.0)
    assert_idle(rig)


def test_put_does_not_wait_for_room_that_only_its_own_chain_holds(rig: Rig) -> None:
    blocks = Blocks(rig)
    slots = rig.setup.memory_blocks
    before_s = rig.clock.now()
    assert sum(blocks.put(blocks.keys(1, slots + 5), deadline_s=60.0)) == slots
    assert rig.clock.now() == before_s
    assert_idle(rig)


def test_put_of_what_is_there_is_a_sight_of_it(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(tier="disk")
    rig.cache.drain()
    assert blocks.put(keys) == [True] * 3
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert blocks.read(keys) == 3, "it was written down again"


def test_a_float_array_of_another_dtype_is_no_block_of_this_layout(rig: Rig) -> None:
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=64, dtype="bfloat16")
    space = rig.cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=16))
    keys = space.keys(range(32))
    wrong = np.ones(space.block_bytes // 4, dtype=np.float32)
    with pytest.raises(LayoutError, match=r"block 1 is a float32 array, and the layout has bfloat16: convert it, or"):
        space.put(keys, [bytes(space.block_bytes), wrong])
    assert space.contains(keys) == 0, "nothing was stored"
    assert space.put(keys[:1], [wrong.view(np.uint8)]) == [True]
    right = KVLayout.full(layers=1, kv_heads=1, head_dim=64, dtype="float32")
    space = rig.cache.space(SpaceDescriptor(model="m", weights="w", layout=right, block_tokens=16))
    block = np.ones((2, 16, 64), dtype=np.float32)
    assert space.put(keys[:1], [block]) == [True]
    assert space.get(keys[:1]) == [block.tobytes()]


def test_states_have_a_dtype_of_their_own(make_rig: MakeRig) -> None:
    rig = make_rig(hybrid=True)
    space = rig.space()
    assert space.descriptor.layout.dtype != "float32"
    block = np.ones(space.block_bytes // 4, dtype=np.float32)
    assert space.put(space.keys(range(space.descriptor.block_tokens)), [block]) == [True]


@pytest.mark.parametrize("block", ["text", 7, None, [1, 2]])
def test_what_has_no_bytes_is_no_block(space: Space, block: Any) -> None:
    with pytest.raises(LayoutError, match=r"block 0 is a .*, and blocks are bytes, memoryviews or numpy arrays"):
        space.put(space.keys(range(space.descriptor.block_tokens)), [block])
