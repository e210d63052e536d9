"""The watch sees a call that does not let other threads run, and none where a call lets them."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np

from kvcairn.bench.gil import first_in_line, watching


def test_a_call_that_holds_on_makes_a_longer_gap_than_a_copy() -> None:
    source, target = np.ones(64 << 20, dtype=np.uint8), np.ones(64 << 20, dtype=np.uint8)
    with watching() as watch:
        held = min(watch.longest_gap_ns(source.tobytes) for _ in range(9))
        free = min(watch.longest_gap_ns(lambda: np.copyto(target, source)) for _ in range(9))
    assert held > 2 * free


def test_the_interpreter_is_left_as_it_was() -> None:
    interval, threads = sys.getswitchinterval(), threading.active_count()
    with watching():
        assert threading.active_count() == threads + 1
    assert (sys.getswitchinterval(), threading.active_count()) == (interval, threads)


def test_threads_stand_in_line_again_afterwards() -> None:
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    with first_in_line():
        pass
    assert (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority) == (policy, priority)
