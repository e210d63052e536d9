"""How fast the engine computes prompts, from its steps: what the cache weighs loading against."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvcairn.errors import KVCairnError
from kvcairn.space import Space

logger = logging.getLogger(__name__)


class Pace:
    """Times steps that compute at least a block. The engine's scheduling thread only."""

    def __init__(self, spaces: Sequence[Space], clock: Callable[[], float] = time.monotonic) -> None:
        """Tell the spaces of all ranks."""
        self._spaces, self._clock = list(spaces), clock
        self._least_tokens = spaces[0].descriptor.block_tokens
        self._begun: deque[tuple[float, int]] = deque()
        self._ended_s = 0.0

    def begin(self, tokens: int) -> None:
        """A step that computes so many tokens was planned."""
        self._begun.append((self._clock(), tokens))

    def end(self) -> None:
        """The oldest step has ended. One that was planned while another ran began when that one ended."""
        if not self._begun:
            return
        (planned_s, tokens), now_s = self._begun.popleft(), self._clock()
        seconds = now_s - max(planned_s, self._ended_s)
        self._ended_s = now_s
        if tokens < self._least_tokens or seconds <= 0:
            return
        try:
            for space in self._spaces:
                space.report_prefill(tokens, seconds)
        except KVCairnError as error:
            logger.warning("speed not told: %s", error)
