"""Where own voice stands on the picture's timeline, compared with a transport that is written down sample by sample."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.engine.ownvoice import DRY_AFTER, OwnVoice
from duplexd.engine.stores import PictureSlots
from duplexd.ids import Epoch, SessionId
from duplexd.units import Span, Ticks

E0, E1 = Epoch(0), Epoch(1)


def span(start: int, end: int) -> Span:
    return Span(Ticks(start), Ticks(end))


def heard(voice: OwnVoice) -> dict[int, int]:
    """Position by pts."""
    places: dict[int, int] = {}
    for piece in voice.spoken():
        for pts in range(piece.span.start, piece.span.end):
            assert pts not in places, "two pieces stand at one pts"
            places[pts] = pts - piece.shift
    return places


def test_nothing_is_heard_before_it_is_placed() -> None:
    voice = OwnVoice(kept=Ticks(100))
    voice.learn(E0, span(0, 50), last=False)

    assert voice.spoken() == ()
    voice.place(E0, Ticks(0), Ticks(1000))
    assert heard(voice) == {1000 + at: at for at in range(50)}
    voice.learn(E0, span(50, 80), last=True)
    assert heard(voice) == {1000 + at: at for at in range(80)}


def test_after_a_hold_it_goes_on_from_what_was_muted() -> None:
    """Sent until position 40, muted from 25 on; it goes on there, later."""
    voice = OwnVoice(kept=Ticks(100))
    voice.learn(E0, span(0, 60), last=True)
    voice.place(E0, Ticks(0), Ticks(100))
    voice.stop(Ticks(140))
    assert heard(voice) == {100 + at: at for at in range(40)}
    voice.place(E0, Ticks(25), Ticks(200))

    assert heard(voice) == {100 + at: at for at in range(40)} | {175 + at: at for at in range(25, 60)}


def test_positions_of_a_dead_epoch_are_not_heard_where_the_new_one_lies() -> None:
    voice = OwnVoice(kept=Ticks(1000))
    voice.learn(E0, span(0, 60), last=False)
    voice.place(E0, Ticks(0), Ticks(100))
    voice.stop(Ticks(150))
    voice.advance(E1, Ticks(30))
    voice.learn(E0, span(60, 90), last=False)  # came too late
    voice.learn(E1, span(30, 70), last=True)
    assert not voice.place(E0, Ticks(40), Ticks(160))
    assert voice.place(E1, Ticks(30), Ticks(300))

    assert heard(voice) == {100 + at: at for at in range(30)} | {270 + at: at for at in range(30, 70)}


def test_it_tells_which_position_stands_where() -> None:
    """Of the living epoch, where it is sent: what is cut, muted or not there yet has no words at that time."""
    voice = OwnVoice(kept=Ticks(1000))
    voice.learn(E0, span(0, 60), last=False)
    voice.place(E0, Ticks(0), Ticks(100))
    voice.stop(Ticks(140))
    voice.place(E0, Ticks(25), Ticks(200))

    assert [voice.said_at(Ticks(pts)) for pts in (99, 100, 139, 140, 200, 234, 235)] == [
        None, 0, 39, None, 25, 59, None,
    ]  # fmt: skip
    voice.advance(E1, Ticks(30))
    assert voice.said_at(Ticks(120)) is None


def test_it_waits_for_a_voice_that_goes_on_and_not_for_one_that_is_over_or_dry() -> None:
    voice = OwnVoice(kept=Ticks(100))
    assert voice.awaited_from(Ticks(0)) is None
    voice.learn(E0, span(0, 50), last=False)
    assert voice.awaited_from(Ticks(0)) is None  # It stands nowhere yet.
    voice.place(E0, Ticks(0), Ticks(1000))

    assert voice.awaited_from(Ticks(1010)) == 1050
    assert voice.awaited_from(Ticks(1050 + DRY_AFTER)) is None
    voice.learn(E0, span(50, 80), last=True)
    assert voice.awaited_from(Ticks(1010)) is None
    voice.learn(E0, span(80, 90), last=False)  # the next reply
    voice.stop(Ticks(1085))
    assert voice.awaited_from(Ticks(1010)) is None


def test_a_voice_that_is_placed_before_it_is_known_is_waited_for() -> None:
    """Both are on their way at once; the reply before it had ended."""
    voice = OwnVoice(kept=Ticks(100))
    voice.learn(E0, span(0, 50), last=True)
    voice.place(E0, Ticks(0), Ticks(1000))
    voice.expect(E0, Ticks(90))
    voice.place(E0, Ticks(50), Ticks(3000))

    assert voice.awaited_from(Ticks(2990)) == 3000
    voice.learn(E0, span(50, 90), last=False)
    assert voice.awaited_from(Ticks(2990)) == 3040


def test_what_is_over_is_forgotten_and_the_rest_is_bounded() -> None:
    voice = OwnVoice(kept=Ticks(100))
    for number in range(1000):
        voice.learn(E0, span(10 * number, 10 * number + 10), last=False)
        voice.place(E0, Ticks(10 * number), Ticks(20 * number))
    assert len(voice.spoken()) <= 16
    voice.stop(Ticks(20_000))
    voice.forget(Ticks(20_101))
    assert voice.spoken() == ()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(1, 30)),
        st.tuples(st.just("play"), st.integers(1, 40)),
        st.tuples(st.just("hold"), st.integers(0, 20)),
        st.tuples(st.just("cut"), st.integers(0, 20)),
        st.tuples(st.just("pause"), st.integers(1, 20)),
    ),
    max_size=30,
)


@given(steps)
def test_it_says_what_the_transport_sent(plan: list[tuple[str, int]]) -> None:
    """A transport that sends one sample a tick, is held, goes on `n` samples earlier, or is cut `n` samples back. What
    is said of pts whose sound still lies in the ring is what was sent there; of muted and cut samples nothing is said
    that was not sent.
    """
    voice = OwnVoice(kept=Ticks(10**6))
    epoch, said, at, pts = 0, 0, 0, 0
    ring: dict[int, Any] = {}
    sent: dict[int, Any] = {}
    placed: tuple[int, int] | None = None
    # A voice that ran dry is placed again as soon as it is sent, which is at once.
    acts = [each for step in plan for each in ([step, ("play", 1)] if step[0] == "say" else [step])]
    for act, count in acts:
        if act == "say":
            for position in range(said, said + count):
                ring[position] = (epoch, position)
            voice.learn(Epoch(epoch), span(said, said + count), last=False)
            said += count
        elif act == "play":
            for _ in range(count):
                if at < said:
                    if placed != (epoch, pts - at):
                        voice.place(Epoch(epoch), Ticks(at), Ticks(pts))
                        placed = (epoch, pts - at)
                    sent[pts] = (epoch, at)
                    at += 1
                pts += 1
        else:
            voice.stop(Ticks(pts))
            placed = None
            if act == "hold":
                at = max(at - count, 0)
            elif act == "cut":
                epoch += 1
                at = said = max(at - count, 0)
                voice.advance(Epoch(epoch), Ticks(at))
            else:
                pts += count
    for when, position in heard(voice).items():
        if when < pts:
            assert sent[when][1] == position
            assert ring[position][1] == position
    live = {when for when, (of, _) in sent.items() if of == epoch}
    if len(voice.spoken()) < 16:
        assert live <= set(heard(voice))


def test_picture_slots_have_a_bound_a_session_and_come_back_once() -> None:
    slots = PictureSlots(6, session_max=3)
    one, other = SessionId(1), SessionId(2)
    mine = [slots.take(one) for _ in range(4)]

    assert None not in mine[:3]
    assert mine[3] is None
    assert len({slots.take(other) for _ in range(3)} - {None}) == 3
    assert slots.free_count == 0
    assert mine[0] is not None
    assert slots.give_back(mine[0]) == one
    assert slots.give_back(mine[0]) is None
    assert slots.give_back(99) is None
    assert slots.held(one) == 2
    assert slots.available(one)
    slots.check()


@pytest.mark.parametrize("count", [0, 1])
def test_without_slots_nothing_is_available(count: int) -> None:
    slots = PictureSlots(count, session_max=1)
    assert slots.available(SessionId(1)) is bool(count)
