"""What a request got from the cache, in tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RowReuse:
    """One sequence of a request.

    Attributes:
        prompt_tokens: length of the prompt, padding left out.
        by_tier: tokens that were loaded instead of computed, by the tier that held them.
        reason: why no more was loaded (`kvcairn.MissReason`, or a sentence where the cache was not asked); None
            where all full blocks of the prompt were loaded.
        stored_blocks: blocks that this request added to the cache.
    """

    prompt_tokens: int
    by_tier: dict[str, int] = field(default_factory=dict)
    reason: str | None = None
    stored_blocks: int = 0

    @property
    def tokens(self) -> int:
        """Tokens loaded instead of computed."""
        return sum(self.by_tier.values())


@dataclass(frozen=True)
class Reuse:
    """A request: one `RowReuse` for each prompt, in the order of the batch."""

    rows: tuple[RowReuse, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, padding left out."""
        return sum(row.prompt_tokens for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens loaded instead of computed, over all rows."""
        return sum(row.tokens for row in self.rows)

    @property
    def by_tier(self) -> dict[str, int]:
        """Tokens loaded, by tier, over all rows."""
        tiers = [tier for row in self.rows for tier in row.by_tier]
        return {tier: sum(row.by_tier.get(tier, 0) for row in self.rows) for tier in tiers}


def leading_blocks(by_tier: dict[str, int], count: int, block_tokens: int) -> dict[str, int]:
    """Return the tokens of the first `count` blocks by tier, given the tiers of all blocks that were found.

    Blocks lie the nearer the earlier they stand in the prefix, so what is missing at the end is taken from the
    slower tiers; `by_tier` names the fastest first.
    """
    kept = {}
    for tier, blocks in by_tier.items():
        taken = min(blocks, count)
        count -= taken
        if taken:
            kept[tier] = taken * block_tokens
    return kept
