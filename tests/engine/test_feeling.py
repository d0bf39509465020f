"""What clauses tell of a mood, by the pocket face's words: little, and nothing where words only look like it."""

from __future__ import annotations

import pytest

from duplexd.engine.feeling import CRIED, MILD, STRONGEST, SURE, mood_of
from duplexd.models.face.moods import MOOD_WORDS
from duplexd.models.face.motion import MOODS


def felt(clause: str) -> dict[str, float]:
    return mood_of(clause, MOOD_WORDS)


@pytest.mark.parametrize(
    ("clause", "mood"),
    [
        ("I am so happy for you.", {"joy": SURE}),
        ("That's great!", {"joy": MILD + CRIED}),
        ("Hello!", {"joy": STRONGEST}),
        ("Hello, how are you?", {"joy": SURE}),
        ("I can help you with that!", {"joy": CRIED}),
        ("Sadly, it ended there.", {"sorrow": SURE}),
        ("Wow, look at it.", {"surprise": SURE}),
        ("I’m sorry to hear that.", {"concern": SURE}),
        ("Why are you sad?", {"concern": SURE}),
        ("Does it hurt you?", {"concern": MILD}),
    ],
)
def test_a_clause_has_the_mood_of_its_words(clause: str, mood: dict[str, float]) -> None:
    assert felt(clause) == pytest.approx(mood)


@pytest.mark.parametrize(
    "clause",
    [
        "The Great Wall of China is long.",
        "Mozart died in Vienna.",
        "I am not happy with it.",
        "It isn't a lovely day.",
        "There is no danger.",
        "Don't worry!",
        "Are you happy?",
        "Watch out!",
        "Water boils at one hundred degrees.",
        "I am happy and sad.",
        "Good morning.",
        "",
    ],
)
def test_off_words_tell_nothing(clause: str) -> None:
    assert felt(clause) == {}


def test_a_face_without_words_has_no_mood() -> None:
    assert mood_of("I am so happy!", ()) == {}


def test_no_word_tells_two_moods_and_every_mood_exists() -> None:
    words = [word for mood in MOOD_WORDS for word in (*mood.sure, *mood.mild)]

    assert len(words) == len(set(words))
    assert {name for mood in MOOD_WORDS for name in (mood.mood, mood.asked) if name} <= set(MOODS)
    assert all(word == word.lower() for word in words)
