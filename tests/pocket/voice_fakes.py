"""A small arena and a small shared memory, enough for the voice's stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId, SlotId
from duplexd.models.pocket import voice
from duplexd.streams.stage import RenderJob, RenderResult, TalkJob, TalkResult
from duplexd.units import Ticks

Pcm = npt.NDArray[np.int16]

# A second thread waits for whoever else has the cores; these networks are too small to gain from one.
torch.set_num_threads(1)

WHO: dict[str, Any] = {
    "session": SessionId(7),
    "epoch": Epoch(0),
    "chunk": ChunkId(1),
    "condition": ConditionVersion(0),
}


class FakeArena:
    """Fields start as NaN, or -1: whoever reads a slot that nobody wrote finds out."""

    def __init__(self, slots: int = 3) -> None:
        partitions = {"latents": voice.latent_fields(), "state": voice.state_fields()}
        self.tensors = {
            (partition, field.name): torch.empty((slots, *field.shape), dtype=getattr(torch, field.dtype))
            for partition, fields in partitions.items()
            for field in fields
        }
        for partition in partitions:
            for slot in range(slots):
                self.spoil(partition, slot)
        for shelf in (voice.Talker().shelf(), voice.Vocoder().shelf()):
            (field,) = shelf.fields
            self.tensors[shelf.name, field.name] = torch.full((1, *field.shape), 0xFF, dtype=torch.uint8)

    def field(self, partition: str, name: str) -> torch.Tensor:
        return self.tensors[partition, name]

    def spoil(self, partition: str, slot: int) -> None:
        for (owner, _), tensor in self.tensors.items():
            if owner == partition:
                tensor[slot] = torch.nan if tensor.is_floating_point() else -1


class FakeMedia:
    def __init__(self) -> None:
        self.slots: dict[int, Pcm] = {}

    def write(self, slot: int, pcm: Pcm) -> None:
        assert pcm.dtype == np.int16
        self.slots[slot] = pcm.copy()


class Voice:
    """Both stages over one arena, driven a job at a time."""

    def __init__(self, talker: voice.Talker | None, vocoder: voice.Vocoder) -> None:
        self.arena, self.media = FakeArena(), FakeMedia()
        self.talker, self.vocoder = talker, vocoder
        if talker:
            talker.load(self.arena)
        vocoder.load(self.arena)

    def talk(self, text: str, *, slot: int = 0) -> Any:
        assert self.talker is not None
        (result,) = self.talker.run([TalkJob(**WHO, text=text, latents=SlotId(slot), first=True)], self.media)
        return result

    def said(self, text: str, *, slot: int = 0) -> TalkResult:
        result = self.talk(text, slot=slot)
        assert isinstance(result, TalkResult), result
        return result

    def job(self, start: int, length: int, *, fresh: bool, latents: int = 0, state: int = 0) -> RenderJob:
        return RenderJob(
            **WHO,
            latents=SlotId(latents),
            state=SlotId(state),
            start=Ticks(start),
            length=Ticks(length),
            fresh=fresh,
            slot=5,
        )

    def render(self, start: int, length: int, *, fresh: bool, latents: int = 0, state: int = 0) -> Pcm:
        job = self.job(start, length, fresh=fresh, latents=latents, state=state)
        (result,) = self.vocoder.run([job], self.media)
        assert result == RenderResult(WHO["session"], length // 2), result
        pcm = self.media.slots.pop(5)
        assert len(pcm) == length // 2
        return pcm
