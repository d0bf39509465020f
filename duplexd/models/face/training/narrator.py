"""The pocket voice as a teacher: a sentence in, its sound and the times of its phonemes out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from duplexd import weights
from duplexd.errors import ModelError
from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId, SlotId
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, PartitionKind, PartitionSpec
from duplexd.models.face.training.mouth import Phone
from duplexd.models.pocket import voice
from duplexd.models.pocket.phonemes import SILENT, Reader
from duplexd.models.pocket.voicenets import load_nets
from duplexd.streams.stage import Failed, RenderJob, TalkJob
from duplexd.units import Ticks

RATE = voice.SAMPLE_RATE
_STEP_SECONDS = voice.STEP_TICKS / 48_000
#: -50 dB of full scale.
_LOUD = 0.003
_STRESS = {"ˈ": 1.0, "ˌ": 0.5}


class Narrator:
    """Says clauses with the stages of the pocket voice. Raises WeightsError when the voice is not there."""

    def __init__(self) -> None:
        slots = PartitionKind.SLOTS
        self._talker, self._vocoder = voice.Talker(), voice.Vocoder()
        self._arena = Arena(
            ArenaLayout(
                [
                    self._talker.shelf(),
                    self._vocoder.shelf(),
                    PartitionSpec("latents", slots, 1, voice.latent_fields()),
                    PartitionSpec("state", slots, 1, voice.state_fields()),
                ]
            )
        )
        self._talker.load(self._arena)
        self._vocoder.load(self._arena)
        self._reader = Reader(oov=weights.path("hibari-oov"), vocabulary=weights.path("hibari-vocab"))
        self._net = load_nets(weights.path("hibari"))[0]
        self.samples: list[npt.NDArray[np.int16]] = []

    # The narrator is its own shared memory.
    def write(self, slot: int, pcm: npt.NDArray[np.int16]) -> None:
        self.samples.append(pcm)

    @torch.inference_mode()
    def say(self, text: str) -> tuple[npt.NDArray[np.float32], list[Phone]]:
        """24 kHz samples of what is played of a clause, and its phonemes, in seconds of it.

        Raises:  ModelError when the voice cannot say it (too long, nothing to say).
        """
        names = (SessionId(1), Epoch(0), ChunkId(1), ConditionVersion(0))
        talked = self._talker.run([TalkJob(*names, text, SlotId(0), True)], self)[0]
        if isinstance(talked, Failed) or not talked.length:
            raise ModelError(f"the voice cannot say {text!r}")
        self.samples.clear()
        rendered = self._vocoder.run([RenderJob(*names, SlotId(0), SlotId(0), Ticks(0), talked.length, True, 0)], self)[
            0
        ]
        if isinstance(rendered, Failed):
            raise ModelError(rendered.reason)
        first = int(self._arena.field("latents", "clause")[0, 1]) * voice.FRAME_TICKS / 48_000
        pcm = self.samples[0].astype(np.float32) / 32768.0
        return pcm, trimmed(self._phones(text, first), pcm)

    def _phones(self, text: str, first: float) -> list[Phone]:
        """Phonemes that sound, in seconds from `first`. A stress mark's time belongs to the sound it stands before."""
        reading = self._reader.read(text)
        steps = self._net.durations(torch.tensor([reading.ids]))[0].tolist()
        phones: list[Phone] = []
        at, held, stress = steps[0] * _STEP_SECONDS - first, None, 0.0
        for symbol, count in zip(reading.phonemes, steps[1:-1], strict=True):
            stop = at + count * _STEP_SECONDS
            if symbol in _STRESS:
                held, stress = (at if held is None else held), _STRESS[symbol]
            elif symbol in SILENT:
                held = None
            else:
                phones.append(Phone(symbol, at if held is None else held, stop, stress))
                held, stress = None, 0.0 if symbol not in "wjɹlɾkɡtdpbfvszmnθðʃʒʧʤh" else stress
            at = stop
        return phones


def trimmed(phones: list[Phone], pcm: npt.NDArray[np.float32]) -> list[Phone]:
    """Phonemes that end when they are not heard any more: the voice counts dying away before a pause as sound."""
    hop = RATE // 100
    loud = np.sqrt((pcm[: len(pcm) // hop * hop].reshape(-1, hop) ** 2).mean(1)) > _LOUD
    kept = []
    for phone, following in zip(phones, [*phones[1:], None], strict=True):
        if following is not None and following.start - phone.stop < 0.06:
            kept.append(phone)
            continue
        heard = np.flatnonzero(loud[max(0, round(phone.start * 100)) : round(phone.stop * 100)])
        stop = phone.start + (heard[-1] + 3) / 100 if len(heard) else phone.start + 0.05
        kept.append(Phone(phone.symbol, phone.start, min(phone.stop, stop), phone.stress))
    return kept
