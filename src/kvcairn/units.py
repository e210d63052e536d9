"""Sizes and times as people write them: one parser for each, used by every setting. Layer 0."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

PAGE_BYTES: Final = 4096
"""The unit of slots, regions and direct I/O."""

_BINARY: Final = {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_DECIMAL: Final = {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)}
_SIZES: Final = {"": 1, "B": 1, "kB": 1000} | _BINARY | _DECIMAL
_TIMES: Final = {
    "": Decimal(1),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: object) -> int:
    """Return a number of bytes from an int or a text such as `"8 GiB"`, `"24.8 GiB"` or `"500 MB"`.

    Part of a byte is left out: a size is a bound, and what is taken stays under what was said.

    Raises:
        ValueError: Negative, no number of bytes, or a unit that is not one of bytes. The text says what was expected.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected bytes or a text like '8 GiB', got {type(value).__name__}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a size cannot be negative")
        return value
    number, unit = _split(value, "a size like '8 GiB'")
    if unit not in _SIZES:
        raise ValueError(f"unknown unit {unit!r} of size; {_near_size(unit)}")
    return int(number * _SIZES[unit])


def parse_duration(value: object) -> float:
    """Return seconds from a number of seconds or a text such as `"200 ms"`.

    Raises:
        ValueError: Negative, not finite, or a unit that is not one of time.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected seconds or a text like '200 ms', got {type(value).__name__}")
    if isinstance(value, str):
        number, unit = _split(value, "a time like '200 ms'")
        if unit not in _TIMES:
            raise ValueError(f"unknown unit {unit!r} of time; use one of us, ms, s, min, h, d")
        value = float(number * _TIMES[unit])
    if not math.isfinite(value) or value < 0:
        raise ValueError("a time is finite and not negative")
    return float(value)


def seconds(given: float, name: str = "deadline_s") -> float:
    """Return a deadline that is a number; what is over already is 0.

    Raises:
        ValueError: It is none; says which argument is meant.
    """
    if isinstance(given, bool) or not isinstance(given, int | float) or math.isnan(given):
        raise ValueError(f"{name} must be a number of seconds, got {given!r}")
    return max(0.0, float(given))


def format_size(size_bytes: int) -> str:
    """Write bytes for people: exact where a binary unit divides them, else with one decimal, rounded down.

    So `parse_size` takes what is written here, and gives no more than there was: advice can be copied into settings.
    What it has read itself is written as it was.
    """
    for name, factor in reversed(_BINARY.items()):
        if size_bytes >= factor:
            whole, rest = divmod(size_bytes, factor)
            return f"{whole}.{(rest * 10 + 9) // factor} {name}" if rest else f"{whole} {name}"
    return f"{size_bytes} B"


def format_duration(seconds: float) -> str:
    """Write seconds for people, in the largest unit that gives a number from 1 up; `parse_duration` takes it."""
    for name, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:g} {name}"
    for name, per_second in (("s", 1), ("ms", 1000)):
        if seconds * per_second >= 1 or not seconds:
            return f"{seconds * per_second:g} {name}"
    return f"{seconds * 1e6:g} us"


def _split(text: str, expected: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"expected {expected}, got {text!r}")
    return Decimal(match[1]), match[2]


def _near_size(unit: str) -> str:
    letter = unit[:1].upper()
    if f"{letter}iB" in _BINARY:
        return f"write {letter}iB (powers of 1024) or {letter}B (powers of 1000)"
    return "use one of B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB, TB, PB"
