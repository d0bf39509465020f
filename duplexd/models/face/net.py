"""The face's transformer: one class for generator and refiner, for the pocket face and for published sizes.

1. A row is one chunk: T tokens, frames x places of a picture (the pocket face has one place). Tokens of a row see each
   other and the row's window: anchors, the last W chunks. That is the chunk-causal mask; there is no other.
2. Keys are given to whoever keeps them before they are rotated, and are rotated when a window is read, by where they
   stand in it: 0..n-1, anchors first (DESIGN §5 rule 6; LPM §3.3).
3. Even layers attend to the speaking audio, odd layers to the listening audio (LPM Fig. 5).
4. Mood enters by AdaLN with the time of the noise. Larger families give text tokens too: then every block has keys and
   values for them beside the audio's, for the same queries (LPM §3.2).
5. The network predicts velocity: x_t = (1 - t) x_0 + t noise, v = noise - x_0.

    x -+- AdaLN, self-attention over the window -+- norm, audio (even: own, odd: the person's) -+- AdaLN, MLP -+-> x
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duplexd.models.face.audio import FEATURES_PER_FRAME, AudioEncoder
from duplexd.models.face.identity import REFERENCES
from duplexd.models.face.motion import CHANNELS, CHUNK_FRAMES, CONDITION


class FaceShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one network. The defaults are the pocket face's."""

    latent: int = CHANNELS  #: numbers of one token
    frames: int = CHUNK_FRAMES  #: latent frames of a chunk
    places: tuple[int, int] = (1, 1)  #: rows and columns of tokens of one frame
    width: int = 128
    heads: int = 4
    layers: int = 6
    mlp: int = 512
    audio: int = 96  #: width of audio features; 0: they come from outside, `audio_given` wide
    audio_given: int = 0
    condition: int = len(CONDITION)
    text: int = 0  #: width of text tokens; 0: none
    anchors: tuple[int, ...] = (len(REFERENCES),)  #: tokens of each anchor slot
    recent: int = 2  #: W: chunks before its own that a chunk sees
    speak_before: int = 8  #: frames of own voice before a chunk that it hears
    speak_after: int = 2  #: and after it: mouths open before the sound
    listen_frames: int = 50  #: frames of the person's sound that a chunk hears
    listen_delay: int = 8  #: frames between the end of those and the chunk: they are what had come when it was begun
    feature_rate: int = FEATURES_PER_FRAME  #: speaking features of one frame

    @property
    def tokens(self) -> int:
        """Tokens of a chunk."""
        return self.frames * self.places[0] * self.places[1]

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def speak_features(self) -> int:
        return (self.speak_before + self.frames + self.speak_after) * self.feature_rate

    @property
    def audio_width(self) -> int:
        return self.audio or self.audio_given


#: What keeps keys and values and gives the window back: (layer, new keys, new values) -> those of the whole windows,
#: (rows, window tokens, heads, head_dim), the new ones last, not rotated.
Reader = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class Places(msgspec.Struct):
    """Where tokens stand in the windows of a batch of rows."""

    queries: Tensor  #: (rows, T) int64, places of the new tokens
    keys: Tensor  #: (rows, window) int64
    seen: Tensor | None = None  #: (rows, window) bool; None: all


class Rotary(nn.Module):
    """Rotation of heads by time, row and column; a picture of one place is rotated by time alone.

    Time turns all pairs of a head that rows and columns leave: of a grid, a sixth of the pairs each.
    """

    def __init__(self, shape: FaceShape, *, base: float = 10_000.0) -> None:
        super().__init__()
        pairs = shape.head_dim // 2
        rows, columns = shape.places
        self.area = rows * columns
        self.columns = columns
        across = pairs // 3 if self.area > 1 else 0
        self.split = (pairs - 2 * across, across, across)
        self.base = base

    def turns(self, places: Tensor, dtype: torch.dtype) -> Turns:
        """(rows, tokens) places of tokens in a window; made once for all layers."""
        time, rest = places // self.area, places % self.area
        parts = [time, rest // self.columns, rest % self.columns]
        angles = []
        for part, count in zip(parts, self.split, strict=True):
            if count:
                speed = self.base ** -(torch.arange(count, device=places.device, dtype=torch.float32) / count)
                angles.append(part[..., None] * speed)
        every = torch.cat(angles, -1)[:, :, None]
        return every.cos().to(dtype), every.sin().to(dtype)


#: Cosine and sine of angles, (rows, tokens, 1, head_dim / 2).
Turns = tuple[Tensor, Tensor]


def turn(x: Tensor, turns: Turns) -> Tensor:
    """Rotate pairs (first half against second half): x (rows, tokens, heads, head_dim)."""
    cos, sin = turns
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """One layer. Layers of even index have keys for the own voice, odd ones for the person."""

    def __init__(self, shape: FaceShape, index: int) -> None:
        super().__init__()
        width, heads = shape.width, shape.heads
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.out = nn.Linear(width, width)
        self.cross_norm = nn.LayerNorm(width)
        self.audio_q = nn.Linear(width, width)
        self.audio_kv = nn.Linear(shape.audio_width, 2 * width)
        self.audio_out = nn.Linear(width, width)
        if shape.text:
            self.text_kv = nn.Linear(shape.text, 2 * width)
            self.text_out = nn.Linear(width, width)
        count = shape.speak_features if index % 2 == 0 else shape.listen_frames
        #: How far a feature lies from a frame decides what it is worth, before what it sounds like.
        self.nearness = nn.Parameter(torch.zeros(heads, shape.frames, count))
        self.mlp = nn.Sequential(nn.Linear(width, shape.mlp), nn.GELU(approximate="tanh"), nn.Linear(shape.mlp, width))
        self.modulation = nn.Parameter(torch.zeros(6, width))
        self.area = shape.places[0] * shape.places[1]
        self.index = index

    def forward(
        self, x: Tensor, step: Tensor, reader: Reader, turns: tuple[Turns, Turns], seen: Tensor | None, heard: Heard
    ) -> Tensor:
        """x (rows, T, width); step (rows, 6, width); turns: of queries and keys."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (self.modulation + step)[:, :, None].unbind(1)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        x = x + gate * self._see(y, reader, turns, seen)
        x = x + self._hear(self.cross_norm(x), heard)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + mlp_scale) + mlp_shift
        out: Tensor = x + mlp_gate * self.mlp(y)
        return out

    def _see(self, y: Tensor, reader: Reader, turns: tuple[Turns, Turns], seen: Tensor | None) -> Tensor:
        q, k, v = self.qkv(y).chunk(3, -1)
        q, k = self.q_norm(q), self.k_norm(k)
        keys, values = reader(self.index, self._split(k), self._split(v))
        mask = None if seen is None else seen[:, None, None]
        return self._merge(self.out, turn(self._split(q), turns[0]), turn(keys, turns[1]), values, mask)

    def _hear(self, y: Tensor, heard: Heard) -> Tensor:
        keys, values = heard.audio[self.index]
        q = self._split(self.audio_q(y))
        near = self.nearness.repeat_interleave(self.area, 1) if self.area > 1 else self.nearness
        out = self._merge(self.audio_out, q, keys, values, near[None].to(q.dtype)) * heard.present
        if heard.text is not None:
            out = out + self._merge(self.text_out, q, *heard.text[self.index], None)
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1)

    def _merge(self, out: nn.Linear, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        merged: Tensor = out(y.transpose(1, 2).flatten(2))
        return merged


class Heard:
    """Keys and values of what a batch of rows hears and reads: made once a chunk, whatever steps it takes."""

    def __init__(
        self, audio: list[tuple[Tensor, Tensor]], text: list[tuple[Tensor, Tensor]] | None, present: Tensor
    ) -> None:
        self.audio = audio  #: by layer, (rows, features, heads, head_dim)
        self.text = text
        self.present = present  #: (rows, 1, 1), 1 for chunks, 0 for anchors, which have no sound


class FaceNet(nn.Module):
    """Velocity of a chunk's latents. Generator and refiner are two of these."""

    def __init__(self, shape: FaceShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.into = nn.Linear(shape.latent, width)
        self.anchor_marks = nn.Parameter(torch.zeros(max(shape.anchors), width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.mood = nn.Linear(shape.condition, width)
        self.step = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.rotary = Rotary(shape)
        if shape.audio:
            self.speaking = AudioEncoder(shape.audio)
            self.listening = AudioEncoder(shape.audio)
        self.blocks = nn.ModuleList([Block(shape, index) for index in range(shape.layers)])
        self.last = nn.Linear(width, shape.latent)
        self.last_modulation = nn.Parameter(torch.zeros(2, width))

    def hear(
        self, speaking: Tensor, listening: Tensor, *, present: Tensor | None = None, text: Tensor | None = None
    ) -> Heard:
        """Keys and values of encoded sounds.

        Args:    speaking (rows, speak_features, audio), listening (rows, listen_frames, audio); text (rows, n, text).
                 present (rows,): 0 for rows that hear nothing (anchors).
        """
        audio, texts = [], []
        for block in self.blocks:
            assert isinstance(block, Block)
            sound = speaking if block.index % 2 == 0 else listening
            keys, values = block.audio_kv(sound).chunk(2, -1)
            audio.append((block._split(keys), block._split(values)))
            if text is not None:
                keys, values = block.text_kv(text).chunk(2, -1)
                texts.append((block._split(keys), block._split(values)))
        there = torch.ones(len(speaking), device=speaking.device) if present is None else present
        return Heard(audio, texts if text is not None else None, there.to(speaking.dtype)[:, None, None])

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        mood: Tensor,
        heard: Heard,
        reader: Reader,
        places: Places,
        *,
        anchors: Tensor | None = None,
    ) -> Tensor:
        """(rows, T, latent) at noise time t (rows,), moods (rows, condition) -> velocity, same shape as x.

        Args:    anchors (rows,): 1 for rows that are anchors, whose tokens are marked by their pose.
        """
        y = self.into(x)
        if anchors is not None:
            y = y + anchors[:, None, None] * self.anchor_marks[: y.shape[1]]
        step = self.time(time_features(t).to(x.dtype)) + self.mood(mood)
        modulation = self.step(step).view(len(x), 6, -1)
        turns = (self.rotary.turns(places.queries, y.dtype), self.rotary.turns(places.keys, y.dtype))
        for block in self.blocks:
            y = block(y, modulation, reader, turns, places.seen, heard)
        shift, scale = (self.last_modulation + step[:, None])[:, :, None].unbind(1)
        velocity: Tensor = self.last(F.layer_norm(y, y.shape[-1:]) * (1 + scale) + shift)
        return velocity

    def begin(self, rng: torch.Generator) -> None:
        """Fresh weights: every block starts as nothing, so that depth does not hurt."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                bound = math.sqrt(1.0 / module.weight[0].numel())
                nn.init.uniform_(module.weight, -bound, bound, generator=rng)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for quiet in (block.out, block.audio_out, block.mlp[2]):
                assert isinstance(quiet, nn.Linear)
                quiet.weight.data.mul_(0.3)
            block.modulation.data[[2, 5]] = 1.0
            if block.index % 2 == 1:
                block.nearness.data.copy_(listening_lags(self.shape, block.index // 2))
        nn.init.normal_(self.anchor_marks, std=0.3, generator=rng)


def listening_lags(shape: FaceShape, layer: int) -> Tensor:
    """Where the heads of a listening layer begin to listen, (heads, frames, listen_frames): each at its own distance
    behind every frame, from what is known to all frames of a chunk to the beginning of what is heard.

    An answer has its moment: a nod comes so long after a phrase. From even attention over two seconds a course of a few
    thousand steps does not find it.
    """
    layers = shape.layers // 2
    tap = torch.arange(shape.heads) * layers + layer
    nearest, furthest = shape.listen_delay + shape.frames, 0.92 * shape.listen_frames
    lag = nearest + (furthest - nearest) * tap / max(1, shape.heads * layers - 1)
    frame, heard = torch.arange(shape.frames), torch.arange(shape.listen_frames)
    centre = shape.listen_frames + shape.listen_delay + frame - lag[:, None]
    return (-0.5 * ((heard - centre[:, :, None]) / 2.0).square()).clamp(min=-6.0)


def time_features(t: Tensor) -> Tensor:
    """Sinusoids of the noise time, (rows, 256)."""
    speeds = torch.exp(-math.log(10_000.0) * torch.arange(128, device=t.device) / 128)
    angles = t[:, None].float() * 1000.0 * speeds
    return torch.cat([angles.cos(), angles.sin()], -1)


def parameter_count(shape: FaceShape) -> int:
    """Parameters of one network of this shape, counted on the meta device: nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in FaceNet(shape).parameters())


def velocity_step(x: Tensor, velocity: Tensor, start: float, stop: float) -> Tensor:
    """Follow a velocity from noise time `start` down to `stop`."""
    return x - (start - stop) * velocity


def blended(clean: Tensor, noise: Tensor, t: Tensor | float) -> Tensor:
    """x_t of rule 5; t is a number or broadcasts against the tensors."""
    return (1.0 - t) * clean + t * noise
