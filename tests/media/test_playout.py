"""Playout against a plain model of its samples, and its rules one by one."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplexd.ids import Epoch
from duplexd.media.playout import FRAME, Pcm, Place, Playout
from duplexd.units import Span, Ticks, ticks_from_ms

RATE = 24_000
STEP = 2  #: ticks of a sample
FRAME_SAMPLES = 480
KEPT = ticks_from_ms(400)
QUEUED_MAX = ticks_from_ms(2000)


def sound(epoch: int, first: int, count: int) -> Pcm:
    """Samples that tell where they belong, and are never silence."""
    index = np.arange(first, first + count)
    return ((epoch * 7919 + index) % 30_000 + 1).astype(np.int16)


def publish(playout: Playout, start: int, count: int, *, last: bool = False, epoch: int = 0) -> bool:
    """`count` samples from sample `start` of the timeline on."""
    span = Span(Ticks(start * STEP), Ticks((start + count) * STEP))
    return playout.publish(epoch=Epoch(epoch), span=span, pcm=sound(epoch, start, count), last=last)


def pull(playout: Playout, frames: int, *, first: int = 0) -> Pcm:
    return np.concatenate([playout.pull((first + index) * FRAME) for index in range(frames)])


class PlayoutMachine(RuleBasedStateMachine):
    """Replies are published, played, frozen, resumed and cut; the ear is somewhere behind the transport.

    Positions of the model are samples of the timeline. `due` is what must still leave, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.playout = Playout(rate=RATE, kept=KEPT, queued_max=QUEUED_MAX)
        self.epoch = 0
        self.next = 0  # end of what was published
        self.due: list[int] = []
        self.heard: dict[int, int] = {}  # pts -> sample, of everything that was sent and not taken back
        self.floor = 0  # the ear is not before this
        self.end = 0  # of what was sent
        self.pts = 0
        self.sent = 0
        self.dropped = 0
        self.held = False

    @rule(count=st.sampled_from([0, 1, 300, 480, 1200]), last=st.booleans())
    def publish(self, count: int, last: bool) -> None:
        if (len(self.due) + count) * STEP > QUEUED_MAX:
            with pytest.raises(OverflowError, match="queued"):
                publish(self.playout, self.next, count, last=last, epoch=self.epoch)
            return
        assert publish(self.playout, self.next, count, last=last, epoch=self.epoch)
        self.due += range(self.next, self.next + count)
        self.next += count

    @rule(frames=st.integers(1, 4))
    def play(self, frames: int) -> None:
        for _ in range(frames):
            frame = self.playout.pull(self.pts)
            now = [] if self.held else self.due[:FRAME_SAMPLES]
            expected = np.zeros(FRAME_SAMPLES, np.int16)
            if now:
                expected[: len(now)] = sound(self.epoch, 0, 1 + now[-1])[now]
                self.end = now[-1] + 1
            assert frame.dtype == np.int16
            assert frame.tolist() == expected.tolist()
            self.heard |= {self.pts + STEP * index: sample for index, sample in enumerate(now)}
            self.due = self.due[len(now) :]
            self.sent += len(now)
            self.pts += FRAME

    @precondition(lambda self: not self.held)
    @rule()
    def hold(self) -> None:
        self.playout.hold()
        self.held = True

    @precondition(lambda self: self.held)
    @rule(back=st.integers(0, 2000), odd=st.integers(0, STEP - 1))
    def resume(self, back: int, odd: int) -> None:
        """The ear stood anywhere in what is kept of this epoch, perhaps inside a sample."""
        heard = max(self.floor, self.end - (KEPT - FRAME) // STEP, self.end - back)
        inside = odd if heard < self.end else 0
        self.playout.resume(Ticks(heard * STEP + inside))
        self.due = list(range(heard, self.end)) + self.due
        self.heard = {pts: sample for pts, sample in self.heard.items() if sample < heard}
        self.floor = self.end = heard
        self.held = False

    @rule(back=st.integers(0, 2000), step=st.integers(1, 2))
    def advance(self, back: int, step: int) -> None:
        at = max(self.floor, self.end - back)
        self.epoch += step
        assert self.playout.advance(Epoch(self.epoch), Ticks(at * STEP)) == len(self.due)
        self.dropped += len(self.due)
        self.due = []
        self.heard = {pts: sample for pts, sample in self.heard.items() if sample < at}
        self.floor = self.end = self.next = at
        self.held = False
        assert self.playout.advance(Epoch(self.epoch - step), Ticks(0)) == 0
        assert not publish(self.playout, self.next, 7, epoch=self.epoch - step)
        self.dropped += 7

    def teardown(self) -> None:
        """The position at a pts is that of the newest sample at or before it; what was muted has none of its own.

        So it never goes back while pts grows.
        """
        sent = sorted(self.heard)
        walked: list[tuple[int, int]] = []
        for pts in range(0, self.pts + FRAME, 97):
            index = bisect_right(sent, pts)
            place = self.playout.place(pts)
            if not index:
                assert place is None
                continue
            newest = sent[index - 1]
            assert place is not None
            assert place.position == self.heard[newest] * STEP + min(pts - newest, STEP)
            assert place.past == max(0, pts - newest - STEP)
            walked.append((place.epoch, place.position))
        assert walked == sorted(walked)

    @invariant()
    def counts_agree(self) -> None:
        playout = self.playout

        assert playout.sent_samples == self.sent
        assert playout.dropped_samples == self.dropped
        assert playout.queued == len(self.due) * STEP
        assert playout.quiet == (not self.due)
        assert playout.delivered == self.end * STEP


PlayoutMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPlayoutMachine = PlayoutMachine.TestCase


@pytest.mark.parametrize("rate", [8000, 16_000, 24_000, 48_000])
def test_a_frame_is_always_whole(rate: int) -> None:
    """20 ms leave whether there is content, too little of it, a hold or nothing."""
    playout = Playout(rate=rate)
    half = rate // 100
    nothing = playout.pull(0)
    playout.publish(epoch=Epoch(0), span=Span(Ticks(0), ticks_from_ms(10)), pcm=sound(0, 0, half), last=True)
    part = playout.pull(FRAME)
    playout.hold()
    held = playout.pull(2 * FRAME)

    assert [len(nothing), len(part), len(held)] == [rate // 50] * 3
    assert np.flatnonzero(part).tolist() == list(range(half))
    assert not nothing.any()
    assert not held.any()


def test_a_rate_that_does_not_divide_the_tick_is_refused() -> None:
    with pytest.raises(ValueError, match="44100"):
        Playout(rate=44_100)


def test_before_the_first_content_the_ear_is_nowhere() -> None:
    playout = Playout(rate=RATE)
    pull(playout, 3)

    assert playout.place(2 * FRAME) is None


def test_a_resume_sends_again_from_the_heard_sample_and_the_later_stretch_counts() -> None:
    """Five frames left, two were heard, three went out muted: those leave again, and only the second time counts."""
    playout = Playout(rate=RATE)
    publish(playout, 0, 8 * FRAME_SAMPLES, last=True)
    before = pull(playout, 5)
    playout.hold()
    silence = pull(playout, 4, first=5)
    playout.resume(Ticks(2 * FRAME))
    after = pull(playout, 6, first=9)

    assert np.concatenate([before[: 2 * FRAME_SAMPLES], after]).tolist() == sound(0, 0, 8 * FRAME_SAMPLES).tolist()
    assert not silence.any()
    assert playout.place(4 * FRAME) == Place(Epoch(0), Ticks(2 * FRAME), Ticks(2 * FRAME))
    assert playout.place(9 * FRAME + 100) == Place(Epoch(0), Ticks(2 * FRAME + 100), Ticks(0))


def test_a_second_hold_inside_the_frame_of_the_first_sends_nothing_twice() -> None:
    """Frozen in the middle of a frame, resumed, and frozen again before the ear has moved."""
    playout = Playout(rate=RATE)
    publish(playout, 0, 3 * FRAME_SAMPLES, last=True)
    pull(playout, 2)
    for _ in range(2):
        playout.hold()
        playout.resume(Ticks(FRAME // 2))
        again = playout.pull(2 * FRAME)

    assert again.tolist() == sound(0, FRAME_SAMPLES // 2, FRAME_SAMPLES).tolist()


def test_only_so_much_is_kept_for_a_resume() -> None:
    """At the bound: an ear further back than `kept` gets what there is."""
    playout = Playout(rate=RATE, kept=Ticks(3 * FRAME))
    publish(playout, 0, 10 * FRAME_SAMPLES)
    pull(playout, 8)
    playout.hold()
    playout.resume(Ticks(0))

    assert playout.pull(8 * FRAME).tolist() == sound(0, 5 * FRAME_SAMPLES, FRAME_SAMPLES).tolist()


def test_an_interruption_drops_the_old_and_the_new_epoch_goes_on_at_the_cut() -> None:
    """Flushed, sent and late chunks of epoch 0 are never heard after epoch 1 began, not even by a resume."""
    playout = Playout(rate=RATE)
    publish(playout, 0, 6 * FRAME_SAMPLES)
    pull(playout, 3)
    playout.hold()
    flushed = playout.advance(Epoch(1), Ticks(2 * FRAME))
    late = publish(playout, 6 * FRAME_SAMPLES, FRAME_SAMPLES, epoch=0)
    publish(playout, 2 * FRAME_SAMPLES, FRAME_SAMPLES, epoch=1, last=True)
    playout.hold()
    playout.resume(Ticks(0))
    after = pull(playout, 3, first=3)

    assert (flushed, late) == (3 * FRAME_SAMPLES, False)
    assert playout.dropped_samples == 4 * FRAME_SAMPLES
    assert after[:FRAME_SAMPLES].tolist() == sound(1, 2 * FRAME_SAMPLES, FRAME_SAMPLES).tolist()
    assert not after[FRAME_SAMPLES:].any()


def test_more_than_the_bound_is_refused_and_changes_nothing() -> None:
    playout = Playout(rate=RATE, queued_max=Ticks(2 * FRAME))
    publish(playout, 0, 2 * FRAME_SAMPLES)
    with pytest.raises(OverflowError, match="bound is 1920"):
        publish(playout, 2 * FRAME_SAMPLES, 1)

    assert playout.queued == 2 * FRAME


def test_the_log_is_bounded() -> None:
    """At the bound the oldest stretch is forgotten: the ear is nowhere there, and right everywhere else."""
    playout = Playout(rate=RATE, log_max=4)
    for turn in range(10):
        publish(playout, turn * FRAME_SAMPLES, FRAME_SAMPLES, last=True)
        pull(playout, 2, first=2 * turn)  # The silence between them keeps the stretches apart.

    assert playout.place(11 * FRAME) is None
    assert playout.place(12 * FRAME) == Place(Epoch(0), Ticks(6 * FRAME), Ticks(0))


# Underruns ----------------------------------------------------------------------------------------------------------


def test_a_gap_inside_a_reply_is_an_underrun_with_its_length() -> None:
    playout = Playout(rate=RATE)
    publish(playout, 0, FRAME_SAMPLES)
    pull(playout, 4)
    publish(playout, FRAME_SAMPLES, FRAME_SAMPLES, last=True)
    assert playout.gaps == 0  # Not before it is known to be one.
    pull(playout, 3, first=4)

    assert (playout.underruns, playout.gaps, playout.underrun_ticks) == (1, 1, 3 * FRAME)


def test_what_runs_dry_before_an_empty_last_chunk_is_the_end_and_no_gap() -> None:
    playout = Playout(rate=RATE)
    publish(playout, 0, FRAME_SAMPLES)
    pull(playout, 4)
    publish(playout, FRAME_SAMPLES, 0, last=True)
    pull(playout, 3, first=4)

    assert (playout.underruns, playout.gaps, playout.underrun_ticks) == (0, 0, 0)


def test_silence_before_between_and_after_replies_is_no_underrun() -> None:
    playout = Playout(rate=RATE)
    pull(playout, 5)
    for turn in range(2):
        publish(playout, 2 * turn * FRAME_SAMPLES, FRAME_SAMPLES)
        publish(playout, (2 * turn + 1) * FRAME_SAMPLES, 100, last=True)
        pull(playout, 10, first=5 + 10 * turn)

    assert (playout.underruns, playout.underrun_ticks) == (0, 0)


def test_a_hold_and_a_flush_are_no_underruns() -> None:
    playout = Playout(rate=RATE)
    publish(playout, 0, 2 * FRAME_SAMPLES)
    pull(playout, 2)
    playout.hold()
    pull(playout, 5, first=2)
    playout.advance(Epoch(1), Ticks(FRAME))
    pull(playout, 5, first=7)

    assert (playout.underruns, playout.underrun_ticks) == (0, 0)


def test_an_underrun_that_a_short_last_chunk_ends_does_not_last_until_the_next_reply() -> None:
    """The last chunk fills half a frame after a gap of one; the silence until the next reply is nobody's gap."""
    playout = Playout(rate=RATE)
    publish(playout, 0, FRAME_SAMPLES)
    pull(playout, 2)
    publish(playout, FRAME_SAMPLES, FRAME_SAMPLES // 2, last=True)
    pull(playout, 50, first=2)
    publish(playout, 2 * FRAME_SAMPLES, FRAME_SAMPLES, last=True)
    pull(playout, 1, first=52)

    assert (playout.underruns, playout.underrun_ticks) == (1, FRAME)


def test_a_reply_that_ends_without_a_last_chunk_is_no_gap() -> None:
    """The thinker's stop may come after the last chunk was published: what runs dry then is the end of the reply."""
    playout = Playout(rate=24_000)
    playout.publish(epoch=Epoch(0), span=Span(Ticks(0), Ticks(960)), pcm=np.ones(480, np.int16), last=False)
    for pts in range(0, 9600, 960):
        playout.pull(pts)
    playout.finish()

    assert (playout.underruns, playout.gaps, playout.underrun_ticks) == (0, 0, 0)


def test_a_chunk_longer_than_what_is_kept_is_taken_whole_and_can_be_sent_again() -> None:
    """A client without a track takes a second at once, where less than half of one is kept for a resume."""
    playout = Playout(rate=RATE, kept=KEPT)
    publish(playout, 0, RATE, last=True)
    taken = playout.take(0)
    assert taken is not None
    playout.hold()
    playout.resume(ticks_from_ms(900))
    again = playout.take(int(ticks_from_ms(2000)))

    assert again is not None
    assert (len(taken.pcm), len(again.pcm)) == (RATE, RATE // 10)
