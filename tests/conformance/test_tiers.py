"""Every tier and wrapper against the contract."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import pytest

from kvcairn.clock import MonotonicClock
from kvcairn.config import DiskTierOptions
from kvcairn.testing.dict_tier import DictTier
from kvcairn.testing.faulty import FaultyTier
from kvcairn.testing.tier_tests import TierTests
from kvcairn.tiers.base import Tier, TierContext
from kvcairn.tiers.disk import DiskTier


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


class DiskTierTests(TierTests):
    """The disk tier at each durability."""

    durability: ClassVar[Literal["none", "data", "full"]] = "none"

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        self.folder = tmp_path
        return self.at(tmp_path)

    def another(self, tier: Tier) -> Tier:
        return self.at(self.folder)

    def at(self, folder: Path) -> DiskTier:
        options = DiskTierOptions(path=str(folder), capacity_bytes=1 << 30, durability=self.durability)
        return DiskTier(options, TierContext(MonotonicClock()))


class TestDiskTier(DiskTierTests):
    pass


class TestFaultyTierAroundADisk(DiskTierTests):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        self.folder = tmp_path
        return FaultyTier(self.at(tmp_path))

    def another(self, tier: Tier) -> Tier:
        return FaultyTier(self.at(self.folder))


class TestDiskTierWithDurableData(DiskTierTests):
    durability = "data"


class TestDiskTierWithFullDurability(DiskTierTests):
    durability = "full"
