"""What the barge-in bench counts: only words of the reply that was interrupted, and every one of them that leaks."""

from __future__ import annotations

import numpy as np
import pytest

from duplexd.bench.bargein import Interruption, _compare, tone_number, words_heard
from duplexd.bench.stage import Event
from duplexd.bench.tap import RATE, ClockMap, Recording
from duplexd.media import tones
from duplexd.units import Nanos

TOLD = [{"text": f"1-{k},"} for k in range(4)]


def recorded(*words: tuple[int, float]) -> Recording:
    """(tone number, share of it that is heard) one after the other."""
    sounds = []
    for index, share in words:
        sound = tones.word_pcm(index, samples=tones.CLOCK_WORD_MS * RATE // 1000, rate=RATE) * 32767
        sound[round(len(sound) * share) :] = 0
        sounds.append(sound)
    clock = ClockMap(rate=RATE, starts=(0,), origins_ns=(0,), spread_ns=0)
    return Recording(pcm=np.concatenate(sounds).astype(np.int16), rate=RATE, first_sample=0, clock=clock)


def test_a_word_of_the_page_has_the_number_of_its_tones() -> None:
    assert [tone_number(text) for text in ("0-3", "2-5,", "2-5.")] == [3, 69, 69]


def test_only_words_of_the_reply_are_counted_and_by_their_place_in_it() -> None:
    """The end of the reply before, and a sound that is no word of this one, are somebody else's."""
    heard = recorded((5, 1.0), (32, 1.0), (33, 1.0), (70, 1.0), (34, 0.4))
    words = words_heard(heard, TOLD, after=Nanos(0), before=heard.end)

    assert [word.index for word in words] == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "remembered", "errors"),
    [
        ([(32, 1.0), (33, 1.0), (34, 0.4)], 2, 0),
        ([(32, 1.0), (33, 1.0), (34, 0.4)], 3, 1),
        ([(32, 1.0), (33, 1.0), (34, 0.4)], 1, 1),
        ([(32, 1.0), (33, 0.7), (34, 1.0)], 3, 0),
        ([(32, 1.0), (33, 0.2), (34, 1.0)], 3, 1),
        ([(32, 1.0), (33, 0.5), (33, 0.55)], 2, 0),
    ],
    ids=[
        "exact",
        "one too many",
        "one too few",
        "a bitten inner word",
        "one that was not played",
        "a last one in parts",
    ],
)
def test_history_is_compared_with_what_sounded(words: list[tuple[int, float]], remembered: int, errors: int) -> None:
    heard = recorded(*words)
    old = words_heard(heard, TOLD, after=Nanos(0), before=heard.end)
    one = Interruption("page", 0.0)
    _compare(one, Event(words=remembered, ambiguous=[]), heard, old)

    assert (one.history_errors, one.compared) == (errors, True)


@pytest.mark.parametrize(
    ("cut_ms", "errors", "undecided"),
    [(432.0, 0, 1), (400.0, 1, 0)],
    ids=["the history's cut is where the sound ended", "it is elsewhere"],
)
def test_a_word_cut_within_the_ears_error_of_its_end_is_undecided(cut_ms: float, errors: int, undecided: int) -> None:
    """434 of 440 ms sound: the ear takes the word for whole, and a history that says it was cut there may be right."""
    heard = recorded((32, 1.0), (33, 434 / tones.CLOCK_WORD_MS))
    old = words_heard(heard, TOLD, after=Nanos(0), before=heard.end)
    one = Interruption("page", 0.0, cut_ms=cut_ms)
    _compare(one, Event(words=1, ambiguous=[]), heard, old)

    assert (one.heard, one.history_errors, one.ear_undecided) == ([0, 1], errors, undecided)
