"""What the barge-in bench counts: only words of the reply that was interrupted, and every one of them that leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from duplexd.bench.bargein import (
    Evidence,
    Half,
    Interruption,
    _compare,
    judge,
    report_from,
    report_of,
    tone_number,
    words_heard,
)
from duplexd.bench.programs import RigError
from duplexd.bench.stage import Event, keep
from duplexd.bench.tap import RATE, ClockMap, Recording
from duplexd.media import tones
from duplexd.units import NANOS_PER_MS, Nanos, ticks_from_ms

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


# From what the page noted and the loudspeaker played ----------------------------------------------------------------

WORD = tones.CLOCK_WORD_MS
SPOKEN = [
    {"text": f"1-{k},", "start": ticks_from_ms(k * WORD), "end": ticks_from_ms(k * WORD + WORD - tones.GAP_MS)}
    for k in range(4)
]
METRICS = {"duplexd_frontend_advance_ms_p95": 1.0, "duplexd_frontend_stale_samples_sent": 0.0}


def noted(at_ms: float, kind: str, **what: Any) -> dict[str, Any]:
    return {"at": round(at_ms * NANOS_PER_MS), "kind": kind, **what}


def evidence(
    *, flush_ms: float, hold: int, position_ms: float = 960, more: list[dict[str, Any]] | None = None
) -> Evidence:
    """The reply begins with the recording; a voice 900 ms later; the flush; a stop three seconds later."""
    log = [
        noted(0, "reply", response=1, state="created"),
        noted(1, "words", response=1, words=SPOKEN),
        *(more or []),
        noted(flush_ms, "flush", hold=hold, position=int(ticks_from_ms(position_ms))),
        noted(flush_ms + 1, "heard", response=1, words=2, ambiguous=[], final=True),
        noted(3000, "state", state="listening"),
    ]
    onset = 900 * NANOS_PER_MS
    return Evidence("question-01", 800.0, begun=0, said=onset, onset=onset, stopped=3000 * NANOS_PER_MS, log=log)


def test_old_sound_after_the_flush_is_in_the_stop() -> None:
    """The page flushed at 1000 ms, and the loudspeaker went on with the old reply until 1080."""
    heard = recorded((32, 1.0), (33, 1.0), (34, 120 / WORD))
    one = judge(evidence(flush_ms=1000, hold=1), heard, by="page", lossy=False)

    assert one.stop_ms == pytest.approx(180, abs=8)
    assert (one.decide_ms, one.old_words_after_flush) == (100.0, 0)


def test_a_word_that_begins_when_all_should_be_quiet_has_leaked_and_is_in_the_stop() -> None:
    heard = recorded((32, 1.0), (33, 1.0), (40, 0.0), (34, 0.5))
    one = judge(evidence(flush_ms=970, hold=1), heard, by="page", lossy=False)

    assert one.old_words_after_flush == 1
    assert one.stop_ms == pytest.approx(3 * WORD + WORD / 2 - 900, abs=8)


def test_a_flush_without_a_hold_is_an_advance_with_a_stop() -> None:
    heard = recorded((32, 1.0), (33, 1.0), (34, 0.25))
    one = judge(evidence(flush_ms=1080, hold=0), heard, by="server", lossy=False)

    assert (one.advanced, one.held) == (True, False)
    assert one.stop_ms == pytest.approx(180, abs=8)


def test_a_scrap_after_the_flush_is_a_word_only_where_no_packet_was_lost() -> None:
    heard = recorded((32, 1.0), (33, 1.0), (40, 0.0), (34, 40 / WORD))
    stops = [judge(evidence(flush_ms=970, hold=1), heard, by="page", lossy=lossy).stop_ms for lossy in (False, True)]

    assert stops == [pytest.approx(3 * WORD + 40 - 900, abs=8), pytest.approx(2 * WORD - tones.GAP_MS - 900, abs=8)]


def test_moving_positions_are_compared_with_what_is_played() -> None:
    """A report 30 ms ahead of the loudspeaker, one that is exact, and one nobody measured, which says so."""
    reports = [
        noted(200, "cursor", playback=int(ticks_from_ms(230)), assumed=False),
        noted(600, "cursor", playback=int(ticks_from_ms(600)), assumed=False),
        noted(700, "cursor", playback=int(ticks_from_ms(100)), assumed=True),
    ]
    heard = recorded((32, 1.0), (33, 1.0), (34, 0.25))
    one = judge(evidence(flush_ms=1080, hold=1, more=reports), heard, by="page", lossy=False)

    assert one.moving_errors_ms == [pytest.approx(30, abs=3), pytest.approx(0, abs=3)]


def test_what_was_kept_gives_the_same_figures(tmp_path: Path) -> None:
    heard = recorded((32, 1.0), (33, 1.0), (34, 0.25))
    half = Half("page", False, "loopback", "a browser", METRICS, [evidence(flush_ms=1080, hold=1)])
    keep(tmp_path, "barge-in-page-loudspeaker", heard)
    keep(tmp_path, "barge-in-page-microphone", heard)
    (tmp_path / "barge-in-page.json").write_bytes(msgspec.json.encode(half))
    report = report_from(tmp_path)

    assert report == report_of([(half, heard)])
    assert (report["advanced"], report["stop_page_ms"]["worst"]) == (1, pytest.approx(180, abs=8))


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RigError, match="holds nothing"):
        report_from(tmp_path)
