"""Lessons: the data of training, made once and kept in a file, and batches of it in the shape of the model's windows.

A batch of B clips of C chunks is rows of the network, 8 tokens each: first anchors and chunks as history, which are
remembered, then the chunks as they are made, at any noise. The window of chunk c is anchors, history c-2, c-1, itself.

A chunk may be cut: later ones see its first tokens only, and the next begins where those end, as after an interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.models.face import audio
from duplexd.models.face.identity import anchor_poses
from duplexd.models.face.motion import CHANNELS, CHUNK_FRAMES
from duplexd.models.face.net import Block, FaceNet, FaceShape, Heard, Places, Reader
from duplexd.models.face.training.corpus import CONFIRMING, HELD_OUT, LAUGHS, Corpus, lexicon_words
from duplexd.models.face.training.mouth import STEPS_PER_SECOND, Phone, mouth_track
from duplexd.models.face.training.narrator import RATE, Narrator
from duplexd.models.face.training.scenes import MARGIN, Said, Scene, Utterance, make_scene

#: Voices are made this much higher and longer: other people's, roughly.
_SHIFTS = (0.80, 1.30)
_STRESSED = 0.9
#: How often each laugh is made higher or lower: there are few, and most are other people's.
_LAUGHS_SHIFTED = 12


# Making ---------------------------------------------------------------------------------------------------------------


def make_pool(count: int, rng: np.random.Generator, *, told: bool = True) -> list[Utterance]:
    """Sentences said by the pocket voice, as many shifted ones, and laughs. `told`: say how far it is."""
    narrator, corpus = Narrator(), Corpus(rng, lexicon_words())
    pool: list[Utterance] = []
    while len(pool) < 2 * count:
        text = corpus.sentence()
        if text in HELD_OUT or text in CONFIRMING:
            continue
        try:
            pcm, phones = narrator.say(text)
        except ModelError:
            continue  # a clause that is too long; another will do
        pool.append(utterance(pcm, phones))
        pool.append(shifted(pcm, phones, float(rng.uniform(*_SHIFTS))))
        if told and len(pool) % 200 == 0:
            print(f"said {len(pool) // 2} of {count} sentences", flush=True)
    for text in LAUGHS:
        pcm, phones = narrator.say(text)
        pool.append(utterance(pcm, phones, laugh=True))
        factors = rng.uniform(*_SHIFTS, _LAUGHS_SHIFTED)
        pool += [shifted(pcm, phones, float(factor), laugh=True) for factor in factors]
    return pool


def save_pool(pool: Sequence[Utterance], path: Path) -> None:
    _save([msgspec.structs.asdict(one) | {"mels": torch.from_numpy(one.mels), "track": torch.from_numpy(one.track)}
           for one in pool], path)  # fmt: skip


def load_pool(path: Path) -> list[Utterance]:
    kept = torch.load(path, weights_only=True)
    return [Utterance(**{**one, "mels": one["mels"].numpy(), "track": one["track"].numpy()}) for one in kept]


def utterance(
    pcm: npt.NDArray[np.float32], phones: Sequence[Phone], *, own: bool = True, laugh: bool = False
) -> Utterance:
    before = np.zeros(audio.before_samples(RATE), np.float32)
    mels = audio.mel_frames(torch.from_numpy(np.concatenate([before, pcm])), RATE).numpy().astype(np.float16)
    track = mouth_track(phones, steps=len(mels) + 2 * MARGIN, offset=-MARGIN / STEPS_PER_SECOND)
    stresses = tuple(float(phone.start) for phone in phones if phone.stress >= _STRESSED)
    return Utterance(mels, track, stresses, own, laugh)


def shifted(pcm: npt.NDArray[np.float32], phones: Sequence[Phone], factor: float, *, laugh: bool = False) -> Utterance:
    """Slower and lower (factor > 1) or faster and higher."""
    longer = np.interp(np.arange(int(len(pcm) * factor)) / factor, np.arange(len(pcm)), pcm).astype(np.float32)
    moved = [Phone(phone.symbol, phone.start * factor, phone.stop * factor, phone.stress) for phone in phones]
    return utterance(longer, moved, own=False, laugh=laugh)


class Lessons(msgspec.Struct, frozen=True):
    """Scenes as arrays; S scenes of F frames."""

    motion: Tensor  #: (S, F, CHANNELS) float16
    conditions: Tensor  #: (S, F, condition) float16
    own: Tensor  #: (S, F * MELS_PER_FRAME, MELS) float16
    other: Tensor
    anchors: Tensor  #: (S, tokens, CHANNELS) float32
    talking: Tensor  #: (S, F) bool: the own voice is heard


def make_lessons(pool: Sequence[Utterance], scenes: int, rng: np.random.Generator) -> Lessons:
    made = [make_scene(pool, rng) for _ in range(scenes)]
    return lessons_of(pool, made)


def lessons_of(pool: Sequence[Utterance], scenes: Sequence[Scene]) -> Lessons:
    steps = len(scenes[0].motion) * audio.MELS_PER_FRAME
    return Lessons(
        motion=torch.from_numpy(np.stack([scene.motion for scene in scenes])).half(),
        conditions=torch.from_numpy(np.stack([scene.conditions for scene in scenes])).half(),
        own=torch.from_numpy(np.stack([laid_out(pool, scene.own, steps) for scene in scenes])),
        other=torch.from_numpy(np.stack([laid_out(pool, scene.other, steps) for scene in scenes])),
        anchors=torch.from_numpy(np.stack([anchor_poses(scene.identity) for scene in scenes])),
        talking=torch.from_numpy(np.stack([_talking(scene.own, steps) for scene in scenes])),
    )


def laid_out(pool: Sequence[Utterance], said: Sequence[Said], steps: int) -> npt.NDArray[np.float16]:
    """Mel frames of one side of a scene; where two utterances touch the louder wins."""
    mels = np.full((steps, audio.MELS), audio.SILENCE, np.float16)
    for one in said:
        length = min(one.stop, steps) - one.start
        if length > 0:
            here = mels[one.start : one.start + length]
            here[:] = np.maximum(here, pool[one.utterance].mels[:length] + np.float16(one.gain))
    return mels


def _talking(said: Sequence[Said], steps: int) -> npt.NDArray[np.bool_]:
    talking = np.zeros(steps, bool)
    for one in said:
        talking[one.start : one.stop] = True
    return np.asarray(talking.reshape(-1, audio.MELS_PER_FRAME).any(1), bool)


def save(lessons: Lessons, path: Path) -> None:
    _save(msgspec.structs.asdict(lessons), path)


def load(path: Path) -> Lessons:
    return Lessons(**torch.load(path, weights_only=True))


def _save(what: object, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".tmp")
    torch.save(what, partial)
    partial.rename(path)


# Batches --------------------------------------------------------------------------------------------------------------


class Clip(msgspec.Struct, frozen=True):
    """A batch of clips of C chunks."""

    motion: Tensor  #: (B, C, 8, CHANNELS), normalised
    moods: Tensor  #: (B, C, condition)
    kept: Tensor  #: (B, C) int64: tokens of each chunk that later ones see
    anchors: Tensor  #: (B, tokens, CHANNELS), normalised
    anchored: Tensor  #: (B,) bool
    own: Tensor  #: (B, mel frames, MELS), from `own_first` frames of motion before the first chunk on
    other: Tensor
    speak_index: Tensor  #: (B, C, speak_features) int64: features of each chunk among the clip's
    listen_index: Tensor  #: (B, C, listen_frames)


class Sampler:
    """Draws clips.

    Args:    mean, deviation: of every channel, for normalisation, (CHANNELS,).
    """

    def __init__(
        self, lessons: Lessons, shape: FaceShape, mean: Tensor, deviation: Tensor, rng: np.random.Generator
    ) -> None:
        self.lessons, self.shape, self.mean, self.deviation, self.rng = lessons, shape, mean, deviation, rng
        reach = 3 * 2 // audio.FEATURES_PER_FRAME  # frames that the encoders look back
        self.own_first = shape.speak_before + reach
        self.other_first = shape.listen_delay + shape.listen_frames + reach
        self.reach = reach

    def draw(self, clips: int, chunks: int, *, cuts: float = 0.06, anchorless: float = 0.1) -> Clip:
        lessons, shape, rng = self.lessons, self.shape, self.rng
        scenes, frames = lessons.motion.shape[:2]
        span = chunks * CHUNK_FRAMES
        kept = np.where(
            rng.random((clips, chunks)) < cuts, rng.integers(1, CHUNK_FRAMES, (clips, chunks)), CHUNK_FRAMES
        )
        starts = np.cumsum(np.concatenate([np.zeros((clips, 1), int), kept[:, :-1]], 1), 1)
        scene = rng.integers(scenes, size=clips)
        first = rng.integers(self.other_first, frames - span - shape.speak_after, size=clips)
        at = first[:, None, None] + starts[:, :, None] + np.arange(CHUNK_FRAMES)
        motion = lessons.motion[scene[:, None, None], at].float()
        own = self._sound(lessons.own, scene, first - self.own_first, span + self.own_first + shape.speak_after)
        other = self._sound(lessons.other, scene, first - self.other_first, span + shape.listen_frames + self.reach)
        speak = starts[:, :, None] * shape.feature_rate + np.arange(shape.speak_features)
        listen = (starts[:, :, None] + np.arange(shape.listen_frames)) * audio.FEATURES_PER_FRAME + 1
        return Clip(
            motion=(motion - self.mean) / self.deviation,
            moods=lessons.conditions[scene[:, None], at[:, :, 0]].float(),
            kept=torch.from_numpy(kept),
            anchors=(lessons.anchors[scene] - self.mean) / self.deviation,
            anchored=torch.from_numpy(rng.random(clips) >= anchorless),
            own=own,
            other=other,
            speak_index=torch.from_numpy(speak),
            listen_index=torch.from_numpy(listen),
        )

    def _sound(self, mels: Tensor, scene: npt.NDArray[np.int64], first: npt.NDArray[np.int64], frames: int) -> Tensor:
        """Louder or softer, through another microphone, in noise."""
        at = first[:, None] * audio.MELS_PER_FRAME + np.arange(frames * audio.MELS_PER_FRAME)
        x = mels[scene[:, None], at].float()
        rng, clips = self.rng, len(scene)
        band = np.linspace(-1, 1, audio.MELS)
        colour = rng.uniform(-0.35, 0.3, (clips, 1, 1)) + rng.normal(0, 0.12, (clips, 1, 1)) * band
        noisy = rng.random((clips, 1, 1)) < 0.6
        level = np.where(noisy, audio.SILENCE + rng.uniform(0, 0.75, (clips, 1, 1)), audio.SILENCE - 1.0)
        hiss = level + rng.normal(0, 0.15, (clips, 1, 1)) * band + rng.normal(0, 0.04, (clips, x.shape[1], 1))
        x = x + torch.from_numpy(colour).float()
        return audio.mixed(x, torch.from_numpy(np.broadcast_to(hiss, x.shape).astype(np.float32)))


#: Keys and values of anchors and history, layer by layer: (B, 1 + C, 8, heads, head_dim).
Memory = list[tuple[Tensor, Tensor]]


class Windows:
    """The rows of a batch of clips, and readers that give each its window.

    Rows of history come first (anchors, then chunks) and are remembered; rows of chunks in work read them.
    """

    def __init__(self, clip: Clip, shape: FaceShape) -> None:
        self.clips, self.chunks = clip.kept.shape
        self._tokens = shape.tokens
        visible = torch.arange(shape.tokens) < clip.kept[:, :, None]
        index = torch.zeros(self.chunks, shape.recent + 1, dtype=torch.long)
        seen = torch.zeros(self.clips, self.chunks, shape.recent + 2, shape.tokens, dtype=torch.bool)
        seen[:, :, 0] = clip.anchored[:, None, None]
        seen[:, :, -1] = True
        for chunk in range(self.chunks):
            for back in range(1, min(chunk, shape.recent) + 1):
                index[chunk, -back] = 1 + chunk - back
                seen[:, chunk, -1 - back] = visible[:, chunk - back]
        self._index = index
        alone = torch.zeros_like(seen[:, :1])
        alone[:, :, -1] = True
        self.current = self._places(seen)
        self.history = self._places(torch.cat([alone, seen], 1))
        #: 1 for the rows of history that are anchors.
        self.anchors = (torch.arange(1 + self.chunks) == 0).float().repeat(self.clips)

    def _places(self, seen: Tensor) -> Places:
        mask = seen.flatten(0, 1).flatten(1)
        keys = (mask.long().cumsum(1) - 1).clamp(min=0)
        return Places(queries=keys[:, -self._tokens :], keys=keys, seen=mask)

    def remembering(self, memory: Memory) -> Reader:
        """For rows of history: what they make is kept in `memory`."""

        def read(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            assert len(memory) == layer
            memory.append((self._apart(keys), self._apart(values)))
            ends = torch.arange(1 + self.chunks)
            index = torch.cat([torch.cat([self._index[:1] * 0, self._index]), ends[:, None]], 1)
            return self._gather(memory[layer][0], index), self._gather(memory[layer][1], index)

        return read

    def reading(self, memory: Memory) -> Reader:
        """For rows of chunks in work."""

        def read(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            before = [self._gather(part, self._index) for part in memory[layer]]
            return torch.cat([before[0], keys], 1), torch.cat([before[1], values], 1)

        return read

    def reading_one(self, memory: Memory, chunk: int, *, keep: bool) -> Reader:
        """For one chunk of every clip; `keep`: its own keys and values take their place in `memory`."""

        def read(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            index = self._index[chunk : chunk + 1]
            before = [self._gather(part, index) for part in memory[layer]]
            if keep:
                memory[layer][0][:, 1 + chunk] = keys
                memory[layer][1][:, 1 + chunk] = values
            return torch.cat([before[0], keys], 1), torch.cat([before[1], values], 1)

        return read

    def part(self, rows: Tensor | None, chunk: int) -> Tensor:
        """What belongs to one chunk, of rows of chunks in work."""
        assert rows is not None
        return rows.view(self.clips, self.chunks, *rows.shape[1:])[:, chunk]

    def _apart(self, x: Tensor) -> Tensor:
        return x.view(self.clips, -1, *x.shape[1:])

    def _gather(self, x: Tensor, index: Tensor) -> Tensor:
        return x[:, index].flatten(0, 1).flatten(1, 2)


class Sounds:
    """What the rows of a batch hear. Keys and values are made once for the clip, as windows overlap."""

    def __init__(self, net: FaceNet, clip: Clip, windows: Windows) -> None:
        speaking, listening = net.speaking(clip.own), net.listening(clip.other)
        clips, chunks = windows.clips, windows.chunks
        row = torch.arange(clips)[:, None, None]
        current, history = [], []
        for block in net.blocks:
            assert isinstance(block, Block)
            even = block.index % 2 == 0
            joined = block.audio_kv(speaking if even else listening)
            made = joined[row, clip.speak_index if even else clip.listen_index]
            current.append(self._split(block, made))
            history.append(self._split(block, torch.cat([made[:, :1], made], 1)))
        self.current = Heard(current, None, torch.ones(clips * chunks, 1, 1))
        self.history = Heard(history, None, (1 - windows.anchors)[:, None, None])

    @staticmethod
    def _split(block: Block, joined: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = joined.flatten(0, 1).chunk(2, -1)
        return block._split(keys), block._split(values)


class Lesson:
    """One batch before one network: its history first, then chunks at any noise."""

    def __init__(self, net: FaceNet, clip: Clip) -> None:
        self.net, self.clip = net, clip
        self.windows = Windows(clip, net.shape)
        self.sounds = Sounds(net, clip, self.windows)
        self.memory: Memory = []

    def remember(self, history: Tensor, t: float) -> Tensor:
        """History (B, C, 8, channels) as it looks at noise `t` -> its velocities, the same shape."""
        clip, windows = self.clip, self.windows
        self.memory = []
        x = torch.cat([clip.anchors[:, None], history], 1).flatten(0, 1)
        times = torch.where(windows.anchors > 0, 0.0, t)
        moods = torch.cat([torch.zeros_like(clip.moods[:, :1]), clip.moods], 1).flatten(0, 1)
        reader = windows.remembering(self.memory)
        v = self.net(x, times, moods, self.sounds.history, reader, windows.history, anchors=windows.anchors)
        velocities: Tensor = v.view(windows.clips, -1, *v.shape[1:])[:, 1:]
        return velocities

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Chunks (B, C, 8, channels) at noise t (B, C), given the history."""
        windows = self.windows
        reader = windows.reading(self.memory)
        v = self.net(
            x.flatten(0, 1), t.flatten(), self.clip.moods.flatten(0, 1), self.sounds.current, reader, windows.current
        )
        velocities: Tensor = v.view_as(x)
        return velocities

    def one(self, x: Tensor, t: float, chunk: int, *, keep: bool) -> Tensor:
        """One chunk (B, 8, channels) of every clip, given what is remembered; `keep`: and is remembered itself."""
        windows = self.windows
        places = Places(*(windows.part(each, chunk) for each in (windows.current.queries, windows.current.keys)))
        places.seen = windows.part(windows.current.seen, chunk)
        heard = self.sounds.current
        audio = [(windows.part(keys, chunk), windows.part(values, chunk)) for keys, values in heard.audio]
        sounds = Heard(audio, None, windows.part(heard.present, chunk))
        reader = windows.reading_one(self.memory, chunk, keep=keep)
        v: Tensor = self.net(x, torch.full((len(x),), t), self.clip.moods[:, chunk], sounds, reader, places)
        return v


def statistics(lessons: Lessons) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel, (CHANNELS,); what hardly moves is not blown up."""
    flat = lessons.motion.reshape(-1, CHANNELS).float()
    return flat.mean(0), flat.std(0).clamp(min=0.03)
