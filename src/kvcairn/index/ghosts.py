"""What is remembered of blocks that are gone, so that a miss can name its reason."""

from __future__ import annotations

from kvcairn.types import MissReason


class Ghosts:
    """Keys of all spaces that were here, with the reason of their leaving; bounded, oldest half forgotten at a time."""

    def __init__(self, limit: int = 1 << 16) -> None:
        """Remember at least `limit` // 2 and at most `limit` keys."""
        self._half = max(1, limit // 2)
        self._young: dict[bytes, MissReason] = {}
        self._old: dict[bytes, MissReason] = {}
        self._has_forgotten = False

    def remember(self, space: int, key: bytes, reason: MissReason) -> None:
        """Note why a key left."""
        self._young[_name(space, key)] = reason
        if len(self._young) >= self._half:
            self._has_forgotten = self._has_forgotten or bool(self._old)
            self._old, self._young = self._young, {}

    def recall(self, space: int, key: bytes) -> MissReason:
        """Return why a key is not here: `unknown` once anything was forgotten, never a guess."""
        name = _name(space, key)
        reason = self._young.get(name) or self._old.get(name)
        if reason is not None:
            return reason
        return MissReason.UNKNOWN if self._has_forgotten else MissReason.NEVER_STORED


def _name(space: int, key: bytes) -> bytes:
    return space.to_bytes(4, "little") + key
