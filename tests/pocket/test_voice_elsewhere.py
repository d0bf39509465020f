"""Voice and ears on a device that is not the host give what they give here, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from duplexd.ids import SlotId
from duplexd.memory.arena import Arena
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec
from duplexd.models.contract import Memory, names, result_of
from duplexd.models.pocket import ears, voice
from duplexd.streams.pretend import PRETENDED, PretendedDevice
from duplexd.streams.stage import CopyJob, RenderJob, TalkJob
from duplexd.units import Ticks


def test_what_the_person_says_is_copied_there_and_read_back() -> None:
    pcm = np.random.default_rng(1).integers(-9000, 9000, 4000).astype(np.int16)
    memory, stage = Memory(), ears.CopyIn()
    memory.slots[0] = pcm
    ring = PartitionSpec("ingest", PartitionKind.SLOTS, 1, (FieldSpec("pcm", (ears.RING_SAMPLES,)),))
    with PretendedDevice():
        arena = Arena(ArenaLayout([ring]), PRETENDED)
        stage.load(arena)
        start = ears.RING_SAMPLES - 1000  # over the end of the ring
        result_of(stage, CopyJob(*names(1), 0, SlotId(0), start, len(pcm)), memory)
        heard = ears.read_ring(arena.field("ingest", "pcm"), SlotId(0), start, len(pcm))

    np.testing.assert_array_equal(heard, pcm.astype(np.float32) / 32768.0)


def said(device: str) -> np.ndarray:
    """A clause in two chunks, 24 kHz."""
    talker, vocoder, memory = voice.Talker(), voice.Vocoder(), Memory()
    slots = PartitionKind.SLOTS
    arena = Arena(
        ArenaLayout(
            [
                PartitionSpec("latents", slots, 1, voice.latent_fields()),
                PartitionSpec("state", slots, 1, voice.state_fields()),
                talker.shelf(),
                vocoder.shelf(),
            ]
        ),
        device,
    )
    for stage in (talker, vocoder):
        stage.load(arena)
    length = result_of(talker, TalkJob(*names(1), "The sea is wide, and blue.", SlotId(0), True), memory).length
    half = length // 2 // voice.FRAME_TICKS * voice.FRAME_TICKS
    parts = []
    for start, stop in ((0, half), (half, length)):
        span = (Ticks(start), Ticks(stop - start))
        result_of(vocoder, RenderJob(*names(1), SlotId(0), SlotId(0), *span, start == 0, 9), memory)
        parts.append(memory.slots[9])
    return np.concatenate(parts)


@pytest.mark.weights
def test_a_voice_sounds_there_as_here() -> None:
    with PretendedDevice():
        there = said(PRETENDED)

    np.testing.assert_array_equal(there, said("cpu"))
