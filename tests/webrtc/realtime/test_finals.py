"""Final objects and retention: what a response was as a whole, how long it is kept, and that nothing outlives that."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from duplexd.webrtc.realtime.session import Transport
from tests.engine.simulation import Simulation, history_words
from tests.webrtc.realtime.simulated import Client

EVENTS: dict[str, Any] = {"type": "realtime", "duplexd": {"events": True}}


def ask(client: Client, text: str, *, at_ms: float, **response: Any) -> None:
    part = {"type": "input_text", "text": text}
    client.send("conversation.item.create", at_ms=at_ms, item={"type": "message", "role": "user", "content": [part]})
    client.send("response.create", at_ms=at_ms, response=response)


def outputs(client: Client) -> dict[str, dict[str, Any]]:
    return {event["modality"]: event for event in client.events("duplexd.output")}


def test_the_final_sound_is_what_the_deltas_were() -> None:
    simulation = Simulation(until_ms=7000)
    client = Client(simulation, settings=EVENTS)
    ask(client, "say 4", at_ms=300)
    simulation.run()
    sound = b"".join(base64.b64decode(event["delta"]) for event in client.events("response.output_audio.delta"))
    audio, text = outputs(client)["audio"], outputs(client)["text"]

    assert (audio["bytes"], audio["sha256"]) == (len(sound), hashlib.sha256(sound).hexdigest())
    assert audio["duration_ms"] == pytest.approx(len(sound) / 48, abs=0.1)
    said = client.events("response.output_audio_transcript.done")[0]["transcript"].encode()
    assert (text["bytes"], text["sha256"], text["state"]) == (len(said), hashlib.sha256(said).hexdigest(), "completed")
    assert text["format"] == {"type": "text/plain"}


def test_a_reply_in_text_has_a_final_text_alone() -> None:
    simulation = Simulation(until_ms=4000)
    client = Client(simulation, settings={**EVENTS, "output_modalities": ["text"]})
    ask(client, "say 3", at_ms=300)
    simulation.run()

    assert list(outputs(client)) == ["text"]
    assert outputs(client)["text"]["bytes"] == len(client.events("response.output_text.done")[0]["text"])


def test_on_a_call_the_final_sound_is_what_the_track_was_given() -> None:
    """It had no bytes and no checksum there."""
    simulation = Simulation(until_ms=8000)
    client = Client(simulation, settings=EVENTS, transport=Transport.WEBRTC)
    ask(client, "say 3", at_ms=300)
    simulation.run()
    audio = outputs(client)["audio"]

    assert audio["format"] == {"type": "audio/pcm", "rate": 24_000}
    assert audio["bytes"] == round(audio["duration_ms"] * 48)
    assert len(audio["sha256"]) == 64
    assert audio["state"] == "completed"


def test_of_a_sound_that_was_cut_on_a_call_nobody_claims_a_checksum() -> None:
    simulation = Simulation(until_ms=8000)
    client = Client(simulation, settings=EVENTS, transport=Transport.WEBRTC)
    ask(client, "say 12", at_ms=300)
    client.send("response.cancel", at_ms=2500)
    simulation.run()
    audio = outputs(client)["audio"]

    assert audio["state"] == "cancelled"
    assert "sha256" not in audio
    assert "bytes" not in audio


def retrieved(client: Client, *, at_ms: float, name: str = "") -> None:
    def send() -> None:
        client.send_now("duplexd.output.retrieve", response_id=name or next(iter(client.view.done)))

    client.do(at_ms, send)


def test_a_final_object_is_told_again_as_long_as_it_is_kept() -> None:
    simulation = Simulation(until_ms=16_000)
    client = Client(simulation, settings={**EVENTS, "duplexd": {"events": True, "retention_s": 5}})
    ask(client, "say 2", at_ms=300)
    retrieved(client, at_ms=4000)
    retrieved(client, at_ms=12_000)
    retrieved(client, at_ms=12_100, name="resp_none")
    simulation.run()

    told = [{k: v for k, v in event.items() if k != "event_id"} for event in client.events("duplexd.output")]
    assert told[:2] == told[2:]
    assert [event["error"]["code"] for event in client.events("error")] == ["output_not_found"] * 2


def test_what_is_older_than_the_retention_leaves_the_thinker_too() -> None:
    """Without the option it is kept as long as the session; with it, the next reply knows nothing of it."""
    kept: list[list[int]] = []
    for retention in (None, 4):
        simulation = Simulation(until_ms=12_000)
        client = Client(simulation, settings={"type": "realtime", "duplexd": {"retention_s": retention}})
        ask(client, "say 2", at_ms=300)
        ask(client, "say 2", at_ms=9000)
        simulation.run()
        kept.append(history_words(simulation))
        assert len(client.view.order) == (4 if retention is None else 2)

    assert len(kept[0]) == 4
    assert len(kept[1]) == 2


def test_nothing_leaves_while_a_reply_lives() -> None:
    simulation = Simulation(until_ms=12_000)
    client = Client(simulation, settings={"type": "realtime", "duplexd": {"retention_s": 1}})
    ask(client, "say 12", at_ms=300)
    simulation.run()
    deleted, done = client.times("conversation.item.deleted"), client.times("response.done")

    assert len(deleted) == 2
    assert min(deleted) > done[0]
    assert client.words() == list(range(12))
