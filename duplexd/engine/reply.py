"""One reply: from tokens to clauses, from clauses to words on the timeline, and how much of it was heard.

States (DESIGN §9); code only looks the table up:

    ACCEPTED -> RUNNING -> STREAMING -> COMPLETED         (RUNNING -> COMPLETED: the thinker had nothing to say)
        |          |           |
        +----------+-----------+--> CANCELLING -> CANCELLED      (an interruption, or the person left)
        +----------+-----------+--> FAILED                       (a stage failed, a deadline passed)
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from duplexd.engine.calls import Call, CallFilter
from duplexd.engine.clause import Clause, ClauseSplitter
from duplexd.ids import UNCONDITIONED, ConditionVersion, Epoch, ResponseId, TurnId
from duplexd.memory.ledger import Lease
from duplexd.messages import OutputState, ResponseState, SpokenWord
from duplexd.streams.graph import TextStream
from duplexd.streams.stage import TalkResult
from duplexd.units import Nanos, Span, Ticks

_WRITTEN_WORD = re.compile(r"\S+")
_LEGAL: dict[ResponseState, frozenset[ResponseState]] = {
    ResponseState.ACCEPTED: frozenset({ResponseState.RUNNING, ResponseState.CANCELLING, ResponseState.FAILED}),
    ResponseState.RUNNING: frozenset(
        {ResponseState.STREAMING, ResponseState.COMPLETED, ResponseState.CANCELLING, ResponseState.FAILED}
    ),
    ResponseState.STREAMING: frozenset({ResponseState.COMPLETED, ResponseState.CANCELLING, ResponseState.FAILED}),
    ResponseState.CANCELLING: frozenset({ResponseState.CANCELLED}),
    ResponseState.COMPLETED: frozenset(),
    ResponseState.CANCELLED: frozenset(),
    ResponseState.FAILED: frozenset(),
}


class PlacedWord(msgspec.Struct, frozen=True):
    """A word of the reply with its place on the output timeline and its last character in the reply's text."""

    text: str
    span: Span
    end_char: int


class SpokenClause(msgspec.Struct):
    """A clause the talker has turned into latents; chunks are cut from it until it is used up."""

    clause: Clause
    latents: Lease
    start: Ticks  #: on the output timeline
    length: Ticks
    planned: Ticks = Ticks(0)  #: how much of it chunks have been planned for
    chunks_open: int = 0  #: chunks planned and not yet made: the latents must stay


class Wording(msgspec.Struct, frozen=True):
    """Words and tokens of a reply, and where they end: what stays of it while its history may be corrected."""

    text: str
    tokens: tuple[int, ...]
    token_ends: tuple[int, ...]  #: characters of the text behind each token
    words: tuple[PlacedWord, ...]
    start: Ticks  #: of the reply, on the output timeline

    def ended_by(self, position: Ticks) -> int:
        """How many words have ended by `position`."""
        return sum(1 for word in self.words if word.span.end <= position)

    def tokens_of_words(self, words: int) -> int:
        """Tokens up to and including the last one of word `words - 1`."""
        return _tokens_of_words(self.words, self.token_ends, words)

    def text_of_words(self, words: int) -> str:
        return _text_of_words(self.text, self.words, words)


class Reply:
    """The character's answer to one turn."""

    def __init__(
        self,
        *,
        turn: TurnId,
        epoch: Epoch,
        start: Ticks,
        stream: Callable[[], TextStream],
        accepted_at: Nanos,
        sentences_max: int,
        words_enough: int,
        tokens_max: int,
        first_words: int = 0,
        key: str = "",
        spoken: bool = True,
    ) -> None:
        self.key = key  #: of the `ReplyWanted` that asked for it
        self.speaks = spoken  #: False: text alone
        self.recited = False  #: somebody else thought up its words
        self.cut_short = False  #: it ended at its limit of tokens
        self.context_tokens = self.cached_tokens = 0
        self.response = ResponseId(0)  #: 0 until it is accepted
        self.turn = turn
        self.epoch = epoch
        self.state = ResponseState.ACCEPTED
        self.accepted_at = accepted_at
        self.ended_at = accepted_at  #: last voiced sample of the turn
        self.prefilled_at = Nanos(0)
        self.worded_at = Nanos(0)
        self.talked_at = Nanos(0)  #: the first clause was talked
        self.held_since = Nanos(0)  #: its first chunk is made and not handed over
        self.published_at = Nanos(0)
        self.tokens: list[int] = []
        self.avoided: tuple[int, ...] = ()  #: tokens of a first attempt that held no word
        self.thought = False  #: no more tokens will come
        self.thinking = False  #: tokens of the next clause are coming
        self.to_talk: deque[Clause] = deque()
        self.spoken: deque[SpokenClause] = deque()  #: with chunks still to plan or to make
        self.words: list[PlacedWord] = []
        self.start = start
        self.talked_until = start  #: end of what the talker has placed
        self.planned_until = start
        self.chunks_made = 0
        self.chunks_published = 0
        self.words_heard = 0
        self.calls_told = 0  #: calls that were announced
        self.start = start
        self._new_stream = stream
        self._stream = stream()
        self._first_words = first_words
        self._splitter = ClauseSplitter(first_words=first_words)
        self._calls = CallFilter()
        self._token_ends: list[int] = []
        self._clauses: list[tuple[Ticks, str]] = []  # where each begins; no more than the reply's tokens
        self._condition = UNCONDITIONED  # that the clause under way began under
        self._begun = False  # a clause is under way
        self._sentences_max = sentences_max
        self._words_enough = words_enough
        self._tokens_max = tokens_max

    @property
    def text(self) -> str:
        return self._splitter.text

    def accept(self, response: ResponseId, turn: TurnId, *, ended_at: Nanos, now: Nanos) -> None:
        """The turn it answers has ended. What was made before that cost the person no time."""
        self.response, self.turn, self.accepted_at, self.ended_at = response, turn, now, ended_at
        self.prefilled_at = now if self.prefilled_at else Nanos(0)
        self.worded_at = now if self.worded_at else Nanos(0)

    def move(self, state: ResponseState) -> None:
        if state not in _LEGAL[self.state]:
            raise ValueError(f"response {self.response} is {self.state.value} and cannot become {state.value}")
        self.state = state

    @property
    def is_empty(self) -> bool:
        """Everything was thought and none of it is a word: a person would wait for nothing."""
        return self.all_talked and not self.words and not self._calls.calls and not self.recited

    def take_calls(self, since: int) -> list[Call]:
        """Functions the model wants called, from number `since` on."""
        return self._calls.calls[since:]

    def think_again(self, *, avoid: tuple[int, ...]) -> None:
        """Begin anew, once, with other tokens."""
        self.avoided = (*self.tokens, *avoid)
        self.tokens, self._token_ends, self.thought = [], [], False
        self._splitter = ClauseSplitter(first_words=self._first_words)
        self._stream, self._calls = self._new_stream(), CallFilter()
        self._begun = False

    # thinking ------------------------------------------------------------------------------------------------------

    def think(
        self,
        tokens: tuple[int, ...],
        *,
        stop: tuple[int, ...],
        condition: ConditionVersion = UNCONDITIONED,
    ) -> int:
        """Take decoded tokens; returns how many belong to the reply (a stop token and what follows it do not).

        Args:    condition: the version they were decoded under. A clause has the one it began under to its end.
        """
        taken = 0
        for token in tokens:
            if token in stop:
                self._finish_thinking(whole=True)
                break
            if not self._begun:
                self._condition, self._begun = condition, True
            taken += 1
            self.tokens.append(token)
            clauses = self._splitter.push(self._calls.push(self._stream.push(token)))
            self._token_ends.append(len(self.text))
            self._take_clauses(clauses)
            self.cut_short = len(self.tokens) >= self._tokens_max
            if self._enough(clauses) or self.cut_short:
                self._finish_thinking(whole=False)
                break
        return taken

    def _enough(self, clauses: list[Clause]) -> bool:
        """A sentence has just ended, and enough has been said: small models ramble."""
        if not clauses or not clauses[-1].ends_sentence:
            return False
        said = len(self.text[: clauses[-1].end].split())
        return self._splitter.sentences >= self._sentences_max or said >= self._words_enough

    def _finish_thinking(self, *, whole: bool) -> None:
        """A reply that was cut short ends with its last whole sentence, if it has one."""
        self.thought = True
        self._take_clauses(self._splitter.push(self._calls.finish()))
        if self._token_ends:
            self._token_ends[-1] = len(self.text)  # What was held back ("<", half a mark) is its last token's.
        if whole or self._splitter.sentences == 0:
            self._take_clauses(self._splitter.finish())

    def _take_clauses(self, clauses: list[Clause]) -> None:
        if clauses:
            self.to_talk.extend(msgspec.structs.replace(clause, condition=self._condition) for clause in clauses)
            self._begun = False

    def recite(self, text: str, words: Callable[[str, bool], list[int]]) -> None:
        """Say these words instead of thinking. `words(word, first)` gives the tokens of one word."""
        self.recited = self.thought = True
        for index, word in enumerate(text.split()):
            self.to_talk.extend(self._splitter.push(f" {word}" if index else word))
            tokens = words(word, index == 0)
            self.tokens += tokens
            self._token_ends += [len(self.text)] * len(tokens)
        self.to_talk.extend(self._splitter.finish())

    # talking -------------------------------------------------------------------------------------------------------

    def place(self, clause: Clause, result: TalkResult, latents: Lease) -> list[PlacedWord]:
        """Put a clause behind the last one on the timeline; returns its words."""
        start = self.talked_until
        words = [
            PlacedWord(
                clause.text[w.start_char : w.end_char],
                Span(Ticks(start + w.start), Ticks(start + w.end)),
                clause.start + w.end_char,
            )
            for w in result.words
        ]
        self.words += words
        self.spoken.append(SpokenClause(clause, latents, start, result.length))
        self._clauses.append((start, clause.text))
        self.talked_until = Ticks(start + result.length)
        return words

    def write(self) -> list[PlacedWord]:
        """A reply that is not spoken: its clauses are words at once, and count as heard."""
        here = Span(self.talked_until, self.talked_until)
        words = [
            PlacedWord(found.group(), here, clause.start + found.end())
            for clause in self.to_talk
            for found in _WRITTEN_WORD.finditer(clause.text)
        ]
        self.to_talk.clear()
        self.words += words
        self.words_heard = len(self.words)
        return words

    @property
    def all_talked(self) -> bool:
        return self.thought and not self.to_talk

    def unplanned(self) -> SpokenClause | None:
        for spoken in self.spoken:
            if spoken.planned < spoken.length:
                return spoken
        return None

    @property
    def all_planned(self) -> bool:
        return self.thought and not self.to_talk and self.unplanned() is None

    def clause_at(self, position: Ticks) -> str:
        """The words of the clause that is said at a position; '' before the first."""
        return next((text for start, text in reversed(self._clauses) if start <= position), "")

    def text_between(self, first: int, end: int) -> str:
        """The reply's text behind word `first - 1`, up to the end of word `end - 1`."""
        start = self.words[first - 1].end_char if first else 0
        return self.text[start : self.words[end - 1].end_char] if end > first else ""

    # hearing -------------------------------------------------------------------------------------------------------

    def heard_by(self, position: Ticks) -> int:
        """How many words have ended by `position`."""
        count = self.words_heard
        while count < len(self.words) and self.words[count].span.end <= position:
            count += 1
        return count

    def tokens_of_words(self, words: int) -> int:
        """Tokens up to and including the last one of word `words - 1`."""
        return _tokens_of_words(self.words, self._token_ends, words)

    def text_of_words(self, words: int) -> str:
        return _text_of_words(self.text, self.words, words)

    def wording(self) -> Wording:
        return Wording(self.text, tuple(self.tokens), tuple(self._token_ends), tuple(self.words), self.start)

    def ambiguous(self, position: Ticks, bound: Ticks) -> tuple[int, ...]:
        """Indexes of words whose end lies within the error bound of the cursor."""
        return tuple(i for i, w in enumerate(self.words) if position - bound < w.span.end <= position + bound)

    def outputs(self) -> tuple[OutputState, ...]:
        """A voice that fails after its text was delivered is a partial result, never a completed one."""
        partial = self.state is ResponseState.FAILED and self.thought and self._is_told
        text = OutputState("text", ResponseState.COMPLETED if partial else self.state)
        return (text, OutputState("voice", self.state)) if self.speaks else (text,)

    @property
    def _is_told(self) -> bool:
        """Every word that was thought has been placed, and with that delivered."""
        told = self.words[-1].end_char if self.words else 0
        return bool(self.words) and not any(character.isalnum() for character in self.text[told:])


def _tokens_of_words(placed: Sequence[PlacedWord], token_ends: Sequence[int], words: int) -> int:
    if words == 0:
        return 0
    end = placed[words - 1].end_char
    # Of a recited word that has no tokens the end lies behind all of them.
    return min(bisect_left(token_ends, end) + 1, len(token_ends))


def _text_of_words(text: str, placed: Sequence[PlacedWord], words: int) -> str:
    return text[: placed[words - 1].end_char].strip() if words else ""


def spoken_words(words: list[PlacedWord]) -> tuple[SpokenWord, ...]:
    return tuple(SpokenWord(w.text, w.span) for w in words)
