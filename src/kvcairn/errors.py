"""The exception tree. A miss, a pending block and "no room" are values, never exceptions.

```
KVCairnError
  ConfigError (ValueError)      a setting is unknown, malformed or impossible here
  UnsupportedError              this front, engine or version cannot do what was asked
  LayoutError (ValueError)      bytes, buffers or groups do not fit the layout of the space
  LeaseError                    a lease, reservation or job is used after its end
  ClosedError                   the cache is closed, or was opened by the parent of this process
  TierError                     a tier failed; carries tier, operation and key
    TierUnavailable             the tier cannot be reached now
    TierTimeout (TimeoutError)  a call passed its deadline
    TierFull                    no room below the tier's bound, or the device is full
    CorruptBlock                what the tier returned is not what was stored
```
"""

from __future__ import annotations


class KVCairnError(Exception):
    """Base of every error that kvcairn raises on purpose."""


class ConfigError(KVCairnError, ValueError):
    """A setting is refused; nothing was opened.

    Attributes:
        path: the setting, as in `tiers[1].capacity`.
        reason: what is wrong with it, with the arithmetic where there is one.
        value: what was given, if anything.
        remedy: what to do about it.
    """

    def __init__(self, path: str, reason: str, value: object = None, remedy: str = "") -> None:
        """Build the one-line message from its parts."""
        self.path, self.reason, self.value, self.remedy = path, reason, value, remedy
        given = "" if value is None else f" (given: {value!r})"
        super().__init__(f"{path}: {reason}{given}" + (f"; {remedy}" if remedy else ""))


class UnsupportedError(KVCairnError):
    """What was asked for exists, but not here: another front, engine, version or platform has it."""


class LayoutError(KVCairnError, ValueError):
    """Bytes, buffers or layer groups do not fit the layout of the space; nothing was stored."""


class LeaseError(KVCairnError):
    """A lease, reservation or job was used after its end, or a ticket does not name an open one."""


class ClosedError(KVCairnError):
    """The cache is closed, or belongs to the parent of this forked process."""


class TierError(KVCairnError):
    """A tier failed. Serving goes on: the blocks concerned are misses.

    Attributes:
        tier: name of the tier.
        op: `read`, `write`, `delete`, `open`, ...
        key: the block key concerned, or None for the tier as a whole.
    """

    def __init__(self, tier: str, op: str, reason: str = "", key: bytes | None = None) -> None:
        """Build the one-line message from its parts."""
        self.tier, self.op, self.reason, self.key = tier, op, reason, key
        of = f" of {key.hex()[:16]}" if key else ""
        super().__init__(f"tier {tier!r}: {op}{of} failed" + (f": {reason}" if reason else ""))


class TierUnavailable(TierError):
    """The tier cannot be reached now; it is tried again later."""


class TierTimeout(TierError, TimeoutError):
    """A call to the tier passed its deadline; slots that it may still touch are quarantined."""


class TierFull(TierError):
    """There is no room below the tier's bound, or its device is full."""


class CorruptBlock(TierError):
    """What the tier returned is not what was stored; the copy is dropped."""
