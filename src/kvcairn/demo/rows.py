"""What the demo reports: a row for each way to the first token, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

_TITLES = {
    "recompute": "recompute",
    "memory": "memory",
    "disk": "disk, new process",
    "damaged": "disk, a block damaged",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One generation over the same prompt.

    Attributes:
        row: `recompute`, `memory`, `disk` or `damaged`.
        ttft_s: seconds from the request to the first token, loading included.
        prompt_tokens: length of the prompt.
        reused_tokens: tokens that were loaded instead of computed, by the tier that held them.
        identical: the new tokens are those of the recomputed row, one by one.
        model: whose answer it is.
        new_tokens: how many tokens were generated.
        damaged_block: number of the block that was damaged, in the row concerned.
        answer: the generated text.
    """

    row: str
    ttft_s: float
    prompt_tokens: int
    reused_tokens: dict[str, int]
    identical: bool
    model: str
    new_tokens: int
    damaged_block: int | None = None
    answer: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain values; those that do not concern the row are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for people; the first one is what the others are compared with."""
    first = rows[0]
    grid = Table(
        title=f"{first.prompt_tokens:,} tokens of prompt, {first.model}, float32, greedy",
        caption=f"The answer, cut after {first.new_tokens} tokens: {' '.join(first.answer.split())}",
        caption_justify="left",
    )
    for title in ("", "first token", "speed-up", "reused tokens", "identical"):
        grid.add_column(title, justify="right" if title else "left")
    for row in rows:
        grid.add_row(
            _TITLES.get(row.row, row.row),
            f"{row.ttft_s:.2f} s",
            f"{first.ttft_s / row.ttft_s:.1f} x" if row is not first else "",
            ", ".join(f"{tier} {n:,}" for tier, n in row.reused_tokens.items()) or "none",
            "yes" if row.identical else "NO",
        )
    return grid
