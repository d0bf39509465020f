"""Text of a clause -> phoneme ids, keeping which whitespace-delimited word each phoneme is for.

1. The reading itself (tokens, tags, lexicon, numbers, unknown words) is hibari's library; this module gives it text it
   can read and finds its words again in the original, because history and captions speak of the person's own text.
2. The library first rewrites the text ("Dr." -> "Dr", "7:30 pm" -> "seven thirty P.M."). Words of the original and of
   the rewritten text are matched like two versions of a file; a stretch that was rewritten as a whole is shared out by
   how many phonemes each of its words has alone.
3. Nothing a person can type is an error. What cannot be read in English (emoji, other scripts, markup) has no
   phonemes; such a word stays in the list with an empty place.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec
from hibari.g2p import G2P
from hibari.g2p.normalize import normalize
from hibari.g2p.oov import OOV

#: Phonemes that make a pause, not a sound.
PAUSES = frozenset(";:,.!?—…")
SILENT = PAUSES | frozenset(' "()“”')

_SYMBOLS = frozenset(".,!?;:'\"()-–—…/&@%#+=$£€¥₹¢°²³µ<>½¼¾")
_PLAIN = str.maketrans(
    {
        "’": "'", "‘": "'", "ʼ": "'", "`": "'", "´": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"',
        "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2015": "—", "\u2212": "-", "\u2044": "/", "×": "x",
    }
)  # fmt: skip
_ADDRESS = re.compile(r"^(\W*)(?:https?|ftp)://(?:www\.)?", re.IGNORECASE)
_LINK_TARGET = re.compile(r"\]\([^\s)]*\)?")
_DOTS = re.compile(r"\.{2,}")
_REPEATED = re.compile(r"([!?,;:—…])\1+")
_WORD = re.compile(r"\S+")


#: Part of a rewritten word: its index, and from where to where (0 to 1).
Share = tuple[int, float, float]


class WordPlace(msgspec.Struct, frozen=True, array_like=True):
    """One whitespace-delimited word: its characters, and its phonemes as a half-open range of `Reading.ids`."""

    start_char: int
    end_char: int
    start_id: int
    end_id: int  #: equal to `start_id` for a word that is not spoken


class Reading(msgspec.Struct, frozen=True):
    """How a clause is read aloud. `ids` is empty when nothing in it can be spoken."""

    phonemes: str
    ids: tuple[int, ...]  #: a boundary mark (0) at both ends, one id for each phoneme between
    words: tuple[WordPlace, ...]
    pause: str  #: the punctuation that ends the clause, or ""


class Reader:
    """Reads English aloud, on paper.

    Args: oov: the network for unknown words, with its alphabet beside it; vocabulary: phoneme -> id (1..177).
    """

    def __init__(self, *, oov: Path, vocabulary: Path) -> None:
        self._ids: dict[str, int] = msgspec.json.decode(vocabulary.read_bytes(), type=dict[str, int])
        self._g2p: Any = G2P(oov=OOV(str(oov)))

    def read(self, text: str) -> Reading:
        matches = list(_WORD.finditer(text))
        cleaned = [readable(match.group()) for match in matches]
        kept = [index for index, word in enumerate(cleaned) if word]
        source = [cleaned[index] for index in kept]
        rewritten = normalize(" ".join(source))
        spoken = self._pronounce(rewritten)
        if not any(set(phonemes) - SILENT for phonemes in spoken):
            return Reading("", (), tuple(WordPlace(match.start(), match.end(), 0, 0) for match in matches), "")
        shares = align(source, rewritten.split(), weight=self._loudness)
        phonemes, places = _lay_out(spoken, shares)
        phonemes += _swallowed_end(source[-1], phonemes)
        by_word = dict(zip(kept, places, strict=True))
        words = _places(matches, by_word)
        return Reading(phonemes, (0, *(self._ids[c] for c in phonemes), 0), words, _last_pause(phonemes))

    def _pronounce(self, text: str) -> list[str]:
        """Phonemes of each whitespace-delimited word of a rewritten text, punctuation included."""
        words = [""]
        for token in self._g2p.phonemize_tokens(self._g2p.tokenize(text)):
            words[-1] += "".join(c for c in token.phonemes or "" if c in self._ids)
            if token.whitespace:
                words.append("")
        return words if text else []

    def _loudness(self, word: str) -> int:
        """How long a word would be alone, in phonemes: shares out a stretch that was rewritten as a whole."""
        return sum(c not in SILENT for spoken in self._pronounce(normalize(word)) for c in spoken)


def readable(word: str) -> str:
    """What is left of one word when everything that English cannot read is taken away; it may be empty.

    Markup that a language model writes (*emphasis*, `code`, [text](address)) loses its signs and keeps its words. This
    also keeps the library's own `[word](/phonemes/)` notation out of reach of whoever writes the text.
    """
    word = _ADDRESS.sub(r"\1", _LINK_TARGET.sub("", word).translate(_PLAIN))
    word = "".join(_readable_character(c) for c in word)
    word = _REPEATED.sub(r"\1", _DOTS.sub("…", word))
    if not any(c.isalnum() or c in _SYMBOLS for c in word):
        return ""
    return "" if set(word) <= {"#", "-"} and word != "-" else word


def _readable_character(character: str) -> str:
    if _is_readable(character):
        return character
    # Full-width and other compatibility forms are English in disguise ("ｏｋ", "①").
    return "".join(c for c in unicodedata.normalize("NFKC", character) if _is_readable(c))


def _is_readable(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character in _SYMBOLS
    return character in _SYMBOLS or (
        character.isalpha() and ord(character) < 0x250 and unicodedata.name(character, "").startswith("LATIN")
    )


def align(source: Sequence[str], rewritten: Sequence[str], *, weight: Callable[[str], int]) -> list[list[Share]]:
    """For every word of `source` (one at least), the stretches of `rewritten` it became.

    Every part of every rewritten word belongs to exactly one source word, in order. `weight` says how long a word is
    alone; it is asked only where words were rewritten together and cannot be told apart.
    """
    shares: list[list[Share]] = [[] for _ in source]
    matcher = SequenceMatcher(a=source, b=rewritten, autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        _share(source, rewritten, (a, b, c, d), shares, weight)
    return shares


def _share(
    source: Sequence[str],
    rewritten: Sequence[str],
    block: tuple[int, int, int, int],
    shares: list[list[Share]],
    weight: Callable[[str], int],
) -> None:
    """Give `rewritten[c:d]` to the words `source[a:b]`."""
    a, b, c, d = block
    if c == d:
        return
    if a == b:  # Words out of nothing belong to the word before them, or to the first one.
        shares[max(a - 1, 0)] += [(index, 0.0, 1.0) for index in range(c, d)]
    elif b - a == d - c:
        for word, index in zip(range(a, b), range(c, d), strict=True):
            shares[word].append((index, 0.0, 1.0))
    elif b - a == 1:
        shares[a] += [(index, 0.0, 1.0) for index in range(c, d)]
    else:
        _share_by_weight(source, rewritten, block, shares, weight)


def _share_by_weight(
    source: Sequence[str],
    rewritten: Sequence[str],
    block: tuple[int, int, int, int],
    shares: list[list[Share]],
    weight: Callable[[str], int],
) -> None:
    a, b, c, d = block
    asked = [max(1, weight(word)) for word in source[a:b]]
    given = [max(1, weight(word)) for word in rewritten[c:d]]
    scale = sum(given) / sum(asked)
    edges = [sum(asked[:n]) * scale for n in range(len(asked) + 1)]
    start = 0.0
    for index, length in zip(range(c, d), given, strict=True):
        for word in range(len(asked)):
            low = max(start, edges[word]) - start
            high = min(start + length, edges[word + 1]) - start
            if high - low > 1e-9 * length:
                shares[a + word].append((index, low / length, high / length))
        start += length


def _lay_out(spoken: Sequence[str], shares: Sequence[Sequence[Share]]) -> tuple[str, list[tuple[int, int]]]:
    """Join the words' phonemes by spaces; the place of each source word in it, without the pauses around it."""
    starts: list[int] = []
    length = 0
    for phonemes in spoken:
        starts.append(length)
        length += len(phonemes) + 1 if phonemes else 0
    joined = " ".join(phonemes for phonemes in spoken if phonemes)
    places: list[tuple[int, int]] = []
    for parts in shares:
        pieces = [
            _sounding(
                joined,
                starts[index] + round(low * len(spoken[index])),
                starts[index] + round(high * len(spoken[index])),
            )
            for index, low, high in parts
        ]
        sounding = [piece for piece in pieces if piece[0] < piece[1]]
        places.append((sounding[0][0], sounding[-1][1]) if sounding else (-1, -1))
    return joined, places


def _sounding(phonemes: str, start: int, end: int) -> tuple[int, int]:
    """The range without silent phonemes at its ends."""
    while start < end and phonemes[start] in SILENT:
        start += 1
    while end > start and phonemes[end - 1] in SILENT:
        end -= 1
    return start, end


def _places(matches: Sequence[re.Match[str]], by_word: dict[int, tuple[int, int]]) -> tuple[WordPlace, ...]:
    """Every word of the text; one without a sound stands empty at the end of the word before it."""
    words: list[WordPlace] = []
    at = 1  # ids start with the boundary mark
    for index, match in enumerate(matches):
        start, end = by_word.get(index, (-1, -1))
        if start < 0:
            words.append(WordPlace(match.start(), match.end(), at, at))
        else:
            words.append(WordPlace(match.start(), match.end(), start + 1, end + 1))
            at = end + 1
    return tuple(words)


def _swallowed_end(last_word: str, phonemes: str) -> str:
    """The sentence end of an abbreviation ("at 7 p.m."): the library spells the word and the full stop is gone."""
    mark = next((c for c in reversed(last_word) if c not in "\"')"), "")
    return mark if mark in tuple(".!?") and not _last_pause(phonemes) else ""


def _last_pause(phonemes: str) -> str:
    """The pause after the last sound; of several the first, as the voice reads it ("?" of '?")')."""
    tail = phonemes[_sounding(phonemes, 0, len(phonemes))[1] :]
    return next((c for c in tail if c in PAUSES), "")
