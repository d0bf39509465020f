"""The voice with its real weights: clauses are as long as they say, words are where they say, chunks join."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from voice_fakes import WHO, Pcm, Voice

from duplexd import weights
from duplexd.ids import SlotId
from duplexd.models.pocket.phonemes import Reading, WordPlace
from duplexd.models.pocket.voice import (
    CLAUSE_TICKS_MAX,
    FRAME_TICKS,
    FRAMES_MAX,
    Clause,
    Talker,
    Vocoder,
    trim,
    word_spans,
)
from duplexd.models.pocket.voicenets import load_nets
from duplexd.streams.stage import Failed, TalkJob, TalkResult, WordSpan
from duplexd.units import Ticks, ms_from_ticks, ticks_from_ms

QUIET = 10 ** (-50 / 20) * 32768

CLAUSES = [
    "Sure.",
    "Hello there,",
    "Dr. Lee paid $42 at 7:30 pm.",
    "Well, it's a so-called 'fact'",
    "Is that you?",
    "1, 2, 3 — go!",
]


@pytest.fixture(scope="module")
def voice() -> Voice:
    return Voice(Talker(), Vocoder())


def loudness(pcm: Pcm, start: int, end: int) -> float:
    """Root mean square between two positions in ticks."""
    return float(np.sqrt(np.square(pcm[start // 2 : end // 2].astype(float)).mean()))


def check_spans(text: str, words: tuple[WordSpan, ...], length: int) -> None:
    assert [text[word.start_char : word.end_char] for word in words] == text.split()
    at = 0
    for word in words:
        assert at <= word.start <= word.end <= length
        at = word.end


@pytest.mark.weights
@pytest.mark.parametrize("text", CLAUSES)
def test_word_spans_cover_the_clause_in_order(voice: Voice, text: str) -> None:
    result = voice.said(text)
    check_spans(text, result.words, result.length)
    sounding = [word for word in result.words if word.end > word.start]

    assert sounding[0].start == 0
    assert len(sounding) == sum(any(c.isalnum() for c in word) for word in text.split())
    assert result.length % FRAME_TICKS == 0


@pytest.mark.weights
@pytest.mark.parametrize("text", CLAUSES)
def test_a_clause_starts_at_once_and_ends_with_its_pause(voice: Voice, text: str) -> None:
    """The voice's own 0.3 s of silence before a clause would be 0.3 s on every answer."""
    result = voice.said(text)
    pcm = voice.render(0, result.length, fresh=True)
    audible = np.flatnonzero(np.abs(pcm.astype(int)) > QUIET)
    pause_ms = {".": 250, "!": 250, "?": 250, ",": 125}.get(text[-1], 50)
    silence_ms = (len(pcm) - 1 - audible[-1]) / 24

    assert audible[0] / 24 < 45
    assert pause_ms - 20 < silence_ms < pause_ms + 60


@pytest.mark.weights
def test_a_pause_is_silent_and_belongs_to_no_word(voice: Voice) -> None:
    """Whoever interrupts after the comma has heard the word before it."""
    result = voice.said("Yes. Come in.")
    pcm = voice.render(0, result.length, fresh=True)
    yes, come, into = result.words

    assert come.start - yes.end >= ticks_from_ms(25)
    assert loudness(pcm, yes.end, come.start) < QUIET
    assert min(loudness(pcm, word.start, word.end) for word in result.words) > 5 * QUIET
    assert come.end == into.start


@pytest.mark.weights
def test_a_number_takes_the_time_of_all_the_words_it_is_read_as(voice: Voice) -> None:
    long = voice.said("I have 42.").words[-1]
    short = voice.said("I have 2.").words[-1]

    assert ms_from_ticks(long.end - long.start) > ms_from_ticks(short.end - short.start) + 150


@pytest.mark.weights
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_chunked_equals_whole_with_the_real_voice(voice: Voice, data: st.DataObject) -> None:
    length = voice.said("Hello there,").length
    samples = sorted(data.draw(st.sets(st.integers(1, length // 2 - 1), max_size=6)))
    whole = voice.render(0, length, fresh=True, state=1)
    edges = [0, *(2 * sample for sample in samples), length]
    parts = [voice.render(a, b - a, fresh=a == 0) for a, b in pairwise(edges)]

    assert np.abs(whole.astype(int) - np.concatenate(parts)).max() <= 1


@pytest.mark.weights
@pytest.mark.parametrize("text", ["", " ", "...", "😀 🎉", "你好 吗", '"'])
def test_a_clause_with_nothing_to_say_has_no_length(voice: Voice, text: str) -> None:
    result = voice.said(text)

    assert result.length == 0
    assert [(word.start, word.end) for word in result.words] == [(0, 0)] * len(text.split())


@pytest.mark.weights
def test_a_clause_that_is_too_long_is_refused_and_its_neighbour_is_said(voice: Voice) -> None:
    assert voice.talker is not None
    long = "It was a bright cold day in April, and the clocks were striking thirteen, as they do in novels."
    jobs: list[Any] = [
        TalkJob(**WHO, text=text, latents=SlotId(slot), first=False)
        for slot, text in enumerate([long, "Yes.", "ha " * 200])
    ]
    refused, said, endless = voice.talker.run(jobs, voice.media)

    assert isinstance(refused, Failed)
    assert "at most 4000 ms" in refused.reason
    assert isinstance(said, TalkResult)
    assert isinstance(endless, Failed)
    assert "600 characters" in endless.reason


@pytest.mark.weights
def test_the_longest_clause_fits_its_slot(voice: Voice) -> None:
    """Every length up to the bound is either said whole or refused; none is cut short."""
    lengths = []
    for words in range(1, 16):
        result = voice.talk("a one " * words)
        if not isinstance(result, Failed):
            lengths.append(result.length)
            count, first, audible, *_ = voice.arena.field("latents", "clause")[0].tolist()
            assert count <= FRAMES_MAX
            assert first + audible <= count

    assert lengths == sorted(lengths)
    assert 0.75 * CLAUSE_TICKS_MAX < lengths[-1] <= CLAUSE_TICKS_MAX


def pitch(voice: Voice, job: TalkJob, word: int, *, last_third: bool = False) -> float:
    """Median pitch of a word of the clause, or of its last third, in hertz."""
    assert voice.talker is not None
    (result,) = voice.talker.run([job], voice.media)
    assert isinstance(result, TalkResult)
    check_spans(job.text, result.words, result.length)
    span, first = result.words[word], int(voice.arena.field("latents", "clause")[0, 1])
    start, end = span.start // FRAME_TICKS, span.end // FRAME_TICKS
    start = end - (end - start) // 3 if last_third else start
    heard = voice.arena.field("latents", "f0")[0, first + start : first + end]
    return float(heard[heard > 50].median())


@pytest.mark.weights
@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("The sun is hotter", "than the moon."),
        ("The sky is blue", "because of a process."),
        ("The spider", "has eight legs."),
    ],
)
def test_a_clause_cut_within_a_phrase_is_said_as_a_part_of_it(voice: Voice, text: str, after: str) -> None:
    """Alone its last word falls as at the end of a sentence; with the next word, which is not said, it does not."""
    job = TalkJob(**WHO, text=text, latents=SlotId(0), first=True)
    last = len(text.split()) - 1
    whole = pitch(voice, msgspec.structs.replace(job, text=f"{text} {after}"), last, last_third=True)
    alone, part = (
        pitch(voice, msgspec.structs.replace(job, after=known), last, last_third=True) for known in ("", after)
    )

    assert abs(part / whole - 1) < 0.05
    assert alone / whole < 0.9


@pytest.mark.weights
def test_a_clause_cut_within_a_phrase_ends_where_the_next_word_begins(voice: Voice) -> None:
    assert voice.talker is not None
    whole = voice.said("The biggest planet is Jupiter.")
    job = TalkJob(**WHO, text="The biggest planet", latents=SlotId(0), first=True, after="is Jupiter.")
    (part,) = voice.talker.run([job], voice.media)

    assert part == TalkResult(WHO["session"], whole.words[3].start, whole.words[:3])


@pytest.mark.weights
def test_a_clause_that_goes_on_is_said_as_if_the_words_before_it_had_been_heard(voice: Voice) -> None:
    """Alone it begins anew, higher."""
    text, before = "is Jupiter.", "The biggest planet"
    job = TalkJob(**WHO, text=text, latents=SlotId(0), first=False)
    alone, joined = (pitch(voice, msgspec.structs.replace(job, before=said), 0) for said in ("", before))
    whole = pitch(voice, msgspec.structs.replace(job, text=f"{before} {text}"), 3)

    assert abs(joined / whole - 1) < 0.05
    assert alone / whole > 1.15


@pytest.mark.weights
def test_words_that_do_not_fit_beside_a_clause_are_left_out(voice: Voice) -> None:
    """The longest clause that can be said is said, whatever stands around it."""
    assert voice.talker is not None
    text = "a one " * 11
    alone = voice.said(text)
    around = TalkJob(**WHO, text=text, latents=SlotId(0), first=False, before="strengths " * 4, after="strengths")
    (result,) = voice.talker.run([around], voice.media)

    assert result == alone


@pytest.mark.weights
def test_the_same_clause_sounds_the_same_again(voice: Voice) -> None:
    length = voice.said("And again.", slot=0).length
    once = voice.render(0, length, fresh=True)
    voice.said("Something else!", slot=0)
    voice.said("And again.", slot=1)

    np.testing.assert_array_equal(once, voice.render(0, length, fresh=True, latents=1))


@pytest.mark.weights
def test_the_signal_is_the_librarys_own(voice: Voice) -> None:
    """hibari's synthesis of the same spectra, with the same noise, gives the same samples."""
    from hibari import dsp as plain

    from duplexd.models.pocket import dsp

    length = voice.said("The capital of France is Paris.").length
    count, first, audible, *_ = voice.arena.field("latents", "clause")[0].tolist()
    frames = voice.arena.field("latents", "frames")[:1, :, :count]
    net = load_nets(weights.path("hibari"))[1]
    with torch.inference_mode():
        for layer in range(9):
            frames = net.layer(layer, torch.nn.functional.pad(frames, (3, 3)))
        parts = [part.T.numpy().copy() for part in net.spectra(frames).unbind(1)]

    class SameNoise:
        def standard_normal(self, shape: tuple[int, int], dtype: Any) -> Any:
            noise = dsp.noise_table(FRAMES_MAX, torch.device("cpu"))[:count].T.contiguous()
            return torch.view_as_real(noise).reshape(shape).numpy().astype(dtype)

    f0 = voice.arena.field("latents", "f0")[0, :count].numpy()
    expected = plain.synth(*parts, f0, SameNoise())[first * 300 : (first + audible) * 300] * 32767
    actual = voice.render(0, length, fresh=True).astype(float)
    ramp = 120

    assert np.abs(expected - actual)[ramp:-ramp].max() < 20, "of a peak above 8000"
    assert np.abs(actual).max() > 8000


@pytest.mark.weights
def test_the_networks_are_those_of_the_file() -> None:
    """ONNX Runtime on the same phonemes: the same number of frames, and spectra as near as its int8 activations are."""
    import onnxruntime

    talk, spectrum = load_nets(weights.path("hibari"))
    ids = torch.tensor([[0, 50, 83, 54, 156, 31, 16, 81, 156, 86, 123, 4, 0]])  # "həlˈO ðˈɛɹ."
    session = onnxruntime.InferenceSession(str(weights.path("hibari")), providers=["CPUExecutionProvider"])
    speed = np.ones(1, np.float32)
    expected = session.run(None, {"ids": ids.numpy(), "speed": speed})
    with torch.inference_mode():
        steps, encoded = talk.durations(ids)
        f0, frames = talk.latents(ids, encoded, steps)
        x = frames[None]
        for layer in range(9):
            x = spectrum.layer(layer, torch.nn.functional.pad(x, (3, 3)))
        log_magnitude = spectrum.spectra(x)[:, 0].T.numpy()

    assert expected[0].shape[1:] == log_magnitude.shape
    assert np.abs(expected[0][0] - log_magnitude).mean() < 0.1
    assert np.abs(expected[5][0] - f0.numpy()).mean() < 5.0


# Without weights ------------------------------------------------------------------------------------------------------


def test_trim_keeps_the_pause_of_the_punctuation_or_what_there_is() -> None:
    loud = [False] * 24 + [True] * 40 + [False] * 30
    short = loud[:70]

    assert trim(loud, ",") == Clause(count=94, first=24, audible=40 + 10)
    assert trim(loud, ".") == Clause(count=94, first=24, audible=40 + 20)
    assert trim(short, ".") == Clause(count=70, first=24, audible=46)
    assert trim([False] * 9, ".") is None


def test_word_spans_follow_the_steps_of_their_phonemes() -> None:
    """ "a b, * c": the space's time is the word's before it, the comma's is nobody's but for the sounds in it."""
    reading = Reading(
        phonemes="a b, c",
        ids=(0, 1, 16, 2, 3, 16, 4, 0),
        words=(WordPlace(0, 1, 1, 2), WordPlace(2, 4, 3, 4), WordPlace(5, 6, 4, 4), WordPlace(7, 8, 6, 7)),
        pause="",
    )
    steps = [5, 4, 1, 3, 4, 1, 4, 6]  # frames: 0-10 | a 10-18 | 18-20 | b 20-26 | , 26-34 | 34-36 | c 36-44 | 44-56
    loud = [False] * 11 + [True] * 16 + [False] * 9 + [True] * 6 + [False] * 14
    clause = trim(loud, "")
    assert clause is not None
    loud[33:36] = [True] * 3  # c sounds before its time
    spans = [(word.start // FRAME_TICKS, word.end // FRAME_TICKS) for word in word_spans(reading, steps, loud, clause)]

    assert clause == Clause(count=56, first=11, audible=35)
    assert spans == [(0, 9), (9, 16), (16, 16), (22, 31)]


def test_a_talker_cannot_promise_more_than_a_slot_holds() -> None:
    with pytest.raises(ValueError, match="clause_max"):
        Talker(clause_max=Ticks(CLAUSE_TICKS_MAX + 1))
