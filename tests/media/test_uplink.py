"""What lay between the person's last audible sample and the block the engine counts from."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from duplexd.media.lateness import Lateness
from duplexd.media.uplink import KEPT, PIECE, Behind, Uplink
from duplexd.units import BLOCK_SAMPLES, INPUT_RATE, NANOS_PER_MS, Nanos, Span, Ticks, ticks_from_ms, ticks_from_samples

BLOCK = ticks_from_samples(BLOCK_SAMPLES, INPUT_RATE)
NEVER = Nanos(0)


def loud(samples: int, *, level: float = 0.3) -> NDArray[np.float32]:
    """So many loud samples, and silence to the end of the block."""
    pcm = np.zeros(BLOCK_SAMPLES, np.float32)
    pcm[:samples] = level
    return pcm


def note(uplink: Uplink, index: int, pcm: NDArray[np.float32], *, voiced: bool = True, filling_ms: float = 0.0) -> None:
    span = Span(Ticks(index * BLOCK), Ticks((index + 1) * BLOCK))
    newest = Ticks(span.end + ticks_from_ms(filling_ms))
    uplink.note(pcm, span, voiced=voiced, newest=newest, late=Nanos(7), now=Nanos(100 + index))


def test_the_tail_is_what_came_after_the_last_loud_piece() -> None:
    """The detector held on for two blocks; the voice ended in the middle of the first."""
    uplink = Uplink()
    for index, pcm in enumerate((loud(BLOCK_SAMPLES), loud(2 * PIECE), loud(0), loud(0, level=0))):
        note(uplink, index, pcm, voiced=index < 3)

    assert uplink.behind(Nanos(102)) == Behind(Ticks(2 * BLOCK - BLOCK // 2), Ticks(0), Nanos(7))
    assert uplink.behind(Nanos(103)) is None


@pytest.mark.parametrize(("room", "tail"), [(0.005, BLOCK), (0.05, 0)], ids=["a quiet room", "somebody whispers on"])
def test_a_room_is_no_voice(room: float, tail: int) -> None:
    uplink = Uplink()
    note(uplink, 0, loud(BLOCK_SAMPLES))
    note(uplink, 1, loud(BLOCK_SAMPLES, level=room))
    found = uplink.behind(Nanos(101))

    assert found is not None
    assert found.tail == tail


def test_a_sample_waits_until_its_packet_is_full() -> None:
    uplink = Uplink()
    note(uplink, 0, loud(BLOCK_SAMPLES), filling_ms=8)

    assert uplink.behind(Nanos(100)) == Behind(Ticks(0), ticks_from_ms(8), Nanos(7))


def test_of_two_blocks_that_came_at_once_the_later_one_counts() -> None:
    uplink = Uplink()
    for index, samples in enumerate((BLOCK_SAMPLES, 3 * PIECE)):
        span = Span(Ticks(index * BLOCK), Ticks((index + 1) * BLOCK))
        uplink.note(loud(samples), span, voiced=True, newest=span.end, late=NEVER, now=Nanos(5))

    assert uplink.behind(Nanos(5)) == Behind(Ticks(BLOCK // 4), Ticks(0), NEVER)


def test_what_is_remembered_is_bounded() -> None:
    uplink = Uplink()
    for index in range(KEPT + 1):
        note(uplink, index, loud(BLOCK_SAMPLES))

    assert uplink.behind(Nanos(100)) is None
    assert uplink.behind(Nanos(101)) is not None


def test_how_late_a_packet_is_counts_from_the_fastest_lately() -> None:
    lateness = Lateness()
    late = [lateness.note(960 * n, Nanos((20 * n + wait) * NANOS_PER_MS)) for n, wait in enumerate((9, 4, 30))]

    assert late == [0, 0, 26 * NANOS_PER_MS]
