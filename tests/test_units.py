"""Ticks and nanoseconds: exact where they promise it, and rounded down where they cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.errors import ConfigError
from duplexd.units import (
    NANOS_PER_SECOND,
    TICKS_PER_SECOND,
    Span,
    Ticks,
    bytes_from_text,
    ms_from_nanos,
    ms_from_ticks,
    nanos_from_ms,
    nanos_from_ticks,
    samples_from_ticks,
    text_from_bytes,
    ticks_from_ms,
    ticks_from_nanos,
    ticks_from_samples,
)

RATES = [8000, 12_000, 16_000, 24_000, 48_000]
long_ago = st.integers(0, 10**9)  #: hours of samples


@given(long_ago, st.sampled_from(RATES))
def test_samples_survive_the_way_through_ticks(samples: int, rate: int) -> None:
    assert samples_from_ticks(ticks_from_samples(samples, rate), rate) == samples


@given(long_ago, long_ago, st.sampled_from(RATES))
def test_the_media_time_of_parts_is_that_of_the_whole(left: int, right: int, rate: int) -> None:
    parts = ticks_from_samples(left, rate) + ticks_from_samples(right, rate)

    assert parts == ticks_from_samples(left + right, rate)


@pytest.mark.parametrize("rate", [11_025, 22_050, 44_100, 7])
def test_a_rate_that_would_be_rounded_is_refused(rate: int) -> None:
    with pytest.raises(ValueError, match=str(rate)):
        ticks_from_samples(1, rate)


@pytest.mark.parametrize("per_second", [24, 25, 30, 50, 60])
def test_a_frame_of_every_usual_video_rate_is_exact(per_second: int) -> None:
    assert TICKS_PER_SECOND % per_second == 0


@given(long_ago)
def test_ticks_survive_the_way_through_nanoseconds_but_for_one(ticks: int) -> None:
    """A tick is 20833.3 ns: both ways round down, and never forward."""
    back = ticks_from_nanos(nanos_from_ticks(ticks))

    assert ticks - 1 <= back <= ticks


@given(st.integers(0, 10**18), st.integers(0, 10**12))
def test_time_never_runs_backward_when_it_is_converted(nanos: int, later: int) -> None:
    assert ticks_from_nanos(nanos) <= ticks_from_nanos(nanos + later)
    assert nanos_from_ticks(nanos) <= nanos_from_ticks(nanos + later)


@given(st.integers(-(10**6), 10**6))
def test_milliseconds_are_exact_both_ways(ms: int) -> None:
    assert ms_from_ticks(ticks_from_ms(ms)) == ms
    assert ms_from_nanos(nanos_from_ms(ms)) == ms


def test_a_second_is_a_second() -> None:
    assert ticks_from_nanos(NANOS_PER_SECOND) == TICKS_PER_SECOND == ticks_from_ms(1000)
    assert nanos_from_ticks(TICKS_PER_SECOND) == NANOS_PER_SECOND == nanos_from_ms(1000)


@given(st.integers(-100, 100), st.integers(0, 100), st.integers(-300, 300))
def test_a_span_holds_its_start_and_not_its_end(start: int, length: int, position: int) -> None:
    span = Span(Ticks(start), Ticks(start + length))

    assert span.length == length
    assert (position in span) == (start <= position < start + length)
    assert sum(one in span for one in range(-300, 300)) == length


def test_spans_order_by_their_start() -> None:
    spans = [Span(Ticks(9), Ticks(10)), Span(Ticks(0), Ticks(20)), Span(Ticks(0), Ticks(5))]

    assert [(span.start, span.end) for span in sorted(spans)] == [(0, 5), (0, 20), (9, 10)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 << 30),
        ("80 GB", 80 * 10**9),
        ("1.5tb", 15 * 10**11),
        ("0.1 GB", 10**8),
        ("1.0000000015kB", 1000),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, count: int) -> None:
    assert bytes_from_text(text) == count


@pytest.mark.parametrize("text", ["", "GB", "24G", "-1GB", "1e9", "24 GiBs", "1,000", "٣GB", "nan"])
def test_a_size_that_could_mean_two_things_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="24GiB or 80GB"):
        bytes_from_text(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (68 * 10**9, "68.0 GB"), (24 << 30, "24 GiB"), (1 << 20, "1.0 MB")],
)
def test_a_size_is_told_in_the_unit_that_fits_it(count: int, text: str) -> None:
    assert text_from_bytes(count) == text
