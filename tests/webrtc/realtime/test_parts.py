"""Small parts of the API: buckets, secrets, settings, the input queue, the duplex replay, the prompt."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from duplexd.ids import SessionId
from duplexd.units import NANOS_PER_SECOND, Nanos
from duplexd.webrtc.realtime.bridge import InputQueue
from duplexd.webrtc.realtime.duplex import Replay, settings_of
from duplexd.webrtc.realtime.faults import Fault
from duplexd.webrtc.realtime.formats import PCM, WireIn
from duplexd.webrtc.realtime.limits import Bucket, Limits
from duplexd.webrtc.realtime.orders import Feed
from duplexd.webrtc.realtime.prompt import condition_of
from duplexd.webrtc.realtime.secrets import Doorkeeper, Key
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import Settings

TOOL = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}}


def seconds(value: float) -> Nanos:
    return Nanos(round(value * NANOS_PER_SECOND))


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = Bucket(per_second=10, burst=5)

    assert sum(bucket.take(seconds(1)) for _ in range(9)) == 5
    assert sum(bucket.take(seconds(1.25)) for _ in range(9)) == 2
    assert bucket.full_in_s(seconds(1.25)) == pytest.approx(0.45)
    assert sum(bucket.take(seconds(100)) for _ in range(9)) == 5


def test_a_secret_lives_as_long_as_it_was_given_and_locks_what_was_named() -> None:
    keeper = Doorkeeper("token")
    wanted = {"expires_after": {"anchor": "created_at", "seconds": 10}, "locked_fields": ["tools"]}
    secret = keeper.make(wanted, model="m", wall=1000.0)

    assert keeper.secret(secret.value, wall=1009.0) is secret
    assert keeper.secret(secret.value, wall=1010.0) is None
    assert secret.locked == {"tools"}
    assert not keeper.is_master(secret.value)
    with pytest.raises(Fault) as caught:
        secret.settings.change({"tools": []}, locked=secret.locked)
    assert caught.value.code == "locked_field"


@pytest.mark.parametrize("session", [5, [1], "x"])
def test_a_secret_for_what_is_no_session_is_a_fault(session: Any) -> None:
    with pytest.raises(Fault) as caught:
        Doorkeeper("").make({"session": session}, model="m", wall=0.0)

    assert caught.value.param == "session"


def test_at_their_bound_the_secret_that_ends_first_gives_way() -> None:
    keeper = Doorkeeper("", secrets_max=2)
    lives = [keeper.make({"expires_after": {"seconds": life}}, model="m", wall=0.0) for life in (60, 20, 40)]

    assert [keeper.secret(one.value, wall=1.0) is not None for one in lives] == [True, False, True]


def test_a_session_begins_to_live_when_it_is_opened() -> None:
    """The front end ticks it from its admission on: on a busy machine it ended before its client was told of it."""
    core = RealtimeSession(
        session=SessionId(1),
        settings=Settings.default(model="m"),
        transport=Transport.WEBSOCKET,
        rate=24_000,
        limits=Limits(life_s=2.0),
    )
    core.tick(seconds(1000))
    core.open(seconds(1000))
    core.tick(seconds(1001.9))
    assert [event["type"] for event in core.events()] == ["session.created"]
    core.tick(seconds(1002))
    assert [event["error"]["code"] for event in core.events()] == ["session_expired"]


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16_000}}}}, "session.audio.input.format.rate"),
        ({"audio": {"input": {"turn_detection": {"type": "semantic_vad", "threshold": 0.5}}}}, "threshold"),
        ({"audio": {"output": {"speed": 1.2}}}, "session.audio.output.speed"),
        ({"output_modalities": ["audio", "text"]}, "session.output_modalities"),
        ({"tools": [{"type": "mcp"}]}, "session.tools[0]"),
        ({"audio": {"input": {"turn_detection": {"type": []}}}}, "session.audio.input.turn_detection.type"),
        ({"max_output_tokens": 0}, "session.max_output_tokens"),
        ({"type": "transcription"}, "session.type"),
    ],
)
def test_one_bad_field_is_named_and_nothing_changes(session: dict[str, Any], param: str) -> None:
    settings = Settings.default(model="m")
    before = json.dumps(settings.values)
    with pytest.raises(Fault) as caught:
        settings.change({"instructions": "new", **session})

    assert caught.value.param.endswith(param)
    assert json.dumps(settings.values) == before


@pytest.mark.parametrize("name", ["tracing", "prompt", "truncation", "reasoning"])
def test_what_is_only_shown_again_has_a_size(name: str) -> None:
    """The second update copied the first one's 900 levels, and the session ended by a RecursionError."""
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    settings = Settings.default(model="m")
    for value in (deep, list(range(5000))):
        with pytest.raises(Fault) as caught:
            settings.change({name: value})
        assert caught.value.param == f"session.{name}"


def test_what_is_wrong_is_shown_short_however_deep_it_is() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    with pytest.raises(Fault) as caught:
        Settings.default(model="m").change({"output_modalities": deep, "instructions": "x" * 10})

    assert len(str(caught.value)) < 300


def test_only_present_fields_change_and_empty_ones_clear() -> None:
    settings = Settings.default(model="m").change({"instructions": "a", "tools": [TOOL]})
    settings = settings.change({"tools": None, "audio": {"input": {"turn_detection": None, "format": None}}})

    assert (settings.values["instructions"], settings.values["tools"]) == ("a", [TOOL])
    assert (settings.turn_detection, settings.input_format) == (None, "audio/pcm")
    assert settings.change({"instructions": "", "tools": []}).values["tools"] == []


def test_sound_is_heard_at_a_bounded_speed_and_in_order_with_its_marks() -> None:
    """A second at 24 kHz: 200 ms at once, the rest at four times its speed, as if it had been resampled whole."""
    queue, wire = InputQueue(ms_max=1100.0), WireIn(PCM)
    sound = (np.arange(24_000) % 3000).astype(np.int16)
    assert queue.push(Feed(sound, wire))
    queue.mark("end")
    assert not queue.push(Feed(np.zeros(4800, np.int16), wire))
    got: list[Any] = []
    for tick in range(60):
        while (item := queue.pop(seconds(1 + tick / 50))) is not None:
            got.append(item)
        if tick == 0:
            assert sum(len(piece) for piece in got) == 3200

    assert got[-1] == "end"
    assert max(len(piece) for piece in got[:-1]) == 320
    assert np.array_equal(np.concatenate(got[:-1]), WireIn(PCM).resample(sound))


def test_what_is_cleared_is_sound_and_never_a_mark() -> None:
    queue = InputQueue(ms_max=1000.0)
    queue.push(Feed(np.zeros(9000, np.int16), WireIn(PCM)))
    queue.mark("end")
    queue.clear_sound()

    assert (queue.pop(seconds(1)), len(queue), queue.marks) == ("end", 0, 0)


def test_only_what_was_missed_and_is_kept_is_told_again() -> None:
    replay = Replay(events_max=4)
    for index in range(6):
        replay.add({"n": index})

    assert replay.since(1) is None  # Number 2 is not kept any more.
    assert [json.loads(text)["server_event_seq"] for text in replay.since(3) or ()] == [4, 5, 6]
    assert (replay.since(6), replay.since(7)) == ([], None)
    replay.acknowledge(5)
    assert replay.since(4) is None
    assert [json.loads(text)["n"] for text in replay.since(5) or ()] == [5]


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ([], "session"),
        ({"input_audio_format": "pcm_f32le"}, "session.input_audio_format"),
        ({"sample_rate_hz": 11_025}, "session.sample_rate_hz"),
        ({"audio": {"output": {"sample_rate_hz": 48_000}}}, "session.audio.output.sample_rate_hz"),
    ],
)
def test_a_duplex_session_that_cannot_be_says_why(session: Any, param: str) -> None:
    with pytest.raises(Fault) as caught:
        settings_of(session, Key(Settings.default(model="m"), frozenset()))

    assert caught.value.param == param


def test_tools_are_told_as_models_have_learnt_them() -> None:
    text = condition_of("Be brief.", [TOOL, {**TOOL, "name": "listen"}], {"type": "function", "name": "look"})

    assert text.startswith("Be brief.\n\n# Tools")
    assert '{"type": "function", "function": {"name": "look"' in text
    assert "listen" not in text
    assert condition_of("", [TOOL], "none") == ""


def test_errors_that_are_too_many_are_told_as_a_number() -> None:
    """Beyond 80 at once they were swallowed, and nobody was told that any were."""
    core = RealtimeSession(
        session=SessionId(1), settings=Settings.default(model="m"), transport=Transport.WEBSOCKET, rate=24_000
    )
    core.open(seconds(1))
    for _ in range(200):
        core.on_text("no json", seconds(1))
    assert [event["type"] for event in core.events()] == ["session.created"] + 80 * ["error"]
    core.tick(seconds(1.5))
    assert core.events() == []
    core.tick(seconds(2.5))
    (told,) = core.events()
    assert (told["error"]["code"], told["error"]["message"].split()[0]) == ("errors_untold", "120")
    core.tick(seconds(9))
    assert core.events() == []
