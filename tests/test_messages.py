"""Every message between front end and engine, there and back; and messages of a newer or older release."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplexd import messages
from duplexd.ids import UNCONDITIONED, ChunkId, Epoch, ResponseId, SessionId
from duplexd.messages import Fact, Modality, News, ResponseState, TurnState, pack, unpack_fact, unpack_news
from duplexd.units import Nanos, Span, Ticks

FACTS: list[type[Any]] = list(get_args(Fact))
NEWS: list[type[Any]] = list(get_args(News))
whole = st.integers(-(2**63), 2**63 - 1)


def strategy_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type, as the type itself describes it."""
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.StructType() as struct:
            return st.builds(struct.cls, **{field.name: strategy_for(field.type) for field in struct.fields})
        case other:
            return strategy_for(other)


def strategy_for(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.IntType():
            return whole
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.StrType():
            return st.text(max_size=20)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([strategy_for(one) for one in types])
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(strategy_for(item), max_size=3).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*(strategy_for(item) for item in items))
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(strategy_for(key), strategy_for(value), max_size=3)
        case msgspec.inspect.StructType(cls=cls):
            return strategy_of(cls)
    raise NotImplementedError(f"no values for {info}")


def unpack(kind: type[Any], packet: bytes) -> Any:
    return unpack_fact(packet) if kind in FACTS else unpack_news(packet)


@pytest.mark.parametrize("kind", FACTS + NEWS, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_went(kind: type[Any]) -> None:
    @settings(max_examples=25)
    @given(strategy_of(kind))
    def there_and_back(message: Any) -> None:
        back = unpack(kind, pack(message))

        assert type(back) is kind
        assert back == message

    there_and_back()


@pytest.mark.parametrize("kind", FACTS + NEWS, ids=lambda kind: kind.__name__)
def test_a_newer_release_may_add_fields_at_the_end(kind: type[Any]) -> None:
    """Rule 1: what this release does not know is left out, and what it knows is read as ever."""

    @settings(max_examples=25)
    @given(strategy_of(kind), st.lists(st.one_of(whole, st.text(), st.none()), min_size=1, max_size=3))
    def with_more(message: Any, more: list[Any]) -> None:
        fields = msgspec.msgpack.decode(pack(message))

        assert unpack(kind, msgspec.msgpack.encode([*fields, *more])) == message

    with_more()


def test_an_older_release_leaves_out_fields_that_have_defaults() -> None:
    opened = unpack_fact(msgspec.msgpack.encode(["SessionOpened", 7]))
    arrived = unpack_fact(msgspec.msgpack.encode(["MediaArrived", 7, 3, [0, 1536], 5, 0.5]))

    assert opened == messages.SessionOpened(SessionId(7))
    assert arrived == messages.MediaArrived(SessionId(7), 3, Span(Ticks(0), Ticks(1536)), Nanos(5), 0.5)


def test_fields_without_a_default_stand_before_those_with_one() -> None:
    """So the first release's fields are those a packet must have; later ones all have defaults."""
    for kind in FACTS + NEWS:
        required = [field.required for field in msgspec.structs.fields(kind)]

        assert required == sorted(required, reverse=True), kind


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["NoSuchFact", 1]),
        msgspec.msgpack.encode(["SessionClosed", 1]),
        msgspec.msgpack.encode(["SessionClosed", 1, 2]),
        msgspec.msgpack.encode({"session": 1}),
    ],
    ids=["empty", "no msgpack", "unknown", "too short", "wrong type", "no array"],
)
def test_what_is_no_fact_is_refused(packet: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        unpack_fact(packet)


@pytest.mark.parametrize("kind", NEWS, ids=lambda kind: kind.__name__)
def test_news_are_no_facts(kind: type[Any]) -> None:
    """A packet that went the wrong way is refused instead of being taken for something else."""
    assert kind not in FACTS
    assert kind.__name__ not in {fact.__name__ for fact in FACTS}


def test_every_message_names_its_session_or_belongs_to_none() -> None:
    """Rule 2. What belongs to the whole process is listed here, so that nothing joins it by accident."""
    nobody = {kind.__name__ for kind in FACTS + NEWS if "session" not in kind.__struct_fields__}

    assert nobody == {"SlotsFreed", "PicturesFreed", "EngineReady", "FreeSlots", "Metrics"}


def test_the_longest_message_fits_a_packet() -> None:
    """A long reply's words travel in one packet (channel: 64 KiB): a thousand words are far inside it."""
    words = tuple(messages.SpokenWord("w" * 12, Span(Ticks(2**40), Ticks(2**40 + 48_000))) for _ in range(1000))
    packet = pack(messages.ReplyWords(SessionId(2**40), ResponseId(2**40), Epoch(2**30), 0, words, 2**40))

    assert len(packet) < 65_536


def test_enums_travel_by_value() -> None:
    """Renaming a member must not change what is on the wire."""
    ready = messages.EngineReady("clock", 4, 24_000, (Modality.AUDIO, Modality.TEXT), "at_cursor", "energy")
    state = messages.StateChanged(SessionId(1), TurnState.SPEAKING)
    changed = messages.ResponseChanged(SessionId(1), ResponseId(1), Epoch(0), ResponseState.FAILED, (), 1)

    assert msgspec.msgpack.decode(pack(ready))[4] == ["audio", "text"]
    assert msgspec.msgpack.decode(pack(state))[2] == "speaking"
    assert msgspec.msgpack.decode(pack(changed))[4] == "failed"


def test_a_chunk_is_read_as_it_was_published() -> None:
    """One by hand, with every field in its place."""
    chunk = messages.PublishChunk(
        SessionId(1), ResponseId(2), ChunkId(3), Epoch(4), Span(Ticks(5), Ticks(6)), 7, 8, True, 9
    )

    assert msgspec.msgpack.decode(pack(chunk)) == ["PublishChunk", 1, 2, 3, 4, [5, 6], 7, 8, True, 9, 0]


def test_a_chunk_of_an_older_trace_has_no_condition_and_is_read() -> None:
    older = msgspec.msgpack.encode(["PublishChunk", 1, 2, 3, 4, [5, 6], 7, 8, True, 9])

    assert unpack_news(older).condition == UNCONDITIONED
