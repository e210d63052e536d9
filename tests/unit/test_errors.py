from __future__ import annotations

import pytest

from kvcairn import errors


def test_every_error_has_one_base() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 11
    assert all(issubclass(kind, errors.KVCairnError) for kind in kinds)


@pytest.mark.parametrize(
    ("kind", "also"),
    [(errors.ConfigError, ValueError), (errors.LayoutError, ValueError), (errors.TierTimeout, TimeoutError)],
)
def test_errors_that_are_also_the_built_in_kind(kind: type[Exception], also: type[Exception]) -> None:
    assert issubclass(kind, also)


@pytest.mark.parametrize(
    "kind", [errors.TierUnavailable, errors.TierTimeout, errors.TierFull, errors.CorruptBlock, errors.TierError]
)
def test_a_tier_error_carries_tier_operation_and_key(kind: type[errors.TierError]) -> None:
    key = bytes(range(32))
    error = kind("disk", "read", "no such file", key)
    assert (error.tier, error.op, error.reason, error.key) == ("disk", "read", "no such file", key)
    assert str(error) == "tier 'disk': read of 0001020304050607 failed: no such file"
    assert str(kind("disk", "open")) == "tier 'disk': open failed"


def test_a_config_error_is_one_line_with_all_its_parts() -> None:
    error = errors.ConfigError("tiers[1].capacity", "is more than the disk has", "1 TiB", "take less")
    assert str(error) == "tiers[1].capacity: is more than the disk has (given: '1 TiB'); take less"
    assert (error.path, error.reason, error.value, error.remedy) == (
        "tiers[1].capacity", "is more than the disk has", "1 TiB", "take less",
    )  # fmt: skip
    assert str(errors.ConfigError("tiers", "is missing")) == "tiers: is missing"


def test_a_value_of_false_or_zero_is_shown() -> None:
    assert "(given: 0)" in str(errors.ConfigError("a", "b", 0))
    assert "(given: False)" in str(errors.ConfigError("a", "b", False))
