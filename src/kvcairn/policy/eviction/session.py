"""By the estimated return of the session, beside a shadow LRU."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import EvictionPolicy, Facts, Names, Rows
from kvcairn.policy.eviction.queues import RowQueues
from kvcairn.policy.eviction.returns import AGE_EDGES_S, AGES, TURNS, Returns
from kvcairn.policy.eviction.shadow import Shadow

_ENDED: Final = TURNS * AGES  # number of the queue for sessions that have ended
_LEARNED_EACH: Final = 128  # requests between two looks at the log
_AGED_EACH_S: Final = 1.0
_AGED_AT_ONCE: Final = 512  # rows
_SAME_REQUEST_S: Final = 1.0  # blocks that follow a use within this time belong to the same request


class Session(EvictionPolicy):
    """Blocks of ended sessions go first, then those whose session is least likely to be back soon.

    A request that extends an earlier chain, or names the same session in its hints, is the next turn of that
    session. How likely a session is to be back is learned while serving, by turn and by the time that it has waited
    (see `Returns`). Blocks lie in one queue for each turn and class of age and move on as time passes, so an eviction
    looks at the heads of a fixed number of queues.

    An LRU that keeps names alone, of a sample of the blocks, runs beside it. Where that has been serving more, the
    order of an LRU is taken for a while (see `Shadow`).
    """

    def __init__(self, facts: Facts) -> None:
        """Start empty; with nothing learned the order is that of an LRU."""
        super().__init__(facts)
        self._queues = RowQueues(TURNS * AGES + 1)
        self._returns = Returns()
        self._shadow = Shadow()
        self._used_s = np.zeros(1024)  # by row: when its request came
        self._request: npt.NDArray[np.int64] = np.zeros(1024, dtype=np.int64)  # by row: number of its request
        self._order: list[int] = []  # of the queues; empty while nothing is learned
        self._learn_at = _LEARNED_EACH
        self._now_s = self._aged_s = 0.0

    def add(self, rows: Rows, now_s: float) -> None:
        """Take new rows into the session of the request that they belong to."""
        if rows.size == 0:
            return
        self._now_s = max(self._now_s, now_s)
        self._age()
        self._grow(int(rows.max()) + 1)
        names = self._facts.names(rows)
        self._shadow.use(names, False)
        request = self._request_above(int(self._facts.parents(rows[:1])[0]), now_s)
        follows = self._latest_turn(names, rows)
        if request == 0:
            request = self._returns.start(now_s, follows)
        elif follows and self._returns.turn(request) == 1:  # only now is it seen to be more than a common beginning
            self._returns.follow(request, follows, now_s)
        self._returns.mark(names[-2:] if names.size > 2 else names[-1:], request)
        self._place(rows, request, now_s)

    def touch(self, rows: Rows, now_s: float) -> None:
        """Begin a request: the next turn of the session whose last blocks these are, or the first of a new one."""
        here = self._queues.here(rows)
        if here.size == 0:
            return
        self._now_s = max(self._now_s, now_s)
        self._age()
        names = self._facts.names(here)
        self._shadow.use(names, True)
        found = self._returns.find(names[-2:])
        follows = max(int(found.max()), self._hinted(here))
        request = self._returns.start(now_s, follows)
        self._returns.mark(names[-2:][found > 0], request)
        self._place(here, request, now_s)
        if self._returns.latest >= self._learn_at:
            self._learn()

    def refresh(self, rows: Rows, now_s: float) -> None:
        """Make them the most recent ones of their queue."""
        self.defer(rows)

    def hint(self, rows: Rows, ends_session: bool, now_s: float) -> None:
        """Remember what the session ended with; let the blocks of an ended one go first."""
        here = self._queues.here(rows)
        if here.size == 0:
            return
        if ends_session:
            self._queues.push(_ENDED, here)
            return
        session = self._facts.sessions(here[-1:])
        if session[0]:
            self._returns.mark(_name(session), int(self._request[here[-1]]))

    def remove(self, rows: Rows) -> None:
        """Forget the rows."""
        self._queues.remove(rows)

    def evict(self, rows: Rows) -> None:
        """Forget the rows; the shadow learns how large the tier is."""
        self._shadow.resize(len(self._queues))
        self._queues.remove(rows)

    def defer(self, rows: Rows) -> None:
        """Put them at the end of their queue."""
        here = self._queues.here(rows)
        self._queues.push_each(self._queues.queue_of(here), here)

    def candidates(self) -> Iterator[int]:
        """Yield rows of ended sessions, then those of the queue that is worth least, and so on."""
        yield from self._queues.oldest(_ENDED)
        if self._order and not self._shadow.is_better:
            for queue in self._order:
                if self._queues.sizes[queue]:
                    yield from self._queues.oldest(queue)
            return
        for age in range(AGES - 1, -1, -1):
            queues = [turn * AGES + age for turn in range(TURNS) if self._queues.sizes[turn * AGES + age]]
            yield from heapq.merge(*map(self._queues.oldest, queues), key=self._used_s.item)

    def __len__(self) -> int:
        """Number of resident nodes."""
        return len(self._queues)

    def _request_above(self, parent: int, now_s: float) -> int:
        """Return the request that used the block before just now; 0 where there is none."""
        if not 0 <= parent < self._request.size or self._queues.here(np.array([parent], dtype=np.intp)).size == 0:
            return 0
        request = int(self._request[parent])
        is_same = request and now_s - self._used_s[parent] <= _SAME_REQUEST_S
        return request if is_same else 0

    def _latest_turn(self, names: Names, rows: Rows) -> int:
        """Return the request whose last blocks are found deepest among these; 0 for none."""
        found = self._returns.find(names)
        known = np.flatnonzero(found)
        return max(int(found[known[-1]]) if known.size else 0, self._hinted(rows))

    def _hinted(self, rows: Rows) -> int:
        """Return the latest request of the session that hints name for these blocks; 0 for none."""
        session = self._facts.sessions(rows[-1:])
        return int(self._returns.find(_name(session))[0]) if session[0] else 0

    def _place(self, rows: Rows, request: int, now_s: float) -> None:
        self._used_s[rows], self._request[rows] = now_s, request
        self._queues.push((min(self._returns.turn(request), TURNS) - 1) * AGES, rows)

    def _learn(self) -> None:
        self._learn_at = self._returns.latest + _LEARNED_EACH
        self._order = np.argsort(self._returns.worth(self._now_s).ravel(), kind="stable").tolist()

    def _age(self) -> None:
        """Move rows on to the class of age that they have grown into: so many at once, the rest at the next call."""
        if self._now_s - self._aged_s < _AGED_EACH_S:
            return
        left = _AGED_AT_ONCE
        for age in range(AGES - 2, -1, -1):
            for turn in range(TURNS):
                if self._queues.sizes[turn * AGES + age]:
                    left -= self._age_queue(turn, age, left)
                    if left <= 0:
                        return
        self._aged_s = self._now_s

    def _age_queue(self, turn: int, age: int, most: int) -> int:
        """Move at most so many rows of one queue on; return how many."""
        older: list[Rows] = []
        count = 0
        for chunk in self._queues.chunks(turn * AGES + age):
            chunk = chunk[: most - count]
            is_young = self._now_s - self._used_s[chunk] < AGE_EDGES_S[age + 1]
            end = int(is_young.argmax()) if is_young.any() else chunk.size
            older.append(chunk[:end])
            count += end
            if end < chunk.size or count == most:
                break
        if count:
            rows = np.concatenate(older)[::-1]
            ages = np.searchsorted(AGE_EDGES_S, self._now_s - self._used_s[rows], side="right") - 1
            self._queues.push_each((turn * AGES + ages).astype(np.int16), rows)
        return count

    def _grow(self, rows: int) -> None:
        if rows > self._used_s.size:
            more = max(rows, self._used_s.size * 5 // 4) - self._used_s.size
            self._used_s = np.concatenate([self._used_s, np.zeros(more)])
            self._request = np.concatenate([self._request, np.zeros(more, dtype=np.int64)])


def _name(session: npt.NDArray[np.uint32]) -> Names:
    """Return a name for a hinted session, beside those of blocks."""
    return (session.astype(np.uint64) << np.uint64(24)) ^ (session.astype(np.uint64) * np.uint64(0x9E3779B1))
