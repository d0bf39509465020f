"""What was heard, by an ear that decodes the sound a client was given, against what the client and the daemon say."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from duplexd.media import tones
from duplexd.models.clock.language import REPLY_WORDS
from duplexd.models.clock.stages import TONE, WORD
from duplexd.units import ms_from_ticks

WORD_MS, TONE_MS = ms_from_ticks(WORD), ms_from_ticks(TONE)
#: Rounding of positions to whole milliseconds, and of the ear's edges on clean sound.
SLACK_MS = 6.0
#: By so much of its tone a word may be shorter and still count as whole: the edges of a word after Opus.
MISSING_MS = 30.0
_NUMBER = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Sounded:
    """One word as it came out of the loudspeaker."""

    number: int  #: in its reply
    ended_ms: float  #: after the first sound of its reply
    lasted_ms: float

    @property
    def is_whole(self) -> bool:
        return self.lacks(0.0)

    def lacks(self, ms: float) -> bool:
        """Whether no more than `ms` of its tone is missing."""
        return self.lasted_ms >= TONE_MS - MISSING_MS - ms


def replies_of(sound: bytes, rate: int, *, least_ms: float = 0.0) -> dict[int, list[Sounded]]:
    """Words in 16-bit PCM, by reply, in order; parts of a word that was muted and resumed are one word.

    `least_ms`: shorter parts are none; behind a codec, what is smeared where sound begins and ends.
    """
    found: dict[int, list[tones.HeardWord]] = {}
    for word in tones.decode(np.frombuffer(sound, "<i2"), rate):
        if word.samples_count * 1000 / rate < least_ms:
            continue
        found.setdefault(word.index // tones.WORDS_PER_REPLY_MAX, []).append(word)
    return {reply: _sounded(words, rate) for reply, words in found.items()}


def _sounded(words: list[tones.HeardWord], rate: int) -> list[Sounded]:
    begun, ms = words[0].start_sample, 1000 / rate
    lasted: dict[int, Sounded] = {}
    for word in words:
        number = word.index % tones.WORDS_PER_REPLY_MAX
        before = lasted[number].lasted_ms if number in lasted else 0.0
        lasted[number] = Sounded(number, (word.end_sample - begun) * ms, before + word.samples_count * ms)
    return list(lasted.values())


def sound_of(found: dict[str, Any], *, least_ms: float = 0.0) -> dict[int, list[Sounded]]:
    """The words of all that a client was given to play, or played."""
    sound = b"".join(base64.b64decode(part) for _, _, part in found["audio"])
    return replies_of(sound, found["rate"], least_ms=least_ms)


def words_of(text: str) -> list[tuple[int, int]]:
    """(reply, word) of everything the word clock says in a text."""
    return [(int(reply), int(word)) for reply, word in _NUMBER.findall(text)]


def ended_by(words: list[Sounded], ms: float, *, early_ms: float = 0.0) -> int:
    """How many words had been heard whole, `ms` after the first sound of their reply.

    `early_ms`: a word counts although its sound was stopped so much before its end.
    """
    return sum(word.lacks(early_ms) and word.ended_ms - word.lasted_ms + TONE_MS <= ms for word in words)


def by_id(found: dict[str, Any], name: str) -> dict[str, list[tuple[int, int]]]:
    """Words of the character's entries in `history` or `remembered`, by id."""
    return {entry["id"]: words_of(entry["text"]) for entry in found[name] if entry["role"] == "assistant"}


def check_remembered(found: dict[str, Any], *, early_ms: float = 0.0) -> None:
    """Every item the daemon remembers says what the ear found in its sound, up to where the client stopped playing.

    `early_ms`: by how much the position a client reports and what its loudspeaker had played may differ.
    """
    sound = sound_of(found)
    stopped = {item: float(ms) for item, ms in found["truncated"]}
    remembered = by_id(found, "remembered")

    assert len(remembered) >= 3, remembered
    assert set(stopped) & set(remembered), (stopped, remembered)
    for item, words in remembered.items():
        assert words, f"{item} is empty"
        reply = words[0][0]
        assert words == [(reply, number) for number in range(len(words))], f"{item}: {words}"
        if item in stopped:
            least = ended_by(sound[reply], stopped[item] - early_ms - SLACK_MS)
            most = ended_by(sound[reply], stopped[item] + early_ms + SLACK_MS, early_ms=early_ms)
            assert least <= len(words) <= most < REPLY_WORDS, f"{item} at {stopped[item]}: {words}, {sound[reply]}"
        else:
            assert len(words) == REPLY_WORDS, f"{item}: {words}"
            assert [word.number for word in sound[reply] if word.is_whole] == list(range(REPLY_WORDS)), sound[reply]


def check_history_is_what_was_heard(found: dict[str, Any]) -> None:
    """The client's own view: word for word what the daemon remembers, which `check_remembered` holds to the sound."""
    assert by_id(found, "history") == by_id(found, "remembered")


def check_history_is_what_was_told(found: dict[str, Any], *, interrupted: int = 1) -> None:
    """A client that keeps, by its own design, the text that it was told before the interruption, heard or not.

    What it keeps begins with what was heard and is otherwise whole; no reply is missing and none is kept twice.
    """
    kept = [words_of(entry["text"]) for entry in found["history"] if entry["role"] == "assistant"]
    heard = {words[0][0]: words for words in by_id(found, "remembered").values()}
    told: dict[int, list[tuple[int, int]]] = {}
    for _, text in found["told"]:
        for reply, word in words_of(text):
            told.setdefault(reply, []).append((reply, word))

    assert [words[0][0] for words in kept] == sorted(heard), kept
    for words in kept:
        reply = words[0][0]
        assert words == told[reply][: len(words)]
        assert words[: len(heard[reply])] == heard[reply]
    assert sum(words != heard[words[0][0]] for words in kept) <= interrupted
