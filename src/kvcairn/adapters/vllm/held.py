"""Write policy `back`: full blocks stay in the engine's pages alone until it is about to write to one of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcairn.adapters.vllm.steps import Pages, Store
from kvcairn.types import Hints


@dataclass
class Block:
    """One block: its parent's key, its pages, and what its request said of its future."""

    parent: bytes | None
    pages: Pages
    hints: Hints | None


class Held:
    """Blocks that are not stored yet, by key and by page: never more than the engine has pages. One thread only."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._blocks: dict[bytes, Block] = {}
        self._by_page: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def hold(self, store: Store) -> None:
        """Take over a store. Where a block is held already its new pages count, which will live longer."""
        parent, blocks = store.parent, len(store.keys)
        rows = [len(part) // blocks for part in store.pages]
        for i, key in enumerate(store.keys):
            self._drop(key)
            pages = tuple(part[i * n : (i + 1) * n] for part, n in zip(store.pages, rows, strict=True))
            self._blocks[key] = Block(parent, pages, store.hints)
            for page in self._pages(pages):
                self._by_page.setdefault(page, set()).add(key)
            parent = key

    def due(self, fresh: Iterable[int], number: Callable[[], int]) -> list[Store]:
        """Give up the blocks with a page that is about to be written to, each behind those before it in its chain.

        Args:
            fresh: these pages.
            number: numbers a store.
        """
        stores: list[Store] = []
        for page in fresh:
            for key in self._by_page.get(page, set()).copy():
                for name, block in self._with_parents(key):
                    last = stores[-1] if stores else None
                    if last is not None and last.keys[-1] == block.parent and last.hints == block.hints:
                        last.keys.append(name)
                        last.pages = tuple([*a, *b] for a, b in zip(last.pages, block.pages, strict=True))
                    else:
                        stores.append(Store(number(), block.parent, [name], block.pages, block.hints))
        return stores

    def clear(self) -> None:
        """Give up all of them unstored."""
        self._blocks.clear()
        self._by_page.clear()

    def _with_parents(self, key: bytes) -> list[tuple[bytes, Block]]:
        """Take a block and those before it that are held, and return them in order."""
        chain: list[tuple[bytes, Block]] = []
        at: bytes | None = key
        while at is not None and at in self._blocks:
            block = self._drop(at)
            assert block is not None
            chain.append((at, block))
            at = block.parent
        return chain[::-1]

    def _drop(self, key: bytes) -> Block | None:
        block = self._blocks.pop(key, None)
        for page in self._pages(block.pages) if block is not None else ():
            keys = self._by_page[page]
            keys.discard(key)
            if not keys:
                del self._by_page[page]
        return block

    @staticmethod
    def _pages(pages: Pages) -> Iterable[int]:
        return (page for part in pages for page in part if page)
