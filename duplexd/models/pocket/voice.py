"""The pocket voice: a talker (clause of text -> latents and word times) and a vocoder (latents -> 24 kHz samples).

1. A clause is talked whole, because its networks look at all of it, and rendered in chunks of any length.
2. What is played starts with the first sound and ends a punctuation's worth of silence after the last: the
   voice itself pads a clause with 0.3 s before and up to 0.5 s after, which would be added to every reply. The padding
   stays in the latents, so that the vocoder sees what it was trained on; it is not played.
3. The vocoder keeps, per layer, the six frames its next step still needs, and the half-summed end of the signal. So a
   chunk costs its own length, not its length plus 27 frames of context on each side, and chunked == whole.

    frame      0 ......... first ........................ first + audible ..... count
               padding     played: ticks 0 ............... length               padding
    played     block j = samples 300 j .. 300 j + 299 of the clause, one block per frame
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from duplexd import weights
from duplexd.ids import SlotId
from duplexd.memory.arena import Shelf, sizes_of
from duplexd.memory.layout import FieldSpec, PartitionSpec, shelf_partition
from duplexd.models.pocket import dsp
from duplexd.models.pocket.phonemes import Reader, Reading
from duplexd.models.pocket.voicenets import (
    CONTEXT,
    DECODER_BLOCKS,
    DECODER_CHANNELS,
    LATENT_CHANNELS,
    REACH,
    SpectrumNet,
    TalkNet,
    empty_nets,
    load_nets,
)
from duplexd.streams.stage import (
    CostModel,
    Failed,
    PayloadKind,
    RenderJob,
    RenderResult,
    Role,
    StageSpec,
    TalkJob,
    TalkResult,
    WordSpan,
)
from duplexd.units import Ticks, ms_from_ticks, ticks_from_ms, ticks_from_samples

SAMPLE_RATE = dsp.SAMPLE_RATE
#: Playback time of one sample; a chunk may start and end at any multiple of it.
SAMPLE_TICKS = ticks_from_samples(1, SAMPLE_RATE)
#: Playback time of one latent frame; a clause is a whole number of them long.
FRAME_TICKS = ticks_from_samples(dsp.HOP, SAMPLE_RATE)
#: A duration of the voice is a step of two frames, 25 ms.
STEP_FRAMES = 2
STEP_TICKS = STEP_FRAMES * FRAME_TICKS
#: Longest clause that is played; longer text is to be split before it gets here.
CLAUSE_TICKS_MAX = ticks_from_ms(4000)
#: Latent frames of a slot: the longest clause and up to 0.8 s of padding around it.
FRAMES_MAX = CLAUSE_TICKS_MAX // FRAME_TICKS + 64
TEXT_CHARS_MAX = 400

#: Frames kept after the last loud one, by the punctuation that follows: 250, 125 and 50 ms.
PAUSE_FRAMES = {**dict.fromkeys(".!?…", 20), **dict.fromkeys(",;:—", 10), "": 4}
#: The last latent channel is the log energy of a frame; above this it is louder than about -60 dB of full scale, 40 dB
#: below the vowels. The voice's own durations are no measure of silence: they count its dying away to -100 dB as sound,
#: and the sound after a pause begins up to 75 ms before the duration of its phoneme does.
LOUD = 0.2
#: Ramp at both ends of a clause, so that a cut in faint noise does not click.
_RAMP_SAMPLES = 120


def latent_fields() -> tuple[FieldSpec, ...]:
    """Fields of the `latents` partition: one slot holds one clause."""
    return (
        FieldSpec("frames", (LATENT_CHANNELS, FRAMES_MAX)),
        FieldSpec("f0", (FRAMES_MAX,)),  # Hz
        FieldSpec("phase", (FRAMES_MAX,), "float64"),  # cycles of the pulse train before each frame, fraction only
        FieldSpec("clause", (3,), "int64"),  # count, first, audible: see the drawing above
    )


class Latents:
    """The fields of the `latents` partition, as the talker writes and the vocoder reads them."""

    def __init__(self, arena: Any) -> None:
        self.frames: Tensor = arena.field("latents", "frames")
        self.f0: Tensor = arena.field("latents", "f0")
        self.phase: Tensor = arena.field("latents", "phase")
        self.clause: Tensor = arena.field("latents", "clause")


def state_fields() -> tuple[FieldSpec, ...]:
    """Fields of the `state` partition: one slot holds what a vocoder remembers between two chunks of one session."""
    return (
        FieldSpec("voice_in", (LATENT_CHANNELS, 2 * REACH)),
        FieldSpec("voice_blocks", (DECODER_BLOCKS, DECODER_CHANNELS, 2 * REACH)),
        FieldSpec("voice_tail", (dsp.TAIL, dsp.HOP)),
        FieldSpec("voice_next", (2,), "int64"),  # latents slot, next sample of its clause
    )


class Clause(msgspec.Struct, frozen=True):
    """The three numbers of a latents slot, in frames."""

    count: int
    first: int
    audible: int


class Talker:
    """Stage: a clause of text into a slot of latents. One unit of its cost is one character.

    Args: lane: where it runs; clause_max: longest clause in playback time, at most `CLAUSE_TICKS_MAX`.
    """

    def __init__(self, *, lane: str = "voice", clause_max: Ticks = CLAUSE_TICKS_MAX) -> None:
        if not 0 < clause_max <= CLAUSE_TICKS_MAX:
            raise ValueError(f"clause_max is {clause_max} ticks; 1 to {CLAUSE_TICKS_MAX} are allowed")
        self.clause_max = clause_max
        self.spec = StageSpec(
            name="talk",
            role=Role.TALK,
            lane=lane,
            takes=PayloadKind.TEXT,
            gives=PayloadKind.LATENT,
            cost=CostModel(fixed_us=7_000, per_unit_us=250),
            load=0.01,
        )

    def shelf(self) -> PartitionSpec:
        """The weights' partition."""
        return shelf_partition("talker weights", sizes_of(empty_nets()[0]))

    def load(self, arena: Any) -> None:
        """Raises WeightsError when a file of the voice is missing or damaged."""
        self._latents = Latents(arena)
        self._reader = Reader(oov=weights.path("hibari-oov"), vocabulary=weights.path("hibari-vocab"))
        self._net: TalkNet = load_nets(weights.path("hibari"))[0]
        shelf = Shelf(arena, self.shelf())
        shelf.place_all(self._net)
        shelf.close()
        # The first use of the unknown-word network and of the kernels is slow; nobody should hear that.
        self._durations(self._reader.read("Hello, zorblax."))

    @torch.inference_mode()
    def run(self, jobs: Sequence[TalkJob], media: Any) -> list[TalkResult | Failed]:
        return [self._talk(job) for job in jobs]

    def _talk(self, job: TalkJob) -> TalkResult | Failed:
        if len(job.text) > TEXT_CHARS_MAX:
            return Failed(job.session, f"a clause of {len(job.text)} characters; at most {TEXT_CHARS_MAX} are allowed")
        reading = self._reader.read(job.text)
        if not reading.ids:
            silence = tuple(WordSpan(word.start_char, word.end_char, Ticks(0), Ticks(0)) for word in reading.words)
            return TalkResult(job.session, Ticks(0), silence)
        if len(reading.ids) * STEP_FRAMES > FRAMES_MAX:
            # Each phoneme takes a step at least: this cannot fit, so the network need not be asked.
            return self._too_long(job, Ticks(len(reading.ids) * STEP_TICKS))
        ids, encoded, steps = self._durations(reading)
        lengths = steps.tolist()
        if STEP_FRAMES * sum(lengths) > FRAMES_MAX:
            return self._too_long(job, Ticks(STEP_TICKS * sum(lengths)))
        f0, frames = self._net.latents(ids, encoded, steps)
        if not bool(torch.isfinite(frames).all()):
            return Failed(job.session, f"the voice gave no finite latents for {job.text!r}")
        loud = (frames[-1] > LOUD).tolist()
        clause = trim(loud, reading.pause)
        if clause is None:
            return Failed(job.session, f"the voice makes no sound of {job.text!r}")
        length = Ticks(clause.audible * FRAME_TICKS)
        if length > self.clause_max:
            return self._too_long(job, length)
        self._keep(job.latents, clause, f0=f0, frames=frames)
        return TalkResult(job.session, length, word_spans(reading, lengths, loud, clause))

    def _durations(self, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
        with torch.inference_mode():
            ids = torch.tensor([reading.ids], device=self._latents.frames.device)
            steps, encoded = self._net.durations(ids)
        return ids, encoded, steps

    def _keep(self, slot: SlotId, clause: Clause, *, f0: Tensor, frames: Tensor) -> None:
        self._latents.frames[slot, :, : clause.count] = frames
        self._latents.f0[slot, : clause.count] = f0
        self._latents.phase[slot, : clause.count] = dsp.start_phases(f0)
        self._latents.clause[slot] = torch.tensor([clause.count, clause.first, clause.audible])

    def _too_long(self, job: TalkJob, length: Ticks) -> Failed:
        return Failed(
            job.session,
            f"a clause of {len(job.text)} characters takes {ms_from_ticks(length):.0f} ms or more to say; "
            f"at most {ms_from_ticks(self.clause_max):.0f} ms are allowed, so split it earlier",
        )


def trim(loud: Sequence[bool], pause: str) -> Clause | None:
    """What is played of a clause whose frames are `loud` or not, by the punctuation that ends it; None: no sound."""
    if True not in loud:
        return None
    first = loud.index(True)
    last = len(loud) - 1 - list(reversed(loud)).index(True)
    end = min(len(loud), last + 1 + PAUSE_FRAMES[pause])
    return Clause(count=len(loud), first=first, audible=end - first)


def word_spans(reading: Reading, steps: Sequence[int], loud: Sequence[bool], clause: Clause) -> tuple[WordSpan, ...]:
    """When each whitespace-delimited word is spoken, relative to the first audible sample.

    Spans are in order and within the clause; the first spoken word starts at 0. A word that another follows without a
    pause lasts until that one starts. Before a pause, a word ends with its last loud frame, after it the next starts
    with its first, and the pause belongs to no word: a word counts as heard as soon as it is. A word that is not spoken
    has an empty span.

    Args: steps: 25 ms steps per id; loud: per frame; clause: what is played of it.
    """
    edges = [0]
    for step in steps:
        edges.append(edges[-1] + step * STEP_FRAMES)
    spans: list[WordSpan] = []
    at = 0
    for index, word in enumerate(reading.words):
        start = at
        if word.start_id < word.end_id:
            high = _word_end(reading, index, edges, loud)
            start = _onset(loud, edges[word.start_id], after=clause.first + at) - clause.first if at else 0
            at = max(start, min(high - clause.first, clause.audible))
        spans.append(WordSpan(word.start_char, word.end_char, Ticks(start * FRAME_TICKS), Ticks(at * FRAME_TICKS)))
    return tuple(spans)


def _onset(loud: Sequence[bool], frame: int, *, after: int) -> int:
    """Where the sound that is there at `frame` began, but not before `after`, the end of the word before."""
    while frame > after and loud[frame - 1]:
        frame -= 1
    return max(frame, after)


def _word_end(reading: Reading, index: int, edges: Sequence[int], loud: Sequence[bool]) -> int:
    """The frame a spoken word ends at."""
    word = reading.words[index]
    later = (other.start_id for other in reading.words[index + 1 :] if other.start_id < other.end_id)
    following = next(later, len(reading.ids) - 1)
    if following < len(reading.ids) - 1 and set(reading.phonemes[word.end_id - 1 : following - 1]) <= {" "}:
        return edges[following]
    end = edges[word.end_id]
    # A last "s" is often still hissing in the time the voice counts for the comma.
    while end < edges[following] and loud[end]:
        end += 1
    while end > edges[word.start_id] + 1 and not loud[end - 1]:
        end -= 1
    return end


class Vocoder:
    """Stage: one chunk of a clause's latents into 24 kHz samples. One unit of its cost is one frame of 12.5 ms.

    Args: lane: where it runs; chunk_max: longest chunk that will be asked for; net: the network, if not the store's.
    """

    def __init__(
        self, *, lane: str = "voice", chunk_max: Ticks = CLAUSE_TICKS_MAX, net: SpectrumNet | None = None
    ) -> None:
        self._given = net
        self.spec = StageSpec(
            name="render",
            role=Role.RENDER,
            lane=lane,
            takes=PayloadKind.LATENT,
            gives=PayloadKind.AUDIO,
            cost=CostModel(fixed_us=7_500, per_unit_us=200),
            load=0.04,
        )

    def shelf(self) -> PartitionSpec:
        """The weights' partition, the table of noise with them."""
        noise = FRAMES_MAX * dsp.BINS * torch.complex64.itemsize
        return shelf_partition("vocoder weights", [*sizes_of(empty_nets()[1]), noise])

    def load(self, arena: Any) -> None:
        """Raises WeightsError when a file of the voice is missing or damaged."""
        self._latents = Latents(arena)
        self._in: Tensor = arena.field("state", "voice_in")
        self._blocks: Tensor = arena.field("state", "voice_blocks")
        self._tail: Tensor = arena.field("state", "voice_tail")
        self._next: Tensor = arena.field("state", "voice_next")
        self._net = self._given or load_nets(weights.path("hibari"))[1]
        shelf = Shelf(arena, self.shelf())
        shelf.place_all(self._net)
        self._noise = shelf.place(dsp.noise_table(FRAMES_MAX, self._latents.frames.device))
        shelf.close()

    @torch.inference_mode()
    def run(self, jobs: Sequence[RenderJob], media: Any) -> list[RenderResult | Failed]:
        return [self._render(job, media) for job in jobs]

    def _render(self, job: RenderJob, media: Any) -> RenderResult | Failed:
        clause = Clause(*self._latents.clause[job.latents].tolist())
        fault = self._fault(job, clause)
        if fault:
            return Failed(job.session, fault)
        samples = self._advance(job, clause)
        if not bool(torch.isfinite(samples).all()):
            return Failed(job.session, f"the voice gave samples that are not finite at {job.start} ticks")
        pcm = (samples.clamp(-1.0, 1.0) * 32767.0).round().to(torch.int16).cpu().numpy()
        media.write(job.slot, pcm)
        return RenderResult(job.session, len(pcm))

    def _fault(self, job: RenderJob, clause: Clause) -> str:
        """Why this chunk cannot be made, or nothing."""
        length = clause.audible * FRAME_TICKS
        if job.start % SAMPLE_TICKS or job.length % SAMPLE_TICKS or job.length <= 0:
            return (
                f"a chunk of {job.length} ticks at {job.start}; both must be multiples of {SAMPLE_TICKS}, and not empty"
            )
        if not 0 <= job.start < job.start + job.length <= length:
            return f"a chunk at {job.start} to {job.start + job.length} ticks of a clause of {length}"
        found = tuple(self._next[job.state].tolist())
        wanted = (job.latents, _sample(job.start, clause))
        if not job.fresh and found != wanted:
            return f"state {job.state} stands at (latents, sample) {found}, the chunk starts at {wanted}"
        return ""

    def _advance(self, job: RenderJob, clause: Clause) -> Tensor:
        """The samples of the chunk; leaves the state ready for the one after it."""
        start, end = _sample(job.start, clause), _sample(job.start + job.length, clause)
        first_block, last_block = start // dsp.HOP, -(-end // dsp.HOP)
        done = max(0, first_block - 1) if job.fresh else _frames_for(start, clause)
        goal = _frames_for(end, clause)
        tail = torch.zeros_like(self._tail[0]) if job.fresh else self._tail[job.state]
        blocks = dsp.overlap(self._signal(job, clause.count, done, goal), tail) if goal > done else tail
        self._tail[job.state] = blocks[-dsp.TAIL :].clone()
        self._next[job.state] = torch.tensor([job.latents, end])
        lowest = done - (dsp.TAIL - 1)
        weight = dsp.overlap_weight(first_block, last_block, clause.count, blocks.device)
        samples = (blocks[first_block - lowest : last_block - lowest] / weight).reshape(-1)
        samples = samples[start - first_block * dsp.HOP : end - first_block * dsp.HOP]
        return samples * _ramp(start, end, clause, samples.device)

    def _signal(self, job: RenderJob, count: int, done: int, goal: int) -> Tensor:
        """Windowed signal of frames `done` to `goal`."""
        x = self._deep(job, count, done, goal)
        f0, phase = self._latents.f0[job.latents, :count], self._latents.phase[job.latents, :count]
        source = dsp.pulse_spectra(f0, phase, done, goal)
        return dsp.frames_of(self._net.spectra(x[:, :, -(goal - done) :]), source, self._noise[done:goal])

    def _deep(self, job: RenderJob, count: int, done: int, goal: int) -> Tensor:
        """Advance every layer just far enough for the last one to reach frame `goal`.

        Layer i must have given `reached(goal, i)` frames. It looks REACH frames ahead, so it takes that many more from
        the layer below, or zeros past the clause's end. The last 2 * REACH frames it took are kept for the next step.
        A fresh start begins CONTEXT frames early: what is wrong at its edge has left the window by frame `done`.
        """
        base = max(0, done - CONTEXT) if job.fresh else -1
        known = base if job.fresh else _reached(done, -1, count)
        x = self._latents.frames[job.latents : job.latents + 1, :, known : _reached(goal, -1, count)]
        for layer in range(1 + DECODER_BLOCKS):
            kept = self._in[job.state] if layer == 0 else self._blocks[job.state, layer - 1]
            # A fresh layer has zeros before the clause, which is the padding of the whole-clause convolution.
            before = x.new_zeros(1, len(kept), REACH) if job.fresh else kept[None]
            past_end = max(0, _reached(goal, layer, count) + REACH - count)
            if not job.fresh:
                past_end -= max(0, _reached(done, layer, count) + REACH - count)
            window = torch.cat([before, x, x.new_zeros(1, len(kept), past_end)], dim=2)
            kept.copy_(window[0, :, -2 * REACH :])
            # Near the clause's end the lower layers have given all they have; there is nothing to convolve.
            has_more = window.shape[2] > 2 * REACH
            x = self._net.layer(layer, window) if has_more else x.new_zeros(1, DECODER_CHANNELS, 0)
        return x


def _reached(goal: int, layer: int, count: int) -> int:
    """Frames layer `layer` (-1: the latents) has given when the last one has given `goal`."""
    return min(count, goal + REACH * (DECODER_BLOCKS - layer))


def _sample(ticks: int, clause: Clause) -> int:
    """Sample of the whole clause, padding included, at a playback position."""
    return clause.first * dsp.HOP + ticks // SAMPLE_TICKS


def _frames_for(sample: int, clause: Clause) -> int:
    """Frames that must be in for every sample before `sample` to be complete."""
    return min(clause.count, -(-sample // dsp.HOP) + dsp.LOOK_AHEAD)


def _ramp(start: int, end: int, clause: Clause, device: torch.device) -> Tensor:
    """Gain of samples `start` to `end`: 1, but for the first and last 5 ms of what is played."""
    first = clause.first * dsp.HOP
    last = (clause.first + clause.audible) * dsp.HOP
    sample = torch.arange(start, end, device=device, dtype=torch.float32)
    inside = torch.minimum(sample - first, last - 1 - sample) + 1
    return (inside / _RAMP_SAMPLES).clamp(max=1.0)
