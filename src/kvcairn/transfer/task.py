"""One piece of work for one tier, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvcairn.errors import TierError


class TaskState(Enum):
    """QUEUED -> RUNNING -> DONE; a task given up while it runs is GIVEN_UP until its call returns."""

    QUEUED = "queued"
    RUNNING = "running"
    GIVEN_UP = "given_up"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Task:
    """Work for one tier.

    Attributes:
        tier: name of the tier; each has queues and threads of its own.
        op: `read`, `write`, `delete`, ...; for errors.
        run: does the work and returns a value; may block, may raise.
        done: called exactly once, with the value or the error, on the thread that ran the task (or gave it up).
        late: called when a call returns after it was given up: only now its buffers are nobody's.
        priority: the lower goes first.
        timeout_s: longest time the call may take, the queue not counted.
    """

    tier: str
    op: str
    run: Callable[[], Any]
    done: Callable[[Any, TierError | None], None]
    late: Callable[[], None]
    priority: int = 0
    timeout_s: float = 5.0
    state: TaskState = field(default=TaskState.QUEUED)
    deadline_s: float = field(default=0.0)
