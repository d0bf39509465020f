"""The gate: a table that turns probabilities into facts; and the detector on real speech."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd import weights
from duplexd.bench import recordings
from duplexd.bench.recordings import noises
from duplexd.errors import WeightsError
from duplexd.media.vad import BLOCK_SAMPLES, GateRule, GateState, Started, Stopped, VoiceDetector, VoiceGate
from duplexd.units import Span, Ticks, ms_from_ticks, ticks_from_ms

BLOCK = 1536
RULE = GateRule()


def span(index: int) -> Span:
    return Span(Ticks(index * BLOCK), Ticks((index + 1) * BLOCK))


def run(gate: VoiceGate, probabilities: list[float], *, first: int = 0, echo: float = 0.0) -> list[Started | Stopped]:
    facts = [gate.push(p, span(first + i), echo=echo) for i, p in enumerate(probabilities)]
    return [fact for fact in facts if fact is not None]


def test_speech_starts_at_its_first_loud_block_and_stops_at_its_last() -> None:
    facts = run(VoiceGate(), [0.0] * 20 + [0.9] * 10 + [0.1] * 10)

    assert facts == [
        Started(at=Ticks(20 * BLOCK), listen_from=Ticks(20 * BLOCK - RULE.prefix), noticed=Ticks(23 * BLOCK)),
        Stopped(at=Ticks(30 * BLOCK), noticed=Ticks(35 * BLOCK)),
    ]


def test_a_click_is_not_speech() -> None:
    assert run(VoiceGate(), [0.0, 0.9, 0.9, 0.0, 0.0, 0.9, 0.9, 0.0, 0.0, 0.0]) == []


def test_a_dip_inside_an_onset_does_not_lose_it() -> None:
    facts = run(VoiceGate(), [0.0, 0.9, 0.2, 0.9, 0.9])

    assert facts == [Started(at=Ticks(BLOCK), listen_from=Ticks(0), noticed=Ticks(5 * BLOCK))]


def test_silence_counts_from_zero_when_speech_resumes() -> None:
    """A pause of four blocks, two more words, then the end: the second silence owes nothing to the first."""
    gate = VoiceGate()
    run(gate, [0.9] * 5 + [0.0] * 4)
    before = gate.silence
    facts = run(gate, [0.9] * 2 + [0.0] * 4, first=9)

    assert before == 4 * BLOCK
    assert (facts, gate.silence, gate.state) == ([], 4 * BLOCK, GateState.FALLING)


def test_faint_sound_keeps_speech_alive_but_does_not_revive_it() -> None:
    faint = (RULE.start + RULE.stop) / 2
    gate = VoiceGate()
    kept = run(gate, [0.9] * 5 + [faint] * 20)
    ended = run(gate, [0.0] + [faint] * 4, first=25)

    assert [type(fact) for fact in kept] == [Started]
    assert ended == [Stopped(at=Ticks(25 * BLOCK), noticed=Ticks(30 * BLOCK))]


def test_a_voice_that_goes_on_after_the_end_of_its_turn_is_a_new_one() -> None:
    """Noise keeps the speech alive while the engine, which counts only loud blocks, has ended the turn: what the
    person says next must be a fact again.
    """
    gate = VoiceGate()
    facts = run(gate, [0.9] * 5 + [0.4] * 30)
    gate.close(span(34).end)
    facts += run(gate, [0.4] * 5 + [0.9] * 5, first=35)

    assert [type(fact) for fact in facts] == [Started, Started]
    assert facts[1].at == span(40).start


def test_the_end_of_an_older_turn_leaves_a_new_voice_alone() -> None:
    gate = VoiceGate()
    run(gate, [0.0] * 5 + [0.9] * 5)
    gate.close(span(5).start)

    assert gate.speaking


def test_the_characters_own_voice_starts_nothing() -> None:
    """T-VAD-01: the loudspeaker is loud in the microphone, and explained."""
    assert run(VoiceGate(), [0.99] * 100, echo=0.9) == []


def test_a_prefix_does_not_reach_into_the_speech_before() -> None:
    facts = run(VoiceGate(), [0.9] * 5 + [0.0] * 6 + [0.9] * 5)

    assert isinstance(facts[2], Started)
    assert facts[2].listen_from == 5 * BLOCK


@pytest.mark.parametrize("how", ["elapse", "gap blocks", "step"])
def test_a_track_muted_mid_word_ends_the_speech_within_a_second(how: str) -> None:
    """T-VAD-07: nothing comes any more, so no silence is ever heard."""
    gate = VoiceGate()
    run(gate, [0.9] * 10)
    stopped: Stopped | Started | None = None
    for i in range(10, 60):
        if how == "elapse":
            stopped = gate.elapse(span(i).end)
        elif how == "gap blocks":
            stopped = gate.push(0.0, span(i), gap=True)
        elif i == 40:
            stopped = gate.push(0.0, span(i))
        if stopped is not None:
            break

    assert isinstance(stopped, Stopped)
    assert (stopped.at, stopped.muted) == (10 * BLOCK, True)
    assert how == "step" or stopped.noticed - stopped.at <= ticks_from_ms(1000)
    assert gate.elapse(span(100).end) is None


def test_a_short_gap_changes_nothing() -> None:
    gate = VoiceGate()
    run(gate, [0.9] * 10)
    gaps = [gate.push(0.0, span(i), gap=True) for i in range(10, 20)]
    facts = run(gate, [0.9] * 3, first=20)

    assert gaps == [None] * 10
    assert (facts, gate.speaking) == ([], True)


def test_a_span_that_goes_back_is_refused_and_changes_nothing() -> None:
    gate = VoiceGate()
    run(gate, [0.9] * 2)

    with pytest.raises(ValueError):
        gate.push(0.9, span(1))
    assert [type(fact) for fact in run(gate, [0.9], first=2)] == [Started]


def test_a_probability_that_is_no_number_is_quiet() -> None:
    assert run(VoiceGate(), [math.nan] * 50) == []


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.floats(0, 1)), max_size=300))
def test_facts_alternate_and_never_go_back(blocks: list[tuple[float, bool, float]]) -> None:
    gate = VoiceGate()
    facts = [gate.push(p, span(i), gap=gap, echo=echo) for i, (p, gap, echo) in enumerate(blocks)]
    told = [fact for fact in facts if fact is not None]

    assert [type(fact) for fact in told] == [Started, Stopped] * (len(told) // 2) + [Started] * (len(told) % 2)
    places = [fact.at for fact in told]
    assert places == sorted(places)
    assert all(fact.at <= fact.noticed for fact in told)
    assert gate.speaking == bool(len(told) % 2)


@pytest.mark.parametrize(
    "wrong",
    [{"start": 0.3, "stop": 0.5}, {"start": 1.5}, {"speech_min": Ticks(0)}, {"echo": 0.0}],
    ids=lambda wrong: str(wrong),
)
def test_a_rule_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        GateRule(**wrong)  # type: ignore[arg-type]


# With the weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network() -> onnxruntime.InferenceSession:
    return VoiceDetector.load(weights.path("silero-vad"))


def probabilities(detector: VoiceDetector, audio: npt.NDArray[np.float32]) -> list[float]:
    blocks = audio[: len(audio) // BLOCK_SAMPLES * BLOCK_SAMPLES].reshape(-1, BLOCK_SAMPLES)
    return [detector.probability(block) for block in blocks]


@pytest.mark.weights
@pytest.mark.parametrize("kind", ["question", "acknowledgement"])
def test_each_utterance_is_one_stretch_of_voice(network: onnxruntime.InferenceSession, kind: str) -> None:
    """Starts within 100 ms of the first voiced sample, stops within 130 ms of the last."""
    for spoken in recordings.load(kind):
        audio = np.concatenate((spoken.audio(), np.zeros(8000, np.float32)))
        facts = run(VoiceGate(), probabilities(VoiceDetector(network), audio))

        assert [type(fact) for fact in facts] == [Started, Stopped], spoken.name
        assert abs(ms_from_ticks(facts[0].at) - spoken.voiced_start_ms) <= 100
        assert abs(ms_from_ticks(facts[1].at) - spoken.voiced_end_ms) <= 130


@pytest.mark.weights
@pytest.mark.parametrize("kind", [*sorted(noises.NOISES), "constant", "square wave", "nothing"])
def test_what_is_not_a_voice_starts_nothing(network: onnxruntime.InferenceSession, kind: str) -> None:
    seconds = np.arange(5 * 16_000) / 16_000
    sounds = {
        "constant": np.full(80_000, 0.4),
        "square wave": np.sign(np.sin(2 * np.pi * 200 * seconds)),
        "nothing": np.zeros(80_000),
    }
    rng = np.random.default_rng(3)
    sound = sounds[kind] if kind in sounds else noises.NOISES[kind](80_000, rng) * 0.3

    assert run(VoiceGate(), probabilities(VoiceDetector(network), sound.astype(np.float32))) == []


@pytest.mark.weights
def test_one_bad_block_does_not_deafen_the_detector(network: onnxruntime.InferenceSession) -> None:
    detector = VoiceDetector(network)
    bad = detector.probability(np.full(BLOCK_SAMPLES, np.nan, np.float32))
    after = probabilities(detector, recordings.find("question-01").audio())

    assert bad == 0.0
    assert after == probabilities(VoiceDetector(network), recordings.find("question-01").audio())


@pytest.mark.weights
def test_a_block_of_another_length_is_refused(network: onnxruntime.InferenceSession) -> None:
    with pytest.raises(ValueError):
        VoiceDetector(network).probability(np.zeros(480, np.float32))


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "vad.onnx"
    file.write_bytes(b"nothing")

    with pytest.raises(WeightsError, match="duplexd fetch"):
        VoiceDetector.load(file)
