"""Random clients, well-behaved and not: whatever they do, the order of events holds (`rules.View` raises if not).

Seeded; a failure names its seed. What else must hold: every response that was created is done exactly once, nothing is
told after the close, everything that was lent comes back, and the neighbour hears its own words only.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from duplexd.webrtc.realtime.session import Transport
from tests.engine.simulation import Simulation, beep
from tests.webrtc.realtime.simulated import Client, b64, beep24

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


class Person:
    """Does something at random every now and then."""

    def __init__(self, client: Client, rng: Random, *, until_ms: float) -> None:
        self.client = client
        self.rng = rng
        at = 200.0
        while at < until_ms:
            client.do(at, self.act)
            at += rng.choice((0.5, 3, 20, 150, 400, 1200))

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


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_client_does_the_order_holds(seed: int) -> None:
    rng = Random(seed)
    simulation = Simulation(seed=seed, until_ms=16_000)
    transport = Transport.WEBRTC if seed % 4 == 3 else Transport.WEBSOCKET
    client = Client(simulation, 1, transport=transport)
    neighbour = Client(simulation, 2)
    client.microphone()
    Person(client, rng, until_ms=9000)
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

    last = client.log[-1][0]
    if leaves:
        assert last <= 9000
        assert 1 not in simulation.core.sessions
    else:
        assert client.view.open == {}, f"never done: {list(client.view.open)}"
        assert client.core._asked == {}
        assert client.core._waiting == type(client.core._waiting)()
    assert neighbour.words() == list(range(12))
    assert neighbour.view.errors == []
    assert simulation.core.metrics().values["out_slots_free"] == 32


@pytest.mark.parametrize("seed", range(30))
def test_a_cancel_that_races_a_turns_own_reply_leaves_one_or_none(seed: int) -> None:
    """+-5 ms around the end of a turn that is answered by itself (T-BI-40)."""
    rng = Random(seed)
    simulation = Simulation(seed=seed, until_ms=9000)
    client = Client(simulation)
    client.microphone()
    client.speak(beep(500), at_ms=500)
    for kind in ("response.cancel", "response.create", "response.cancel"):
        client.send(kind, at_ms=1600 + rng.uniform(-25, 25))
    simulation.run()

    assert client.view.open == {}
    assert all(status in ("completed", "cancelled") for status in (r["status"] for r in client.view.done.values()))


def test_events_after_the_end_are_none() -> None:
    simulation = Simulation(until_ms=3000)
    client = Client(simulation)
    client.do(500, lambda: client.core.end("session_expired", "that was it"))
    client.send("response.create", at_ms=600)
    simulation.run()

    assert client.log[-1][1]["error"]["code"] == "session_expired"
    assert client.log[-1][0] <= 521


def test_what_is_told_is_json() -> None:
    simulation = Simulation(until_ms=3000)
    client = Client(simulation, settings={"duplexd": {"events": True}})
    client.microphone()
    client.speak(beep(500), at_ms=500)
    simulation.run()

    assert all(json.loads(json.dumps(event)) == event for _, event in client.log)
