"""A session's face: pictures that are due by the clock, made of the voice that is sent and of the person who speaks.

1. The eye is where the clock says (`PictureTimeline`): no report is needed, and a frame that comes late is dropped.
2. Without a voice the face lives on by itself, no further ahead than a chunk. With one it runs as far ahead as the
   voice is known, and asks for it that much earlier (`voice_ahead`); a chunk that is due before all of its voice is
   known is cut short, and the next one goes on there.
   From the person's falling silent to the reply's first sound pictures are drawn later, and every second one.
3. A voice that begins, stops or goes on elsewhere makes every frame that was not sent be made again, from the first
   that can still be made in time. Motion goes on from the last frame before it (cut: at the cursor, by frames).
4. A chunk hears and feels what it did when it was begun, in every stage.
5. A fault in any stage ends the face, never the voice: the last picture stays, and it is counted.

    view up -> anchors -> GENERATE -> REFINE -> DECODE, two pictures at a time -> PublishFrames
               voice: PublishChunk -> OVERHEAR -> ring, placed by VoicePlaced
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from duplexd.channel import PICTURES_PER_SLOT
from duplexd.engine.chunk import Chunk, ChunkState
from duplexd.engine.feeling import mood_of
from duplexd.engine.governor import HUSHED, LEVELS, Fidelity, Governor
from duplexd.engine.monitor import Monitor
from duplexd.engine.ownvoice import OwnVoice
from duplexd.engine.pipeline import Made, Passing, Pipeline
from duplexd.engine.policy import Gate
from duplexd.engine.stores import FaceStores, Stores
from duplexd.engine.timeline import PictureTimeline
from duplexd.engine.work import Launch, Need, StageFailed, StageFinished, Work
from duplexd.errors import ArenaFull
from duplexd.ids import ChunkId, ConditionVersion, Epoch, FenceId, SessionId, SlotId, WorkId
from duplexd.memory.classes import CacheClass
from duplexd.memory.histories import GENERATE, REFINE, Histories, HistoryStage
from duplexd.memory.ledger import Lease
from duplexd.memory.window import Window
from duplexd.messages import (
    CutFrames,
    FramesSent,
    MediaArrived,
    PersonSeen,
    PictureShortage,
    PublishChunk,
    PublishFrames,
    TurnState,
    ViewEnded,
    ViewStarted,
    VoicePlaced,
    VoiceStopped,
)
from duplexd.streams.graph import FacePlan, ModelPlan
from duplexd.streams.stage import (
    DecodeJob,
    Failed,
    GenerateJob,
    OverhearJob,
    ReferenceJob,
    RefineJob,
    Role,
    Spoken,
)
from duplexd.units import (
    INPUT_RATE,
    Nanos,
    Span,
    Ticks,
    samples_from_ticks,
    ticks_from_ms,
    ticks_from_nanos,
)

#: How much earlier than the way through the stages takes a chunk is begun: what their times vary by. What the person
#: says is heard until 320 ms before a chunk, so nothing is gained by less.
AHEAD_IDLE = ticks_from_ms(200)
AHEAD_VOICE = ticks_from_ms(400)  #: the same while the voice of it is known
DUE_MARGIN = ticks_from_ms(60)  #: the same where a chunk waits for more of its voice to be known
LEAD_MARGIN = ticks_from_ms(20)  #: on top of what the stages take on average, where frames are made again
LEAD_MAX = ticks_from_ms(600)
DRAWN_IDLE = ticks_from_ms(320)  #: how far pictures lie ahead of the eye
DRAWN_VOICE = ticks_from_ms(640)
DRAWN_HUSHED = ticks_from_ms(200)
#: Of a chunk that are drawn at once. A part is begun when its end comes within reach: were it longer, what is drawn
#: 200 ms ahead (`DRAWN_HUSHED`) would have 40 ms left for its first picture.
PART_FRAMES_MAX = 2
SHOWN_MIN = 3  #: frames that a chunk is worth being made for, while the voice behind them is not known yet
#: Of the person's ring: copies that are on their way may overwrite the oldest of it while a stage reads.
RING_GUARD = INPUT_RATE
#: Chunks of its own voice that a face has not heard yet, each of which holds an output slot. At the bound it misses the
#: newest: half of a session's slots are the voice's own, whatever becomes of the face.
UNHEARD_MAX = 4
MOODS_MAX = 64  #: chunks of voice whose mood is remembered: more than a ring of six seconds holds
MOOD_LINGERS = ticks_from_ms(1000)  #: after the last word
THOUGHT = 0.6  #: how much a face shows that it is thinking
PictureFact = ViewStarted | ViewEnded | VoicePlaced | VoiceStopped | FramesSent | PersonSeen | PictureShortage
PICTURE_FACTS = (ViewStarted, ViewEnded, VoicePlaced, VoiceStopped, FramesSent, PersonSeen, PictureShortage)


class _Senses(msgspec.Struct, frozen=True):
    """What one chunk hears and feels, in every stage."""

    spoken: tuple[Spoken, ...]
    heard_from: int
    heard_end: int
    mood: tuple[float, ...]


class _Motion(msgspec.Struct):
    """One chunk of motion that later ones may be made on."""

    start: Ticks
    epoch: Epoch
    frames: int  #: of it that are, or will be, seen
    refined: bool = False
    seen: bool = False


class _Drawn(msgspec.Struct):
    """What a chunk holds until its last picture is drawn."""

    lease: Lease
    senses: _Senses


class _Flight(msgspec.Struct):
    """One launch that has not come back."""

    role: Role
    passing: Passing | None = None  #: None: anchors, or own voice
    anchors: HistoryStage | None = None
    slot: int = -1  #: picture slot that is being filled
    voice: tuple[PublishChunk, ...] = ()


class Face:
    """Args: plan: of a family with a face. ring: the person's sound. `emit` takes orders for the front end.

    Raises:  SessionRefused when the arena has no room for one more.
    """

    def __init__(
        self,
        *,
        session: SessionId,
        plan: ModelPlan,
        stores: Stores,
        monitor: Monitor,
        governor: Governor,
        emit: Callable[[Any], None],
        ring: Lease,
        now: Nanos,
    ) -> None:
        assert plan.face is not None
        assert stores.face is not None
        self.id = session
        self.ended = ""  #: why there is no face any more
        self.viewed = False
        self.hushed = False  #: a first sound of the character is awaited: pictures take less time
        self.copied_until = Ticks(0)  #: of the person's sound, on the input timeline
        self._model = plan
        self._plan: FacePlan = plan.face
        self._stores = stores
        self._own: FaceStores = stores.face
        self._monitor = monitor
        self._governor = governor
        self._emit = emit
        self._ring = ring
        self._voice_ring = stores.lease(self._own.voice, session, CacheClass.INGEST, "overhear")
        self.timeline = PictureTimeline(ahead=AHEAD_IDLE)
        self.pipeline = Pipeline(
            session=session,
            stages=[plan.need(role) for role in (Role.GENERATE, Role.REFINE, Role.DECODE)],
            length=None,
            lookahead=_budget,
            times=monitor.times,
            fidelity=governor.fidelity,
            timeline=self.timeline,
            part=self._part,
            now=now,
        )
        self.voice = OwnVoice(kept=Ticks(self._plan.voice_before + self._plan.chunk))
        self._histories: Histories | None = None
        self._anchors_missing: list[HistoryStage] = []
        self._motions: dict[ChunkId, _Motion] = {}  # as the histories hold them
        self._drawn: dict[ChunkId, _Drawn] = {}
        self._flights: dict[WorkId, _Flight] = {}
        # Own voice on its way into the ring, at most `UNHEARD_MAX` with what a lane has.
        self._unheard: deque[PublishChunk] = deque()
        self._unheard_since = now
        self._input: tuple[Ticks, Nanos] | None = None  # newest sound of the person: its end, and when that was
        self._origin: Nanos | None = None
        self._sent = Ticks(0)
        self._condition = dict.fromkeys(self._plan.conditions, 0.0)
        # What chunks of the voice feel, by position; looked up only while a chunk lies in the ring or is on its way.
        self._moods: deque[tuple[Span, Mapping[str, float]]] = deque(maxlen=MOODS_MAX)
        self._felt_until = Ticks(0)  # pts up to which a mood stays although nothing is said
        self._due: Nanos | None = None  # when a chunk is begun with whatever voice is known
        self._flowing = False  # frames follow each other: what is missing between them was dropped
        self._viewed_since = now

    def _part(self, fidelity: Fidelity) -> Ticks:
        """As many pictures as a slot holds, but none that lasts so long that its first would wait for its last."""
        pictures = min(PICTURES_PER_SLOT, max(1, PART_FRAMES_MAX // fidelity.stride))
        return Ticks(pictures * fidelity.stride * self._plan.frame)

    # Facts -----------------------------------------------------------------------------------------------------------

    def handle(self, fact: PictureFact, now: Nanos) -> None:
        match fact:
            case ViewStarted():
                self._begin_view(fact.origin, now)
            case ViewEnded():
                self._end_view(now)
            case VoicePlaced():
                if self.voice.place(fact.epoch, fact.position, fact.pts):
                    self._make_again(fact.pts, now)
            case VoiceStopped():
                self.voice.stop(fact.pts)
                self._make_again(fact.pts, now)
            case FramesSent():
                self._sent = Ticks(max(self._sent, fact.until))
            case PersonSeen():
                self._look_at(fact)
                self._monitor.note(now, self.id, "person_seen" if fact.present else "person_gone")
            case PictureShortage():
                self._governor.note_sent(fact.share)

    def note_input(self, fact: MediaArrived) -> None:
        """The person's sound up to `span.end` was said at `captured_at`."""
        self._input = (fact.span.end, fact.captured_at)

    def overhear(self, news: PublishChunk, clause: str, now: Nanos) -> None:
        """The voice is about to be sent: the face hears it first, from the slot that carries it. `clause`: whose words
        it says; they give the mood of what is seen with it.
        """
        if not self.viewed or self.ended:
            return
        if len(self._unheard) + sum(len(flight.voice) for flight in self._flights.values()) >= UNHEARD_MAX:
            self._monitor.count("face_voice_missed")  # Its lane is stuck: better a deaf face than a voice that waits.
            return
        self._moods.append((news.span, mood_of(clause, self._plan.moods)))
        if not self._unheard:
            self._unheard_since = now
        self._stores.overhear(news.slot)
        self._unheard.append(news)
        self.voice.expect(news.epoch, news.span.end)  # It may be placed before it lies in the ring.

    def advance(self, epoch: Epoch, at: Ticks) -> None:
        """An interruption of the voice. Where it stopped is told by `VoiceStopped`; the pictures are cut then."""
        self.voice.advance(epoch, at)
        self._moods.clear()  # Positions are given again; and who is interrupted stops laughing.
        self._felt_until = Ticks(0)
        for news in [news for news in self._unheard if news.epoch != epoch]:
            self._unheard.remove(news)
            self._stores.overheard(news.slot)

    def show(self, state: TurnState) -> None:
        """What the conversation is doing, as far as a face shows it."""
        self._feel(thought=THOUGHT if state is TurnState.THINKING else 0.0)

    def _look_at(self, fact: PersonSeen) -> None:
        """Eyes go to where the person is, as far as the family's eyes were taught to turn.

        A face looks out of the picture: what is to its own right is on the left of whoever looks at it, and `look_x`
        counts to the right of the picture.
        """
        far = self._plan.look_max
        x, y = (-fact.x, fact.y) if fact.present else (0.0, 0.0)
        self._feel(look_x=min(far, max(-far, x)), look_y=min(far, max(-far, y)))

    def _feel_words(self, start: Ticks) -> None:
        """The mood of a chunk at `start`: that of the clause said in its middle, or at its beginning. It stays for a
        moment after its last word, whether silence follows or words without a mood.
        """
        middle = Ticks(start + self._plan.chunk // 2)
        said = next((at for pts in (middle, start) if (at := self.voice.said_at(pts)) is not None), None)
        mood = None if said is None else next((mood for span, mood in self._moods if said in span), None)
        if mood:
            self._felt_until = Ticks(start + self._plan.chunk + MOOD_LINGERS)
        elif start < self._felt_until:
            return
        self._feel(**(dict.fromkeys((words.mood for words in self._plan.moods), 0.0) | dict(mood or {})))

    def _feel(self, **given: float) -> None:
        """A new version of the condition, taken at the next chunk's boundary."""
        new = self._condition | {
            name: min(1.0, max(-1.0, value)) for name, value in given.items() if name in self._condition
        }
        if new != self._condition:
            self._condition = new
            self.pipeline.condition = ConditionVersion(self.pipeline.condition + 1)

    # The view --------------------------------------------------------------------------------------------------------

    def _begin_view(self, origin: Nanos, now: Nanos) -> None:
        if self.ended:
            return
        self._end_view(now)
        if self._origin != origin:
            self._origin = origin
            self._drop_histories()  # Another clock: its frames do not follow those that were seen.
        self.timeline.begin(origin)
        self.voice.clear()
        self._sent = Ticks(0)
        self.viewed, self._viewed_since, self._flowing = True, now, False

    def _open_histories(self, now: Nanos) -> bool:
        """Anchors are prefilled once, and pinned. False while work still holds what an earlier view had."""
        if self._histories is None:
            if self._flights:
                return False
            own, epoch = self._own, self.timeline.epoch
            try:
                self._histories = Histories(own.noisy, own.clean, self.id, self._plan.history, epoch=epoch)
            except ArenaFull as full:
                self._end(str(full), now)
                return False
            self._anchors_missing = [GENERATE, REFINE]
        return True

    def _drop_histories(self) -> None:
        if self._histories is not None:
            self._histories.close(after=self._fences)
            self._histories, self._anchors_missing = None, []
            self._motions.clear()

    @property
    def _fences(self) -> tuple[FenceId, ...]:
        return tuple(FenceId(work) for work in self._flights)

    def _end_view(self, now: Nanos) -> None:
        """Nobody looks: what was not seen is taken back, and nothing new is begun."""
        if not self.viewed:
            return
        at = self._aligned(max(self._sent, self.timeline.playback(now)))
        self._cut(at, now, parts=False)
        self.viewed = False
        while self._unheard:
            self._stores.overheard(self._unheard.popleft().slot)

    # Made again ------------------------------------------------------------------------------------------------------

    def _make_again(self, pts: Ticks, now: Nanos) -> None:
        """Own voice is another from `pts` on than the frames were made for."""
        if not self.viewed or self.ended:
            return
        at = self._aligned(max(pts, self._sent, self.timeline.playback(now) + self._lead))
        if self.timeline.generation > at:
            self._cut(at, now)

    def _cut(self, at: Ticks, now: Nanos, *, parts: bool = True) -> None:
        """Frames from `at` on are another future; motion goes on from the last frame before it."""
        beyond = max(0, self.timeline.published - at)
        for passing in self.pipeline.advance(at, now, parts=parts):
            self._let_go(passing.chunk.chunk_id, passing.work)
        self._roll_back(at)
        if beyond:
            self._monitor.count("face_frames_remade", beyond // self._plan.frame)
            self._emit(CutFrames(self.id, self.timeline.epoch, at))

    def _roll_back(self, at: Ticks) -> None:
        """Keys of the frames before `at` stay, in both histories; all later ones are masked or go."""
        if self._histories is None:
            return
        kept = [name for name, motion in self._motions.items() if motion.refined and motion.start < at]
        keep, tokens = (kept[-1] if kept else None), None
        if keep is not None:
            motion = self._motions[keep]
            frames = (at - motion.start) // self._plan.frame
            if frames < motion.frames:
                motion.frames, tokens = frames, frames * self._plan.frame_tokens
            elif motion.frames < self._plan.frames:
                tokens = motion.frames * self._plan.frame_tokens
        self._histories.interrupt(self.timeline.epoch, keep=keep, tokens=tokens)
        self._histories.slide()
        self._forget_motions()

    def _forget_motions(self) -> None:
        assert self._histories is not None
        resident = set(self._histories.chunks())
        self._motions = {name: motion for name, motion in self._motions.items() if name in resident}

    def _let_go(self, chunk: ChunkId, work: WorkId | None) -> None:
        """Nothing more of this chunk is drawn."""
        drawn = self._drawn.pop(chunk)
        self._own.motion.discard(drawn.lease, after=None if work is None else FenceId(work))

    # What it wants ---------------------------------------------------------------------------------------------------

    def offers(self, now: Nanos) -> Iterator[Work]:
        """Work that could start now, at most one piece a stage."""
        if self._unheard and not self._busy(Role.OVERHEAR):
            yield self._work(Role.OVERHEAR, Need.INPUT, self._unheard_since)
        self._due = None
        if not self.viewed or self.ended or not self._open_histories(now):
            return
        self._see(now)
        for stage in self._anchors_missing:
            role = Role.GENERATE if stage == GENERATE else Role.REFINE
            if not self._busy(role):
                yield self._work(role, Need.CHUNK, self._viewed_since)
        self._aim(now)
        decode = self._model.need(Role.DECODE).name
        for work in self.pipeline.offers(now):
            if work.stage != decode or self._own.pictures.available(self.id):
                yield work

    def timer(self, now: Nanos) -> Nanos | None:
        """When to look again without an event; asked after `offers`."""
        if not self.viewed or self.ended or self._histories is None:
            return None
        times = (self._due, self.pipeline.begins_at(now), self.pipeline.part_at(now))
        return min((at for at in times if at is not None and at > now), default=None)

    def _work(self, role: Role, need: Need, ready_at: Nanos) -> Work:
        return Work(session=self.id, stage=self._model.need(role).name, role=role, need=need, ready_at=ready_at)

    def _busy(self, role: Role) -> bool:
        return any(flight.role is role for flight in self._flights.values())

    def _aim(self, now: Nanos) -> None:
        """Where the next chunk begins, how long it is and how far ahead; its length is None while none may begin."""
        pipeline, timeline, plan = self.pipeline, self.timeline, self._plan
        playback = timeline.playback(now)
        self.voice.forget(playback)
        speaks = self.voice.heard_at(playback)
        timeline.ahead = AHEAD_VOICE if speaks else AHEAD_IDLE
        pipeline.parts_ahead = DRAWN_VOICE if speaks else DRAWN_HUSHED if self.hushed else DRAWN_IDLE
        pipeline.length, pipeline.fidelity = None, self._fidelity
        if pipeline.fidelity.still or not self._own.pictures.available(self.id):
            self._flowing = False  # What nobody copies out, or asks for, is not late.
            return
        if self._has_room:
            self._skip(playback)
            frames = self._frames_known(pipeline.fidelity, playback, now)
            pipeline.length = Ticks(frames * plan.frame) if frames else None
            self._feel_words(timeline.generation)

    @property
    def _fidelity(self) -> Fidelity:
        found = self._governor.fidelity
        return LEVELS[HUSHED] if self.hushed and found is LEVELS[0] else found

    @property
    def _has_room(self) -> bool:
        """A chunk that begins now can be carried through, and what it follows is finished as far as it is seen."""
        newest, own = self.pipeline.newest, self._own
        if newest is not None and newest.chunk.span.length < self._plan.chunk and not self._refined(newest.chunk):
            return False
        unseen = sum(not motion.seen for motion in self._motions.values())
        return (
            not self._anchors_missing
            and unseen < self._plan.history.lookahead
            and all(_free(ledger, self.id) for ledger in (own.noisy, own.clean, own.motion))
        )

    def _refined(self, chunk: Chunk) -> bool:
        motion = self._motions.get(chunk.chunk_id)
        return motion is not None and motion.refined

    def _skip(self, playback: Ticks) -> None:
        """Frames that could not be shown in time are not made."""
        timeline = self.timeline
        first = self._aligned(playback + self._lead)
        if timeline.generation >= first:
            return
        if self._flowing:
            frames = (first - timeline.generation) // self._plan.frame
            self._monitor.count("face_frames_dropped", frames)
            self._monitor.count("face_pictures_planned", -(-frames // max(1, self._fidelity.stride)))
        timeline.generation = first

    def _frames_known(self, fidelity: Fidelity, playback: Ticks, now: Nanos) -> int:
        """Frames of the next chunk whose own voice is known; 0 to wait for more of it."""
        plan, start = self._plan, self.timeline.generation
        awaited = self.voice.awaited_from(playback)
        if awaited is None:
            return plan.frames
        known = (awaited - plan.voice_after - start) // plan.frame
        if known >= plan.frames:
            return plan.frames
        due = self.timeline.due(Ticks(start - self._lead - DUE_MARGIN))
        if due > now:
            self._due = due
            return 0
        if known < SHOWN_MIN:  # At least what is said while it is seen; how it goes on from there is not known.
            known = (awaited - start) // plan.frame
        # A picture that stays for one more frame is better than a mouth that shuts in the middle of a word.
        return 0 if known < SHOWN_MIN else min(plan.frames, -(-known // fidelity.stride) * fidelity.stride)

    @property
    def voice_ahead(self) -> Ticks:
        """How much earlier than for the ear alone the voice must be there, so that whole chunks are made of it."""
        if not self.viewed or self.ended or self._governor.fidelity.still:
            return Ticks(0)
        return Ticks(self._plan.chunk + self._plan.voice_after + self._lead)

    @property
    def _lead(self) -> Ticks:
        """From now to the first picture of a chunk that is begun now, on average."""
        return Ticks(min(LEAD_MAX, ticks_from_nanos(self.pipeline.way()) + LEAD_MARGIN))

    def _aligned(self, pts: int) -> Ticks:
        """The first frame that begins at or after a pts."""
        return Ticks(-(-pts // self._plan.frame) * self._plan.frame)

    def _see(self, now: Nanos) -> None:
        """Chunks whose last frame has passed the eye may slide out of the histories."""
        assert self._histories is not None
        playback, plan = self.timeline.playback(now), self._plan
        self.pipeline.chunks.hear(playback)
        passed = [
            (name, motion)
            for name, motion in self._motions.items()
            if motion.refined and not motion.seen and motion.start + motion.frames * plan.frame <= playback
        ]
        for name, motion in passed:
            self._histories.hear(name, motion.epoch)
            motion.seen = True
        if passed:
            self._histories.slide()
            self._forget_motions()

    # Launching -------------------------------------------------------------------------------------------------------

    def launch(self, work: Work, work_id: WorkId, now: Nanos) -> Launch | None:
        """Turn an offer into an order; None when others have taken since what it needs, and it is tried again."""
        if work.role is Role.DECODE and not self._own.pictures.available(self.id):
            self._monitor.count("face_launches_short_of_slots")
            return None
        self._stores.fence_begun(FenceId(work_id))
        if work.role is Role.OVERHEAR:
            jobs, flight = self._overhear_jobs(), _Flight(Role.OVERHEAR)
            flight.voice = tuple(self._unheard.popleft() for _ in jobs)
            self._unheard_since = now
        elif self._anchors_missing and work.role is not Role.DECODE:
            stage = GENERATE if work.role is Role.GENERATE else REFINE
            self._anchors_missing.remove(stage)
            jobs, flight = (self._reference(stage),), _Flight(work.role, anchors=stage)
        else:
            passing = self.pipeline.launch(work, work_id, now)
            flight = _Flight(work.role, passing)
            jobs = (self._job(flight, passing, FenceId(work_id), now),)
        self._flights[work_id] = flight
        return Launch(work_id, work.stage, jobs)

    def _who(self, chunk: ChunkId = ChunkId(0), epoch: Epoch | None = None, condition: int = 0) -> dict[str, Any]:
        return {
            "session": self.id,
            "epoch": self.timeline.epoch if epoch is None else epoch,
            "chunk": chunk,
            "condition": ConditionVersion(condition),
        }

    def _overhear_jobs(self) -> tuple[Any, ...]:
        count = min(len(self._unheard), self._model.need(Role.OVERHEAR).batch_max)
        return tuple(
            OverhearJob(
                **self._who(news.chunk, news.epoch),
                slot=news.slot,
                ring=self._voice_ring.slot,
                start=news.span.start,
                samples=news.samples,
            )
            for news in list(self._unheard)[:count]
        )

    def _reference(self, stage: HistoryStage) -> ReferenceJob:
        assert self._histories is not None
        slots = tuple(SlotId(lease.slot) for lease in self._histories.anchors(stage))
        return ReferenceJob(**self._who(), slots=slots, character=self._plan.character)

    def _job(self, flight: _Flight, passing: Passing, fence: FenceId, now: Nanos) -> Any:
        match flight.role:
            case Role.GENERATE:
                return self._generate_job(passing, fence, now)
            case Role.REFINE:
                return self._refine_job(passing, fence)
        flight.slot = self._picture_slot()
        return self._decode_job(passing, flight.slot)

    def _picture_slot(self) -> int:
        slot = self._own.pictures.take(self.id)
        assert slot is not None, "offered without a slot"
        return slot

    def _generate_job(self, passing: Passing, fence: FenceId, now: Nanos) -> GenerateJob:
        assert self._histories is not None
        chunk = passing.chunk
        lease = self._stores.lease(
            self._own.motion, self.id, CacheClass.CURRENT, "generate", chunk=chunk.chunk_id, epoch=chunk.epoch
        )
        window = self._histories.begin(chunk.chunk_id, chunk.epoch, fence=fence)
        assert window is not None, f"offered without room: {self._histories.refusal}"
        self._drawn[chunk.chunk_id] = _Drawn(lease, self._senses(chunk.span.start))
        frames = chunk.span.length // self._plan.frame
        self._motions[chunk.chunk_id] = _Motion(chunk.span.start, chunk.epoch, frames)
        self._flowing = True
        return GenerateJob(**self._motion_fields(passing, window), steps=passing.fidelity.steps)

    def _refine_job(self, passing: Passing, fence: FenceId) -> RefineJob:
        assert self._histories is not None
        chunk = passing.chunk
        window = self._histories.refine(chunk.chunk_id, chunk.epoch, fence=fence)
        return RefineJob(**self._motion_fields(passing, window))

    def _motion_fields(self, passing: Passing, window: Window) -> dict[str, Any]:
        chunk = passing.chunk
        drawn = self._drawn[chunk.chunk_id]
        senses = drawn.senses
        return {
            **self._who(chunk.chunk_id, chunk.epoch, passing.condition),
            "window": tuple(SlotId(lease.slot) for lease in window.leases),
            "tokens": window.tokens,
            "motion": drawn.lease.slot,
            "start": chunk.span.start,
            "voice": self._voice_ring.slot,
            "spoken": senses.spoken,
            "ring": self._ring.slot,
            "heard_end": senses.heard_end,
            "heard_from": senses.heard_from,
            "mood": senses.mood,
        }

    def _decode_job(self, passing: Passing, slot: int) -> DecodeJob:
        chunk, frame = passing.chunk, self._plan.frame
        return DecodeJob(
            **self._who(chunk.chunk_id, chunk.epoch, passing.condition),
            motion=self._drawn[chunk.chunk_id].lease.slot,
            character=self._plan.character,
            first=(passing.part.start - chunk.span.start) // frame,
            stop=(passing.part.end - chunk.span.start) // frame,
            slot=slot,
            stride=passing.fidelity.stride,
        )

    def _senses(self, start: Ticks) -> _Senses:
        first = start - self._plan.voice_before
        spoken = tuple(piece for piece in self.voice.spoken() if piece.span.end > first)
        return _Senses(spoken, *self._person_heard(start), tuple(self._condition.values()))

    def _person_heard(self, start: Ticks) -> tuple[int, int]:
        """Samples of the person's ring that a chunk at `start` hears: those said until `listen_delay` before it, as far
        as they have come.
        """
        if self._input is None:
            return 0, 0
        end, at = self._input
        said = Ticks(end + start - self._plan.listen_delay - self.timeline.playback(at))
        copied = samples_from_ticks(self.copied_until, INPUT_RATE)
        oldest = max(0, copied - self._model.ring_samples + RING_GUARD)
        return oldest, min(samples_from_ticks(said, INPUT_RATE), copied)

    # Stages came back ------------------------------------------------------------------------------------------------

    def owns(self, work: WorkId) -> bool:
        return work in self._flights

    def finished(self, fact: StageFinished | StageFailed, now: Nanos) -> None:
        flight = self._flights.pop(fact.work)
        self._stores.fence_passed(FenceId(fact.work))
        for news in flight.voice:
            self._stores.overheard(news.slot)
        if (reason := _failure(fact)) or self.ended:
            self._give_back(flight)
            self._end(f"stage {flight.role.value} failed: {reason}", now)
        elif flight.role is Role.OVERHEAR:
            for news in flight.voice:
                self.voice.learn(news.epoch, news.span, last=news.last)
        elif flight.passing is not None:
            self._passed(fact.work, flight, flight.passing, now)

    def _passed(self, work: WorkId, flight: _Flight, passing: Passing, now: Nanos) -> None:
        dead = passing.chunk.state is ChunkState.RETIRING
        made = self.pipeline.finish(work, now)
        if dead:
            self._give_back(flight)
        elif flight.role is Role.DECODE:
            assert made is not None
            self._publish(made, flight, now)
        else:
            self._moved(flight.role, passing, now)

    def _moved(self, role: Role, passing: Passing, now: Nanos) -> None:
        assert self._histories is not None
        chunk = passing.chunk
        self._histories.finish(chunk.chunk_id, chunk.epoch, GENERATE if role is Role.GENERATE else REFINE)
        if role is Role.REFINE:
            self._motions[chunk.chunk_id].refined = True
            if chunk.span.length < self._plan.chunk and passing is self.pipeline.newest:
                self._cut(chunk.span.end, now)  # Made for a voice that was not known to its end: the rest is masked.

    def _publish(self, made: Made, flight: _Flight, now: Nanos) -> None:
        if made.last:
            self._let_go(made.chunk.chunk_id, None)
        span, frame = made.span, self._plan.frame
        frames = span.length // frame
        if not frames:
            self._give_back(flight)
            return
        late = min(frames, max(0, -(-(self.timeline.playback(now) - span.start) // frame)))
        stride = made.fidelity.stride
        self._monitor.count("face_frames", frames)
        self._monitor.count("face_frames_late", late)
        self._monitor.count("face_pictures_planned", -(-frames // stride))
        if stride > self._governor.fidelity.stride > 0:
            self._monitor.count("face_frames_hushed", frames)
        self._emit(
            PublishFrames(
                self.id,
                made.chunk.chunk_id,
                made.chunk.epoch,
                span.start,
                -(-frames // stride),
                flight.slot,
                Ticks(stride * frame),
                made.condition,
            )
        )

    def _give_back(self, flight: _Flight) -> None:
        if flight.slot >= 0:
            self._own.pictures.give_back(flight.slot)

    def _end(self, reason: str, now: Nanos) -> None:
        """No more pictures in this session; the last one stays."""
        if self.ended:
            return
        self.ended = reason
        self._monitor.count("face_faults")
        self._monitor.note(now, self.id, "face_ended")
        self.close()

    # Leaving ---------------------------------------------------------------------------------------------------------

    def close(self) -> tuple[FenceId, ...]:
        """Everything goes back, behind the work that still uses it; returns the fences of that work."""
        while self._unheard:
            self._stores.overheard(self._unheard.popleft().slot)
        fences = self._fences
        self._drop_histories()
        for drawn in self._drawn.values():
            self._own.motion.discard(drawn.lease, after=fences)
        self._drawn.clear()
        self.viewed = False
        self.pipeline.length = None
        return fences

    def orphan(self, work: WorkId) -> None:
        """Work that came back after the close: its slots go home."""
        flight = self._flights.pop(work)
        self._stores.fence_passed(FenceId(work))
        for news in flight.voice:
            self._stores.overheard(news.slot)
        self._give_back(flight)

    @property
    def in_flight(self) -> bool:
        return bool(self._flights)


def _budget(gate: Gate) -> Ticks | None:
    """How far ahead chunks run is the picture's own affair: whatever the policy, they are due by the clock."""
    return gate.budget


def _free(ledger: Any, session: SessionId) -> bool:
    return bool(ledger.free_count > 0 and ledger.owned(session) < ledger.spec.session_slots)


def _failure(fact: StageFinished | StageFailed) -> str:
    if isinstance(fact, StageFailed):
        return fact.reason or "no reason given"
    return next((result.reason for result in fact.results if isinstance(result, Failed)), "")
