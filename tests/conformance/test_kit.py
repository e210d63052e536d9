"""The kit itself: an oracle that misses nothing, and a tier that fails exactly as it was told to."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest

from kvcairn.errors import TierError, TierFull, TierTimeout
from kvcairn.testing.dict_tier import DictTier
from kvcairn.testing.faulty import Fault, FaultKind, FaultyTier
from kvcairn.testing.oracle import ByteOracle, WrongBytes
from kvcairn.testing.tier_tests import SPACE, TierSuite
from kvcairn.tiers.base import Stored, Tier, Write
from kvcairn.types import MissReason

KEY, OTHER_KEY = b"k" * 32, b"l" * 32


class TestByteOracle:
    @pytest.mark.parametrize("nbytes", [1, 7, 8, 4096, 4099, 1 << 20])
    def test_right_bytes_pass_and_one_wrong_byte_does_not(self, nbytes: int) -> None:
        oracle = ByteOracle(3)
        data = bytearray(oracle.part(SPACE, KEY, 0, nbytes))
        oracle.check(data, SPACE, KEY)
        for at in {0, nbytes // 2, nbytes - 1}:
            data[at] ^= 1
            with pytest.raises(WrongBytes) as caught:
                oracle.check(data, SPACE, KEY)
            assert caught.value.offset == at
            data[at] ^= 1

    def test_names_and_offsets_give_different_pages(self) -> None:
        oracle = ByteOracle(3)
        parts = [
            oracle.part(space, key, group, 64 * 4096)
            for space in (SPACE, b"t" * 32)
            for key in (KEY, OTHER_KEY)
            for group in (0, 1)
        ]
        pages = [part[at : at + 4096] for part in parts for at in range(0, len(part), 4096)]
        assert len(set(pages)) == len(pages)

    def test_a_part_begins_like_a_longer_one(self) -> None:
        assert ByteOracle(3).part(SPACE, KEY, 0, 9000)[:100] == ByteOracle(3).part(SPACE, KEY, 0, 100)

    def test_it_tells_whose_bytes_they_are(self) -> None:
        oracle = ByteOracle(3)
        mixed = bytearray(oracle.part(SPACE, KEY, 0, 4096))
        mixed[1001:2000] = oracle.part(SPACE, OTHER_KEY, 0, 4096)[1001:2000]
        with pytest.raises(
            WrongBytes, match=f"first at offset 1001; .* block {OTHER_KEY.hex()[:16]} .* from offset 1001"
        ):
            oracle.check(mixed, SPACE, KEY)
        with pytest.raises(WrongBytes, match="from there on all bytes are 0xdd"):
            oracle.check(b"\xdd" * 4096, SPACE, KEY)


class TestFaultyTier(TierSuite):
    """Each kind of fault, seen from the caller of the tier."""

    @pytest.fixture
    def tier(self) -> FaultyTier:
        return FaultyTier(DictTier(), seed=1)

    @pytest.fixture
    def writes(self, opened: FaultyTier) -> list[Write]:
        return [self.make(number) for number in range(4)]

    def test_the_kth_call_fails_and_no_other(self, opened: FaultyTier, writes: list[Write]) -> None:
        opened.faults = (Fault(kind=FaultKind.ERROR, calls=frozenset([2]), error=TierFull),)
        self.store(opened, writes[0])
        with pytest.raises(TierFull):
            self.store(opened, writes[1])
        self.store(opened, writes[2])
        self.expect(opened, writes[0])
        self.expect_missing(opened.inner, writes[1])
        assert opened.injected == {FaultKind.ERROR: 1}

    @pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.ALTERED, FaultKind.SWAPPED])
    def test_wrong_bytes_reported_done(self, opened: FaultyTier, writes: list[Write], kind: FaultKind) -> None:
        self.store(opened, *writes)
        opened.faults = (Fault(kind=kind, ops=frozenset(["read"])),)
        outcomes, outs = self.load(opened, *writes)
        assert outcomes == [None] * 4
        wrong = [not self.oracle.is_right(out, SPACE, write.block.key) for write, out in zip(writes, outs, strict=True)]
        assert all(wrong)

    @pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.ALTERED, FaultKind.SWAPPED])
    def test_wrong_bytes_written_are_found_by_the_tier(
        self, opened: FaultyTier, writes: list[Write], kind: FaultKind
    ) -> None:
        opened.faults = (Fault(kind=kind, ops=frozenset(["write"])),)
        self.store(opened, *writes)
        self.expect_missing(opened, *writes)

    def test_acknowledgements_that_lie(self, opened: FaultyTier, writes: list[Write]) -> None:
        opened.faults = (Fault(kind=FaultKind.LOST_ACK),)
        assert all(isinstance(outcome, TierError) for outcome in opened.write(writes[:2]))
        opened.faults = (Fault(kind=FaultKind.FALSE_ACK, ops=frozenset(["write"])),)
        assert opened.write(writes[2:]) == [None, None]
        opened.heal()
        self.expect(opened, *writes[:2])
        self.expect_missing(opened, *writes[2:])

    def test_some_blocks_fail(self, opened: FaultyTier) -> None:
        writes = [self.make(number) for number in range(100)]
        self.store(opened, *writes)
        for kind, wanted in ((FaultKind.VANISHED, MissReason.VANISHED), (FaultKind.CORRUPT, MissReason.CORRUPT)):
            opened.faults = (Fault(kind=kind, block_rate=0.3),)
            outcomes, _ = self.load(opened, *writes)
            assert 10 < sum(outcome is wanted for outcome in outcomes) < 60
        opened.faults = (Fault(kind=FaultKind.BLOCK_ERROR, block_rate=0.3, error=TierTimeout),)
        outcomes, _ = self.load(opened, *writes)
        assert 10 < sum(isinstance(outcome, TierTimeout) for outcome in outcomes) < 60

    def test_lists_of_outcomes_that_fit_nothing(self, opened: FaultyTier, writes: list[Write]) -> None:
        for kind, wanted in (
            (FaultKind.NO_OUTCOMES, None),
            (FaultKind.EMPTY_OUTCOMES, []),
            (FaultKind.MANY_OUTCOMES, [None] * 5),
        ):
            opened.faults = (Fault(kind=kind),)
            assert opened.write(writes) == wanted

    def test_a_bug_raises_what_no_tier_may(self, opened: FaultyTier, writes: list[Write]) -> None:
        opened.faults = (Fault(kind=FaultKind.BUG, ops=frozenset(["probe"])),)
        with pytest.raises(OSError, match="injected"):
            opened.probe([writes[0].block])

    def test_a_hanging_call_completes_when_released(self, opened: FaultyTier, writes: list[Write]) -> None:
        opened.faults = (Fault(kind=FaultKind.HANG),)
        call = threading.Thread(target=opened.write, args=(writes,))
        call.start()
        assert opened.inner.probe([writes[0].block]) == [False]
        opened.release()
        call.join()
        opened.faults = ()
        self.expect(opened, *writes)

    def test_the_same_seed_fails_in_the_same_places(self) -> None:
        def fate(seed: int) -> list[bool]:
            tier = FaultyTier(DictTier(), [Fault(kind=FaultKind.BUG, ops=frozenset(["probe"]), rate=0.5)], seed)
            failed = []
            for _ in range(64):
                try:
                    tier.probe([])
                except OSError:
                    failed.append(True)
                else:
                    failed.append(False)
            return failed

        assert fate(1) == fate(1) != fate(2)


METHODS = [name for name, member in vars(Tier).items() if callable(member) and not name.startswith("_")]


class Noting(DictTier):
    """A tier whose every member is told from the contract's default, and that notes the calls of the optional ones."""

    def __init__(self) -> None:
        super().__init__("noting")
        self.noted: list[tuple[str, object]] = []

    def open(self) -> list[Stored]:
        for name in Tier.__annotations__:
            setattr(self, name, f"the inner tier's {name}")
        return []

    def __getattribute__(self, name: str) -> Any:
        if name in METHODS and name != "open":
            return lambda *arguments: self.noted.append((name, arguments))
        return super().__getattribute__(name)


def test_the_wrapper_has_every_attribute_of_the_tier_inside() -> None:
    inner = Noting()
    wrapper = FaultyTier(inner)
    wrapper.open()
    assert {"clears", "last_generation", "region_bytes", "overhead_bytes"} <= set(Tier.__annotations__)
    for name in Tier.__annotations__:
        assert getattr(wrapper, name) == f"the inner tier's {name}"


@pytest.mark.parametrize("name", [name for name in METHODS if name != "open"])
def test_the_wrapper_passes_every_call_on(name: str) -> None:
    inner = Noting()
    wrapper = FaultyTier(inner)
    arguments = tuple(object() for _ in list(inspect.signature(getattr(Tier, name)).parameters)[1:])
    getattr(wrapper, name)(*arguments)
    assert inner.noted == [(name, arguments)]
