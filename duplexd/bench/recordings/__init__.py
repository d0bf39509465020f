"""Spoken test material: questions, utterances with pauses for thought, acknowledgements, a reader; and made-up noise.

None of it is the character's own voice. `scripts/make_recordings` makes the files, `recordings.toml` describes them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import cast

import av
import msgspec
import numpy as np
import numpy.typing as npt

RATE = 16_000
FOLDER = Path(__file__).parent

Pcm = npt.NDArray[np.int16]


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file; times are milliseconds from its start."""

    name: str
    kind: str  #: "question", "paused" (the person stops to think and goes on), "acknowledgement", "reader"
    text: str
    voice: str
    licence: str
    samples: int
    voiced_start_ms: int
    voiced_end_ms: int  #: end of the last voiced 10 ms: where the turn ends
    pauses_ms: tuple[tuple[int, int], ...]  #: pauses inside the utterance

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.flac"

    def pcm(self) -> Pcm:
        """int16 (samples,), 16 kHz mono. Raises ValueError when the file is not what the manifest says."""
        with av.open(str(self.path)) as file:
            parts = [cast(Pcm, frame.to_ndarray()).reshape(-1) for frame in file.decode(audio=0)]
            rate = file.streams.audio[0].rate
        pcm = np.concatenate(parts)
        if pcm.dtype != np.int16 or rate != RATE or len(pcm) != self.samples:
            raise ValueError(
                f"{self.path.name}: {len(pcm)} samples of {pcm.dtype} at {rate} Hz, expected {self.samples}"
            )
        return pcm

    def audio(self) -> npt.NDArray[np.float32]:
        """float32 (samples,), full scale 1.0."""
        return np.asarray(self.pcm() / 32768, np.float32)


def load(*kinds: str) -> list[Recording]:
    """All recordings of these kinds, or all there are, in the manifest's order."""
    manifest = tomllib.loads((FOLDER / "recordings.toml").read_text("utf-8"))
    every = msgspec.convert(manifest["recording"], list[Recording])
    return [one for one in every if not kinds or one.kind in kinds]


def find(name: str) -> Recording:
    """Raises KeyError with the names there are."""
    every = {one.name: one for one in load()}
    if name not in every:
        raise KeyError(f"no recording {name!r}; there are {', '.join(every)}")
    return every[name]
