"""Every tier and wrapper against the contract."""

from __future__ import annotations

import pytest

from kvcairn.testing.dict_tier import DictTier
from kvcairn.testing.faulty import FaultyTier
from kvcairn.testing.tier_tests import TierTests
from kvcairn.tiers.base import Tier


class TestDictTier(TierTests):
    @pytest.fixture
    def tier(self) -> Tier:
        return DictTier()

    def another(self, tier: Tier) -> Tier:
        assert isinstance(tier, DictTier)
        return DictTier(tier.name, tier.content)


class TestFaultyTierWithoutFaults(TierTests):
    @pytest.fixture
    def tier(self) -> Tier:
        return FaultyTier(DictTier())

    def another(self, tier: Tier) -> Tier:
        assert isinstance(tier, FaultyTier) and isinstance(tier.inner, DictTier)
        return FaultyTier(DictTier(tier.name, tier.inner.content))
