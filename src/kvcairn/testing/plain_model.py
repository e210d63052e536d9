"""What a cache without bounds would answer, kept in a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcairn.layout import KVLayout

Name = tuple[bytes, bytes]  # space, key


class PlainModel:
    """Which copies may be there and which must be.

    A copy that was committed *may* be there until it is forgotten, cleared or expired; it is *sure* while nothing that
    is free to drop it has happened. What a lookup returns lies between what is sure and what may be.

    Args:
        layout: of the spaces.
        block_tokens: of the spaces.
    """

    def __init__(self, layout: KVLayout, block_tokens: int) -> None:
        self._back = [group.blocks_back(block_tokens) for group in layout.groups]
        self._sure: dict[Name, dict[int, bool]] = {}
        self._lost: list[dict[Name, dict[int, bool]]] = [{}, {}]  # forgotten and expired: a crash may bring them back
        self._expiry: dict[Name, tuple[float, bool]] = {}  # when, and whether it is certain to hold

    def groups(self) -> range:
        """Numbers of the layer groups."""
        return range(len(self._back))

    def commit(self, space: bytes, key: bytes, groups: Iterable[int]) -> None:
        """These copies are there now."""
        self._sure.setdefault((space, key), {}).update(dict.fromkeys(groups, True))
        self._loosen((space, key))

    def maybe(self, space: bytes, key: bytes) -> None:
        """Some copies of this block may be there now."""
        copies = self._sure.setdefault((space, key), {})
        for group in self.groups():
            copies.setdefault(group, False)
        self._loosen((space, key))

    def forget(self, space: bytes, keys: Iterable[bytes]) -> None:
        """These blocks are gone for sure."""
        for key in keys:
            self._drop((space, key), 0)

    def clear(self, space: bytes | None) -> None:
        """All blocks of a space, or of all spaces, are gone for sure."""
        for name in [name for name in self._sure if space in (None, name[0])]:
            self._drop(name, 0)

    def doubt(self, names: Iterable[Name] | None = None) -> None:
        """These blocks, or all, may be gone."""
        for name in list(self._sure) if names is None else names:
            if name in self._sure:
                self._sure[name] = dict.fromkeys(self._sure[name], False)

    def trust(self) -> None:
        """All that may be there is there."""
        for name, groups in self._sure.items():
            self._sure[name] = dict.fromkeys(groups, True)

    def limit(self, space: bytes, keys: Iterable[bytes], at_s: float) -> None:
        """From `at_s` on the copies that are there now are misses."""
        for key in keys:
            self._expiry[space, key] = (at_s, (space, key) in self._sure)

    def drained(self) -> None:
        """What was forgotten so far is forgotten on every tier, and stays so after a restart."""
        self._lost[0].clear()

    def restart(self) -> None:
        """The cache was opened again. What was just forgotten, and what had expired, may be back; so may be limits."""
        for name in self._expiry:
            self._loosen(name)
        for lost in self._lost:
            for name, groups in lost.items():
                for group in groups:
                    self._sure.setdefault(name, {}).setdefault(group, False)
            lost.clear()

    def pass_time(self, now_s: float) -> None:
        """Drop what has expired."""
        for name, (at_s, is_certain) in list(self._expiry.items()):
            if at_s <= now_s:
                del self._expiry[name]
                if is_certain:
                    self._drop(name, 1)
                else:
                    self.doubt([name])

    def needed(self, length: int) -> list[tuple[int, int]]:
        """Return, for each group, the first block that a restored run of `length` blocks cannot do without."""
        return [(group, 0 if back is None else max(0, length - back)) for group, back in enumerate(self._back)]

    def may_have(self, space: bytes, key: bytes) -> bool:
        """Return whether a copy of this block may be there."""
        return bool(self._sure.get((space, key)))

    def boundaries(self, space: bytes, keys: Sequence[bytes], start: int, sure: bool) -> list[int]:
        """Return the restorable lengths, counted from `start`, of what is sure or of what may be there."""
        found = []
        for length in range(start + 1, len(keys) + 1):
            need = (
                (i, group)
                for group, back in enumerate(self._back)
                for i in range(start if back is None else max(start, length - back), length)
            )
            if all(self._has(space, keys[i], group, sure) for i, group in need):
                found.append(length - start)
        return found

    def _has(self, space: bytes, key: bytes, group: int, sure: bool) -> bool:
        groups = self._sure.get((space, key), {})
        return groups.get(group, False) if sure else group in groups

    def _drop(self, name: Name, why: int) -> None:
        if name in self._sure:
            self._lost[why].setdefault(name, {}).update(self._sure.pop(name))
        self._loosen(name)

    def _loosen(self, name: Name) -> None:
        """Whether a limit holds for what comes after a change is up to the cache."""
        if name in self._expiry:
            self._expiry[name] = (self._expiry[name][0], False)
