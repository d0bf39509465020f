"""Voice: a probability for every block, and a gate that turns probabilities into facts.

1. `VoiceDetector` runs the network (Silero VAD 6, one thread); `VoiceGate` is pure: it knows no model and no clock.
2. The gate counts media time, never machine time: `push` gets spans of the session's input timeline.
3. A block explained by the character's own voice is as good as quiet (issue T-VAD-01: a bot that interrupts itself).
4. A gap (lost packets, a muted track) is neither voice nor silence and changes nothing, until `mute` of it in a row
   ends the speech (T-VAD-07: a track muted mid-word).

               LOUD              FAINT             QUIET
    QUIET      begin -> RISING   rest              rest
    RISING     rise              voice             dip (-> QUIET after `fade`)
    SPEAKING   voice             voice             fall -> FALLING
    FALLING    voice -> SPEAKING fall              fall (-> QUIET after `silence_min`)

FAINT lies between the two thresholds: it keeps speech alive, and never starts or revives it.
`rise` becomes SPEAKING after `speech_min` of loud time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime

from duplexd.media.network import load_network
from duplexd.units import BLOCK_SAMPLES, INPUT_RATE, Span, Ticks, ticks_from_ms

_CONTEXT_SAMPLES = 64  #: tail of the previous block that the network wants in front

Block = npt.NDArray[np.float32]


class VoiceDetector:
    """Silero VAD 6.2 through ONNX Runtime: 16 kHz blocks in order, one probability each. One instance a session.

    Raises: WeightsError when the file cannot be loaded.    Cost: about 0.15 ms a block on one core.
    """

    def __init__(self, network: onnxruntime.InferenceSession) -> None:
        self._network = network
        self._rate = np.array(INPUT_RATE, np.int64)
        self._takes_rate = any(one.name == "sr" for one in network.get_inputs())
        self.reset()

    @staticmethod
    def load(model: Path) -> onnxruntime.InferenceSession:
        """The network alone: it is stateless, so all sessions of a process share one."""
        return load_network(model, called="the voice detector")

    def reset(self) -> None:
        """Forget what was heard: after a gap in the input, and at the start."""
        self._state = np.zeros((2, 1, 128), np.float32)
        self._context = np.zeros(_CONTEXT_SAMPLES, np.float32)

    def probability(self, block: Block) -> float:
        """Probability that the block holds speech, 0..1.

        Args:   block: float32 (512,), full scale 1.0.
        Raises: ValueError for another length. A block that is not finite counts as silence: one NaN let into the
                recurrent state would make the session deaf for ever.
        """
        if block.shape != (BLOCK_SAMPLES,):
            raise ValueError(f"a block is {BLOCK_SAMPLES} samples, got {block.shape}")
        if not np.isfinite(block).all():
            self.reset()
            return 0.0
        feeds: dict[str, Any] = {"input": np.concatenate((self._context, block))[None], "state": self._state}
        if self._takes_rate:
            feeds["sr"] = self._rate
        answer, self._state = self._network.run(None, feeds)
        self._context = block[-_CONTEXT_SAMPLES:].astype(np.float32)
        return float(answer[0, 0])


class GateRule(msgspec.Struct, frozen=True):
    """When a run of probabilities is speech. Durations are media time."""

    start: float = 0.5  #: a block at or above this is loud
    stop: float = 0.35  #: a block below this is quiet
    echo: float = 0.5  #: a block with at least this share of echo is quiet, however loud
    speech_min: Ticks = ticks_from_ms(96)  #: loud time before an onset is a fact; a click is shorter
    fade: Ticks = ticks_from_ms(64)  #: quiet time that ends a rise before it has become a fact
    silence_min: Ticks = ticks_from_ms(160)  #: quiet time before an end is a fact
    prefix: Ticks = ticks_from_ms(300)  #: what the ears get from before the onset (T-VAD-05: "three" heard as "ree")
    mute: Ticks = ticks_from_ms(800)  #: gap that ends speech: a track muted mid-word sends nothing any more

    def __post_init__(self) -> None:
        if not 0 < self.stop <= self.start <= 1 or self.echo <= 0:
            raise ValueError(f"thresholds need 0 < stop <= start <= 1 and echo > 0, got {self}")
        if min(self.speech_min, self.silence_min, self.fade, self.mute) <= 0 or self.prefix < 0:
            raise ValueError(f"durations of a voice gate are positive, got {self}")


class Started(msgspec.Struct, frozen=True):
    at: Ticks  #: start of the first loud block
    listen_from: Ticks  #: `at` less the prefix, not before the end of the speech before
    noticed: Ticks  #: end of the block that made it a fact


class Stopped(msgspec.Struct, frozen=True):
    at: Ticks  #: end of the last voiced block
    noticed: Ticks
    muted: bool = False  #: the input went missing; nobody knows whether the person went on


class GateState(Enum):
    QUIET = "quiet"
    RISING = "rising"
    SPEAKING = "speaking"
    FALLING = "falling"


class _Sound(Enum):
    LOUD = "loud"
    FAINT = "faint"
    QUIET = "quiet"


class VoiceGate:
    """Facts about one person's voice, from one block after the other. Bounded: it keeps seven numbers."""

    def __init__(self, rule: GateRule | None = None) -> None:
        self.rule = rule or GateRule()
        self.state = GateState.QUIET
        self._now = Ticks(0)  #: end of the newest span
        self._came_end = Ticks(0)  #: end of the newest span that was not a gap
        self._onset = Ticks(0)
        self._loud = 0  #: loud time since the onset
        self._voiced_end = Ticks(0)
        self._quiet = 0  #: quiet time since then
        self._before = Ticks(0)  #: end of the speech before: a prefix does not reach back over it

    @property
    def speaking(self) -> bool:
        """Between a Started and its Stopped."""
        return self.state in (GateState.SPEAKING, GateState.FALLING)

    @property
    def silence(self) -> Ticks:
        """Quiet time since the last voiced block; 0 again as soon as speech resumes. Gaps do not count."""
        return Ticks(self._quiet)

    @property
    def voiced_end(self) -> Ticks:
        """End of the last voiced block: where the turn ended if nothing more is said."""
        return self._voiced_end

    def push(self, probability: float, span: Span, *, echo: float = 0.0, gap: bool = False) -> Started | Stopped | None:
        """One block; a stretch that no span covers counts as a gap.

        Raises: ValueError for a span that is empty or goes back; then nothing has changed.
        """
        if span.start < self._now or span.length <= 0:
            raise ValueError(f"span {span.start}..{span.end} is empty or starts before {self._now}")
        self._now = span.end
        if (stopped := self._mute(span.end if gap else span.start)) is not None:
            return stopped
        if gap:
            return None
        self._came_end = span.end
        act, self.state = _TABLE[self.state, self._sound(probability, echo)]
        return act(self, span)

    def close(self, until: Ticks) -> None:
        """The turn of this speech has ended at `until`, by somebody else's judgement: what goes on begins anew.

        Without it a voice that never fell quite quiet, or came back within `silence_min`, would be a fact to nobody.
        """
        if self.speaking and self._onset < until:
            self.state, self._before = GateState.QUIET, self._voiced_end

    def elapse(self, until: Ticks) -> Stopped | None:
        """Nothing came although the timeline has reached `until`: ends speech whose track went silent mid-word."""
        return self._mute(until)

    def _sound(self, probability: float, echo: float) -> _Sound:
        if echo >= self.rule.echo or not probability >= self.rule.stop:  # `not >=`: a NaN is quiet
            return _Sound.QUIET
        return _Sound.LOUD if probability >= self.rule.start else _Sound.FAINT

    def _mute(self, until: Ticks) -> Stopped | None:
        if self.state is GateState.QUIET or until - self._came_end < self.rule.mute:
            return None
        spoke, self.state = self.speaking, GateState.QUIET
        self._before = self._voiced_end
        return Stopped(at=self._voiced_end, noticed=until, muted=True) if spoke else None

    def _rest(self, span: Span) -> None:
        self._quiet += span.length

    def _begin(self, span: Span) -> Started | None:
        self._onset, self._loud = span.start, 0
        return self._rise(span)

    def _rise(self, span: Span) -> Started | None:
        self._voice(span)
        self._loud += span.length
        if self._loud < self.rule.speech_min:
            return None
        self.state = GateState.SPEAKING
        start = max(self._before, self._onset - self.rule.prefix, 0)
        return Started(at=self._onset, listen_from=Ticks(start), noticed=span.end)

    def _dip(self, span: Span) -> None:
        self._quiet += span.length
        if self._quiet >= self.rule.fade:
            self.state = GateState.QUIET

    def _voice(self, span: Span) -> None:
        self._voiced_end, self._quiet = span.end, 0

    def _fall(self, span: Span) -> Stopped | None:
        self._quiet += span.length
        if self._quiet < self.rule.silence_min:
            return None
        self.state, self._before = GateState.QUIET, self._voiced_end
        return Stopped(at=self._voiced_end, noticed=span.end)


_Act = Callable[[VoiceGate, Span], Started | Stopped | None]
_Q, _R, _S, _F = GateState.QUIET, GateState.RISING, GateState.SPEAKING, GateState.FALLING
_TABLE: dict[tuple[GateState, _Sound], tuple[_Act, GateState]] = {
    (_Q, _Sound.LOUD): (VoiceGate._begin, _R),
    (_Q, _Sound.FAINT): (VoiceGate._rest, _Q),
    (_Q, _Sound.QUIET): (VoiceGate._rest, _Q),
    (_R, _Sound.LOUD): (VoiceGate._rise, _R),
    (_R, _Sound.FAINT): (VoiceGate._voice, _R),
    (_R, _Sound.QUIET): (VoiceGate._dip, _R),
    (_S, _Sound.LOUD): (VoiceGate._voice, _S),
    (_S, _Sound.FAINT): (VoiceGate._voice, _S),
    (_S, _Sound.QUIET): (VoiceGate._fall, _F),
    (_F, _Sound.LOUD): (VoiceGate._voice, _S),
    (_F, _Sound.FAINT): (VoiceGate._fall, _F),
    (_F, _Sound.QUIET): (VoiceGate._fall, _F),
}
