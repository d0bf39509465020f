"""The contract suite of the face: `duplexd check-model face` (rules: models/contract.py).

Whole means: without arena, ledgers or chunks of sound. Sounds are encoded once from beginning to end, every chunk keeps
its keys in a list, and a window is put together from those.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.ids import ChunkId, SlotId
from duplexd.memory.histories import GENERATE, REFINE, HistoryStage
from duplexd.models.contract import (
    CAUSAL,
    CLAIMED,
    MASKED,
    REDO,
    RESET,
    WHOLE,
    Bytes,
    Finding,
    Memory,
    held_bytes,
    names,
    result_of,
    same,
    tried,
)
from duplexd.models.face import audio
from duplexd.models.face.checkpoint import FaceWeights, load_face
from duplexd.models.face.drawing.character import character_names, load_character
from duplexd.models.face.identity import anchor_poses
from duplexd.models.face.motion import CHUNK_FRAMES, CONDITION, Motion, condition
from duplexd.models.face.net import FaceNet, Heard, Places, Reader, blended, velocity_step
from duplexd.models.face.painter import PAINTER_BYTES
from duplexd.models.face.performer import Part, Performer
from duplexd.models.face.stages import VOICE_RATE, Decoder, Overhear, chunk_noise
from duplexd.streams.stage import DecodeJob, Failed, GenerateJob, OverhearJob, RefineJob, Stage
from duplexd.units import INPUT_RATE, Ticks

#: Float32 on both ways, summed in another order, through eight chunks that build on each other.
NEAR = 1e-4
_CHUNKS = 7


def check() -> list[Finding]:
    """Every rule for every stage of the face. Raises ModelError when the checkpoint is missing."""
    torch.set_num_threads(1)
    return FaceSuite(load_face()).findings()


class Cut(msgspec.Struct, frozen=True):
    """An interruption after so many chunks, at a frame of the last of them."""

    after: int
    frames: int


class FaceSuite:
    def __init__(self, weights: FaceWeights) -> None:
        self.weights = weights
        rng = np.random.default_rng(5)
        self.parts = [self._part(rng, character) for character in ("mira", "theo")]

    def _part(self, rng: np.random.Generator, character: str) -> Part:
        """Bursts of noise from both, and a mood that changes at a boundary."""
        seconds = 3.0
        moods = [condition(joy=0.5)] * 3 + [condition(thought=0.8, look_x=0.3)] * 8
        return Part(
            character=character,
            voice=_bursts(rng, round(seconds * VOICE_RATE), VOICE_RATE),
            person=_bursts(rng, round(seconds * INPUT_RATE), INPUT_RATE),
            moods=moods,
        )

    def findings(self) -> list[Finding]:
        return [tried(stage, rule, attempt) for stage, rule, attempt in self.attempts()]

    def attempts(self) -> list[tuple[str, str, Callable[[], None]]]:
        """Stage, rule and what raises when it is broken."""
        rules = (WHOLE, CAUSAL, MASKED, RESET, REDO, CLAIMED)
        by_stage: dict[str, tuple[Callable[[], None], ...]] = {
            "generate, refine": (self.whole, self.causal, self.masked, self.reset, self.redo, self.claimed),
            # Overhearing is a copy, drawing a function of one frame.
            "overhear": (
                self.overhear, self.overhear_in_any_order, self.overhear_beside, self.overhear_used,
                self.overhear_again, self.overhear_claims,
            ),
            "decode": (
                self.decode_parts, self.decode_causal, self.decode_beside, self.decode_fresh, self.decode,
                self.decode_claims,
            ),
        }  # fmt: skip
        return [
            (stage, rule, attempt)
            for stage, attempts in by_stage.items()
            for rule, attempt in zip(rules, attempts, strict=True)
        ]

    # Generator and refiner

    def whole(self) -> None:
        performer = Performer(self.weights, self.parts[:1])
        same(performer.play(_CHUNKS)[0], Offline(self.weights, self.parts[0]).play(_CHUNKS), "all chunks", within=NEAR)
        cut = Cut(after=3, frames=3)
        performer = Performer(self.weights, self.parts[:1])
        motion = performer.play(cut.after)[0]
        performer.interrupt(0, frames=cut.frames)
        after = performer.play(3)[0]
        seen = np.concatenate([motion[: (cut.after - 1) * CHUNK_FRAMES + cut.frames], after])
        same(seen, Offline(self.weights, self.parts[0]).play(6, cut=cut), "with an interruption", within=NEAR)

    def causal(self) -> None:
        part = self.parts[0]
        expected = Performer(self.weights, [part]).play(3)[0]
        shape = self.weights.shape
        said = (3 * CHUNK_FRAMES + shape.speak_after) * VOICE_RATE // 25
        heard = (2 * CHUNK_FRAMES - shape.listen_delay) * INPUT_RATE // 25
        later = msgspec.structs.replace(
            part,
            voice=np.concatenate([part.voice[:said], np.float32(0.5) - part.voice[said:]]),
            person=np.concatenate([part.person[:heard], np.float32(0.5) - part.person[heard:]]),
            moods=[*part.moods[:3], condition(sorrow=1.0)],
        )
        same(Performer(self.weights, [later]).play(3)[0], expected, "before a change")
        changed = np.abs(Performer(self.weights, [later]).play(6)[0] - Performer(self.weights, [part]).play(6)[0]).max()
        assert changed > 1e-3, "another voice, person and mood change nothing at all"

    def masked(self) -> None:
        # Names decide the noise, so a session alone must have the place it has beside others.
        both = Performer(self.weights, self.parts).play(4)
        alone = Performer(self.weights, self.parts[:1]).play(4)
        same(both[0], alone[0], "a session beside another", within=NEAR)
        self._hasty_neighbour()
        performer = Performer(self.weights, self.parts)
        performer.play(2)
        for stage, job in self._jobs(performer):
            before = Bytes(performer.arena)
            result_of(stage, job, None)
            mine = {"noisy" if isinstance(job, GenerateJob) else "clean": {job.window[-1]}, "motion": {job.motion}}
            before.check_only({partition: {int(slot) for slot in slots} for partition, slots in mine.items()})

    def _hasty_neighbour(self) -> None:
        """Rows that take another number of steps leave a row as it is."""
        performer = Performer(self.weights, self.parts)
        performer.play(2)
        mine, other = (self._next_chunk(performer, session) for session in (0, 1))
        draft = performer.arena.field("motion", "draft")[mine.motion]
        performer.generator.run([mine], None)
        alone = draft.clone()
        performer.generator.run([mine, msgspec.structs.replace(other, steps=1)], None)
        same(draft, alone, "a row beside one of fewer steps", within=NEAR)

    def _next_chunk(self, performer: Performer, session: int) -> GenerateJob:
        history, chunk = performer.histories[session], ChunkId(99)
        window = history.begin(chunk, history.epoch, fence=performer.fence())
        assert window is not None
        return performer.job(GenerateJob, session, chunk, window)

    def reset(self) -> None:
        fresh = Performer(self.weights, self.parts[:1], anchored=False).play(3)[0]
        performer = Performer(self.weights, self.parts[:1], anchored=False)
        rng = torch.Generator().manual_seed(3)
        for partition, field in (
            ("noisy", "kv"),
            ("clean", "kv"),
            ("motion", "draft"),
            ("motion", "motion"),
            ("voice", "pcm"),
        ):
            view = performer.arena.field(partition, field)
            view.copy_(torch.randn(view.shape, generator=rng))
        same(performer.play(3)[0], fresh, "in slots that were used")

    def redo(self) -> None:
        performer = Performer(self.weights, self.parts[:1])
        performer.play(3)
        for stage, job in self._jobs(performer):
            field, partition = ("draft", "noisy") if isinstance(job, GenerateJob) else ("motion", "clean")
            made, kept = performer.arena.field("motion", field)[job.motion], performer.arena.field(partition, "kv")
            result_of(stage, job, None)
            expected = made.clone(), kept[job.window[-1]].clone()
            performer.arena.fill_nan(partition, [job.window[-1]])
            made.fill_(float("nan"))
            result_of(stage, job, None)
            same(made, expected[0], f"{field} made again")
            same(kept[job.window[-1]], expected[1], f"keys in {partition} made again")

    def _jobs(self, performer: Performer) -> Iterator[tuple[Stage, GenerateJob | RefineJob]]:
        """The next chunk of the first session, a stage at a time; whoever takes a job runs it before the next."""
        history, chunk = performer.histories[0], ChunkId(99)
        yield performer.generator, self._next_chunk(performer, 0)
        history.finish(chunk, history.epoch, GENERATE)
        window = history.refine(chunk, history.epoch, fence=performer.fence())
        yield performer.refiner, performer.job(RefineJob, 0, chunk, window)

    def claimed(self) -> None:
        performer = Performer(self.weights, self.parts)
        performer.chunk()
        held = held_bytes(performer.generator) + held_bytes(performer.refiner)
        performer.play(12)
        now = held_bytes(performer.generator) + held_bytes(performer.refiner)
        assert now == held, f"stages hold {now - held:,} bytes more after twelve chunks"
        layout = performer.arena.layout
        shape = self.weights.shape
        slot = shape.layers * shape.tokens * 2 * shape.width * 4
        for partition in ("noisy", "clean"):
            spec = layout.partitions[partition]
            assert spec.slot_bytes == slot, (
                f"{partition} claims {spec.slot_bytes:,} bytes a slot; a chunk's keys take {slot:,}"
            )
            written = torch.isfinite(performer.arena.field(partition, "kv").flatten(1)).all(1)
            whole = written | torch.isnan(performer.arena.field(partition, "kv").flatten(1)).all(1)
            assert bool(whole.all()), f"a slot of {partition} is written in part only"
            # Two anchors and the chunks a rollback needs are there; a closed session leaves nothing.
            assert int(written.sum()) == 2 * (len(shape.anchors) + shape.recent), (
                f"{int(written.sum())} slots are in use"
            )

    # Overhear and decode

    def overhear(self) -> None:
        performer, memory, stage = Performer(self.weights, self.parts), Memory(), Overhear()
        stage.load(performer.arena)
        rng = np.random.default_rng(1)
        pcm = rng.integers(-9000, 9000, 3 * VOICE_RATE).astype(np.int16)
        start = 4 * VOICE_RATE + 17  # wraps around the end of the ring
        memory.slots = {0: pcm, 1: pcm[:5000], 2: pcm[5000:]}
        ring = performer.arena.field("voice", "pcm")
        result_of(stage, OverhearJob(*names(1), 0, SlotId(0), Ticks(2 * start), len(pcm)), memory)
        for slot, at in ((1, 0), (2, 5000)):
            job = OverhearJob(*names(2), slot, SlotId(1), Ticks(2 * (start + at)), len(memory.slots[slot]))
            result_of(stage, job, memory)
        same(torch.nan_to_num(ring[0]), torch.nan_to_num(ring[1]), "one piece and two")
        heard = audio.valid_stretch(ring[0], start - 10, start + len(pcm), [(start, start + len(pcm))])
        same(heard, np.concatenate([np.zeros(10), pcm / 32768.0]), "what is read back", within=1e-6)

    def overhear_in_any_order(self) -> None:
        """What is said later changes nothing that lies there."""
        ring, memory, stage = self._overhearing()
        self._hear(stage, memory, 0, start=1000)
        before = ring[0, 1000:9000].clone()
        self._hear(stage, memory, 1, start=9000)
        same(ring[0, 1000:9000], before, "what was said before")

    def overhear_beside(self) -> None:
        performer, memory, stage = self._overhearing_all()
        before = Bytes(performer.arena)
        self._hear(stage, memory, 0, start=1000)
        before.check_only({"voice": {0}})

    def overhear_used(self) -> None:
        """In a ring that another session has used."""
        ring, memory, stage = self._overhearing()
        ring[0] = 0.25
        self._hear(stage, memory, 0, start=1000)
        same(ring[0, 1000:9000], memory.slots[0] / 32768.0, "a used ring", within=1e-6)

    def overhear_again(self) -> None:
        ring, memory, stage = self._overhearing()
        self._hear(stage, memory, 0, start=1000)
        before = ring[0, 1000:9000].clone()
        ring[0, 1000:9000] = float("nan")
        self._hear(stage, memory, 0, start=1000)
        same(ring[0, 1000:9000], before, "heard again")

    def overhear_claims(self) -> None:
        ring, memory, stage = self._overhearing()
        held = held_bytes(stage)
        for turn in range(40):
            self._hear(stage, memory, turn % 2, start=8000 * turn)
        assert held_bytes(stage) == held, f"holds {held_bytes(stage) - held:,} bytes more after forty chunks"
        assert bool(torch.isfinite(ring[0]).all()), "forty chunks do not fill the ring that is claimed"

    def _overhearing_all(self) -> tuple[Performer, Memory, Overhear]:
        performer, memory, stage = Performer(self.weights, self.parts), Memory(), Overhear()
        stage.load(performer.arena)
        rng = np.random.default_rng(2)
        memory.slots = {slot: rng.integers(-9000, 9000, 8000).astype(np.int16) for slot in (0, 1)}
        return performer, memory, stage

    def _overhearing(self) -> tuple[Tensor, Memory, Overhear]:
        performer, memory, stage = self._overhearing_all()
        return performer.arena.field("voice", "pcm"), memory, stage

    @staticmethod
    def _hear(stage: Overhear, memory: Memory, slot: int, *, start: int) -> None:
        result_of(stage, OverhearJob(*names(1), slot, SlotId(0), Ticks(2 * start), len(memory.slots[slot])), memory)

    def decode(self) -> None:
        performer, memory, stage = Performer(self.weights, self.parts), Memory(), Decoder()
        stage.load(performer.arena)
        performer.chunk()
        before = Bytes(performer.arena)
        result_of(stage, DecodeJob(*names(1), SlotId(0), "mira", 0, 8, 0), memory)
        result_of(stage, DecodeJob(*names(2), SlotId(1), "theo", 0, 2, 20), memory)
        result_of(stage, DecodeJob(*names(1), SlotId(0), "mira", 5, 8, 30, 2), memory)
        before.check_only({})
        same(memory.pictures[30, 0], memory.pictures[0, 5], "a picture drawn again after others")
        same(memory.pictures[30, 1], memory.pictures[0, 7], "a picture drawn among every second")
        assert memory.pictures[0, 0].shape == (768, 512), f"pictures are {memory.pictures[0, 0].shape}"
        assert not np.array_equal(memory.pictures[0, 5], memory.pictures[20, 0]), "two characters look alike"

    def decode_parts(self) -> None:
        """A chunk in three parts, the last of every second frame, is the chunk at once."""
        performer, memory, stage = self._decoding()
        result_of(stage, self._draw("mira", 0, 8, slot=0), memory)
        for first, stop, slot in ((0, 3, 10), (3, 5, 20), (5, 8, 30)):
            result_of(stage, self._draw("mira", first, stop, slot=slot), memory)
            for frame in range(first, stop):
                same(memory.pictures[slot, frame - first], memory.pictures[0, frame], f"picture {frame} of a part")
        assert performer.frame[0] == CHUNK_FRAMES

    def decode_causal(self) -> None:
        """A picture is that of its own frame, whatever the others are."""
        performer, memory, stage = self._decoding()
        result_of(stage, self._draw("mira", 0, 8, slot=0), memory)
        performer.arena.field("motion", "motion")[0, 4:] *= -1
        result_of(stage, self._draw("mira", 0, 8, slot=10), memory)
        for frame in range(4):
            same(memory.pictures[10, frame], memory.pictures[0, frame], f"picture {frame} before a change")
        assert not np.array_equal(memory.pictures[10, 4], memory.pictures[0, 4]), "another motion is drawn alike"

    def decode_beside(self) -> None:
        """One session beside another, and nothing is written but the slot that was given."""
        performer, memory, stage = self._decoding()
        result_of(stage, self._draw("mira", 0, 2, slot=0), memory)
        before = Bytes(performer.arena)
        jobs = [DecodeJob(*names(2), SlotId(1), "theo", 0, 2, 10), self._draw("mira", 0, 2, slot=20)]
        for result in stage.run(jobs, memory):
            assert not isinstance(result, Failed), result
        before.check_only({})
        assert set(memory.pictures) == {(slot, at) for slot in (0, 10, 20) for at in (0, 1)}, "a slot nobody gave"
        same(memory.pictures[20, 1], memory.pictures[0, 1], "a picture beside another session's")

    def decode_fresh(self) -> None:
        """A painter that has drawn other people draws as a fresh one does."""
        _, memory, stage = self._decoding()
        for slot, name in enumerate(character_names()):
            result_of(stage, self._draw(name, 0, 1, slot=slot), memory)
        result_of(stage, self._draw("mira", 0, 1, slot=10), memory)
        _, fresh_memory, fresh = self._decoding()
        result_of(fresh, self._draw("mira", 0, 1, slot=10), fresh_memory)
        same(memory.pictures[10, 0], fresh_memory.pictures[10, 0], "a picture of a fresh painter")

    def decode_claims(self) -> None:
        """The process that draws takes what the plan says, however much it has drawn."""
        _, memory, stage = self._decoding()
        for name in character_names():
            result_of(stage, self._draw(name, 0, 8, slot=0), memory)
        held, resident = held_bytes(stage), resident_bytes(stage.painter.pid)
        for _ in range(3):
            for name in character_names():
                result_of(stage, self._draw(name, 0, 8, slot=0), memory)
        now = resident_bytes(stage.painter.pid)
        assert held_bytes(stage) == held, f"holds {held_bytes(stage) - held:,} bytes more after nine chunks"
        assert now <= PAINTER_BYTES, f"the process that draws takes {now:,} bytes; {PAINTER_BYTES:,} are claimed"
        assert now - resident <= PAINTER_BYTES // 20, f"it takes {now - resident:,} bytes more after nine chunks"

    def _decoding(self) -> tuple[Performer, Memory, Decoder]:
        performer, memory, stage = Performer(self.weights, self.parts), Memory(), Decoder()
        stage.load(performer.arena)
        performer.chunk()
        return performer, memory, stage

    @staticmethod
    def _draw(character: str, first: int, stop: int, *, slot: int) -> DecodeJob:
        return DecodeJob(*names(1), SlotId(0), character, first, stop, slot)


def resident_bytes(pid: int | None) -> int:
    """Resident memory of a process. Raises ModelError when there is none."""
    if pid is None:
        raise ModelError("no process draws")
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _bursts(rng: np.random.Generator, samples: int, rate: int) -> npt.NDArray[np.float32]:
    envelope = np.repeat(rng.uniform(0, 0.4, samples // (rate // 10) + 1), rate // 10)[:samples]
    sound: npt.NDArray[np.float32] = (rng.normal(size=samples) * envelope).astype(np.float32)
    return sound


# The whole, offline ---------------------------------------------------------------------------------------------------


class Offline:
    """The same face from nothing: no arena, no slots, sounds encoded in one run."""

    def __init__(self, weights: FaceWeights, part: Part) -> None:
        self.weights, self.part, self.shape = weights, part, weights.shape
        self._keys: dict[HistoryStage, list[tuple[list[tuple[Tensor, Tensor]], int]]] = {GENERATE: [], REFINE: []}
        self._voice = part.voice

    @torch.inference_mode()
    def play(self, chunks: int, *, cut: Cut | None = None) -> Motion:
        nets: list[tuple[HistoryStage, FaceNet]] = [(GENERATE, self.weights.generator), (REFINE, self.weights.refiner)]
        for stage, net in nets:
            self._anchor(stage, net)
        frame, shown = 0, []
        epoch = 0
        for chunk in range(1, chunks + 1):
            motion = self._chunk(chunk, epoch, frame)
            frame += CHUNK_FRAMES
            if cut is not None and chunk == cut.after:
                motion, frame, epoch = motion[: cut.frames], frame + cut.frames - CHUNK_FRAMES, epoch + 1
                self._voice = self._voice[: frame * VOICE_RATE // 25]
                for stage, _ in nets:
                    self._keys[stage][-1] = (self._keys[stage][-1][0], cut.frames)
            shown.append(motion.numpy())
        return np.concatenate(shown)

    def _chunk(self, chunk: int, epoch: int, frame: int) -> Tensor:
        w = self.weights
        mood = torch.from_numpy(self.part.moods[min(chunk - 1, len(self.part.moods) - 1)])[None]
        heard = self._heard(w.generator, frame)
        x = self._noise("generate", chunk, epoch)
        times = (*w.generator_times, 0.0)
        for start, stop in pairwise(times):
            made: list[tuple[Tensor, Tensor]] = []
            v = w.generator(x, torch.tensor([start]), mood, heard, self._reader(GENERATE, made), self._places(GENERATE))
            x = velocity_step(x, v, start, stop)
        self._keys[GENERATE].append((made, CHUNK_FRAMES))
        heard = self._heard(w.refiner, frame)
        x = blended(x, self._noise("refine", chunk, epoch), w.refiner_time)
        time = torch.tensor([w.refiner_time])
        x = velocity_step(
            x, w.refiner(x, time, mood, heard, self._reader(REFINE, []), self._places(REFINE)), w.refiner_time, 0.0
        )
        made = []
        w.refiner(x, torch.zeros(1), mood, heard, self._reader(REFINE, made), self._places(REFINE))
        self._keys[REFINE].append((made, CHUNK_FRAMES))
        return (x * w.deviation + w.mean)[0]

    def _noise(self, stage: str, chunk: int, epoch: int) -> Tensor:
        job = GenerateJob(
            *names(1, chunk), (), (), SlotId(0), Ticks(0), SlotId(0), (), SlotId(0), 0, 0, (0.0,) * len(CONDITION)
        )
        return chunk_noise(msgspec.structs.replace(job, epoch=epoch), stage, self.shape)[None]

    def _anchor(self, stage: HistoryStage, net: FaceNet) -> None:
        poses = torch.from_numpy(anchor_poses(load_character(self.part.character).identity))
        x = ((poses - self.weights.mean) / self.weights.deviation)[None]
        made: list[tuple[Tensor, Tensor]] = []
        places = torch.arange(x.shape[1])[None]
        silent = (
            torch.zeros(1, self.shape.speak_features, self.shape.audio),
            torch.zeros(1, self.shape.listen_frames, self.shape.audio),
        )
        heard = net.hear(*silent, present=torch.zeros(1))
        mood = torch.zeros(1, len(CONDITION))
        reader = self._reader(stage, made)
        net(x, torch.zeros(1), mood, heard, reader, Places(places, places), anchors=torch.ones(1))
        self._keys[stage].append((made, x.shape[1]))

    def _window(self, stage: HistoryStage) -> list[tuple[list[tuple[Tensor, Tensor]], int]]:
        kept = self._keys[stage]
        return [*kept[:1], *kept[1:][-self.shape.recent :]]

    def _reader(self, stage: HistoryStage, made: list[tuple[Tensor, Tensor]]) -> Reader:
        def read(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            made.append((keys, values))
            past = [(layers[layer], tokens) for layers, tokens in self._window(stage)]
            return (
                torch.cat([*(pair[0][:, :tokens] for pair, tokens in past), keys], 1),
                torch.cat([*(pair[1][:, :tokens] for pair, tokens in past), values], 1),
            )

        return read

    def _places(self, stage: HistoryStage) -> Places:
        past = sum(tokens for _, tokens in self._window(stage))
        every = torch.arange(past + self.shape.tokens)[None]
        return Places(every[:, past:], every)

    def _heard(self, net: FaceNet, frame: int) -> Heard:
        """Features of the whole timeline, silence before and after it, and of them what this chunk hears."""
        shape = self.shape
        before = 80
        own = _features(net.speaking, self._voice, VOICE_RATE, before)
        first = (before + frame - shape.speak_before) * audio.FEATURES_PER_FRAME
        speaking = own[:, first : first + shape.speak_features]
        end = frame - shape.listen_delay
        person = _features(net.listening, self.part.person[: max(0, end * INPUT_RATE // 25)], INPUT_RATE, before)
        listening = person[:, audio.FEATURES_PER_FRAME - 1 :: audio.FEATURES_PER_FRAME]
        return net.hear(speaking, listening[:, before + end - shape.listen_frames : before + end])


def _features(
    encoder: audio.AudioEncoder, pcm: Sequence[float] | npt.NDArray[np.float32], rate: int, before: int
) -> Tensor:
    lead = (before + encoder.reach // audio.FEATURES_PER_FRAME) * rate // 25 + audio.before_samples(rate)
    sound = np.concatenate([np.zeros(lead, np.float32), np.asarray(pcm, np.float32), np.zeros(2 * rate, np.float32)])
    mels = audio.mel_frames(torch.from_numpy(sound), rate)
    features: Tensor = encoder(mels[None, : len(mels) // audio.MELS_PER_FRAME * audio.MELS_PER_FRAME])
    return features
