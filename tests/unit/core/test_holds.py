from __future__ import annotations

import pytest

from kvcairn.core.holds import Hold, Kind, Ledger
from kvcairn.errors import LeaseError
from tests.unit.core.test_residency import Tier


@pytest.fixture
def tier() -> Tier:
    return Tier()


def test_a_hold_pins_until_its_last_share_has_ended(tier: Tier) -> None:
    ledger, rows = Ledger(), tier.rows(1, 2)
    tier.store(rows)
    hold = ledger.add(Hold("lease", tier.space, []))
    ledger.pin(hold, tier.one, 0, rows)
    ledger.pin(hold, tier.one, 0, rows[:0])
    ledger.share(hold)
    assert not ledger.end(hold)
    assert tier.one.copies[0].pins[rows].tolist() == [1, 1]
    assert ledger.end(hold)
    assert tier.one.copies[0].pins[rows].tolist() == [0, 0]
    assert ledger.open_holds() == []
    tier.check()


@pytest.mark.parametrize("kind", ["lease", "reservation", "job"])
def test_a_hold_is_found_by_number_and_kind(tier: Tier, kind: Kind) -> None:
    ledger = Ledger()
    hold = ledger.add(Hold(kind, tier.space, []))
    others: set[Kind] = {"lease", "reservation", "job"}
    others.discard(kind)
    assert ledger.get(hold.number, kind) is ledger.find(hold.number, kind) is hold
    assert [ledger.count(k) for k in (kind, *sorted(others))] == [1, 0, 0]
    for other in others:
        assert ledger.find(hold.number, other) is None
        with pytest.raises(LeaseError, match="not open"):
            ledger.get(hold.number, other)
    ledger.end(hold)
    assert ledger.find(hold.number, kind) is None


def test_numbers_are_never_used_twice(tier: Tier) -> None:
    ledger, seen = Ledger(), set[int]()
    for _ in range(10):
        hold = ledger.add(Hold("job", tier.space, []))
        assert hold.number not in seen
        seen.add(hold.number)
        ledger.end(hold)
