"""The word clock's language: a reply is a row of numbered words, so that whoever hears them knows what was heard.

    token            text            meaning
    0                                anchor
    1, 2, 3, 4                       person opens, person closes and reply opens, reply closes, end
    5                any word        a word of the person
    100 + n          "n"             the person said the number n: the reply has n words
    1000 + 2 w + l   "r-k" "," "."   word k of reply r, w = 64 r + k; l: it is the last

A clause has four words. Word k of reply r sounds as word `32 r + k` of the tone code (`media.tones`).
"""

from __future__ import annotations

from duplexd.media.tones import WORDS_PER_REPLY_MAX

WORDS_PER_CLAUSE = 4
REPLY_WORDS = 12
ANCHOR, OPEN_USER, CLOSE_USER, CLOSE_REPLY, END, WORD = range(6)
NUMBER = 100
SPOKEN = 1000


def spoken(reply: int, word: int, *, last: bool) -> int:
    return SPOKEN + 2 * (64 * reply + word) + last


def parts(token: int) -> tuple[int, int, bool]:
    """(reply, word, last) of a spoken token."""
    number, last = divmod(token - SPOKEN, 2)
    return number // 64, number % 64, bool(last)


def tone_index(reply: int, word: int) -> int:
    return reply * WORDS_PER_REPLY_MAX + word


def following(tokens: list[int]) -> int:
    """The token that follows a context: pure arithmetic on what the context holds.

    The number of a reply is one more than that of the last reply the context remembers, so a reply that was forgotten
    because nobody heard it is told again under the same number.
    """
    opened = max(i for i, token in enumerate(tokens) if token == CLOSE_USER)
    said = [token for token in tokens[opened + 1 :] if token >= SPOKEN]
    if said and parts(said[-1])[2]:
        return END
    earlier = [token for token in tokens[:opened] if token >= SPOKEN]
    reply = parts(said[-1])[0] if said else (parts(earlier[-1])[0] + 1 if earlier else 0)
    word = parts(said[-1])[1] + 1 if said else 0
    return spoken(reply, word, last=word + 1 >= _length(tokens[:opened]))


def _length(before: list[int]) -> int:
    """The person's newest number says how many words they want to hear."""
    for token in reversed(before):
        if token == OPEN_USER:
            break
        if NUMBER < token < SPOKEN:
            return min(token - NUMBER, WORDS_PER_REPLY_MAX)
    return REPLY_WORDS


class ClockStream:
    """Tokens to text."""

    def push(self, token: int) -> str:
        reply, word, last = parts(token)
        mark = "." if last else "," if word % WORDS_PER_CLAUSE == WORDS_PER_CLAUSE - 1 else ""
        return f"{' ' if word else ''}{reply}-{word}{mark}"


class ClockDialect:
    stop: tuple[int, ...] = (END,)

    def anchor(self) -> list[int]:
        return [ANCHOR]

    def open_user(self) -> list[int]:
        return [OPEN_USER]

    def words(self, text: str, *, first: bool) -> list[int]:
        return [_word(word) for word in text.split()]

    def close_user_open_reply(self) -> list[int]:
        return [CLOSE_USER]

    def close_reply(self) -> list[int]:
        return [CLOSE_REPLY]

    def stream(self) -> ClockStream:
        return ClockStream()


def _word(word: str) -> int:
    digits = word.strip(".,!?")
    return NUMBER + int(digits) if digits.isdigit() and 0 < int(digits) < SPOKEN - NUMBER else WORD
