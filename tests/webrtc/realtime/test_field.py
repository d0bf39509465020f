"""What went wrong elsewhere, retold for a client of the Realtime protocol (the cases' ids stand in each story)."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from duplexd.engine.work import Launch
from duplexd.ids import SessionId
from duplexd.messages import AdvanceEpoch, PublishChunk, StateChanged, TurnState
from duplexd.streams.stage import CostModel
from duplexd.units import NANOS_PER_MS
from duplexd.webrtc.realtime.session import Transport
from tests.engine.simulation import Simulation, beep, history_words
from tests.webrtc.realtime.simulated import Client
from tests.webrtc.realtime.test_session import ask


def test_a_cancel_carries_the_position_and_does_not_race_the_text() -> None:
    """T-BI-02: an acknowledgement comes 300 ms late, the stop overtakes it; nothing that was played is forgotten."""
    simulation = Simulation(until_ms=6000)
    client = Client(simulation)
    ask(client, "say 12")

    def stop() -> None:
        client.send_now("playback.ack", played_ms=1500, item_id=client.view.order[-1], truncate=True)

    client.do(2200, stop)
    client.do(2500, lambda: client.send_now("playback.ack", played_ms=1200, item_id=client.view.order[-1]))
    simulation.run()

    assert history_words(simulation) == [0, 1, 2]
    assert client.view.errors == []


@pytest.mark.parametrize("seed", range(20))
def test_an_interruption_silences_within_the_target_wherever_it_falls(seed: int) -> None:
    """T-BI-05, over a track: silence within 400 ms of the onset."""
    rng = Random(seed)
    onset = rng.uniform(1200, 4500)
    simulation = Simulation(seed=seed, until_ms=9000)
    client = Client(simulation, transport=Transport.WEBRTC)
    client.microphone()
    ask(client, "say 12")
    client.speak(beep(1000), at_ms=onset)
    simulation.run()

    frames = [(50 + 20 * index, frame) for index, frame in enumerate(client.sound)]
    old = [at for at, frame in frames if frame.any() and at > onset]
    answered = client.times("output_audio_buffer.started")[1]
    assert max((at for at in old if at < answered), default=0) <= onset + 400
    assert next(iter(client.view.done.values()))["status"] == "cancelled"


@pytest.mark.parametrize("seed", range(10))
def test_of_a_reply_that_was_interrupted_not_a_sample_leaves_ever_again(seed: int) -> None:
    """T-BI-16, T-BI-17: from the decision on silence, and nobody answers here: five seconds later still silence."""
    rng = Random(seed)
    detection = {"type": "semantic_vad", "create_response": False}
    simulation = Simulation(seed=seed, until_ms=12_000)
    client = Client(
        simulation,
        transport=Transport.WEBRTC,
        settings={"type": "realtime", "audio": {"input": {"turn_detection": detection}}},
    )
    client.microphone()
    ask(client, "say 12")
    client.speak(beep(1000), at_ms=rng.uniform(1200, 4000))
    simulation.run()

    decided = next(at for at, news in simulation.world.news if isinstance(news, AdvanceEpoch)) / NANOS_PER_MS
    after = [frame for index, frame in enumerate(client.sound) if 50 + 20 * index > decided]
    assert decided < 6000
    assert len(after) >= 5000 / 20
    assert not any(frame.any() for frame in after)


def test_truncating_before_the_first_sound_is_no_error() -> None:
    """T-BI-08: a plugin truncates at 0 ms what has not begun; the reply ends, and the item is empty or gone."""
    simulation = Simulation(until_ms=6000)
    client = Client(simulation)
    ask(client, "say 9")

    def stop() -> None:
        item = client.view.order[-1]
        client.send_now("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=0)

    client.do(301.8, stop)
    ask(client, "say 2", at_ms=2000)
    simulation.run()

    assert client.view.errors == []
    assert history_words(simulation) == [0, 1]


def test_an_answer_that_was_never_reached_leaves_the_history_with_its_preamble_cut() -> None:
    """T-BI-11: a preamble and an answer, stopped in the preamble. Both are one item; nothing of the answer stays."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    ask(client, "say 12")  # Three clauses: the first is the preamble.
    reply: list[str] = []

    def stop() -> None:
        reply.append(client.view.order[-1])
        client.send_now("response.cancel")
        client.send_now("conversation.item.truncate", item_id=reply[0], content_index=0, audio_end_ms=1000)

    client.do(2500, stop)
    client.do(3000, lambda: client.send_now("conversation.item.retrieve", item_id=reply[0]))
    ask(client, "say 2", at_ms=3500)
    simulation.run()

    first, second = (entry for entry in client.view.items.values() if entry["role"] == "assistant")
    told = "".join(
        e["delta"] for e in client.events("response.output_audio_transcript.delta") if e["item_id"] == reply[0]
    )
    assert len(told.split()) > 4  # The answer was on its way.
    assert (first["content"][0]["transcript"], first["status"]) == ("0-0 0-1", "incomplete")
    assert second["content"][0]["transcript"].split()[0] == "1-0"
    assert history_words(simulation) == [0, 1, 32, 33]


@pytest.mark.slow
def test_fifty_replies_of_any_length_are_remembered_to_the_byte() -> None:
    """T-BI-04: what is retrieved at the end is what was told, every word of it was heard, and the last one, too."""
    rng = Random(4)
    counts = [rng.randint(1, 12) for _ in range(50)]
    begins = [300.0]
    for count in counts:
        begins.append(begins[-1] + 480 * count + 1200)
    simulation = Simulation(until_ms=begins[-1] + 2000)
    client = Client(simulation)
    for count, at in zip(counts, begins, strict=False):
        ask(client, f"say {count}", at_ms=at)

    def look() -> None:
        for item_id in list(client.view.order):
            client.send_now("conversation.item.retrieve", item_id=item_id)

    client.do(begins[-1], look)
    simulation.run()

    told: dict[str, str] = {}
    for event in client.events("response.output_audio_transcript.delta"):
        told[event["item_id"]] = told.get(event["item_id"], "") + event["delta"]
    kept = {e["item"]["id"]: e["item"] for e in client.events("conversation.item.retrieved")}
    said = {name: item["content"][0]["transcript"] for name, item in kept.items() if item["role"] == "assistant"}
    assert said == told
    assert [len(text.split()) for text in said.values()] == counts
    assert client.words() == [(32 * turn + word) % 1024 for turn, count in enumerate(counts) for word in range(count)]


def test_everything_is_made_and_still_plays_and_can_be_interrupted() -> None:
    """T-BI-22: response.done is there; the sound of a whole reply lies with a client that said it has played little."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation)
    client.microphone()
    ask(client, "say 4")
    client.speak(beep(900), at_ms=2100)  # 1.9 s of sound, made by 1.6 s.
    simulation.run()

    first = next(iter(client.view.done.values()))
    made = client.times("response.done")[0]
    assert (first["status"], made < 2100) == ("completed", True)
    assert client.times("input_audio_buffer.speech_started")
    assert history_words(simulation)[:4] in ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 32])


def test_work_for_an_old_reply_ends_within_one_step() -> None:
    """T-BI-26: after the advance no launch works for the dead epoch."""
    simulation = Simulation(until_ms=6000)
    client = Client(simulation)
    ask(client, "say 30")
    client.send("response.cancel", at_ms=1500)
    simulation.run()

    ended = next(at for at, news in simulation.world.news if isinstance(news, AdvanceEpoch))
    later = [launch for at, launch in simulation.world.launches if at > ended and launch.stage in ("talk", "render")]
    assert later == []
    assert all(news.epoch == 0 for _, news in simulation.world.news if isinstance(news, PublishChunk))


def test_ten_interruptions_cost_the_next_reply_nothing() -> None:
    """T-BI-28, T-BI-34: the first sound after each stop is as near as in silence."""
    simulation = Simulation(until_ms=30_000)
    client = Client(simulation)
    asked = [500 + 2500 * turn for turn in range(11)]
    for at in asked:
        ask(client, "say 20", at_ms=at)
        client.send("response.cancel", at_ms=at + 1700)
    simulation.run()

    deltas = client.times("response.output_audio.delta")
    first = [min(at for at in deltas if at >= begin) - begin for begin in asked]
    assert max(first) <= first[0] + 50


@pytest.mark.parametrize("seed", range(8))
def test_a_hundred_random_stops_leave_the_states_sane(seed: int) -> None:
    """T-BI-32, in eight parts: 0 to 300 ms apart, by cancel, clear, truncate, acknowledgement."""
    rng = Random(seed)
    simulation = Simulation(seed=seed, until_ms=22_000)
    client = Client(simulation, transport=rng.choice(list(Transport)))
    at = 300.0
    for _ in range(100):
        at += rng.uniform(0, 180)
        if rng.random() < 0.5:
            ask(client, f"say {rng.randint(1, 20)}", at_ms=at)
        kind = rng.choice(("response.cancel", "output_audio_buffer.clear", "playback.ack"))
        fields: dict[str, Any] = {"played_ms": rng.uniform(0, 900), "truncate": True} if kind == "playback.ack" else {}
        client.send(kind, at_ms=at + rng.uniform(0, 90), **fields)
    simulation.run()

    assert client.view.open == {}
    assert simulation.core.metrics().values["latents_held"] == 0
    session = simulation.core.sessions[SessionId(1)]
    assert (session.reply, session.state) == (None, TurnState.LISTENING)


def test_the_buffer_stops_when_the_last_sample_has_gone() -> None:
    """T-PP-01: `output_audio_buffer.stopped` within 150 ms of the last sound, as the published lag has it."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation, transport=Transport.WEBRTC)
    ask(client, "say 6")
    simulation.run()

    last = max(50 + 20 * index for index, frame in enumerate(client.sound) if frame.any())
    assert -150 <= client.times("output_audio_buffer.stopped")[0] - (last + 250 + 120) <= 150


def test_a_client_that_never_reports_hangs_nobody() -> None:
    """T-PP-02: by the conservative clock the reply ends, the state says so, and history says it is assumed."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation, settings={"duplexd": {"events": True}})
    ask(client, "say 6")
    simulation.run()

    assert next(iter(client.view.done.values()))["status"] == "completed"
    assert client.events("duplexd.history")[-1]["estimated"] is True
    assert simulation.news(StateChanged)[-1].state is TurnState.LISTENING


def test_a_client_is_told_that_a_character_that_is_not_heard_does_not_speak() -> None:
    """T-PP-04: the voice is made as slowly as it can be, so that the reply has a hole of seconds in it."""
    simulation = Simulation(until_ms=60_000)
    client = Client(simulation, transport=Transport.WEBRTC, settings={"duplexd": {"events": True}})
    ask(client, "say 6")

    def stand() -> None:
        spec = simulation.world.stages["render"].spec
        simulation.world.stages["render"].spec = msgspec.structs.replace(spec, cost=CostModel(fixed_us=4_000_000))

    client.do(1500, stand)
    simulation.run()
    states = [event["state"] for event in client.events("duplexd.state")]

    assert states[:4] == ["thinking", "speaking", "thinking", "speaking"]
    assert states[-1] == "listening"
    assert client.line.speaking.lapses == states.count("thinking") - 1


def test_two_seconds_of_a_clients_own_buffer_are_not_mistaken_for_heard() -> None:
    """T-PP-08: it plays two seconds late and says so; the cut follows its ear, and generation its pace."""
    simulation = Simulation(until_ms=14_000)
    client = Client(simulation, settings={"duplexd": {"events": True}})
    ask(client, "say 20")

    def acknowledge() -> None:
        begun = client.times("response.output_audio.delta")
        if begun and client.view.open:
            played = max(0.0, simulation.world.now() / 1e6 - begun[0] - 2000)
            client.send_now("playback.ack", played_ms=played)

    for at in range(320, 7000, 100):
        client.do(at, acknowledge)
    client.send("response.cancel", at_ms=6000)
    simulation.run()

    cut = client.events("conversation.item.truncated")[0]["audio_end_ms"]
    ear = 6000 - client.times("response.output_audio.delta")[0] - 2000
    assert abs(cut - ear) < 150
    ahead = [e["generation_ms"] - e["playback_ms"] for e in client.events("duplexd.cursor")]
    assert max(ahead) <= 1500 + 20


@pytest.mark.slow
def test_in_two_hundred_turns_nobody_hears_a_strangers_word() -> None:
    """T-ISO-01: four people, fifty turns each, overlapping; every one of them begins at another number.

    What tells them apart is what each was made to remember before: replies are numbered on from there.
    """
    turns, every_ms = 50, 1600.0
    simulation = Simulation(until_ms=400 + turns * every_ms + 3000)
    people = [Client(simulation, number) for number in range(1, 5)]
    for index, person in enumerate(people):
        first = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": f"{7 * index}-0."}],
        }
        person.send("conversation.item.create", at_ms=200, item=first)
        for turn in range(turns):
            ask(person, f"say {1 + (turn + index) % 2}", at_ms=400 + every_ms * turn + 130 * index)
    simulation.run()

    for index, person in enumerate(people):
        expected = [(32 * (7 * index + 1 + t) + w) % 1024 for t in range(turns) for w in range(1 + (t + index) % 2)]
        assert person.words() == expected, f"person {index}"
        assert person.view.errors == []
        replies = [r["output"][0]["content"][0]["transcript"] for r in person.view.done.values()]
        assert all(text.startswith(f"{7 * index + 1 + t}-0") for t, text in enumerate(replies))


def test_who_joins_and_leaves_repeats_nothing_of_a_neighbours() -> None:
    """T-ISO-02: nobody hears a word twice or a stranger's word while others come and go."""
    simulation = Simulation(until_ms=12_000)
    staying = Client(simulation, 1)
    ask(staying, "say 20")
    for index in range(3):
        guest = Client(simulation, 2 + index, at_ms=200 + 900 * index)
        ask(guest, "say 5", at_ms=400 + 900 * index)
        guest.leave(at_ms=900 + 900 * index)
    simulation.run()

    assert staying.words() == list(range(20))


def test_a_fault_in_one_session_changes_no_bit_of_a_neighbours_sound() -> None:
    """T-ISO-04: a stage fails for one; the other's sound is the same, sample for sample."""

    def heard(*, fails: bool) -> bytes:
        def fault(launch: Launch) -> str:
            return "made to fail" if fails and launch.stage == "render" and launch.jobs[0].session == 1 else ""

        simulation = Simulation(until_ms=8000, fails=fault)
        unlucky, neighbour = Client(simulation, 1), Client(simulation, 2)
        ask(unlucky, "say 6")
        ask(neighbour, "say 8", at_ms=320)
        simulation.run()
        if fails:
            assert next(iter(unlucky.view.done.values()))["status"] == "failed"
        return b"".join(pcm.tobytes() for pcm in neighbour.sound)

    assert heard(fails=True) == heard(fails=False)
