"""The framer: a sample's place is its timestamp, whatever the network does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.media.framer import BLOCK_SAMPLES, AudioBlock, Framer
from duplexd.units import Ticks, ticks_from_ms

FRAME = 320
RTP_STEP = 960


def voice(samples: int) -> npt.NDArray[np.int16]:
    """A signal in which every sample tells its own index, and none is zero."""
    return (np.arange(samples) % 32_000 + 1).astype(np.int16)


def frames(pcm: npt.NDArray[np.int16], rtp: int = 0) -> list[tuple[npt.NDArray[np.int16], int]]:
    return [(pcm[i : i + FRAME], rtp + i * 3) for i in range(0, len(pcm), FRAME)]


def feed(framer: Framer, packets: Iterable[tuple[npt.NDArray[np.int16], int]]) -> list[AudioBlock]:
    return [block for pcm, rtp in packets for block in framer.push(pcm, rtp)]


def assert_on_timeline(blocks: list[AudioBlock], pcm: npt.NDArray[np.int16]) -> None:
    for earlier, later in itertools.pairwise(blocks):
        assert earlier.span.end <= later.span.start
    for block in blocks:
        said = pcm[block.start : block.start + BLOCK_SAMPLES]
        heard = block.pcm[: len(said)]
        came = heard != 0
        assert int((block.pcm == 0).sum()) == block.missing
        assert np.array_equal(heard[came], said[came])


@pytest.mark.parametrize("rtp", [0, 12_345, (1 << 32) - 2 * RTP_STEP], ids=["zero", "random", "wraps"])
def test_whole_stream_comes_out_sample_for_sample(rtp: int) -> None:
    pcm = voice(16_000)
    packets = [(one, at % (1 << 32)) for one, at in frames(pcm, rtp)]

    blocks = feed(Framer(), packets)

    assert np.array_equal(np.concatenate([block.pcm for block in blocks]), pcm[: len(blocks) * BLOCK_SAMPLES])
    assert [block.start for block in blocks] == list(range(0, len(blocks) * BLOCK_SAMPLES, BLOCK_SAMPLES))
    assert len(blocks) == 31


def test_a_block_leaves_with_its_last_sample() -> None:
    """No waiting when nothing is lost: the second 20 ms frame completes the first 32 ms block."""
    framer, packets = Framer(), frames(voice(640))

    assert framer.push(*packets[0]) == []
    assert [block.start for block in framer.push(*packets[1])] == [0]


def test_a_lost_packet_is_a_flagged_hole_and_shifts_nothing() -> None:
    pcm = voice(16_000)
    packets = frames(pcm)
    del packets[10]

    blocks = feed(Framer(), packets)

    assert_on_timeline(blocks, pcm)
    assert sum(block.missing for block in blocks) == FRAME
    assert [block.gap for block in blocks].count(True) <= 1


@given(st.randoms(use_true_random=False), st.integers(0, (1 << 32) - 1))
def test_loss_reordering_and_doubles_move_no_sample(rng: random.Random, rtp: int) -> None:
    """Any network: each sample that leaves stands where it was said, blocks leave once and in order."""
    pcm = voice(16_000)
    sent = [
        (i + rng.uniform(0, 4), packet) for i, packet in enumerate(frames(pcm, rtp)) if i == 0 or rng.random() > 0.2
    ]
    sent += [(when + rng.uniform(0, 8), packet) for when, packet in sent if rng.random() < 0.2]
    sent[0] = (-1.0, sent[0][1])
    packets = [(one, at % (1 << 32)) for _, (one, at) in sorted(sent, key=lambda item: item[0])]
    framer = Framer()

    blocks = feed(framer, packets)

    assert_on_timeline(blocks, pcm)
    assert [block.start for block in blocks] == list(range(0, len(blocks) * BLOCK_SAMPLES, BLOCK_SAMPLES))
    assert framer.counts.streams == 0


def test_old_doubles_by_the_hundred_do_not_restart_the_stream() -> None:
    pcm = voice(16_000)
    packets = frames(pcm)

    blocks = feed(Framer(), packets[:30] + [packets[2]] * 100 + packets[30:])

    assert_on_timeline(blocks, pcm)
    assert len(blocks) == 31


def test_a_pause_of_ten_seconds_keeps_the_timeline_and_is_bounded() -> None:
    """Discontinuous transmission: ten seconds without packets are ten seconds, of which the last two leave as zeros."""
    pcm = voice(12 * 16_000)
    packets = frames(pcm)
    framer = Framer()

    blocks = feed(framer, packets[:50] + packets[550:])

    assert_on_timeline(blocks, pcm)
    assert blocks[-1].span.end > ticks_from_ms(11_900)
    assert len(blocks) <= 31 + 31 + 64
    assert framer.counts.skipped > 7 * 16_000


def test_a_new_stream_goes_on_after_the_newest_sample() -> None:
    """The browser changes SSRC: the timestamps start again at a random place."""
    pcm = voice(16_000)
    framer = Framer()

    blocks = feed(framer, frames(pcm[:8000], 5) + frames(pcm[8000:], 3_000_000_000))

    assert np.array_equal(np.concatenate([block.pcm for block in blocks]), pcm[: len(blocks) * BLOCK_SAMPLES])
    assert framer.counts.streams == 1


def test_a_stream_that_lags_for_good_is_heard_again() -> None:
    """The timeline was advanced past a muted track whose clock then goes on from where it stopped."""
    pcm = voice(32_000)
    framer = Framer()
    feed(framer, frames(pcm[:3200]))
    framer.advance(ticks_from_ms(1500))

    blocks = feed(framer, frames(pcm[3200:], 3200 * 3))

    assert framer.counts.streams == 1
    assert sum(BLOCK_SAMPLES - block.missing for block in blocks) > 24_000


def test_a_muted_track_yields_flagged_silence() -> None:
    framer = Framer()
    feed(framer, frames(voice(3200)))

    blocks = framer.advance(ticks_from_ms(1000))

    assert blocks[-1].span.end == 30 * BLOCK_SAMPLES * 3 + BLOCK_SAMPLES * 3 or blocks[-1].span.end <= ticks_from_ms(
        1000
    )
    assert all(block.gap for block in blocks[1:])


def test_before_the_first_packet_there_is_no_timeline() -> None:
    assert Framer().advance(Ticks(480_000)) == []


@pytest.mark.parametrize("shape", [(2, 320), (4000,)], ids=["stereo", "too long"])
def test_a_wrong_frame_is_refused_and_changes_nothing(shape: tuple[int, ...]) -> None:
    pcm = voice(1600)
    framer = Framer()
    feed(framer, frames(pcm[:320]))

    with pytest.raises(ValueError):
        framer.push(np.zeros(shape, np.int16), 960)
    blocks = feed(framer, frames(pcm)[1:])

    assert_on_timeline(blocks, pcm)
    assert [block.missing for block in blocks] == [0, 0, 0]


def test_an_empty_frame_is_nothing() -> None:
    assert Framer().push(np.zeros(0, np.int16), 77) == []
