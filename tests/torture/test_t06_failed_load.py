"""T06: a failed or partial load is reported exactly, and the tokens are those of a run without cache."""

from __future__ import annotations

import pytest

from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.engine import FakeEngine
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import LinkKind
from tests.torture.support import MakeRig

BLOCKS = 8
FAILURES = [
    FaultKind.BLOCK_ERROR, FaultKind.VANISHED, FaultKind.CORRUPT, FaultKind.SHORT, FaultKind.ALTERED,
    FaultKind.FALSE_ACK,
]  # fmt: skip
CALL_FAILURES = [
    FaultKind.ERROR, FaultKind.BUG, FaultKind.LATE_ERROR, FaultKind.NO_OUTCOMES, FaultKind.EMPTY_OUTCOMES,
    FaultKind.MANY_OUTCOMES,
]  # fmt: skip
READ = frozenset(["read"])


@pytest.mark.parametrize("kth", [0, 3, 7])
@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("verify", ["never", "always"])
def test_the_kth_block_fails(
    make_rig: MakeRig, link: LinkKind, kind: FaultKind, kth: int, is_async: bool, verify: str
) -> None:
    rig = make_rig(link=link, below="disk", settings=(("verify_memory", verify),))
    blocks = Blocks(rig)
    keys = blocks.keys(1, BLOCKS)
    assert all(blocks.put(keys))
    rig.reopen()
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=READ, keys=frozenset([keys[kth]])),)
    before = rig.cache.stats().hits_by_tier
    if is_async:
        with blocks.space.prefetch(keys) as job:
            job.wait(5.0)
            assert job.ready == kth
    with blocks.space.acquire(keys, deadline_s=5.0) as lease:
        assert lease.count == kth
        assert lease.reason is not None
        for i in range(kth):
            blocks.oracle.check(lease[i], blocks.descriptor, keys[i])
    assert rig.faulty.injected[kind] >= 1
    served = rig.cache.stats().hits_by_tier
    assert sum(served.values()) - sum(before.values()) == kth
    rig.faulty.heal()
    assert_idle(rig)


@pytest.mark.parametrize("kind", CALL_FAILURES)
def test_the_whole_call_fails(make_rig: MakeRig, link: LinkKind, kind: FaultKind) -> None:
    rig = make_rig(link=link, below="disk")
    blocks = Blocks(rig)
    keys = blocks.keys(1, BLOCKS)
    assert all(blocks.put(keys))
    rig.reopen()
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=READ),)
    assert blocks.read(keys, deadline_s=5.0) == 0
    assert rig.cache.stats().hits_by_tier.get("disk", 0) == 0
    rig.faulty.heal()
    assert_idle(rig)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("kind", [*FAILURES, *CALL_FAILURES])
def test_tokens_are_those_without_cache(make_rig: MakeRig, link: LinkKind, kind: FaultKind, hybrid: bool) -> None:
    rig = make_rig(link=link, below="disk", hybrid=hybrid)
    layout, tokens = rig.setup.layout, rig.setup.block_tokens
    prompt = list(range(4 * BLOCKS + 2))
    plain = FakeEngine(None, layout, tokens, page_tokens=2).generate(prompt, 6)
    FakeEngine(rig.space(), layout, tokens, page_tokens=2).generate(prompt, 6)
    rig.reopen()
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=READ, rate=0.7, block_rate=0.2),)
    engine = FakeEngine(rig.space(), layout, tokens, page_tokens=2)
    for turn in range(4):
        again = engine.generate(prompt, 6, prefetch=turn % 2 == 1)
        assert again.tokens == plain.tokens
        rig.cache.clear(tier="memory")
    rig.faulty.heal()
    assert_idle(rig)


def test_the_destination_is_untouched_by_a_miss(make_rig: MakeRig, link: LinkKind) -> None:
    rig = make_rig(link=link, below="disk")
    layout, tokens = rig.setup.layout, rig.setup.block_tokens
    engine = FakeEngine(rig.space(), layout, tokens, page_tokens=4)
    plain = FakeEngine(None, layout, tokens, page_tokens=4)
    prompts = [[prompt, *range(30)] for prompt in range(5)]
    for prompt in prompts:
        assert engine.generate(prompt, 4).tokens == plain.generate(prompt, 4).tokens
    warm = [engine.generate(prompt, 4) for prompt in prompts]
    assert [again.reused_tokens for again in warm] == [28] * 5
    assert [again.tokens for again in warm] == [plain.generate(prompt, 4).tokens for prompt in prompts]
