"""Cuts a reply that is still being written into clauses that can be spoken on their own.

1. A clause ends after punctuation that a space follows; the first clause of a reply does not wait for the space,
   because somebody is waiting for it.
2. A clause never exceeds `words_max` words or `chars_max` characters: it is the unit in which speech runs ahead.
3. A comma needs `words_min` words before it, so that "Well," is not spoken alone.
4. Where a clause ends within a phrase it says so: it carries the word that has begun behind it, and the next one the
   words before. A voice that knows them neither falls and lengthens before the cut nor starts anew behind it.
5. With `first_words` the first clause ends after so many words when the next has begun: it is waited for.
"""

from __future__ import annotations

import re

import msgspec

from duplexd.ids import ConditionVersion

_STRONG = ".!?…"
_WEAK = ",;:"
_CLOSERS = "\"')]}’”"
_ABBREVIATIONS = frozenset({"mr.", "mrs.", "ms.", "dr.", "st.", "e.g.", "i.e.", "vs.", "no.", "prof."})
_WORD = re.compile(r"\S+")
#: Bounds of the words before a clause that its voice is told.
BEFORE_WORDS, BEFORE_CHARS = 4, 32
FIRST_CHARS = 10  #: a first clause that ends within a phrase is not shorter: what follows is made while it is heard


class Clause(msgspec.Struct, frozen=True):
    """`text` is characters `start..end` of the reply."""

    index: int
    text: str
    start: int
    end: int
    ends_sentence: bool
    condition: ConditionVersion = ConditionVersion(0)  #: the one its first token was thought under
    before: str = ""  #: the last words said before it, if no pause lies between
    after: str = ""  #: the word that follows without a pause, as far as it is written


def halves(clause: Clause) -> tuple[Clause, Clause] | None:
    """A clause that turned out too long to be spoken at once, as two; None for a single word."""
    words = list(_WORD.finditer(clause.text))
    if len(words) < 2:
        return None
    middle = words[len(words) // 2]
    left = clause.text[: middle.start()].rstrip()
    right = clause.text[middle.start() :]
    edge = clause.end - len(right)
    after, before = ("", "") if _pauses(left) else (middle.group(), last_words(f"{clause.before} {left}"))
    replace = msgspec.structs.replace
    return (
        replace(clause, text=left, end=clause.start + len(left), ends_sentence=False, after=after),
        replace(clause, text=right, start=edge, before=before),
    )


def _pauses(text: str) -> bool:
    """It ends with a mark that is heard."""
    return text.rstrip(_CLOSERS)[-1:] in {*_STRONG, *_WEAK}


def last_words(text: str) -> str:
    """The words that a voice is told it has just said: so many that the tune goes on, so few that it costs little."""
    said = " ".join(text.split()[-BEFORE_WORDS:])
    return said if len(said) <= BEFORE_CHARS else said[-BEFORE_CHARS:].partition(" ")[2]


class ClauseSplitter:
    """Push pieces of text, get whole clauses.

    Args:    first_words: of the first clause, see rule 5; 0: it is like the others.
    """

    def __init__(self, *, first_words: int = 0, words_min: int = 2, words_max: int = 8, chars_max: int = 40) -> None:
        self.first_words = first_words
        self.words_min = words_min
        self.words_max = words_max
        self.chars_max = chars_max
        self.text = ""
        self.sentences = 0
        self._start = 0
        self._count = 0
        self._before = ""  # what the next clause goes on from

    def push(self, piece: str) -> list[Clause]:
        self.text += piece
        clauses = []
        while (end := self._boundary()) is not None:
            clauses += self._take(end)
        return clauses

    def finish(self) -> list[Clause]:
        """The reply is complete: what is left is the last clause."""
        clauses = []
        while (end := self._boundary()) is not None:
            clauses += self._take(end)
        return clauses + self._take(len(self.text))

    def _take(self, end: int) -> list[Clause]:
        raw = self.text[self._start : end]
        start = self._start + len(raw) - len(raw.lstrip())
        text = raw.strip()
        self._start = end
        if not any(character.isalnum() for character in text):
            return []  # The second mark of "?!", which came after the first clause had been hurried off.
        ends_sentence = text.rstrip(_CLOSERS)[-1:] in set(_STRONG)
        self.sentences += ends_sentence
        self._count += 1
        before, after = self._before, self._after(text, end)
        self._before = last_words(f"{before} {text}") if after else ""
        return [Clause(self._count - 1, text, start, start + len(text), ends_sentence, before=before, after=after)]

    def _after(self, text: str, end: int) -> str:
        """The word that goes on where the clause ends; '' when there is a pause, or nothing yet."""
        following = _WORD.search(self.text, end)
        return following.group() if following is not None and not _pauses(text) else ""

    def _boundary(self) -> int | None:
        """Where the next clause ends, or None while that is not known."""
        for words, word in enumerate(_WORD.finditer(self.text, self._start), start=1):
            complete = word.end() < len(self.text)
            if self._closes(word.group(), words) and (complete or self._may_hurry(word.group())):
                return word.end()
            if complete and (words >= self.words_max or word.end() - self._start >= self.chars_max):
                return word.end()
            if self._may_begin(words, word.end()):
                return word.end()
        return None

    def _may_begin(self, words: int, end: int) -> bool:
        """Enough of the first clause is there to be spoken, and the word behind it has begun."""
        if self._count or not self.first_words or words < self.first_words or end - self._start < FIRST_CHARS:
            return False
        return _WORD.search(self.text, end) is not None

    def _closes(self, word: str, words: int) -> bool:
        if word.lower() in _ABBREVIATIONS:
            return False
        last = word.rstrip(_CLOSERS)[-1:]
        return bool(last) and (last in _STRONG or (last in _WEAK and words >= self.words_min))

    def _may_hurry(self, word: str) -> bool:
        """The first clause need not wait for the next token, unless that could still belong to the number."""
        return self._count == 0 and not word[:-1][-1:].isdigit()
