from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcairn.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("8 GiB", 8 << 30),
        ("8GiB", 8 << 30),
        (" 8 GB ", 8 * 10**9),
        ("512 MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("3 kB", 3000),
        ("2 TiB", 2 << 40),
        ("24.8 GiB", 248 * (1 << 30) // 10),
        ("0.5 B", 0),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-1, "negative"),
        (True, "got bool"),
        (1.0, "got float"),
        (float("nan"), "got float"),
        (None, "got NoneType"),
        ("-1 GiB", "expected a size"),
        ("nan", "expected a size"),
        ("1e3", "expected a size"),
        ("", "expected a size"),
        ("GiB", "expected a size"),
        ("٣ GiB", "expected a size"),
        ("8 G", "GiB .*or GB"),
        ("8 Gb", "GiB .*or GB"),
        ("8 gib", "GiB .*or GB"),
        ("8 s", "use one of B, KiB"),
    ],
)
def test_sizes_refused(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_size(value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0.0), (2, 2.0), (0.25, 0.25), ("3", 3.0), ("200 ms", 0.2), ("5us", 5e-6), ("2 min", 120.0), ("1 h", 3600.0)],
)
def test_durations(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-0.1, "not negative"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (True, "got bool"),
        ("-1 s", "expected a time"),
        ("1 GiB", "unknown unit 'GiB' of time"),
        ([], "got list"),
    ],
)
def test_durations_refused(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_duration(value)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_plain_number_of_bytes_survives_as_text(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == parse_size(size_bytes) == size_bytes


@given(st.integers(min_value=1, max_value=1023), st.sampled_from([10, 20, 30, 40, 50]))
def test_what_a_unit_divides_is_written_so_that_it_reads_back(number: int, shift: int) -> None:
    assert parse_size(format_size(number << shift)) == number << shift


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_size_as_written_for_people_reads_back_as_no_more(size_bytes: int) -> None:
    read = parse_size(format_size(size_bytes))
    assert size_bytes * 9 // 10 <= read <= size_bytes
    assert format_size(read) in (format_size(size_bytes), format_size(size_bytes).replace(".0 ", " "))


@given(st.integers(min_value=1, max_value=1023), st.integers(min_value=1, max_value=9))
def test_a_size_in_tenths_is_written_as_it_was_read(whole: int, tenths: int) -> None:
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        assert format_size(parse_size(f"{whole}.{tenths} {unit}")) == f"{whole}.{tenths} {unit}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (5.0, "5 s"), (0.25, "250 ms"), (90.0, "90 s"), (120.0, "2 min"), (86400.0, "1 d"), (2e-6, "2 us")],
)
def test_times_as_people_write_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    assert parse_duration(text) == seconds
