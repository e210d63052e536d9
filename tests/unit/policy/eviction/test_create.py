from __future__ import annotations

import pytest

from kvcairn import plugins
from kvcairn.errors import ConfigError
from kvcairn.policy import eviction
from kvcairn.policy.eviction.lru import LRU
from kvcairn.testing import PlainFacts
from tests.unit.conftest import Install

FACTS = PlainFacts()


def test_lru_is_always_there() -> None:
    one, two = eviction.create("lru", FACTS), eviction.create("lru", FACTS)
    assert isinstance(one, LRU)
    assert one is not two


def test_an_unknown_policy_is_refused_by_path() -> None:
    with pytest.raises(ConfigError, match="there are: arc, fifo, lfu, lru, priority, s3fifo, session") as caught:
        eviction.create("newest", FACTS, "tiers[1].eviction")
    assert caught.value.path == "tiers[1].eviction"


def test_a_plug_in_comes_in_by_entry_point(install: Install) -> None:
    text = "from kvcairn.policy.eviction.lru import LRU\nclass Newest(LRU): pass\n"
    install("kvt_newest", text, plugins.POLICIES, "newest = kvt_newest:Newest")
    assert type(eviction.create("newest", FACTS)).__name__ == "Newest"
    assert type(eviction.create("lru", FACTS)) is LRU
    with pytest.raises(ConfigError, match="there are: arc, fifo, lfu, lru, newest, priority"):
        eviction.create("oldest", FACTS)


def test_a_plug_in_does_not_replace_what_is_built_in(install: Install) -> None:
    install("kvt_other_lru", "LRU = dict\n", plugins.POLICIES, "lru = kvt_other_lru:LRU")
    assert type(eviction.create("lru", FACTS)) is LRU


def test_a_plug_in_that_is_no_policy_is_refused(install: Install) -> None:
    install("kvt_broken", "class Broken: pass\n", plugins.POLICIES, "broken = kvt_broken:Broken")
    with pytest.raises(ConfigError, match=r"\(kvt_broken:Broken\) is no EvictionPolicy") as caught:
        eviction.create("broken", FACTS, "tiers[0].eviction")
    assert caught.value.path == "tiers[0].eviction"
