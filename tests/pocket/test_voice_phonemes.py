"""Reading aloud on paper: every word of the text keeps its own phonemes, whatever the text is rewritten to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplexd import weights
from duplexd.models.pocket.phonemes import Reader, Reading, align, readable


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(oov=weights.path("hibari-oov"), vocabulary=weights.path("hibari-vocab"))


def spoken(reading: Reading, text: str) -> list[tuple[str, str]]:
    """(word of the text, its phonemes without stress)."""
    marks = str.maketrans("", "", "ˈˌ")
    return [
        (text[word.start_char : word.end_char], reading.phonemes[word.start_id - 1 : word.end_id - 1].translate(marks))
        if word.start_id < word.end_id
        else (text[word.start_char : word.end_char], "")
        for word in reading.words
    ]


@pytest.mark.weights
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's 42.", [("It's", "ɪts"), ("42.", "fɔɹTi tu")]),
        ("Dr. Lee is in", [("Dr.", "dɑktəɹ"), ("Lee", "li"), ("is", "ɪz"), ("in", "ɪn")]),
        ("on Main St.", [("on", "ɔn"), ("Main", "mAn"), ("St.", "stɹit")]),
        ("a well-known 'fact'", [("a", "ɐ"), ("well-known", "wɛlnOn"), ("'fact'", "fækt")]),
        ('"Well," he said.', [('"Well,"', "wɛl"), ("he", "hi"), ("said.", "sɛd")]),
        ("at 7:30 pm sharp", [("at", "æt"), ("7:30", "sɛvən θɜɹTi"), ("pm", "piɛm"), ("sharp", "ʃɑɹp")]),
        ("$5 million more", [("$5", "fIv"), ("million", "mɪljᵊn dɑləɹz"), ("more", "mɔɹ")]),
        ("3 March 2024", [("3", "ðə θɜɹd ʌv"), ("March", "mɑɹʧ"), ("2024", "twɛnti twɛnti fɔɹ")]),
        (
            "10 - 20 of them",
            [("10", "tɛn"), ("-", "tə"), ("20", "twɛnti"), ("of", "ʌv"), ("them", "ðɛm")],
        ),
        ("5 km, or 50%", [("5", "fIv"), ("km,", "kəlɑməTəɹz"), ("or", "ɔɹ"), ("50%", "fɪfti pəɹsɛnt")]),
        ("so — yes", [("so", "sO"), ("—", ""), ("yes", "jɛs")]),
        ("ok 😀 你好 then", [("ok", "OkA"), ("😀", ""), ("你好", ""), ("then", "ðɛn")]),
        ("**Sure**, `x`", [("**Sure**,", "ʃʊɹ"), ("`x`", "ɛks")]),
        ("see [the map](http://m.example/x)", [("see", "si"), ("[the", "ðə"), ("map](http://m.example/x)", "mæp")]),
        ("[yes](/nˈO/)", [("[yes](/nˈO/)", "jɛs")]),
        ("  two   spaces ", [("two", "tu"), ("spaces", "spAsᵻz")]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_word_keeps_its_own_phonemes(reader: Reader, text: str, expected: list[tuple[str, str]]) -> None:
    assert spoken(reader.read(text), text) == expected


@pytest.mark.weights
@pytest.mark.parametrize("text", ["", "   ", "...", "😀 🎉", "你好", "—", '"', "()", "​ ﻿", "#", "---"])
def test_nothing_speakable_is_no_error_and_has_no_phonemes(reader: Reader, text: str) -> None:
    reading = reader.read(text)

    assert reading.ids == ()
    assert len(reading.words) == len(text.split())


@pytest.mark.weights
@pytest.mark.parametrize(
    ("text", "pause"),
    [
        ("Yes", ""),
        ("Yes,", ","),
        ("Yes.", "."),
        ("Yes!!", "!"),
        ('"Yes?"', "?"),
        ("(yes.)", "."),
        ("at 7 p.m.", "."),
        ("7 p.m", ""),
    ],
)
def test_the_punctuation_that_ends_a_clause_is_known(reader: Reader, text: str, pause: str) -> None:
    """An abbreviation swallows the full stop after it; the sentence still ends."""
    assert reader.read(text).pause == pause


fragments = st.sampled_from(
    ["Dr.", "St.", "42", "$5", "7:30", "pm", "3", "March", "2024", "—", "-", "well-known", "😀", "OK?", "the", "10-20",
     "No.", "5", "km", "°C", "VIII,", "Henry", "=", "+", "%", "@home", "a.m.", "etc.", "1/2", "¥", "500", "你", "'tis",
     "C++", "#1", "x_y", "(so)", "million", "½", "naïve", "J.", "K.", "https://a.example/b"]
)  # fmt: skip


def check_places(reading: Reading, text: str) -> None:
    """Every word of the text once, in order, with ranges of ids that neither overlap nor leave the clause."""
    assert [text[word.start_char : word.end_char] for word in reading.words] == text.split()
    at = 1
    for word in reading.words:
        if reading.ids:
            assert at <= word.start_id <= word.end_id <= len(reading.ids) - 1
            at = word.end_id
        else:
            assert word.start_id == word.end_id
    if reading.ids:
        covered = {id for word in reading.words for id in range(word.start_id, word.end_id)}
        between = [reading.phonemes[i - 1] for i in range(1, len(reading.ids) - 1) if i not in covered]
        assert set(between) <= set(' ;:,.!?—…"()“”'), "every sound belongs to a word"


@pytest.mark.weights
@settings(max_examples=300, deadline=None)
@given(text=st.lists(fragments, max_size=7).map(" ".join))
def test_words_cover_every_sound_of_awkward_sentences(reader: Reader, text: str) -> None:
    check_places(reader.read(text), text)


@pytest.mark.weights
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_at_all_is_read(reader: Reader, text: str) -> None:
    check_places(reader.read(text), text)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("**bold**,", "bold,"),
        ("don’t", "don't"),
        ("what?!!", "what?!"),
        ("wait....", "wait…"),
        ("ｏｋ", "ok"),
        ("https://www.a.example", "a.example"),
        ("日本", ""),
        ("###", ""),
        ("#1", "#1"),
        ("--", ""),
        ("x\u0000y\u202e", "xy"),
    ],
)
def test_what_english_cannot_read_is_taken_away(word: str, expected: str) -> None:
    assert readable(word) == expected


words = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=6)


@given(source=words.filter(bool), rewritten=words)
def test_align_gives_every_part_of_every_rewritten_word_to_one_word_in_order(
    source: Sequence[str], rewritten: Sequence[str]
) -> None:
    shares = align(source, rewritten, weight=len)
    flat = [share for shares_of_word in shares for share in shares_of_word]
    total = [0.0] * len(rewritten)
    for (index, low, high), (next_index, next_low, _) in pairwise(flat):
        assert (next_index, next_low) == ((index, pytest.approx(high)) if high < 1 - 1e-6 else (index + 1, 0.0))
        assert low < high
    for index, low, high in flat:
        total[index] += high - low

    assert total == pytest.approx([1.0] * len(rewritten))
