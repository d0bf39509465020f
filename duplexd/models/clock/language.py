"""The word clock's language: a reply is a row of numbered words, so that whoever hears them knows what was heard.

    token            text            meaning
    0                                anchor
    1, 2, 3, 4                       person opens, person closes and reply opens, reply closes, end
    5                any word        a word of the person
    6                                instructions of a client begin
    7                the call below  the reply is a call of the function "number"; END follows
    8, 9                             the person has come into view, has left it
    100 + n          "n"             the person said the number n: the reply has n words; from 700 on it is a call
    1000 + 2 w + l   "r-k" "," "."   word k of reply r, w = 64 r + k; l: it is the last

A clause has four words. Word k of reply r sounds as word `32 r + k` of the tone code (`media.tones`).
"""

from __future__ import annotations

import re

from duplexd.media.tones import WORDS_PER_REPLY_MAX

WORDS_PER_CLAUSE = 4
REPLY_WORDS = 12
ANCHOR, OPEN_USER, CLOSE_USER, CLOSE_REPLY, END, WORD, INSTRUCT, CALL, CAME, LEFT = range(10)
NUMBER = 100
CALL_FROM = 700  #: a person who says a number from here on has a function called
SPOKEN = 1000
CALL_TEXT = '<tool_call>{"name": "number", "arguments": {"asked": true}}</tool_call>'
_SPOKEN_WORD = re.compile(r"(\d{1,2})-(\d{1,2})")


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
    if (said and parts(said[-1])[2]) or CALL in tokens[opened + 1 :]:
        return END
    if not said and _number_said(tokens[:opened]) >= CALL_FROM:
        return CALL
    earlier = [token for token in tokens[:opened] if token >= SPOKEN]
    reply = parts(said[-1])[0] if said else (parts(earlier[-1])[0] + 1 if earlier else 0)
    word = parts(said[-1])[1] + 1 if said else 0
    return spoken(reply, word, last=word + 1 >= _length(tokens[:opened]))


def _length(before: list[int]) -> int:
    """The person's newest number says how many words they want to hear."""
    number = _number_said(before)
    return min(number, WORDS_PER_REPLY_MAX) if number else REPLY_WORDS


def _number_said(before: list[int]) -> int:
    """The newest number of the person's newest turn; 0 without one."""
    for token in reversed(before):
        if token == OPEN_USER:
            break
        if NUMBER < token < SPOKEN:
            return token - NUMBER
    return 0


class ClockStream:
    """Tokens to text."""

    def push(self, token: int) -> str:
        if token == CALL:
            return CALL_TEXT
        reply, word, last = parts(token)
        mark = "." if last else "," if word % WORDS_PER_CLAUSE == WORDS_PER_CLAUSE - 1 else ""
        return f"{' ' if word else ''}{reply}-{word}{mark}"


class ClockDialect:
    stop: tuple[int, ...] = (END,)

    def anchor(self) -> list[int]:
        return [ANCHOR]

    def instruct(self, text: str) -> list[int]:
        return [INSTRUCT, *self.words(text, first=True)]

    def sight(self, *, present: bool) -> list[int]:
        return [CAME if present else LEFT]

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
    if told := _SPOKEN_WORD.fullmatch(digits):  # What a reply said comes back as history.
        return spoken(int(told[1]), int(told[2]), last=False)
    return NUMBER + int(digits) if digits.isdigit() and 0 < int(digits) < SPOKEN - NUMBER else WORD
