"""The demo's prompt: chapters of Python's own reference that ship with it, and a question about them."""

from __future__ import annotations

from pydoc_data.topics import topics

DOCUMENT_TOKENS = 6_300
QUESTION = "What does str.upper() return?"
UNRELATED = (
    "A cairn is a heap of stones that marks a way where no path can be seen. Walkers add a stone when they pass, so "
    "that those who come later find their direction in fog and snow. On high ground a line of cairns leads from one "
    "valley to the next; each is in sight of the one before it. Some are old and tall and have names, others are a few "
    "stones that somebody put up last summer. Tell in one sentence what a cairn is good for, and who builds it."
)


def document() -> str:
    """Return the text, longer than needed: the caller cuts it to the tokens that it wants.

    The chapters on strings come first, since the question is about them.
    """
    first = [name for name in ("string-methods", "formatstrings") if name in topics]
    return "\n\n".join(topics[name] for name in [*first, *sorted(topics.keys() - set(first))])


def instruction(text: str, question: str = QUESTION) -> str:
    """Return what a user would write who has a question about a document."""
    return f"Here is a document.\n\n{text}\n\nAnswer from the document: {question}"
