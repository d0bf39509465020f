"""The vocoder on random weights: however a clause is cut into chunks, the samples are those of the whole clause."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from voice_fakes import Pcm, Voice

from duplexd.models.pocket import dsp
from duplexd.models.pocket.voice import FRAME_TICKS, SAMPLE_TICKS, Vocoder
from duplexd.models.pocket.voicenets import CONTEXT, DECODER_BLOCKS, LATENT_CHANNELS, SpectrumNet
from duplexd.streams.stage import Failed

COUNT, FIRST, AUDIBLE = 90, 9, 70
LENGTH = AUDIBLE * FRAME_TICKS


def write_clause(
    voice: Voice,
    *,
    slot: int,
    seed: int = 3,
    count: int = COUNT,
    first: int = FIRST,
    audible: int = AUDIBLE,
    follows: bool = False,
    leads: bool = False,
) -> None:
    """Random latents with a gliding, partly unvoiced pitch."""
    rng = torch.Generator().manual_seed(seed)
    f0 = 150 + 80 * torch.rand(count, generator=rng)
    f0[: count // 6] = 0
    f0[count // 2 : count // 2 + 5] = 20
    voice.arena.field("latents", "frames")[slot, :, :count] = torch.randn(LATENT_CHANNELS, count, generator=rng)
    voice.arena.field("latents", "f0")[slot, :count] = f0
    voice.arena.field("latents", "phase")[slot, :count] = dsp.start_phases(f0)
    voice.arena.field("latents", "clause")[slot] = torch.tensor([count, first, audible, follows, leads])


def far_sighted_net() -> SpectrumNet:
    """Random weights whose outermost taps are the strongest, so that the farthest frame of a sample's view is heard."""
    torch.manual_seed(11)
    net = SpectrumNet().eval().requires_grad_(False)
    for name, weight in net.named_parameters():
        if name == "dec_in.weight" or name.endswith(".dw.weight"):
            weight[:, :, [0, -1]] *= 10
    return net


@pytest.fixture(scope="module")
def voice() -> Voice:
    made = Voice(None, Vocoder(net=far_sighted_net()))
    for slot in (0, 1):
        write_clause(made, slot=slot, seed=3 + slot)
    return made


@pytest.fixture(scope="module")
def whole(voice: Voice) -> Pcm:
    return voice.render(0, LENGTH, fresh=True, state=2)


def chunked(voice: Voice, cuts: Sequence[int], *, latents: int = 0, state: int = 0, length: int = LENGTH) -> Pcm:
    """Render between successive cuts (ticks), each chunk from the state of the one before."""
    edges = [0, *cuts, length]
    parts = [voice.render(a, b - a, fresh=a == 0, latents=latents, state=state) for a, b in pairwise(edges)]
    return np.concatenate(parts)


def assert_same(expected: Pcm, actual: Pcm) -> None:
    assert len(expected) == len(actual)
    assert np.abs(expected.astype(int) - actual.astype(int)).max() <= 1, "more than rounding"


cut_schedules = st.lists(st.integers(1, LENGTH // SAMPLE_TICKS - 1), max_size=7, unique=True).map(sorted)


@settings(max_examples=40, deadline=None)
@given(samples=cut_schedules)
def test_chunked_equals_whole_for_every_schedule(voice: Voice, whole: Pcm, samples: list[int]) -> None:
    """Chunks end at any sample, not only at a frame; their lengths sum up to the clause's."""
    assert_same(whole, chunked(voice, [sample * SAMPLE_TICKS for sample in samples]))


@pytest.mark.parametrize("ticks", [FRAME_TICKS, 960, 7680, 9600], ids=["one frame", "20 ms", "160 ms", "200 ms"])
def test_chunked_equals_whole_at_even_steps(voice: Voice, whole: Pcm, ticks: int) -> None:
    assert_same(whole, chunked(voice, range(ticks, LENGTH, ticks)))


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(6, 60),
    first=st.integers(0, 20),
    audible=st.integers(1, 60),
    data=st.data(),
)
def test_short_clauses_and_ends_without_padding(
    voice: Voice, count: int, first: int, audible: int, data: st.DataObject
) -> None:
    """The clause may be shorter than the network's view, and may be played up to its very first or last frame."""
    first = min(first, count - 1)
    audible = min(audible, count - first)
    write_clause(voice, slot=2, seed=count, count=count, first=first, audible=audible)
    length = audible * FRAME_TICKS
    cuts = data.draw(st.lists(st.integers(1, length // SAMPLE_TICKS - 1), max_size=4, unique=True).map(sorted))
    expected = voice.render(0, length, fresh=True, latents=2, state=1)

    assert_same(expected, chunked(voice, [c * SAMPLE_TICKS for c in cuts], latents=2, length=length))


@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, LENGTH // SAMPLE_TICKS - 1))
def test_a_fresh_start_in_the_middle_sounds_as_if_it_had_come_from_the_beginning(
    voice: Voice, whole: Pcm, start: int
) -> None:
    actual = voice.render(start * SAMPLE_TICKS, LENGTH - start * SAMPLE_TICKS, fresh=True, state=1)

    assert_same(whole[start:], actual)


def test_a_used_or_spoiled_state_is_as_good_as_new(voice: Voice, whole: Pcm) -> None:
    """`fresh` reads nothing of the slot: another clause's leftovers and NaN are both overwritten."""
    voice.render(0, 9600, fresh=True, latents=1, state=0)
    after_other = chunked(voice, [9600, 24_000], state=0)
    voice.arena.spoil("state", 0)
    after_spoil = chunked(voice, [9600, 24_000], state=0)

    assert_same(whole, after_other)
    np.testing.assert_array_equal(after_other, after_spoil)


@settings(max_examples=25, deadline=None)
@given(edge=st.integers(1, AUDIBLE - 2), moved=st.floats(0, 0.999), samples=cut_schedules)
def test_two_clauses_that_go_on_from_each_other_sound_like_one(
    voice: Voice, whole: Pcm, edge: int, moved: float, samples: list[int]
) -> None:
    """Both are parts of one passage, and their pulses were counted from different places: nobody hears where they meet,
    however they are cut into chunks.
    """
    write_clause(voice, slot=1, audible=edge, leads=True)
    write_clause(voice, slot=2, first=FIRST + edge, audible=AUDIBLE - edge, follows=True)
    voice.arena.field("latents", "phase")[2] = (voice.arena.field("latents", "phase")[2] + moved) % 1
    border = edge * FRAME_TICKS
    cuts = [sample * SAMPLE_TICKS for sample in samples]
    left = chunked(voice, [cut for cut in cuts if cut < border], latents=1, state=1, length=border)
    # A chunk shorter than what is blended would lose the end of it; the engine makes none.
    later = [cut - border for cut in cuts if cut - border >= 2 * FRAME_TICKS]
    right = chunked(voice, later, latents=2, state=1, length=LENGTH - border)
    write_clause(voice, slot=1, seed=4)

    assert_same(whole, np.concatenate([left, right]))


def test_a_clause_that_goes_on_from_one_that_was_never_made_begins_softly(voice: Voice) -> None:
    """What was thrown away between them left nothing behind."""
    voice.render(0, LENGTH, fresh=True, state=1)
    write_clause(voice, slot=2, follows=True)
    actual = voice.render(0, LENGTH, fresh=True, latents=2, state=1)

    loud = np.abs(actual.astype(int))
    assert loud[0] < loud.max() / 50


def test_two_sessions_do_not_hear_each_other(voice: Voice, whole: Pcm) -> None:
    """Chunks of two clauses alternate on one vocoder, each with its own state."""
    other = chunked(voice, [9600, 19_200], latents=1, state=1)
    mine, theirs = [], []
    edges = [0, 9600, 19_200, LENGTH]
    for a, b in pairwise(edges):
        mine.append(voice.render(a, b - a, fresh=a == 0, latents=0, state=0))
        theirs.append(voice.render(a, b - a, fresh=a == 0, latents=1, state=1))

    assert_same(whole, np.concatenate(mine))
    np.testing.assert_array_equal(other, np.concatenate(theirs))


def test_a_chunk_that_is_made_again_is_identical(voice: Voice) -> None:
    """Discarded and redone from its state before, a chunk has the same bytes."""
    voice.render(0, 9600, fresh=True, state=0)
    names = ("voice_in", "voice_blocks", "voice_tail", "voice_next", "voice_seam", "voice_pulse")
    before = {name: voice.arena.field("state", name)[0].clone() for name in names}
    once = voice.render(9600, 9600, fresh=False, state=0)
    for name, value in before.items():
        voice.arena.field("state", name)[0] = value

    np.testing.assert_array_equal(once, voice.render(9600, 9600, fresh=False, state=0))


@pytest.mark.parametrize(
    ("start", "length", "fresh", "reason"),
    [
        (1, 600, True, "multiples of 2"),
        (0, 0, True, "not empty"),
        (0, LENGTH + 600, True, "of a clause of"),
        (-600, 600, True, "of a clause of"),
        (19_200, 600, False, "stands at"),
    ],
    ids=["half a sample", "empty", "past the end", "before the start", "out of order"],
)
def test_a_chunk_that_cannot_be_made_is_refused_with_the_reason(
    voice: Voice, start: int, length: int, fresh: bool, reason: str
) -> None:
    voice.render(0, 9600, fresh=True, state=0)
    bad = voice.job(start, length, fresh=fresh)
    good = voice.job(9600, 9600, fresh=False)
    refused, made = voice.vocoder.run([bad, good], voice.media)

    assert isinstance(refused, Failed)
    assert reason in refused.reason
    assert not isinstance(made, Failed), "a neighbour goes on"


def test_latents_that_are_not_finite_end_their_own_chunk_only(voice: Voice) -> None:
    write_clause(voice, slot=2)
    voice.arena.field("latents", "frames")[2, 5, 30] = torch.nan
    refused, made = voice.vocoder.run(
        [voice.job(0, LENGTH, fresh=True, latents=2, state=1), voice.job(0, LENGTH, fresh=True)], voice.media
    )

    assert isinstance(refused, Failed)
    assert "not finite" in refused.reason
    assert not isinstance(made, Failed)


def test_a_frame_sees_context_frames_to_each_side_and_no_more() -> None:
    net = far_sighted_net().double()
    latents = torch.randn(1, LATENT_CHANNELS, 2 * CONTEXT + 3, dtype=torch.float64, requires_grad=True)
    x = latents
    for layer in range(1 + DECODER_BLOCKS):
        x = net.layer(layer, x)
    (seen,) = torch.autograd.grad(x[0, :, 1].square().sum(), latents)
    frames = torch.nonzero(seen[0].abs().sum(0)).flatten().tolist()

    assert x.shape[2] == 3
    assert frames == list(range(1, 2 * CONTEXT + 2))


def test_the_pulse_train_does_not_jump_between_pieces(voice: Voice) -> None:
    """A click at every border is what a restarted phase sounds like: the phase is that of one sum over all samples."""
    f0 = voice.arena.field("latents", "f0")[0, :COUNT]
    hertz = dsp.frequency(f0, 0, COUNT).reshape(-1).double()
    angle = 2 * torch.pi * hertz.clamp(min=40.0).cumsum(0) / dsp.SAMPLE_RATE
    harmonic = torch.arange(1, 276)[:, None]
    plain = (torch.cos(harmonic * angle) * (harmonic <= 11_000 // hertz.clamp(min=40.0))).sum(0) * (hertz > 40)
    phases = dsp.start_phases(f0)
    pieces = torch.cat([dsp.pulses(f0, phases, a, a + 10) for a in range(0, COUNT, 10)])

    torch.testing.assert_close(pieces.double(), plain, rtol=0, atol=0.5)  # of pulses that are 50 high and more


def test_a_steady_pitch_gives_that_pitch() -> None:
    """200 Hz: a pulse every 120 samples, harmonics up to 11 kHz."""
    f0 = torch.full((16,), 200.0)
    train = dsp.pulses(f0, dsp.start_phases(f0), 0, 16).double()
    spectrum = torch.fft.rfft(train[:4800]).abs()
    peaks = torch.nonzero(spectrum > spectrum.max() / 2).flatten() * 5

    assert peaks.tolist() == list(range(200, 11_001, 200))


def test_spectra_of_a_signal_come_back_as_that_signal() -> None:
    """Windowing twice and dividing by the weight is the identity, at the ends of the clause too."""
    count = 12
    signal = torch.randn(count * dsp.HOP, generator=torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(signal[None], (dsp.HALF, dsp.HALF), mode="reflect")[0]
    frames = padded.unfold(0, dsp.WINDOW, dsp.HOP)[:count] * dsp.window(signal.device).square()
    blocks = dsp.overlap(frames.reshape(count, 4, dsp.HOP), torch.zeros(dsp.TAIL, dsp.HOP))
    weight = dsp.overlap_weight(0, count, count, signal.device)

    torch.testing.assert_close((blocks[3 : 3 + count] / weight).reshape(-1), signal, rtol=0, atol=1e-5)
