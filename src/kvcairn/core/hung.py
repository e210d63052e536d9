"""A tier call that may outlive its task: what it may still touch is freed when it returns, and not before."""

from __future__ import annotations

from collections.abc import Callable

from kvcairn.core.state import State


class HungCall:
    """Meets the two ends of a call that was given up: the giving up and the return, in either order."""

    def __init__(self, state: State) -> None:
        """Not given up, not returned."""
        self._state = state
        self._frees: list[Callable[[], None]] = []
        self._has_returned = False

    def leave(self, free: Callable[[], None]) -> None:
        """The call was given up: `free` runs as soon as it returns. The lock is held."""
        if self._has_returned:
            free()
        else:
            self._frees.append(free)

    def returned(self) -> None:
        """The call came back, on a transfer thread."""
        with self._state.changed:
            self._has_returned = True
            frees, self._frees = self._frees, []
            for free in frees:
                free()
            self._state.notify()
