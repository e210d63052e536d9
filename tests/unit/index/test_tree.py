from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcairn.index.arrays import Rows
from kvcairn.index.tree import ROOT, UNKNOWN_PARENT, SpaceRows, Tree
from kvcairn.types import CopyState, MissReason

READY = int(CopyState.READY)


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def parents(tree: Tree, rows: Rows) -> list[bytes | None]:
    return [tree.parent_key(row) for row in rows.tolist()]


def hold(tree: Tree, rows: Rows) -> None:
    """As if each row had one copy."""
    tree.nodes.copies[rows] += 1


def drop(tree: Tree, rows: Rows) -> None:
    tree.nodes.copies[rows] -= 1
    tree.prune(rows)


def assert_no_ring(tree: Tree) -> None:
    for row in np.flatnonzero(tree.nodes.space[:-1] >= 0).tolist():
        seen, above = {row}, int(tree.nodes.parent[row])
        while above >= 0:
            assert above not in seen, "the tree has a ring"
            seen.add(above)
            above = int(tree.nodes.parent[above])


@pytest.fixture
def tree() -> Tree:
    return Tree()


@pytest.fixture
def space(tree: Tree) -> SpaceRows:
    return tree.add_space(b"one")


def test_a_space_is_made_once(tree: Tree) -> None:
    one, two = tree.add_space(b"one"), tree.add_space(b"two")
    assert (one.number, two.number) == (0, 1)
    assert tree.add_space(b"one") is one


def test_a_chain_is_linked_to_its_parent(tree: Tree, space: SpaceRows) -> None:
    rows = tree.ensure(space, keys(1, 2, 3), ROOT)
    assert parents(tree, rows) == [None, key(1), key(2)]
    assert tree.nodes.parent[rows[0]] == ROOT
    more = tree.ensure(space, keys(4, 5), int(rows[1]))
    assert parents(tree, more) == [key(2), key(4)]
    assert tree.ancestors(int(more[1])) == [int(more[0]), int(rows[1]), int(rows[0])]
    tree.check()


def test_what_is_known_is_not_made_again(tree: Tree, space: SpaceRows) -> None:
    first = tree.ensure(space, keys(1, 2), ROOT)
    again = tree.ensure(space, keys(1, 2, 3), ROOT)
    assert again[:2].tolist() == first.tolist()
    assert len(tree) == 3
    assert tree.ensure(space, [], ROOT).size == 0


def test_a_key_named_twice_is_one_row(tree: Tree, space: SpaceRows) -> None:
    rows = tree.ensure(space, keys(1, 2, 1), ROOT)
    assert (len(tree), int(rows[0])) == (2, int(rows[2]))
    assert_no_ring(tree)
    tree.check()


def test_equal_keys_of_two_spaces_are_two_blocks(tree: Tree, space: SpaceRows) -> None:
    other = tree.add_space(b"two")
    one, two = tree.ensure(space, keys(1), ROOT), tree.ensure(other, keys(1), ROOT)
    assert one[0] != two[0]
    assert tree.find(other, keys(1, 2)).tolist() == [int(two[0]), -1]
    assert tree.space_of(int(two[0])) is other


def test_a_floating_segment_attaches_when_its_parent_is_known(tree: Tree, space: SpaceRows) -> None:
    floating = tree.ensure(space, keys(3, 4), UNKNOWN_PARENT)
    copies = tree.add_copies()
    hold(tree, floating)
    copies.state[floating] = READY
    copies.children[floating[0]] += 1
    assert parents(tree, floating) == [None, key(3)]
    rows = tree.ensure(space, keys(1, 2, 3), ROOT)
    assert parents(tree, rows) == [None, key(1), key(2)]
    assert (tree.nodes.children[rows[1]], copies.children[rows[1]]) == (1, 1)
    assert copies.children[rows[2]] == 1
    tree.check()


def test_a_known_parent_is_never_replaced(tree: Tree, space: SpaceRows) -> None:
    rows = tree.ensure(space, keys(1, 2), ROOT)
    tree.ensure(space, keys(9, 2), ROOT)
    tree.ensure(space, keys(2), UNKNOWN_PARENT)
    assert parents(tree, rows) == [None, key(1)]
    tree.check()


def test_a_floating_block_may_turn_out_to_be_the_first(tree: Tree, space: SpaceRows) -> None:
    rows = tree.ensure(space, keys(1), UNKNOWN_PARENT)
    tree.ensure(space, keys(1), ROOT)
    assert tree.nodes.parent[rows[0]] == ROOT


@pytest.mark.parametrize("with_copies", [False, True])
@pytest.mark.parametrize(
    ("chains", "above"),
    [
        ([[1, 2]], [2]),  # the parent is the last of the chain
        ([[1, 2, 3]], [2]),
        ([[1]], [1]),  # a block is its own parent
        ([[1, 2], [2, 1]], [None, None]),
        ([[1], [2], [3]], [2, 3, 1]),
        ([[1, 2, 3], [3, 1]], [None, None]),
        ([[1, 3, 1]], [3]),
    ],
)  # fmt: skip
def test_keys_that_are_no_chain_make_no_ring(
    tree: Tree, space: SpaceRows, chains: list[list[int]], above: list[int | None], with_copies: bool
) -> None:
    for chain, parent in zip(chains, above, strict=True):
        row = UNKNOWN_PARENT if parent is None else int(tree.ensure(space, keys(parent), UNKNOWN_PARENT)[0])
        rows = tree.ensure(space, keys(*chain), row)
        if with_copies:
            hold(tree, rows)
    assert_no_ring(tree)
    tree.check()


def test_pruning_forgets_what_has_neither_copies_nor_children(tree: Tree, space: SpaceRows) -> None:
    rows = tree.ensure(space, keys(1, 2, 3), ROOT)
    hold(tree, rows)
    drop(tree, rows[1:2])
    assert tree.find(space, keys(1, 2, 3)).tolist() == rows.tolist(), "3 still refers to 2"
    drop(tree, rows[2:])
    assert tree.find(space, keys(1, 2, 3)).tolist() == [int(rows[0]), -1, -1]
    drop(tree, rows[:1])
    assert len(tree) == 0
    tree.check()


def test_a_row_that_is_used_again_has_another_serial_and_nothing_of_the_old_block(tree: Tree, space: SpaceRows) -> None:
    rows = tree.ensure(space, keys(1, 2), ROOT)
    serial = tree.nodes.serial[rows].copy()
    hold(tree, rows)
    tree.nodes.hinted.expires_s[rows] = 5.0
    tree.note_gone(rows, MissReason.CORRUPT)
    drop(tree, rows[::-1])
    again = tree.ensure(space, keys(7, 8), UNKNOWN_PARENT)
    assert sorted(again.tolist()) == sorted(rows.tolist())
    assert (tree.nodes.serial[rows] == serial + 1).all()
    assert tree.nodes.hinted.expires_s[again].tolist() == [0.0, 0.0]
    assert [tree.why_gone(space, k, int(r)) for k, r in zip(keys(7, 8), again, strict=True)] == ["never_stored"] * 2


def test_why_a_block_is_gone_outlives_its_row(tree: Tree, space: SpaceRows) -> None:
    rows = tree.ensure(space, keys(1), ROOT)
    hold(tree, rows)
    tree.note_gone(rows, MissReason.EVICTED)
    assert tree.why_gone(space, key(1), int(rows[0])) is MissReason.EVICTED
    drop(tree, rows)
    assert tree.why_gone(space, key(1), -1) is MissReason.EVICTED
    assert tree.why_gone(space, key(2), -1) is MissReason.NEVER_STORED
    assert tree.why_gone(tree.add_space(b"two"), key(1), -1) is MissReason.NEVER_STORED


def test_adopted_blocks_are_linked_in_any_order(tree: Tree, space: SpaceRows) -> None:
    tree.adopt(space, keys(3, 1, 2, 9), [key(2), None, key(1), key(8)])
    rows = tree.find(space, keys(1, 2, 3, 9))
    assert parents(tree, rows) == [None, key(1), key(2), key(8)]
    tree.check()


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_blocks_adopted_one_after_the_other_make_no_ring(tree: Tree, space: SpaceRows, at_once: int) -> None:
    above = {1: 2, 2: 3, 3: 4, 4: 1, 5: 4}
    numbers = list(above)
    for begin in range(0, len(numbers), at_once):
        part = numbers[begin : begin + at_once]
        tree.adopt(space, keys(*part), [key(above[n]) for n in part])
    assert_no_ring(tree)
    linked = [tree.parent_key(row) for row in tree.find(space, keys(*numbers)).tolist()]
    assert sum(parent is None for parent in linked) == 1, "one link of the ring is left out"
    tree.check()


def test_adopted_blocks_that_name_each_other_make_no_ring(tree: Tree, space: SpaceRows) -> None:
    tree.adopt(space, keys(1, 2, 3, 4), [key(2), key(3), key(1), key(4)])
    assert_no_ring(tree)
    tree.check()


@given(st.lists(st.integers(-1, 9), min_size=1, max_size=10), st.randoms(use_true_random=False))
def test_the_most_recent_come_first_and_leaves_behind_their_parents(shape: list[int], draw: random.Random) -> None:
    tree = Tree()
    space = tree.add_space(b"one")
    above = [parent if parent < number else -1 for number, parent in enumerate(shape)]
    every = list(range(len(shape)))
    tree.adopt(space, keys(*every), [None if above[n] < 0 else key(above[n]) for n in every])
    draw.shuffle(every)
    rows = tree.find(space, keys(*every))
    used = [draw.randrange(5) for _ in every]
    ordered = tree.by_recency(rows, np.array(used)).tolist()
    assert sorted(ordered) == sorted(rows.tolist())
    latest = dict(zip(rows.tolist(), used, strict=True))
    for row in reversed(ordered):
        parent = int(tree.nodes.parent[row])
        assert parent < 0 or ordered.index(parent) < ordered.index(row)
        if parent >= 0:
            latest[parent] = max(latest[parent], latest[row])
    assert [latest[row] for row in ordered] == sorted(latest.values(), reverse=True)


def test_it_grows_and_its_columns_with_it(tree: Tree, space: SpaceRows) -> None:
    copies, first = tree.add_copies(), tree.ensure(space, keys(1, 2), ROOT)
    hold(tree, first)
    copies.slot[first], copies.state[first], copies.pins[first] = [5, 6], READY, 2
    copies.children[first[0]] = 1
    copies.checksum[first] = 7
    rows = tree.ensure(space, keys(*range(1, 5000)), ROOT)
    assert rows[:2].tolist() == first.tolist()
    assert copies.slot.size == copies.state.size == len(copies.checksum) == tree.nodes.rows + 1
    assert copies.slot[first].tolist() == [5, 6]
    assert (
        (copies.state[first] == READY).all() and (copies.pins[first] == 2).all() and (copies.checksum[first] == 7).all()
    )
    assert (copies.slot[rows[2:]] == -1).all() and (copies.state[rows[2:]] == 0).all() and copies.slot[-1] == -1
    late = tree.add_copies()
    assert late.slot.size == tree.nodes.rows + 1
    tree.check()


class TreeMachine(RuleBasedStateMachine):
    """The tree against a dictionary of true parents; malformed chains come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.spaces = [self.tree.add_space(name) for name in (b"one", b"two")]
        self.copies = self.tree.add_copies()
        self.held: dict[tuple[int, bytes], int] = {}

    def rows_held(self) -> Rows:
        return np.array(list(self.held.values()), dtype=np.intp)

    @rule(
        space=st.integers(0, 1),
        chain=st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True),
        parent=st.sampled_from([None, "unknown"]) | st.integers(0, 12),
        hold_them=st.booleans(),
    )
    def ensure(self, space: int, chain: Sequence[int], parent: int | str | None, hold_them: bool) -> None:
        here = self.spaces[space]
        row = ROOT if parent is None else UNKNOWN_PARENT
        if isinstance(parent, int):
            row = int(self.tree.ensure(here, keys(parent), UNKNOWN_PARENT)[0])
        rows = self.tree.ensure(here, keys(*chain), row)
        assert [self.tree.key(r) for r in rows.tolist()] == keys(*chain)
        for k, r in zip(keys(*chain), rows.tolist(), strict=True):
            if hold_them and (space, k) not in self.held:
                self.held[space, k] = r
                hold(self.tree, np.array([r]))
        self.tree.prune(np.unique(rows))

    @rule(draw=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def drop(self, draw: random.Random, share: float) -> None:
        chosen = [place for place in self.held if draw.random() < share]
        rows = np.array([self.held.pop(place) for place in chosen], dtype=np.intp)
        self.tree.note_gone(rows, MissReason.EVICTED)
        drop(self.tree, rows)

    @invariant()
    def it_is_a_tree(self) -> None:
        assert_no_ring(self.tree)
        self.tree.check()
        for (space, k), row in self.held.items():
            assert self.tree.find(self.spaces[space], [k]).tolist() == [row]
        bare = [
            row for row in np.flatnonzero(self.tree.nodes.space[:-1] >= 0).tolist()
            if self.tree.nodes.copies[row] == 0 and self.tree.nodes.children[row] == 0
        ]  # fmt: skip
        assert all(row in self.made_bare() for row in bare)

    def made_bare(self) -> set[int]:
        """Rows that `ensure` made for a parent that was not known: nobody prunes them before they have children."""
        return set(np.flatnonzero(self.tree.nodes.parent[:-1] == UNKNOWN_PARENT).tolist())


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
