"""Cuts a reply that is still being written into clauses that can be spoken on their own.

1. A clause ends after punctuation that a space follows; the first clause of a reply does not wait for the space,
   because somebody is waiting for it.
2. A clause never exceeds `words_max` words or `chars_max` characters: it is the unit in which speech runs ahead.
3. A comma needs `words_min` words before it, so that "Well," is not spoken alone.
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


class Clause(msgspec.Struct, frozen=True):
    """`text` is characters `start..end` of the reply."""

    index: int
    text: str
    start: int
    end: int
    ends_sentence: bool
    condition: ConditionVersion = ConditionVersion(0)  #: the one its first token was thought under


def halves(clause: Clause) -> tuple[Clause, Clause] | None:
    """A clause that turned out too long to be spoken at once, as two; None for a single word."""
    words = list(_WORD.finditer(clause.text))
    if len(words) < 2:
        return None
    middle = words[len(words) // 2]
    left = clause.text[: middle.start()].rstrip()
    right = clause.text[middle.start() :]
    return (
        Clause(clause.index, left, clause.start, clause.start + len(left), False, clause.condition),
        Clause(clause.index, right, clause.end - len(right), clause.end, clause.ends_sentence, clause.condition),
    )


class ClauseSplitter:
    """Push pieces of text, get whole clauses."""

    def __init__(self, *, words_min: int = 2, words_max: int = 8, chars_max: int = 40) -> None:
        self.words_min = words_min
        self.words_max = words_max
        self.chars_max = chars_max
        self.text = ""
        self.sentences = 0
        self._start = 0
        self._count = 0

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
        return [Clause(self._count - 1, text, start, start + len(text), ends_sentence)]

    def _boundary(self) -> int | None:
        """Where the next clause ends, or None while that is not known."""
        for words, word in enumerate(_WORD.finditer(self.text, self._start), start=1):
            complete = word.end() < len(self.text)
            if self._closes(word.group(), words) and (complete or self._may_hurry(word.group())):
                return word.end()
            if complete and (words >= self.words_max or word.end() - self._start >= self.chars_max):
                return word.end()
        return None

    def _closes(self, word: str, words: int) -> bool:
        if word.lower() in _ABBREVIATIONS:
            return False
        last = word.rstrip(_CLOSERS)[-1:]
        return bool(last) and (last in _STRONG or (last in _WEAK and words >= self.words_min))

    def _may_hurry(self, word: str) -> bool:
        """The first clause need not wait for the next token, unless that could still belong to the number."""
        return self._count == 0 and not word[:-1][-1:].isdigit()
