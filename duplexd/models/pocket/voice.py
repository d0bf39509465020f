"""The pocket voice: a talker (clause of text -> latents and word times) and a vocoder (latents -> 24 kHz samples).

1. A clause is talked whole, because its networks look at all of it, and rendered in chunks of any length.
2. What is played starts with the first sound and ends a punctuation's worth of silence after the last: the
   voice itself pads a clause with 0.3 s before and up to 0.5 s after, which would be added to every reply. The padding
   stays in the latents, so that the vocoder sees what it was trained on; it is not played.
3. A clause that ends within a phrase is talked with the word behind it, and the next with the words before: so neither
   its durations nor its tune know of the cut, and what is played begins and ends at the edge of a word. At that edge
   the two are blended over 10 ms, the pulses of the second in step with those of the first.
4. The vocoder keeps, per layer, the six frames its next step still needs, and the half-summed end of the signal. So a
   chunk costs its own length, not its length plus 27 frames of context on each side, and chunked == whole.

    frame      0 ......... first ........................ first + audible ..... count
               padding     played: ticks 0 ............... length               padding
    played     block j = samples 300 j .. 300 j + 299 of the clause, one block per frame
    Where a clause goes on from another, or another from it, words take the place of the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from duplexd import weights
from duplexd.ids import SlotId
from duplexd.memory.arena import Shelf, sizes_of
from duplexd.memory.layout import FieldSpec, PartitionSpec, shelf_partition
from duplexd.models.pocket import dsp
from duplexd.models.pocket.phonemes import Reader, Reading, WordPlace
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
#: Over which a clause and the one it goes on from are blended; less than a frame.
_SEAM_SAMPLES = 240


def latent_fields() -> tuple[FieldSpec, ...]:
    """Fields of the `latents` partition: one slot holds one clause."""
    return (
        FieldSpec("frames", (LATENT_CHANNELS, FRAMES_MAX)),
        FieldSpec("f0", (FRAMES_MAX,)),  # Hz
        FieldSpec("phase", (FRAMES_MAX,), "float64"),  # cycles of the pulse train before each frame, fraction only
        FieldSpec("clause", (5,), "int64"),  # count, first, audible: see the drawing above; follows, leads
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
        FieldSpec("voice_seam", (_SEAM_SAMPLES,)),  # what of a clause is blended with the next; zeros: nothing
        FieldSpec("voice_pulse", (1,), "float64"),  # cycles of its pulse train there, fraction only; below 0: none
    )


class Clause(msgspec.Struct, frozen=True):
    """The numbers of a latents slot: frames, and whether no pause lies at its edges."""

    count: int
    first: int
    audible: int
    follows: bool = False  #: it goes on from the clause before
    leads: bool = False  #: the next goes on from it


class _Timing(NamedTuple):
    ids: Tensor
    encoded: Tensor
    steps: Tensor  # of each id

    @property
    def frames(self) -> int:
        return STEP_FRAMES * int(self.steps.sum())


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
        passage = passage_of(self._reader, job.text, before=job.before, after=job.after)
        if not passage.is_spoken:
            return TalkResult(job.session, Ticks(0), passage.silence)
        timing = self._durations(passage.reading)
        if timing.frames > FRAMES_MAX and (job.before or job.after):
            # The words around it would not fit beside it: it is spoken as if it stood alone.
            passage = passage_of(self._reader, job.text)
            timing = self._durations(passage.reading)
        if timing.frames > FRAMES_MAX:
            return self._too_long(job, Ticks(timing.frames * FRAME_TICKS))
        ids, encoded, steps = timing.ids, timing.encoded, timing.steps
        reading, lengths = passage.reading, steps.tolist()
        f0, frames = self._net.latents(ids, encoded, steps)
        if not bool(torch.isfinite(frames).all()):
            return Failed(job.session, f"the voice gave no finite latents for {job.text!r}")
        loud = (frames[-1] > LOUD).tolist()
        clause = passage.cut_out(trim(loud, reading.pause), lengths)
        if clause is None:
            return Failed(job.session, f"the voice makes no sound of {job.text!r}")
        length = Ticks(clause.audible * FRAME_TICKS)
        if length > self.clause_max:
            return self._too_long(job, length)
        self._keep(job.latents, clause, f0=f0, frames=frames)
        spans = word_spans(reading, lengths, loud, clause, words=passage.own_words)
        return TalkResult(job.session, length, passage.within(spans))

    def _durations(self, reading: Reading) -> _Timing:
        ids = torch.tensor([reading.ids], device=self._latents.frames.device)
        if len(reading.ids) * STEP_FRAMES > FRAMES_MAX:
            # Each phoneme takes a step at least: this cannot fit, so the network need not be asked.
            return _Timing(ids, ids, torch.ones_like(ids[0]))
        with torch.inference_mode():
            steps, encoded = self._net.durations(ids)
        return _Timing(ids, encoded, steps)

    def _keep(self, slot: SlotId, clause: Clause, *, f0: Tensor, frames: Tensor) -> None:
        self._latents.frames[slot, :, : clause.count] = frames
        self._latents.f0[slot, : clause.count] = f0
        self._latents.phase[slot, : clause.count] = dsp.start_phases(f0)
        self._latents.clause[slot] = torch.tensor(msgspec.structs.astuple(clause))

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


class Passage(msgspec.Struct, frozen=True):
    """How a clause is read among the words around it."""

    reading: Reading
    own_words: range  #: which of its words are the clause's
    offset: int  #: characters before the clause
    follows: bool  #: spoken words stand before it
    leads: bool  #: and behind it

    @property
    def own(self) -> tuple[WordPlace, ...]:
        return self.reading.words[self.own_words.start : self.own_words.stop]

    @property
    def is_spoken(self) -> bool:
        return any(word.start_id < word.end_id for word in self.own)

    @property
    def silence(self) -> tuple[WordSpan, ...]:
        """Its words, when none of them is spoken."""
        return self.within([WordSpan(w.start_char, w.end_char, Ticks(0), Ticks(0)) for w in self.own])

    def within(self, spans: Sequence[WordSpan]) -> tuple[WordSpan, ...]:
        """The same spans, by the characters of the clause alone."""
        moved = msgspec.structs.replace
        return tuple(moved(s, start_char=s.start_char - self.offset, end_char=s.end_char - self.offset) for s in spans)

    def cut_out(self, whole: Clause | None, steps: Sequence[int]) -> Clause | None:
        """What is played: from the edge of its first spoken word to that of the one behind it, where there are words
        around; None: nothing.
        """
        if whole is None:
            return None
        first, end = whole.first, whole.first + whole.audible
        if self.follows:
            own = next(word for word in self.own if word.start_id < word.end_id)
            first = STEP_FRAMES * sum(steps[: own.start_id])
        if self.leads:
            words = self.reading.words[self.own_words.stop :]
            behind = next(word for word in words if word.start_id < word.end_id)
            end = STEP_FRAMES * sum(steps[: behind.start_id])
        if end <= first:
            return None
        return Clause(whole.count, first, end - first, self.follows, self.leads)


def passage_of(reader: Reader, text: str, *, before: str = "", after: str = "") -> Passage:
    """Read a clause between the words that are said before and behind it."""
    parts = [part for part in (before, text, after) if part]
    reading = reader.read(" ".join(parts))
    start = len(before.split())
    own = range(start, start + len(text.split()))
    spoken = [word.start_id < word.end_id for word in reading.words]
    return Passage(
        reading=reading,
        own_words=own,
        offset=len(before) + 1 if before else 0,
        follows=any(spoken[: own.start]),
        leads=any(spoken[own.stop :]),
    )


def word_spans(
    reading: Reading, steps: Sequence[int], loud: Sequence[bool], clause: Clause, *, words: range | None = None
) -> tuple[WordSpan, ...]:
    """When each whitespace-delimited word is spoken, relative to the first audible sample.

    Spans are in order and within the clause; the first spoken word starts at 0. A word that another follows without a
    pause lasts until that one starts. Before a pause, a word ends with its last loud frame, after it the next starts
    with its first, and the pause belongs to no word: a word counts as heard as soon as it is. A word that is not spoken
    has an empty span.

    Args: steps: 25 ms steps per id; loud: per frame; clause: what is played of it; words: which of them, if not all.
    """
    edges = [0]
    for step in steps:
        edges.append(edges[-1] + step * STEP_FRAMES)
    spans: list[WordSpan] = []
    at = 0
    for index in words if words is not None else range(len(reading.words)):
        word = reading.words[index]
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
        self._seam: Tensor = arena.field("state", "voice_seam")
        self._pulse: Tensor = arena.field("state", "voice_pulse")
        self._net = self._given or load_nets(weights.path("hibari"))[1]
        shelf = Shelf(arena, self.shelf())
        shelf.place_all(self._net)
        self._noise = shelf.place(dsp.noise_table(FRAMES_MAX, self._latents.frames.device))
        shelf.close()

    @torch.inference_mode()
    def run(self, jobs: Sequence[RenderJob], media: Any) -> list[RenderResult | Failed]:
        return [self._render(job, media) for job in jobs]

    def _render(self, job: RenderJob, media: Any) -> RenderResult | Failed:
        count, first, audible, follows, leads = self._latents.clause[job.latents].tolist()
        clause = Clause(count, first, audible, bool(follows), bool(leads))
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
        ends = end == (clause.first + clause.audible) * dsp.HOP
        spare = _SEAM_SAMPLES if ends and clause.leads else 0  # For the next clause to be blended with.
        if begins := job.start == 0:
            self._join(job, clause)
        samples = self._samples(job, clause, start, end + spare)
        self._next[job.state] = torch.tensor([job.latents, end])
        samples, seam = samples[: end - start], samples[end - start :]
        samples = samples * _ramp(start, end, clause, samples.device)
        if begins and clause.follows:
            blended = min(_SEAM_SAMPLES, len(samples))
            samples[:blended] += self._seam[job.state, :blended]
        if ends:
            self._leave(job, clause, seam)
        return samples

    def _join(self, job: RenderJob, clause: Clause) -> None:
        """Move the pulses of a clause so that at its first frame they stand where those before the seam stopped."""
        seam = float(self._pulse[job.state])
        if not (clause.follows and seam >= 0):
            self._seam[job.state], self._pulse[job.state] = 0.0, -1.0
            return
        phases = self._latents.phase[job.latents, : clause.count]
        phases += seam - float(phases[clause.first])
        phases -= phases.floor()

    def _leave(self, job: RenderJob, clause: Clause, seam: Tensor) -> None:
        """The end of a clause: what the next one needs to go on from it; nothing where a pause follows."""
        if not clause.leads:
            self._seam[job.state], self._pulse[job.state] = 0.0, -1.0
            return
        fall = torch.arange(_SEAM_SAMPLES, 0, -1, device=seam.device, dtype=torch.float32) / (_SEAM_SAMPLES + 1)
        self._seam[job.state] = seam * fall
        self._pulse[job.state] = self._latents.phase[job.latents, clause.first + clause.audible]

    def _samples(self, job: RenderJob, clause: Clause, start: int, end: int) -> Tensor:
        """Samples `start` to `end` of the clause, padding included, without ramps; the state then stands at `end`."""
        first_block, last_block = start // dsp.HOP, -(-end // dsp.HOP)
        done = max(0, first_block - 1) if job.fresh else _frames_for(start, clause)
        goal = _frames_for(end, clause)
        tail = torch.zeros_like(self._tail[0]) if job.fresh else self._tail[job.state]
        blocks = dsp.overlap(self._signal(job, clause.count, done, goal), tail) if goal > done else tail
        self._tail[job.state] = blocks[-dsp.TAIL :].clone()
        lowest = done - (dsp.TAIL - 1)
        weight = dsp.overlap_weight(first_block, last_block, clause.count, blocks.device)
        samples = (blocks[first_block - lowest : last_block - lowest] / weight).reshape(-1)
        return samples[start - first_block * dsp.HOP : end - first_block * dsp.HOP]

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
    """Gain of samples `start` to `end`: 1, but for the first and last 5 ms of what is played, or the first 10 ms where
    it is blended with the clause before.
    """
    first = clause.first * dsp.HOP
    last = (clause.first + clause.audible) * dsp.HOP
    sample = torch.arange(start, end, device=device, dtype=torch.float32)
    rises = (sample - first + 1) / (_SEAM_SAMPLES + 1 if clause.follows else _RAMP_SAMPLES)
    falls = torch.full_like(sample, torch.inf) if clause.leads else (last - sample) / _RAMP_SAMPLES
    return torch.minimum(rises, falls).clamp(max=1.0)
