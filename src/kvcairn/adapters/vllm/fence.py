"""Pages that stores still read: a step that overwrites one waits for its stores."""

from __future__ import annotations

from collections import Counter

from kvcairn.adapters.vllm.steps import Store


class Fence:
    """Stores that have begun and not ended in every worker. One thread only."""

    def __init__(self, workers: int) -> None:
        """Each store is done by so many workers, each its part."""
        self._workers = workers
        self._sources: dict[int, frozenset[int]] = {}
        self._done: Counter[int] = Counter()
        self._next = 0

    def __len__(self) -> int:
        """Number of stores."""
        return len(self._sources)

    def number(self) -> int:
        """Return a number for the next store."""
        self._next += 1
        return self._next - 1

    def begin(self, store: Store) -> None:
        """A store reads its pages from now on."""
        self._sources[store.number] = frozenset(page for part in store.pages for page in part)

    def end(self, counts: Counter[int]) -> None:
        """So many workers have ended these stores."""
        self._done += counts
        for number in [n for n, count in self._done.items() if count >= self._workers]:
            del self._done[number]
            self._sources.pop(number, None)

    def around(self, fresh: set[int]) -> set[int]:
        """Return the stores that read a page which is about to be overwritten."""
        if not fresh or not self._sources:
            return set()
        return {number for number, pages in self._sources.items() if not fresh.isdisjoint(pages)}
