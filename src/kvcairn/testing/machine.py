"""A hypothesis state machine: any sequence of operations on a cache, against a plain model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcairn.testing.operations import OPERATIONS, Operation
from kvcairn.testing.rig import Rig, Setup
from kvcairn.testing.table import Table, check, finish


@dataclass(frozen=True, slots=True)
class DataDraw:
    """Draws parameters from a hypothesis data object, so that failures shrink."""

    data: st.DataObject

    def integer(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`, both included."""
        return self.data.draw(st.integers(low, high))


class CacheMachine(RuleBasedStateMachine):
    """Plays any operations on the cache that `setup` describes and checks it after each.

    Derive from it, set the class attributes, and run with `hypothesis.stateful.run_state_machine_as_test`.

    Attributes:
        setup: the cache.
        is_ample: whether all that can be stored fits into every tier, so that answers are exact.
        letters: size of the alphabet of prompts.
        depth: most blocks of a prompt.
        steps: operations played since the class was made.
    """

    setup: ClassVar[Setup] = Setup()
    is_ample: ClassVar[bool] = True
    letters: ClassVar[int] = 2
    depth: ClassVar[int] = 5
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvcairn-machine-"))
        self.rig = Rig(self.setup, self.folder)
        self.table = Table(self.rig, self.letters, self.depth, self.is_ample)

    @invariant()
    def holds(self) -> None:
        """Check what must hold after every step."""
        check(self.table)

    def play(self, operation: Operation, data: st.DataObject) -> None:
        """Play one operation."""
        type(self).steps += 1
        try:
            operation.play(self.table, DataDraw(data))
        finally:
            if self.table.log:
                note(self.table.log[-1])

    def teardown(self) -> None:
        """Let go of everything, see that nothing stays behind, and close."""
        try:
            finish(self.table)
        finally:
            self.rig.__exit__()
            shutil.rmtree(self.folder)


def _rule(operation: Operation) -> Any:
    def play(self: CacheMachine, data: st.DataObject) -> None:
        self.play(operation, data)

    play.__name__ = operation.play.__name__
    made: Callable[..., None] = rule(data=st.data())(play)
    return precondition(lambda self: operation.is_possible(self.table))(made) if operation.needs else made


for _name, _operation in OPERATIONS.items():
    setattr(CacheMachine, _name, _rule(_operation))
