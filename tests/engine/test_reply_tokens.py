"""Which tokens of a reply belong to how many of its words."""

from __future__ import annotations

import pytest

from duplexd.engine.reply import Reply
from duplexd.ids import Epoch, TurnId
from duplexd.units import Nanos, Ticks

STOP = 0
TEXTS = {1: "one", 2: " two", 3: " <", 4: " <tool"}


class Stream:
    def push(self, token: int) -> str:
        return TEXTS[token]


def reply_of(*tokens: int) -> Reply:
    reply = Reply(
        turn=TurnId(1),
        epoch=Epoch(0),
        start=Ticks(0),
        stream=Stream,
        accepted_at=Nanos(0),
        sentences_max=9,
        words_enough=99,
        tokens_max=99,
        spoken=False,
    )
    reply.think((*tokens, STOP), stop=(STOP,))
    reply.write()
    return reply


@pytest.mark.parametrize("tokens", [(1, 2, 3), (1, 2, 4)], ids=["a less-than sign", "half a mark"])
def test_what_might_have_been_a_call_belongs_to_the_last_token(tokens: tuple[int, ...]) -> None:
    """A reply that ended so raised StopIteration in the engine when its last word was heard: every session ended."""
    reply = reply_of(*tokens)

    assert [word.text for word in reply.words] == ["one", "two", TEXTS[tokens[-1]].strip()]
    assert [reply.tokens_of_words(count) for count in range(4)] == [0, 1, 2, 3]


def test_a_recited_word_without_tokens_takes_all_there_are() -> None:
    reply = reply_of()
    reply.recite("one ☃", lambda word, first: [1] if word == "one" else [])
    reply.write()

    assert [reply.tokens_of_words(count) for count in range(3)] == [0, 1, 1]
