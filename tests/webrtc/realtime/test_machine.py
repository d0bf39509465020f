"""Random clients, well-behaved and not: whatever they do, the order of events holds (`rules.View` raises if not).

A hundred clients, a hundred acts each: ten thousand (T-BAD-04). Seeded; a failure names its seed. What else must hold:
every response that was created is done exactly once, nothing is told after the close, everything that was lent comes
back, and the neighbour hears its own words only.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from duplexd.ids import SessionId
from duplexd.webrtc.realtime.session import Transport
from tests.engine.simulation import Simulation, beep, ms
from tests.webrtc.realtime.simulated import Client, b64, beep24
from tests.webrtc.realtime.test_session import ask

SETTINGS: list[dict[str, Any]] = [
    {"type": "realtime", "audio": {"input": {"turn_detection": None}}},
    {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}},
    {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "high"}}}},
    {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad", "create_response": False}}}},
    {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}}},
    {"type": "realtime", "audio": {"input": {"transcription": {"model": "x"}}}},
    {"type": "realtime", "output_modalities": ["text"]},
    {"type": "realtime", "output_modalities": ["audio"]},
    {"type": "realtime", "audio": {"output": {"format": {"type": "audio/pcmu"}}}},
    {"type": "realtime", "instructions": "be brief", "max_output_tokens": 6},
    {"type": "realtime", "duplexd": {"events": True}},
    {"type": "realtime", "nonsense": 1},
]


SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed >= 20 else ()) for seed in range(100)]
ACTS = 100  #: of one client
ACTING_MS = 8800.0  #: in this time
UNTIL_MS = 40_000.0  #: by then even four responses that waited have been spoken
GAPS_MS = (0.5, 3, 20, 60, 150, 400)  #: between two acts, before they are fitted into that time


class Person:
    """Does something at random every now and then."""

    def __init__(self, client: Client, rng: Random) -> None:
        self.client = client
        self.rng = rng
        gaps = [rng.choice(GAPS_MS) for _ in range(ACTS)]
        scale = ACTING_MS / sum(gaps)
        at = 200.0
        for gap in gaps:
            client.do(at, self.act)
            at += gap * scale

    def act(self) -> None:
        if self.client._ended:
            return
        act = self.rng.choices(
            (self.say, self.ask, self.cancel, self.truncate, self.speak, self.append, self.acknowledge, self.other),
            (4, 6, 3, 3, 4, 2, 3, 4),
        )[0]
        act()

    def _item(self) -> str:
        order = self.client.view.order
        return self.rng.choice([*order, "nobody"]) if order else "nobody"

    def say(self) -> None:
        text = f"say {self.rng.choice((1, 2, 5, 12, 700))}"
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        where = {"previous_item_id": self._item()} if self.rng.random() < 0.2 else {}
        self.client.send_now("conversation.item.create", item=item, **where)

    def ask(self) -> None:
        wanted: dict[str, Any] = {}
        if self.rng.random() < 0.2:
            wanted = {"conversation": "none", "output_modalities": ["text"]}
        elif self.rng.random() < 0.2:
            wanted = {"instructions": "be very brief", "metadata": {"a": "b"}}
        self.client.send_now("response.create", response=wanted)

    def cancel(self) -> None:
        self.client.send_now(self.rng.choice(("response.cancel", "output_audio_buffer.clear")))

    def truncate(self) -> None:
        ms = self.rng.choice((0, 300, 900, 2000, 9000))
        self.client.send_now("conversation.item.truncate", item_id=self._item(), content_index=0, audio_end_ms=ms)

    def speak(self) -> None:
        self.client._mic.append(beep(self.rng.choice((60, 150, 400, 900))))

    def append(self) -> None:
        self.client.send_now("input_audio_buffer.append", audio=b64(beep24(self.rng.choice((10, 300)))))
        self.client.send_now(self.rng.choice(("input_audio_buffer.commit", "input_audio_buffer.clear")))

    def acknowledge(self) -> None:
        played = self.rng.choice((0, 200, 1000, 60_000))
        self.client.send_now("playback.ack", played_ms=played, truncate=self.rng.random() < 0.2)

    def other(self) -> None:
        kind = self.rng.choice(("session.update", "conversation.item.delete", "conversation.item.retrieve", "junk"))
        if kind == "session.update":
            self.client.send_now(kind, session=self.rng.choice(SETTINGS))
        elif kind == "junk":
            self.client.raw(
                self.rng.choice(("", "{}", "[]", '{"type": 3}', '{"type":"response.listen"}', "\x00", "{" * 999))
            )
        else:
            self.client.send_now(kind, item_id=self._item())


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_a_client_does_the_order_holds(seed: int) -> None:
    rng = Random(seed)
    simulation = Simulation(seed=seed, until_ms=UNTIL_MS)
    transport = Transport.WEBRTC if seed % 4 == 3 else Transport.WEBSOCKET
    client = Client(simulation, 1, transport=transport)
    neighbour = Client(simulation, 2)
    client.microphone()
    Person(client, rng)
    neighbour.send(
        "conversation.item.create",
        at_ms=400,
        item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say 12"}]},
    )
    neighbour.send("response.create", at_ms=400)
    leaves = seed % 2 == 0
    if leaves:
        client.leave(at_ms=rng.uniform(500, 9000))
    simulation.run()

    if leaves:
        assert 1 not in simulation.core.sessions
    else:
        assert client.view.open == {}, f"never done: {list(client.view.open)}"
        assert client.core._asked == {}
        assert client.core._waiting == type(client.core._waiting)()
    assert neighbour.words() == list(range(12))
    assert neighbour.view.errors == []
    assert simulation.core.metrics().values["out_slots_free"] == 32


RACES = 25  #: in one session
RACE_EVERY_MS = 2400.0


def answered_at(*, speaks_ms: float) -> float:
    """When the reply to a turn is created that nobody interferes with, ms after the person begins to speak."""
    simulation = Simulation(until_ms=4000)
    client = Client(simulation)
    client.microphone()
    client.speak(beep(speaks_ms), at_ms=500)
    simulation.run()
    return client.times("response.created")[0] - 500


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow if s >= 2 else ()) for s in range(20)])
def test_a_cancel_that_races_a_turns_own_reply_leaves_one_or_none(seed: int) -> None:
    """Within 5 ms of the moment at which a turn is answered by itself, 25 times in a session, 500 in all (T-BI-40).

    A response that was asked for a moment before the turn ended is made first, and the turn's own when that one ends:
    it takes two cancels then until nobody speaks, and no third response comes.
    """
    rng = Random(seed)
    moment = answered_at(speaks_ms=300)
    simulation = Simulation(seed=seed, until_ms=500 + RACE_EVERY_MS * RACES + 4000)
    client = Client(simulation)
    client.microphone()
    begins = [500 + RACE_EVERY_MS * race for race in range(RACES)]
    for begin in begins:
        client.speak(beep(300), at_ms=begin)
        for kind in ("response.cancel", "response.create", "response.cancel"):
            client.send(kind, at_ms=begin + moment + rng.uniform(-5, 5))
        for after_ms in (400, 500):
            client.send("response.cancel", at_ms=begin + moment + after_ms)
        client.do(begin + moment + 700, lambda: races.append(len(client.view.open)))
    races: list[int] = []
    simulation.run()

    assert races == [0] * RACES  # `View` holds that there were never two.
    assert {response["status"] for response in client.view.done.values()} <= {"completed", "cancelled"}
    assert len(client.view.committed) == RACES
    assert simulation.core.sessions[SessionId(1)].reply is None


def test_events_after_the_end_are_none() -> None:
    simulation = Simulation(until_ms=3000)
    client = Client(simulation)

    def end() -> None:
        client.core.end("session_expired", "that was it")
        client._flush()
        client.view.closed = True  # Raises at any event from here on.

    client.do(500, end)
    client.send("response.create", at_ms=600)
    simulation.run()

    assert client.log[-1][1]["error"]["code"] == "session_expired"


@pytest.mark.parametrize("at_ms", [450, 900, 1500, 2600])
def test_nothing_is_told_of_what_the_engine_does_after_the_close(at_ms: float) -> None:
    """The client has gone in the middle of a reply; the engine's news of it still come, and are nobody's."""
    simulation = Simulation(until_ms=6000)
    client = Client(simulation, settings={"duplexd": {"events": True}})
    client.microphone()
    ask(client, "say 9")

    def close() -> None:
        client.core.close()
        client.view.closed = True  # Raises at any event from here on.

    client.do(at_ms, close)
    simulation.run()

    after = [news for at, news in simulation.world.news if at > ms(at_ms) and getattr(news, "session", 0) == 1]
    assert client.log[-1][0] <= at_ms
    assert after


def test_what_is_told_is_json() -> None:
    simulation = Simulation(until_ms=3000)
    client = Client(simulation, settings={"duplexd": {"events": True}})
    client.microphone()
    client.speak(beep(500), at_ms=500)
    simulation.run()

    assert all(json.loads(json.dumps(event)) == event for _, event in client.log)
