from __future__ import annotations

import pytest

from kvcairn.adapters.vllm.pace import Pace
from kvcairn.clock import VirtualClock
from kvcairn.testing.rig import Rig
from tests.unit.conftest import MakeRig


def rates(rig: Rig) -> list[float]:
    return list(rig.cache.stats().prefill_tokens_per_s.values())


def test_a_step_is_timed_from_its_plan_to_its_end(make_rig: MakeRig) -> None:
    rig, clock = make_rig(), VirtualClock(10.0)
    pace = Pace([rig.space()], clock.now)
    pace.begin(1000)
    clock.advance(2.0)
    pace.end()
    assert rates(rig) == [pytest.approx(500)]


def test_overlapping_steps_share_no_time(make_rig: MakeRig) -> None:
    rig, clock = make_rig(), VirtualClock(10.0)
    pace = Pace([rig.space()], clock.now)
    for _ in range(20):
        pace.begin(1000)
        pace.begin(1000)
        clock.advance(1.0)
        pace.end()
        clock.advance(1.0)
        pace.end()
    assert rates(rig) == [pytest.approx(1000)]


def test_steps_of_a_few_tokens_say_nothing(make_rig: MakeRig) -> None:
    rig, clock = make_rig(), VirtualClock(10.0)
    pace = Pace([rig.space()], clock.now)
    pace.begin(rig.space().descriptor.block_tokens - 1)
    clock.advance(1.0)
    pace.end()
    pace.end()
    assert rates(rig) == []


def test_a_closed_cache_is_no_matter(make_rig: MakeRig) -> None:
    rig, clock = make_rig(), VirtualClock(10.0)
    pace = Pace([rig.space()], clock.now)
    rig.cache.close()
    pace.begin(1000)
    clock.advance(1.0)
    pace.end()
