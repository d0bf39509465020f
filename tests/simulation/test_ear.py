"""The listener's ear, computed: when a chunk is heard, where the ear stands, what is a gap."""

from __future__ import annotations

from duplexd.ids import Epoch, ResponseId
from duplexd.simulation.ear import Ear, Gap, Stretch
from duplexd.units import NANOS_PER_MS, Nanos, Span, Ticks, ticks_from_ms

WAY = 80


def ms(value: float) -> Nanos:
    return Nanos(round(value * NANOS_PER_MS))


def publish(ear: Ear, begin: float, end: float, *, now: float, delay: float = 10, response: int = 1) -> Stretch:
    span = Span(ticks_from_ms(begin), ticks_from_ms(end))
    stretch = ear.publish(epoch=ear.epoch, response=ResponseId(response), span=span, now=ms(now), delay=ms(delay))
    assert stretch is not None
    return stretch


def test_a_chunk_is_heard_one_way_after_it_was_published_or_after_the_one_before() -> None:
    ear = Ear(way=ms(WAY))

    assert publish(ear, 0, 300, now=1000).at == ms(1080)
    assert publish(ear, 300, 600, now=1100).at == ms(1380)
    assert ear.where(ms(1480)).position == ticks_from_ms(400)


def test_a_chunk_that_comes_after_its_predecessor_ran_out_leaves_a_gap() -> None:
    """300 ms of sound, the next chunk 450 ms later: 150 ms of silence, heard at the ear."""
    ear = Ear(way=ms(WAY))
    publish(ear, 0, 300, now=1000)
    late = publish(ear, 300, 600, now=1450)

    assert ear.gap_before(late) == Gap(ResponseId(1), ms(1530), ms(150))


def test_a_late_packet_is_a_gap_only_beyond_the_buffer() -> None:
    ear = Ear(way=ms(WAY))
    publish(ear, 0, 300, now=1000)
    assert ear.gap_before(publish(ear, 300, 600, now=1200, delay=70)) is None

    late = publish(ear, 600, 900, now=1300, delay=200)
    gap = ear.gap_before(late)

    assert gap is not None
    assert gap.length == ms(120)


def test_silence_between_two_replies_is_no_gap() -> None:
    ear = Ear(way=ms(WAY))
    publish(ear, 0, 300, now=1000)

    assert ear.gap_before(publish(ear, 300, 600, now=5000, response=2)) is None


def test_what_was_frozen_goes_on_where_it_stopped_and_is_no_gap() -> None:
    ear = Ear(way=ms(WAY))
    publish(ear, 0, 300, now=1000)
    publish(ear, 300, 600, now=1100)
    assert ear.freeze(ms(1180)).position == ticks_from_ms(100)
    left = ear.resume(ms(2000))

    assert [(s.start, s.at) for s in left] == [(ticks_from_ms(100), ms(2080)), (ticks_from_ms(300), ms(2280))]
    assert ear.gap_before(left[-1]) is None
    assert ear.where(ms(2130)).position == ticks_from_ms(150)


def test_after_a_flush_nothing_old_is_heard() -> None:
    ear = Ear(way=ms(WAY))
    publish(ear, 0, 900, now=1000)
    place = ear.flush(epoch=Epoch(1), at=ticks_from_ms(400), now=ms(1480))

    assert place.position == ticks_from_ms(400)
    assert ear.where(ms(3000)).position == ticks_from_ms(400)
    stale = Span(Ticks(0), ticks_from_ms(100))
    assert ear.publish(epoch=Epoch(0), response=ResponseId(1), span=stale, now=ms(3000), delay=ms(1)) is None
