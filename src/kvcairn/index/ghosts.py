"""What is remembered of blocks that are gone, so that a miss can name its reason."""

from __future__ import annotations

from kvcairn.types import MissReason


class Ghosts:
    """Keys that were here, with the reason of their leaving; bounded, oldest half forgotten at a time."""

    def __init__(self, limit: int = 1 << 16) -> None:
        """Remember at least `limit` // 2 and at most `limit` keys."""
        self._half = max(1, limit // 2)
        self._young: dict[bytes, MissReason] = {}
        self._old: dict[bytes, MissReason] = {}
        self._has_forgotten = False

    def remember(self, key: bytes, reason: MissReason) -> None:
        """Note why a key left."""
        self._young[key] = reason
        if len(self._young) >= self._half:
            self._has_forgotten = self._has_forgotten or bool(self._old)
            self._old, self._young = self._young, {}

    def recall(self, key: bytes) -> MissReason:
        """Return why a key is not here: `unknown` once anything was forgotten, never a guess."""
        reason = self._young.get(key) or self._old.get(key)
        if reason is not None:
            return reason
        return MissReason.UNKNOWN if self._has_forgotten else MissReason.NEVER_STORED
