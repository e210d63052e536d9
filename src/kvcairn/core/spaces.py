"""The spaces that the core knows, opened by a client or left behind on disk."""

from __future__ import annotations

from collections.abc import Iterator

from kvcairn.errors import LayoutError
from kvcairn.index.tree import SpaceRows, Tree
from kvcairn.layout import LayerGroup, SpaceDescriptor
from kvcairn.memory.slots import round_up
from kvcairn.policy.planner import PrefillSpeed


class SpaceInfo:
    """One space: its rows in the tree, and the sizes of its blocks. `descriptor` is None until a client opens it."""

    def __init__(self, rows: SpaceRows) -> None:
        """Know only the id."""
        self.rows = rows
        self.descriptor: SpaceDescriptor | None = None
        self.part_bytes: dict[int, int] = {}
        self.prefill: PrefillSpeed | None = None  # of the engine, once it has told

    @property
    def number(self) -> int:
        """The space's number in requests and in the tree."""
        return self.rows.number

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups; empty while nobody has opened the space."""
        return self.descriptor.layout.groups if self.descriptor else ()

    def is_full(self, group: int) -> bool:
        """Whether blocks of this group are of use only with all blocks before them; so is what is not known."""
        return not self.groups or self.groups[group].kind == "full"

    @property
    def chain_bytes(self) -> int:
        """Bytes that a further block of a chain adds to what is loaded: those of full groups, where there are any."""
        full = [nbytes for group, nbytes in self.part_bytes.items() if self.is_full(group)]
        return sum(full) or sum(self.part_bytes.values())

    def slot_bytes(self, group: int, header_bytes: int = 0) -> int:
        """Size of a slot for one copy of this group."""
        return header_bytes + round_up(self.part_bytes[group])

    def ranges(self, length: int) -> list[tuple[int, int]]:
        """Return for each group which blocks [from, to) are needed to restore `length` blocks."""
        tokens = self.descriptor.block_tokens if self.descriptor else 1
        backs = [group.blocks_back(tokens) for group in self.groups]
        return [(0 if back is None else max(0, length - back), length) for back in backs]


class Spaces:
    """All spaces, by number and by id."""

    def __init__(self, tree: Tree) -> None:
        """Start empty."""
        self._tree = tree
        self._infos: list[SpaceInfo] = []

    def __len__(self) -> int:
        """Number of spaces."""
        return len(self._infos)

    def __getitem__(self, number: int) -> SpaceInfo:
        """Return a space by number."""
        return self._infos[number]

    def __iter__(self) -> Iterator[SpaceInfo]:
        """All spaces."""
        return iter(self._infos)

    def known(self, space_id: bytes) -> SpaceInfo:
        """Return the space of that id, made if need be."""
        rows = self._tree.add_space(space_id)
        if rows.number == len(self._infos):
            self._infos.append(SpaceInfo(rows))
        return self._infos[rows.number]

    def open(self, descriptor: SpaceDescriptor, largest_slot_bytes: int) -> SpaceInfo:
        """Return the space of a descriptor.

        Raises:
            LayoutError: one of its parts is larger than the memory tier can ever hold.
        """
        layout = descriptor.layout
        parts = {g: layout.part_bytes(g, descriptor.block_tokens) for g in range(len(layout.groups))}
        for group, nbytes in parts.items():
            if round_up(nbytes) > largest_slot_bytes:
                raise LayoutError(
                    f"group {group}: a block of {descriptor.block_tokens} tokens takes {round_up(nbytes)} bytes, "
                    f"the memory tier holds slots of at most {largest_slot_bytes}"
                )
        info = self.known(descriptor.space_id)
        info.descriptor, info.part_bytes = descriptor, parts
        return info
