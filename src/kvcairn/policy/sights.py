"""How often blocks that are nowhere were asked to be stored: what `selective` knows of them. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcairn.policy.admission import MOST_SIGHTS, Sights

Words = npt.NDArray[np.uint32]

LEAST_PLACES = 1024
MOST_PLACES = 1 << 22  # 20 MiB


class SightTable:
    """Counts of keys, each at the one place that its own bits choose: a newcomer puts out who was there.

    So a key is forgotten after about as many others as there are places, at a cost that no number of keys changes, and
    is never taken for another: 32 bits of it are compared.
    """

    def __init__(self, places: int) -> None:
        """Remember about `places` keys, rounded up to a power of two within bounds."""
        places = 1 << (min(max(places, LEAST_PLACES), MOST_PLACES) - 1).bit_length()
        self._mask = np.uint32(places - 1)
        self._prints: Words = np.zeros(places, dtype="<u4")
        self._counts: Sights = np.zeros(places, dtype=np.uint8)

    def see(self, keys: list[bytes]) -> Sights:
        """Count one sight of each key; return how often each has been seen, at most `MOST_SIGHTS`."""
        at, prints = self._places(keys)
        before = self._known(at, prints)
        counts: Sights = before + (before < MOST_SIGHTS)
        self._prints[at], self._counts[at] = prints, counts
        return counts

    def seen(self, keys: list[bytes]) -> Sights:
        """Return how often each key has been seen; changes nothing."""
        return self._known(*self._places(keys))

    def _places(self, keys: list[bytes]) -> tuple[npt.NDArray[np.intp], Words]:
        words = np.frombuffer(b"".join(keys), dtype="<u4").reshape(len(keys), -1)
        return (words[:, 0] & self._mask).astype(np.intp), words[:, 1]

    def _known(self, at: npt.NDArray[np.intp], prints: Words) -> Sights:
        return np.where(self._prints[at] == prints, self._counts[at], np.uint8(0))
