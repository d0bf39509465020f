"""Ten thousand mutated events over each transport: no exception, nothing that grows, no neighbour disturbed."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import pytest

from duplexd.ids import SessionId
from duplexd.units import NANOS_PER_MS, Nanos
from duplexd.webrtc.realtime.limits import Limits
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import Settings
from tests.engine.simulation import Simulation
from tests.webrtc.realtime.rules import View
from tests.webrtc.realtime.simulated import Client, b64, beep24

EVENTS = 10_000
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5Er"
    "kJggg=="
)


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


VALID: list[dict[str, Any]] = [
    {"type": "session.update", "session": {"type": "realtime", "instructions": "x", "tools": [TOOL]}},
    {"type": "session.update", "session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}}},
    {
        "type": "session.update",
        "session": {"type": "realtime", "audio": {"output": {"format": {"type": "audio/pcma"}}}},
    },
    {"type": "input_audio_buffer.append", "audio": b64(beep24(20))},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    {
        "type": "conversation.item.create",
        "previous_item_id": "root",
        "item": {"type": "message", "role": "user", "content": [part("input_text", text="hello")]},
    },
    {
        "type": "conversation.item.create",
        "item": {"type": "message", "role": "user", "content": [part("input_image", image_url=PNG)]},
    },
    {
        "type": "conversation.item.create",
        "item": {"type": "function_call_output", "call_id": "c", "output": "{}", "id": "given"},
    },
    {"type": "conversation.item.retrieve", "item_id": "given"},
    {"type": "conversation.item.delete", "item_id": "given"},
    {"type": "conversation.item.truncate", "item_id": "given", "content_index": 0, "audio_end_ms": 100},
    {"type": "response.create", "response": {"conversation": "none", "input": [], "metadata": {"a": "b"}}},
    {"type": "response.create", "response": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}},
    {"type": "response.cancel", "response_id": "resp_1_1"},
    {"type": "output_audio_buffer.clear"},
    {"type": "playback.ack", "played_ms": 10, "response_id": "resp_1_1", "truncate": True},
    {"type": "duplexd.prefetch"},
]
JUNK: list[Any] = [None, True, -1, 2**70, 1e308, "", "\u0000", "x" * 300, [], {}, [[[]]], {"type": {}}, "\ud83d\ude00"]


def mutated(event: dict[str, Any], rng: Random) -> str:
    """One to three changes somewhere in the event, or in its text."""
    event = copy.deepcopy(event)
    for _ in range(rng.randint(1, 3)):
        _change(event, rng)
    text = json.dumps(event)
    if rng.random() < 0.15:
        at = rng.randrange(len(text))
        text = (
            text[:at]
            + rng.choice(("", "{", '"', "\\", "\u2028", "]" * 50, "[" * 2000))
            + text[at + rng.randint(0, 3) :]
        )
    return text


def _change(value: Any, rng: Random) -> None:
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.6:
            value = value[key]
            continue
        if rng.random() < 0.25:
            del value[key]
        elif rng.random() < 0.2 and isinstance(value, dict):
            value[rng.choice(("extra", "type", "id", "item_id", "\u00e9"))] = copy.deepcopy(rng.choice(JUNK))
        else:
            value[key] = copy.deepcopy(rng.choice(JUNK))
        return


@pytest.mark.parametrize("transport", list(Transport), ids=lambda t: t.value)
def test_ten_thousand_mutated_events_are_errors_at_worst(transport: Transport) -> None:
    rng = Random(1)
    limits = Limits(events_per_second=1e9, events_burst=1e9, responses_per_minute=1e9)
    settings = Settings.default(model="clock")
    core = RealtimeSession(session=SessionId(1), settings=settings, transport=transport, rate=24_000, limits=limits)
    view = View(webrtc=transport is Transport.WEBRTC)
    core.open(Nanos(0))
    for index in range(EVENTS):
        now = Nanos((index + 1) * 100 * NANOS_PER_MS)
        core.on_text(mutated(rng.choice(VALID), rng), now)
        told = core.events()
        core.orders()
        assert sum(event["type"] == "error" for event in told) <= 1
        for event in told:
            view.take(event)

    assert core.counts["faults"] > EVENTS // 4
    assert len(core.conversation) <= 1024
    assert len(core._responses) <= 64 + len(core._asked) + len(core._waiting)
    core.on_text('{"type": "conversation.item.retrieve", "item_id": "nobody"}', Nanos(10**15))
    assert core.events()[-1]["error"]["code"] == "item_retrieve_invalid_item_id"


@pytest.mark.parametrize("seed", range(6))
def test_mutated_events_in_the_middle_of_a_conversation_disturb_no_neighbour(seed: int) -> None:
    rng = Random(seed)
    simulation = Simulation(seed=seed, until_ms=11_000)
    client, neighbour = Client(simulation, 1), Client(simulation, 2)
    client.microphone()
    for index in range(400):
        text = mutated(rng.choice(VALID), rng)
        client.do(300 + 15 * index, lambda text=text: client.raw(text))
    client.leave(at_ms=7000)
    item = {"type": "message", "role": "user", "content": [part("input_text", text="say 12")]}
    neighbour.send("conversation.item.create", at_ms=400, item=item)
    neighbour.send("response.create", at_ms=400)
    simulation.run()

    assert neighbour.words() == list(range(12))
    assert neighbour.view.errors == []
    assert simulation.core.metrics().values["out_slots_free"] == 32
