"""Words that tell a mood, in English: what the pocket face shows of what it says (rules: engine/feeling.py).

1. Feelings and what people say of them, no facts: "died", "war" or "gold" have no face of their own.
2. Words of two meanings are left out ("like", "well", "kind", "mean", "miss", "fine", "lost", "sick").
3. Joy is first: a cry without any of these words is a friendly one.
"""

from __future__ import annotations

from duplexd.streams.graph import MoodWords


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MOOD_WORDS = (
    MoodWords(
        "joy",
        sure=_words(
            "happy glad delighted delightful wonderful lovely hooray yay haha cheerful joy joyful "
            "thrilled hilarious fantastic"
        ),
        mild=_words(
            "great good nice fun funny love loved enjoy excellent thank pleased pleasure beautiful "
            "delicious exciting excited awesome brilliant perfect smile laugh laughing proud cool"
        ),
    ),
    # "Hello, how are you?" asks, and greets all the same.
    MoodWords("joy", sure=_words("hello hi hey welcome thanks congratulations"), asked="joy"),
    MoodWords(
        "sorrow",
        sure=_words("sad sadly sadness unhappy lonely heartbroken heartbreaking grief sorrow miserable"),
        mild=_words("cry crying tears alas awful terrible"),
        asked="concern",
    ),
    MoodWords(
        "surprise",
        sure=_words("wow whoa gosh astonishing unbelievable incredible surprise surprising surprised"),
        mild=_words("oh amazing amazed"),
        asked="surprise",
    ),
    MoodWords(
        "concern",
        sure=_words("sorry worried worry worrying unfortunately afraid frightened dangerous careful"),
        mild=_words("danger hurt hurts pain painful trouble scared upset difficult"),
        asked="concern",
    ),
)
