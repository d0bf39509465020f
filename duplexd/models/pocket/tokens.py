"""The dialect of a thinker: a conversation as token ids, in pieces that can be appended as they come. No torch.

    anchor            open_user  words ...  close_user_open_reply   reply ...            close_reply
    [begin][examples] <user>     what is    <end> <character>       It is four. (<end>)  <end>

1. A context only grows at its end: every piece here is what is appended next, whatever came before.
2. A stop token that a thinker returns is not appended; `close_reply` ends a whole reply and a cut one alike.
3. `words` takes whole words. Every tokenizer read here starts a new piece at a single space before a word, and no merge
   crosses two pieces, so the ids of "a b" followed by the ids of " c" are exactly the ids of "a b c".
   White space is folded to single spaces for that; a word cut in two ("wo", "rld") is two words.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from duplexd.models.pocket.persona import Exchange, Persona
from duplexd.models.pocket.vocabulary import Template, Vocabulary

_PERSON, _CHARACTER, _SYSTEM = "user", "assistant", "system"


class Dialect:
    """Conversation to tokens and back, for one vocabulary and one persona."""

    def __init__(self, vocabulary: Vocabulary, persona: Persona) -> None:
        self.persona = persona
        self.stop: tuple[int, ...] = vocabulary.stop
        self._vocabulary = vocabulary
        self._close = _closing(vocabulary)
        self._open = {role: _opening(vocabulary, role) for role in (_PERSON, _CHARACTER, _SYSTEM)}

    def as_persona(self, persona: Persona) -> Dialect:
        """The same language spoken by somebody else."""
        return Dialect(self._vocabulary, persona)

    def anchor(self) -> list[int]:
        """What every context of this persona starts with: the begin token, the system text, the example turns."""
        ids = [] if self._vocabulary.begin is None else [self._vocabulary.begin]
        if self.persona.system:
            ids += [*self._open[_SYSTEM], *self.words(self.persona.system, first=True), *self._close]
        for turn in self.persona.turns:
            ids += self._told(turn)
        return ids

    def _told(self, turn: Exchange) -> list[int]:
        ids = [*self.open_user(), *self.words(turn.person, first=True), *self._close]
        return [*ids, *self._open[_CHARACTER], *self.words(turn.character, first=True), *self._close]

    def sight(self, *, present: bool) -> list[int]:
        """As a turn of the persona's manner: a note from outside makes a small model forget who it is."""
        turn = self.persona.came if present else self.persona.left
        return [] if turn is None else self._told(turn)

    def instruct(self, text: str) -> list[int]:
        """Instructions of a client, behind the anchor and before the first turn."""
        return [*self._open[_SYSTEM], *self.words(text, first=True), *self._close]

    def open_user(self) -> list[int]:
        """Starts a turn of the person."""
        return list(self._open[_PERSON])

    def words(self, text: str, *, first: bool) -> list[int]:
        """Whole words of a turn. `first`: nothing of this turn was given before. White space is folded."""
        folded = " ".join(text.split())
        if not folded:
            return []
        return self._vocabulary.encode(folded if first else " " + folded)

    def close_user_open_reply(self) -> list[int]:
        """Ends the person's turn and starts the character's; the next decoded token is the reply's first."""
        # Qwen3 opens with an empty thought when it is not to think aloud.
        thought = self._vocabulary.encode("<think>\n\n</think>\n\n") if self._vocabulary.thinks else []
        return [*self._close, *self._open[_CHARACTER], *thought]

    def close_reply(self) -> list[int]:
        """Ends the character's turn, said to its end or cut."""
        return list(self._close)

    def piece(self, ids: Iterable[int]) -> str:
        """Text of some tokens, control tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._bytes(token) for token in ids).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """Text of one reply, token by token."""
        return TextStream(self)

    def _bytes(self, token: int) -> bytes:
        pieces = self._vocabulary.pieces
        return pieces[token] if 0 <= token < len(pieces) else b""


class TextStream:
    """Text of one reply as its tokens come; a character whose bytes span tokens appears with its last one."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that are whole now; may be empty."""
        return self._decoder.decode(self._dialect._bytes(token))

    def finish(self) -> str:
        """What is left of a character that never became whole: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


def _opening(vocabulary: Vocabulary, role: str) -> list[int]:
    control = vocabulary.control
    if vocabulary.template is Template.CHATML:
        return [control["<|im_start|>"], *vocabulary.encode(role + "\n")]
    header = [control["<|start_header_id|>"], *vocabulary.encode(role), control["<|end_header_id|>"]]
    return [*header, *vocabulary.encode("\n\n")]


def _closing(vocabulary: Vocabulary) -> list[int]:
    if vocabulary.template is Template.CHATML:
        return [vocabulary.control["<|im_end|>"], *vocabulary.encode("\n")]
    return [vocabulary.control["<|eot_id|>"]]
