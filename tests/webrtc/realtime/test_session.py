"""The Realtime protocol over the word clock, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from duplexd.webrtc.realtime.session import Transport
from tests.engine.simulation import Simulation, beep, history_words
from tests.webrtc.realtime.simulated import Client, beep24

MANUAL: dict[str, Any] = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
TEXT: dict[str, Any] = {"type": "realtime", "output_modalities": ["text"]}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def ask(client: Client, text: str, *, at_ms: float = 300, **response: Any) -> None:
    client.send("conversation.item.create", at_ms=at_ms, item=user(text))
    client.send("response.create", at_ms=at_ms, **({"response": response} if response else {}))


def test_a_typed_turn_has_the_order_of_the_protocol() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation)
    ask(client, "say 3")
    simulation.run()

    assert client.kinds() == [
        "session.created",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "rate_limits.updated",
    ]
    assert client.words() == [0, 1, 2]
    assert [client.view.text(item) for item in client.view.order] == ["say 3", "0-0 0-1 0-2."]


def test_a_spoken_turn_is_started_stopped_committed_and_answered() -> None:
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    client.microphone()
    client.speak(beep(600), at_ms=1000)
    simulation.run()

    kinds = client.kinds()
    assert kinds[1:6] == [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
    ]
    started = client.events("input_audio_buffer.speech_started")[0]
    stopped = client.events("input_audio_buffer.speech_stopped")[0]
    assert abs(started["audio_start_ms"] - (940 - 300)) <= 40
    assert abs(stopped["audio_end_ms"] - (1540 + 500)) <= 80
    assert client.view.committed == [started["item_id"]]
    assert client.words() == list(range(12))
    assert [r["status"] for r in client.view.done.values()] == ["completed"]


def test_a_voice_over_the_reply_cancels_it_and_the_item_is_what_was_heard() -> None:
    """No playback is ever reported: the position is an estimate, and history and item agree on it."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    client.microphone()
    ask(client, "say 12")
    client.speak(beep(900), at_ms=2500)
    simulation.run()

    first = next(iter(client.view.done.values()))
    assert (first["status"], first["status_details"]["reason"]) == ("cancelled", "turn_detected")
    kinds = client.kinds(but=("response.output_audio.delta", "response.output_audio_transcript.delta"))
    at = kinds.index("input_audio_buffer.speech_started")
    assert kinds[at : at + 8] == [
        "input_audio_buffer.speech_started",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "rate_limits.updated",
    ]
    item = first["output"][0]["id"]
    truncated = client.events("conversation.item.truncated")[0]
    heard = client.view.text(item).split()
    decided = client.times("input_audio_buffer.speech_started")[0]
    ear = decided - client.times("response.output_audio.delta")[0] - 250  # The conservative clock's lag.
    assert decided < 2500 + 400
    assert abs(truncated["audio_end_ms"] - ear) < 60
    assert truncated["audio_end_ms"] // 480 - 1 <= len(heard) <= truncated["audio_end_ms"] // 480
    assert history_words(simulation)[: len(heard)] == list(range(len(heard)))


def test_a_cough_over_the_reply_is_never_told() -> None:
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    client.microphone()
    ask(client, "say 8")
    client.speak(beep(120), at_ms=2000)
    simulation.run()

    assert not client.events("input_audio_buffer.speech_started")
    assert client.words() == list(range(8))


@pytest.mark.parametrize("played_ms", [0, 700, 1500])
def test_a_client_that_stops_and_truncates_decides_what_was_heard(played_ms: int) -> None:
    """response.cancel, then conversation.item.truncate with the client's own position (agents-js, LiveKit, Pipecat)."""
    simulation = Simulation(until_ms=6000)
    client = Client(simulation)
    ask(client, "say 12")

    def stop() -> None:
        client.send_now("response.cancel")
        item = client.view.order[-1]
        client.send_now("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=played_ms)

    client.do(2400, stop)
    client.do(3500, lambda: client.send_now("conversation.item.retrieve", item_id=client.view.order[-1]))
    simulation.run()

    words = played_ms // 480
    assert client.view.errors == []
    assert client.view.text(client.view.order[-1]).split() == [
        f"0-{k}{',' if k % 4 == 3 else ''}" for k in range(words)
    ]
    assert history_words(simulation) == list(range(words))
    assert next(iter(client.view.done.values()))["status_details"]["reason"] == "client_cancelled"


def test_a_truncation_beyond_the_sound_is_an_error_and_the_session_goes_on() -> None:
    """85 ms more than there is (T-BI-07)."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    ask(client, "say 2")

    def truncate(extra: float) -> None:
        sent = sum(len(pcm) for pcm in client.sound) / 24
        item = client.view.order[-1]
        client.send_now("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=sent + extra)

    client.do(2500, lambda: truncate(85))
    client.do(2600, lambda: truncate(15))
    ask(client, "say 3", at_ms=3000)
    simulation.run()

    assert [error["param"] for error in client.view.errors] == ["audio_end_ms"]
    assert len(client.events("conversation.item.truncated")) == 1
    assert client.words() == [0, 1, 32, 33, 34]


def test_push_to_talk_commits_and_asks() -> None:
    simulation = Simulation(until_ms=9000)
    client = Client(simulation, settings={**MANUAL, "audio": {"input": {"turn_detection": None, "transcription": {}}}})
    client.append(beep24(2000), at_ms=300)
    client.send("input_audio_buffer.commit", at_ms=310)
    client.send("response.create", at_ms=311)
    simulation.run()

    assert client.view.errors == []
    assert client.view.transcripts == {client.view.order[0]: "sound"}
    assert client.words()[:3] == [0, 1, 2]
    assert not client.events("input_audio_buffer.speech_started")


def test_an_empty_buffer_is_no_turn() -> None:
    simulation = Simulation(until_ms=1000)
    client = Client(simulation, settings=MANUAL)
    client.send("input_audio_buffer.commit", at_ms=300)
    client.append(beep24(500), at_ms=400)
    client.send("input_audio_buffer.clear", at_ms=410)
    client.send("input_audio_buffer.commit", at_ms=420)
    simulation.run()

    assert [e["code"] for e in client.view.errors] == ["input_audio_buffer_commit_empty"] * 2


def test_in_writing_nothing_is_spoken() -> None:
    simulation = Simulation(until_ms=3000)
    client = Client(simulation, settings=TEXT)
    ask(client, "say 4")
    simulation.run()

    assert client.view.text(client.view.order[-1]) == "0-0 0-1 0-2 0-3."
    assert not client.events("response.output_audio.delta")
    done = next(iter(client.view.done.values()))
    assert done["usage"]["output_token_details"] == {"text_tokens": done["usage"]["output_tokens"], "audio_tokens": 0}


def test_one_response_at_a_time() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation)
    ask(client, "say 4")
    client.send("response.create", at_ms=301, event_id="second")
    simulation.run()

    assert [(e["code"], e["event_id"]) for e in client.view.errors] == [
        ("conversation_already_has_active_response", "second")
    ]
    assert client.words() == [0, 1, 2, 3]


def test_what_was_asked_twice_under_one_id_happens_once() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation)
    for at in (300, 305):
        client.send("conversation.item.create", at_ms=at, item=user("say 2"), event_id="item-1")
        client.send("response.create", at_ms=at, event_id="response-1")
    simulation.run()

    assert client.view.errors == []
    assert client.words() == [0, 1]


def test_cancelling_before_a_sound_leaves_nothing() -> None:
    """50 ms after it was asked (T-BI-31): no sound ever, one terminal event, no item of the character (T-BI-14)."""
    for delay in (0, 1, 3, 50):
        simulation = Simulation(until_ms=4000)
        client = Client(simulation)
        ask(client, "say 9")
        client.send("response.cancel", at_ms=300 + delay)
        simulation.run()

        done = next(iter(client.view.done.values()))
        assert done["status"] == "cancelled"
        assert history_words(simulation) == []
        assert all(at <= 300 + delay for at in client.times("response.output_audio.delta"))
        assert len(client.view.order) == 1 or client.events("conversation.item.truncated")[0]["audio_end_ms"] == 0


def test_cancelling_nothing_is_a_benign_error() -> None:
    simulation = Simulation(until_ms=1000)
    client = Client(simulation)
    client.send("response.cancel", at_ms=300)
    simulation.run()

    error = client.view.errors[0]
    assert error["code"] == "response_cancel_not_active"
    assert error["message"].startswith("Cancellation failed")


def test_acknowledged_playback_is_where_an_interruption_cuts() -> None:
    """The client plays 400 ms late and says so; the voice cuts where its ear was, not where the clock thought."""
    simulation = Simulation(until_ms=8000)
    client = Client(simulation, settings={"duplexd": {"events": True}})
    client.microphone()
    ask(client, "say 12")
    begin: list[float] = []

    def acknowledge() -> None:
        deltas = client.times("response.output_audio.delta")
        if deltas and not client.view.done:
            played = max(0.0, simulation.world.now() / 1e6 - deltas[0] - 400)
            client.send_now("playback.ack", played_ms=played, item_id=client.view.order[-1])
            begin.append(played)

    for at in range(400, 4000, 100):
        client.do(at, acknowledge)
    client.speak(beep(900), at_ms=2600)
    simulation.run()

    cut = client.events("conversation.item.truncated")[0]["audio_end_ms"]
    final = next(e for e in client.events("duplexd.history") if e["final"])
    decided = client.times("input_audio_buffer.speech_started")[0]
    ear = decided - client.times("response.output_audio.delta")[0] - 400
    assert abs(cut - ear) < 150
    assert client.core.counts["acks_ignored"] == 0
    assert final["words"] == len(client.view.text(client.view.items[final["item_id"]]["id"]).split())


def test_a_late_acknowledgement_is_counted_and_nothing_else() -> None:
    """Two seconds after the reply (T-BI-38), and one beyond all sound (T-BI-23)."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    ask(client, "say 3")
    client.do(900, lambda: client.send_now("playback.ack", played_ms=60_000))
    client.do(5000, lambda: client.send_now("playback.ack", played_ms=300, item_id=client.view.order[1]))
    simulation.run()

    assert client.view.errors == []
    assert (client.core.counts["acks_ignored"], client.core.counts["acks_clamped"]) == (1, 1)
    assert client.view.text(client.view.order[1]) == "0-0 0-1 0-2."


def test_clearing_the_output_stops_it_and_the_next_reply_is_accepted() -> None:
    """Everything is made, it still plays (T-BI-35)."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation, transport=Transport.WEBRTC)
    ask(client, "say 4")
    client.send("output_audio_buffer.clear", at_ms=1900)
    ask(client, "say 3", at_ms=2000)
    simulation.run()

    assert client.view.errors == []
    assert client.words()[-3:] == [32, 33, 34]
    assert client.kinds().count("output_audio_buffer.cleared") == 1


def test_over_a_track_the_buffer_starts_and_stops_behind_the_response() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation, transport=Transport.WEBRTC)
    ask(client, "say 3")
    simulation.run()

    kinds = client.kinds()
    assert kinds.index("response.content_part.added") < kinds.index("output_audio_buffer.started")
    assert kinds.index("response.done") < kinds.index("output_audio_buffer.stopped")
    assert client.words() == [0, 1, 2]


def test_over_a_track_a_voice_clears_and_truncates_by_itself() -> None:
    simulation = Simulation(until_ms=9000)
    client = Client(simulation, transport=Transport.WEBRTC)
    client.microphone()
    ask(client, "say 12")
    client.speak(beep(900), at_ms=2500)
    simulation.run()

    kinds = client.kinds()
    assert kinds.index("response.done") < kinds.index("output_audio_buffer.cleared")
    assert "conversation.item.truncated" in kinds
    first = next(iter(client.view.done.values()))
    heard = client.view.text(first["output"][0]["id"]).split()
    assert history_words(simulation)[: len(heard)] == list(range(len(heard)))
    assert len(heard) >= 2


def test_functions_are_called_answered_and_the_answer_is_told() -> None:
    tools = [{"type": "function", "name": "number", "parameters": {"type": "object", "properties": {}}}]
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    client.send("session.update", at_ms=100, session={"type": "realtime", "tools": tools})
    ask(client, "say 700")

    def answer() -> None:
        call = client.view.items[client.view.order[-1]]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        client.send_now("conversation.item.create", item=output)
        client.send_now("response.create")

    client.do(2000, answer)
    simulation.run()

    call = client.events("response.function_call_arguments.done")[0]
    assert (call["name"], call["arguments"]) == ("number", '{"asked": true}')
    assert [i["type"] for i in client.view.items.values()] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert client.view.errors == []
    assert client.words()


def test_items_stand_where_they_are_put_and_the_thinker_knows_them() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation, settings=TEXT)
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4-0 4-1."}]}
    client.send("conversation.item.create", at_ms=300, item={**user("hello"), "id": "one"})
    client.send("conversation.item.create", at_ms=301, item={**said, "id": "two"})
    client.send("conversation.item.create", at_ms=302, item={**user("say 2"), "id": "four"})
    client.send("conversation.item.create", at_ms=303, item={**user("x"), "id": "zero"}, previous_item_id="root")
    client.send("conversation.item.create", at_ms=304, item={**user("y"), "id": "five"}, previous_item_id="nobody")
    client.send("conversation.item.create", at_ms=305, item={**user("y"), "id": "four"})
    client.send("conversation.item.delete", at_ms=306, item_id="zero")
    client.send("response.create", at_ms=310)
    simulation.run()

    assert client.view.order[:3] == ["one", "two", "four"]
    assert [e["code"] for e in client.view.errors] == ["item_not_found", "item_already_exists"]
    assert client.view.text(client.view.order[-1]) == "5-0 5-1."  # It counts on from what it was told it had said.


def test_a_deleted_reply_is_forgotten() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation, settings=TEXT)
    ask(client, "say 2")
    client.do(1500, lambda: client.send_now("conversation.item.delete", item_id=client.view.order[-1]))
    client.send("response.create", at_ms=2000)
    simulation.run()

    assert client.view.text(client.view.order[-1]) == "0-0 0-1."


def test_a_response_out_of_band_is_told_and_not_remembered() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation, settings=TEXT)
    ask(client, "say 2")
    client.send(
        "response.create",
        at_ms=320,
        response={"conversation": "none", "input": [user("say 5")], "metadata": {"topic": "aside"}},
    )
    ask(client, "say 3", at_ms=3000)
    simulation.run()

    aside = [r for r in client.view.done.values() if r.get("metadata") == {"topic": "aside"}]
    assert [r["output"][0]["content"][0]["text"] for r in aside] == ["0-0 0-1 0-2 0-3, 0-4."]
    assert [client.view.text(item) for item in client.view.order] == ["say 2", "0-0 0-1.", "say 3", "1-0 1-1 1-2."]


def test_a_person_who_says_nothing_is_asked() -> None:
    detection = {"type": "server_vad", "idle_timeout_ms": 5000}
    simulation = Simulation(until_ms=12_000)
    client = Client(simulation, settings={"type": "realtime", "audio": {"input": {"turn_detection": detection}}})
    client.microphone()
    ask(client, "say 2")
    simulation.run()

    played = client.times("response.done")[0]
    timeout = client.times("input_audio_buffer.timeout_triggered")[0]
    assert 5000 <= timeout - played < 6800
    assert len(client.view.done) >= 1
    assert len(client.events("response.created")) == 2


def test_a_transcription_session_understands_and_says_nothing() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation)
    client.core.settings = client.core.settings.as_kind("transcription")
    client.microphone()
    client.speak(beep(600), at_ms=1000)
    client.send("response.create", at_ms=5000)
    simulation.run()

    assert list(client.view.transcripts.values()) == ["sound"]
    assert client.events("response.created") == []
    assert [e["code"] for e in client.view.errors] == ["invalid_request"]


def test_tokens_run_out() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation, settings=TEXT)
    ask(client, "say 20", max_output_tokens=3)
    simulation.run()

    done = next(iter(client.view.done.values()))
    assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert (done["max_output_tokens"], done["usage"]["output_tokens"]) == (3, 3)


def test_a_longer_recording_than_time_is_heard_whole() -> None:
    """A file of 9 s appended in one event: it is listened to at four times its speed, and nothing of it is lost."""
    simulation = Simulation(until_ms=9000)
    transcribed = {"type": "realtime", "audio": {"input": {"turn_detection": None, "transcription": {}}}}
    client = Client(simulation, settings=transcribed)

    def append() -> None:
        for _ in range(3):
            client.send_now("input_audio_buffer.append", audio=_b64(beep24(700)))
            client.send_now("input_audio_buffer.append", audio=_b64(beep24(2300, level=0)))
        client.send_now("input_audio_buffer.commit")

    client.do(300, append)
    simulation.run()

    assert list(client.view.transcripts.values()) == ["sound sound sound"]
    assert client.times("conversation.item.input_audio_transcription.completed")[0] < 300 + 9000 / 4 + 400


def _b64(pcm: Any) -> str:
    from tests.webrtc.realtime.simulated import b64

    return b64(pcm)


def test_an_event_that_was_refused_may_be_sent_again_under_its_id() -> None:
    """Its id was remembered before it was looked at: the retry got neither an error nor a response."""
    simulation = Simulation(until_ms=12_000)
    client = Client(simulation)
    ask(client, "say 2")
    client.send("response.create", at_ms=400, event_id="again")
    client.send("response.create", at_ms=7000, event_id="again")
    client.send("response.create", at_ms=9000, event_id="again")
    simulation.run()

    errors = [event["error"] for event in client.events("error")]
    assert [(e["code"], e["event_id"]) for e in errors] == [("conversation_already_has_active_response", "again")]
    assert len(client.events("response.created")) == 2


def test_a_prefetch_asks_the_engine_for_more_than_the_history() -> None:
    simulation = Simulation(until_ms=3000)
    client = Client(simulation)
    client.send("conversation.item.create", at_ms=300, item=user("say 2"))
    client.send("duplexd.prefetch", at_ms=600)
    simulation.run()

    assert client.events("error") == []
    assert simulation.core.monitor["prefetches_done"] == 1


def test_usage_grows_with_the_words_that_are_told() -> None:
    """It was zero until the response was done."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    written: list[int] = []
    ask(client, "say 6")
    take = client.view.take

    def look(event: dict[str, Any]) -> None:
        take(event)
        if event["type"] == "response.output_audio_transcript.delta":
            usage = client.core.usage_of(event["response_id"])
            written.append(usage["output_tokens"] if usage is not None else -1)

    client.view.take = look  # type: ignore[method-assign]
    simulation.run()

    assert written == sorted(written)
    assert 0 < written[0] <= written[-1] == client.events("response.done")[0]["response"]["usage"]["output_tokens"]
