"""Plain trees: dicts, lists and single values, as TOML and JSON give them. Layer 0.

A place in a tree is written `tiers[0].capacity`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

# 'dsik' is meant to be 'disk' (0.75); 'redis' is not (0.67).
_ALIKE: Final = 0.7


def join(path: str, name: str) -> str:
    """Return the path of a name inside the table at a path; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def lay(node: object, parts: Sequence[str], text: str, path: str = "") -> str:
    """Set a single value in place, making tables on the way, and return its path.

    Args:
        node: The tree, of dicts and lists.
        parts: Names of tables and numbers of list entries on the way to the value; the last is its name.
        text: The value.
        path: The path of the tree itself.

    Raises:
        ValueError: There is no such place; the tree may have gained empty tables.
    """
    head, rest = parts[0], parts[1:]
    if not head:
        raise ValueError("names no setting")
    if isinstance(node, list):
        if not head.isdecimal() or int(head) >= len(node):
            raise ValueError(f"{path} has no entry {head!r}; there are {len(node)}")
        if not rest:
            raise ValueError(f"{path}[{head}] is a table, not a single setting")
        return lay(node[int(head)], rest, text, f"{path}[{int(head)}]")
    if not isinstance(node, dict):
        raise ValueError(f"{path} is a single setting, not a table")
    path = join(path, head)
    if not rest:
        node[head] = text
        return path
    return lay(node.setdefault(head, [] if rest[0].isdecimal() else {}), rest, text, path)


def find(tree: object, path: str, absent: object = None) -> object:
    """Return what stands at a path of table names, or `absent`."""
    found = tree
    for name in filter(None, path.split(".")):
        found = found.get(name, absent) if isinstance(found, Mapping) else absent
    return found


def leaves(node: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every single value, in order."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from leaves(child, join(path, name))
    elif isinstance(node, list | tuple):
        for number, child in enumerate(node):
            yield from leaves(child, f"{path}[{number}]")
    else:
        yield path, node


def near(name: str, known: Collection[str]) -> str:
    """Return a question that names the known name most like this one, or an empty text."""
    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=_ALIKE)
    return f"did you mean {found[0]!r}?" if found else ""
