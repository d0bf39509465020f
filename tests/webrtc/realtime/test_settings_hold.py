"""What a session's settings say is what it does: formats of sound, detection of turns, a reply's final object."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from duplexd.ids import SessionId
from duplexd.media import tones
from duplexd.media.endpoint import End, Judged, Wait, default_rule, patient_rule
from duplexd.media.resample import Resampler
from duplexd.messages import TurnSettingChanged
from duplexd.units import Nanos, ticks_from_ms
from duplexd.webrtc.realtime.formats import ALAW, PCM, ULAW, alaw_encode, base64_of, ulaw_encode
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import Settings
from tests.engine.simulation import RATE, Simulation, beep, history_words
from tests.webrtc.realtime.simulated import Client
from tests.webrtc.realtime.test_session import ask


def audio(**sides: Any) -> dict[str, Any]:
    return {"type": "realtime", "audio": sides}


def detection(**fields: Any) -> dict[str, Any]:
    return audio(input={"turn_detection": {"type": "server_vad", **fields}})


# Sound ----------------------------------------------------------------------------------------------------------------


def telephone(pcm: NDArray[np.int16], kind: str) -> str:
    """int16 at 16 kHz as a telephone sends it."""
    sound = Resampler(16_000, 8000).push(pcm)
    return base64_of((ulaw_encode(sound) if kind == ULAW else alaw_encode(sound)).tobytes())


def off_telephone(data: bytes, kind: str) -> NDArray[np.int16]:
    """What a telephone makes of it, int16 at 24 kHz; the codes of G.711 by their definition, not by our tables."""
    codes = np.frombuffer(data, np.uint8).astype(np.int64)
    if kind == ULAW:
        codes = ~codes & 0xFF
        size = ((((codes & 15) << 3) + 132) << ((codes >> 4) & 7)) - 132
        level = np.where(codes & 128, -size, size)
    else:
        codes = codes ^ 0x55
        exponent, low = (codes >> 4) & 7, ((codes & 15) << 4) + 8
        size = np.where(exponent > 0, (low + 256) << np.maximum(exponent - 1, 0), low)
        level = np.where(codes & 128, size, -size)
    return Resampler(8000, RATE).push(level.astype(np.int16))


@pytest.mark.parametrize("kind", [ULAW, ALAW])
def test_a_turn_is_spoken_and_answered_over_a_telephones_codec(kind: str) -> None:
    """The person is understood; the reply is decoded from what came, and the position counts bytes of 8 kHz."""
    simulation = Simulation(until_ms=9000)
    form = {"format": {"type": kind}}
    client = Client(simulation, settings=audio(input={**form, "transcription": {"model": "x"}}, output=form))
    spoken = np.concatenate([np.zeros(3200, np.int16), beep(600), np.zeros(24_000, np.int16)])
    for at in range(0, len(spoken), 1600):
        part = telephone(spoken[at : at + 1600], kind)
        client.send("input_audio_buffer.append", at_ms=500 + at / 16, audio=part)
    simulation.run()

    deltas = [base64.b64decode(e["delta"]) for e in client.events("response.output_audio.delta")]
    heard = tones.decode(off_telephone(b"".join(deltas), kind), RATE)
    started = client.events("input_audio_buffer.speech_started")[0]
    assert list(client.view.transcripts.values()) == ["sound"]
    assert abs(started["audio_start_ms"] - max(0, 200 - 300)) <= 40
    # A telephone ends short of 4 kHz; words with a higher tone are heard by nobody on it.
    low = [word for word in range(12) if tones.tone_of(word).high_hz < 3700]
    assert len(low) >= 7
    assert [word.index for word in heard if word.index in low] == low
    assert sum(map(len, deltas)) == pytest.approx(8 * 480 * 12, rel=0.01)


def test_a_truncation_on_a_telephone_counts_eight_thousand_a_second() -> None:
    simulation = Simulation(until_ms=6000)
    client = Client(simulation, settings=audio(output={"format": {"type": ULAW}}))
    ask(client, "say 12")

    def stop() -> None:
        item = client.view.order[-1]
        client.send_now("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=1000)

    client.do(2000, stop)
    simulation.run()

    assert client.view.errors == []
    assert history_words(simulation) == [0, 1]


# Turns ----------------------------------------------------------------------------------------------------------------


def settled_ms(silence_ms: int) -> float:
    """How long after the last sound a turn of the person is over."""
    simulation = Simulation(until_ms=9000)
    client = Client(simulation, settings=detection(silence_duration_ms=silence_ms))
    client.microphone()
    client.speak(beep(600), at_ms=1000)
    simulation.run()
    return client.times("input_audio_buffer.speech_stopped")[0] - 1600


@pytest.mark.parametrize("silence_ms", [300, 700, 1500])
def test_a_turn_ends_after_the_silence_that_was_asked_for(silence_ms: int) -> None:
    assert settled_ms(silence_ms) == pytest.approx(silence_ms, abs=80)


class Doubtful:
    """A detector that is sure of nothing: whatever is loud is a voice by 0.6."""

    def probability(self, block: NDArray[np.float32]) -> float:
        return 0.6 if float(np.abs(block).max()) > 0.05 else 0.0


@pytest.mark.parametrize(("threshold", "turns"), [(0.3, 1), (0.55, 1), (0.7, 0), (0.9, 0)])
def test_a_voice_below_the_threshold_is_none(threshold: float, turns: int) -> None:
    simulation = Simulation(until_ms=5000)
    client = Client(simulation, settings=detection(threshold=threshold), detector=Doubtful())
    client.microphone()
    client.speak(beep(600), at_ms=1000)
    simulation.run()

    assert len(client.view.committed) == turns


def test_who_may_not_interrupt_is_listened_to_and_the_reply_goes_on() -> None:
    simulation = Simulation(until_ms=12_000)
    client = Client(simulation, settings=detection(interrupt_response=False))
    client.microphone()
    ask(client, "say 8")
    client.speak(beep(900), at_ms=2000)
    simulation.run()

    first = next(iter(client.view.done.values()))
    assert first["status"] == "completed"
    assert client.words()[:8] == list(range(8))
    assert history_words(simulation)[:8] == list(range(8))
    assert len(client.view.committed) == 1


@pytest.mark.parametrize(
    ("eagerness", "patience_ms"), [("low", 8000), ("medium", 4000), ("auto", 4000), ("high", 2000)]
)
def test_eagerness_is_how_long_an_unfinished_thought_is_waited_for(eagerness: str, patience_ms: int) -> None:
    """The engine is told so, and its rule waits as long with whoever the judge does not call finished."""
    wanted = audio(input={"turn_detection": {"type": "semantic_vad", "eagerness": eagerness}})
    core = RealtimeSession(
        session=SessionId(1),
        settings=Settings.default(model="clock").change(wanted),
        transport=Transport.WEBSOCKET,
        rate=RATE,
    )
    core.open(Nanos(0))
    told = [order for order in core.orders() if isinstance(order, TurnSettingChanged)]
    assert [(order.patience_ms, order.silence_ms) for order in told] == [(float(patience_ms), 0.0)]

    rule = patient_rule(default_rule(), patience_ms)
    unfinished = [Judged(ticks_from_ms(400), 0.01)]
    just_before, after = (rule.decide(ticks_from_ms(patience_ms + d), unfinished) for d in (-20, 20))
    assert isinstance(just_before, Wait)
    assert after == End(judged=False)
    assert rule.decide(ticks_from_ms(100), [Judged(ticks_from_ms(60), 0.99)]) == End(judged=True)


# The final object -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PCM, ULAW])
@pytest.mark.parametrize("stop_ms", [None, 1800])
def test_the_final_object_of_a_reply_is_what_its_deltas_add_up_to(kind: str, stop_ms: int | None) -> None:
    simulation = Simulation(until_ms=6000)
    wanted = {**audio(output={"format": {"type": kind}}), "duplexd": {"events": True}}
    client = Client(simulation, settings=wanted)
    ask(client, "say 6")
    if stop_ms is not None:
        client.send("response.cancel", at_ms=stop_ms)
    simulation.run()

    data = b"".join(base64.b64decode(e["delta"]) for e in client.events("response.output_audio.delta"))
    [output] = [event for event in client.events("duplexd.output") if "duration_ms" in event]
    assert output["sha256"] == hashlib.sha256(data).hexdigest()
    assert output["bytes"] == len(data)
    assert output["duration_ms"] == pytest.approx(len(data) / (48 if kind == PCM else 8), abs=5)
    assert output["state"] == ("completed" if stop_ms is None else "cancelled")
    assert output["format"]["type"] == kind
    assert output["response_id"] in client.view.done
