"""One person's line: the front end's half of a session, without sockets.

Audio, page reports and engine news go in with `now`; facts for the engine and orders for the page come out of `drain`.

1. Playout freezes at once when somebody speaks over the reply; the engine decides afterwards (DESIGN §6).
2. The answer of the page to a hold is the authoritative position of the ear; everything else is an estimate.
3. Without reports of the page, positions come from a conservative clock and say so (`assumed`).
4. Nothing here waits: `tick` is called every 20 ms.
5. While somebody sees the character, the engine is told which sound stands at which pts: at each place where sound
   enters the track or does not follow what was there, and where it is stopped before its end.
6. A session that says that it speaks is watched (speaking.py): what its client is shown follows the ear, not the plan.

    FREE --voice over the reply--> HELD --engine: resume / advance, or hold_max--> FREE
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.ids import Epoch, ResponseId, SessionId, TurnId
from duplexd.media.echo import EchoReference, EchoRule
from duplexd.media.framer import AudioBlock, Framer
from duplexd.media.playout import FRAME, Entry, Pcm, Place, Playout, Taken
from duplexd.media.speaking import SpeakingWatch
from duplexd.media.uplink import Behind, Uplink
from duplexd.media.vad import GateRule, Started, Stopped, VoiceGate
from duplexd.messages import (
    VOICE_THRESHOLD,
    AdvanceEpoch,
    Cursor,
    CursorReported,
    HoldAnswered,
    HoldExpired,
    LatencyMeasured,
    PublishChunk,
    ResumePlayback,
    TextArrived,
    TurnOutcome,
    TurnSettled,
    TurnState,
    VoicePlaced,
    VoiceStarted,
    VoiceStopped,
)
from duplexd.units import (
    BLOCK_SAMPLES,
    INPUT_RATE,
    NANOS_PER_MS,
    Nanos,
    Span,
    Ticks,
    ms_from_nanos,
    ms_from_ticks,
    nanos_from_ticks,
    samples_from_ticks,
    ticks_from_ms,
    ticks_from_nanos,
    ticks_from_samples,
)

HOLD_MAX = Nanos(2000 * NANOS_PER_MS)
BIAS = ticks_from_ms(12)  #: decoded and unplayed audio the page's statistics do not show (measured: 12 ms, sd 5)
BOUND = ticks_from_ms(20)  #: published error of a position while it moves
ASSUMED_LAG = ticks_from_ms(250)  #: transport, jitter buffer and output of a listener who reports nothing
ASSUMED_BOUND = ticks_from_ms(120)
ASSUMED_NETWORK_MS = 50.0  #: of `ASSUMED_LAG`, one way; the rest is the listener's jitter buffer and output
ROUND_TRIP_MAX_MS = 4000.0  #: what a receiver's reports may claim
JITTER_MAX_MS = 500.0
REPORTS_MISSED_AFTER = Nanos(1500 * NANOS_PER_MS)
INPUT_LOST_AFTER = Nanos(700 * NANOS_PER_MS)
ECHO_GAIN_CANCELLED = 0.01  #: strongest echo assumed behind a canceller, as power: -20 dB (measured: -62 dB)
_BLOCK = ticks_from_samples(BLOCK_SAMPLES, INPUT_RATE)
TEXTS_MAX = 4  #: typed turns that wait for a cut; at the bound they all stop waiting, oldest first
MEASURED_MAX = 16  #: durations kept for whoever counts them; the oldest are lost
SENT_REMEMBERED = 100  #: frames; news of the engine that is two seconds late is no news any more
REST = Nanos(600 * NANOS_PER_MS)  #: after a false alarm the server's detector rests this long


class Block(msgspec.Struct, frozen=True):
    """For the engine: one block of the person's audio. The front end puts it into a slot."""

    pcm: NDArray[np.int16]
    span: Span
    captured_at: Nanos
    voice: float
    echo: float
    gap: bool


class Way(msgspec.Struct, frozen=True):
    """From the transport to the ear of a listener who reports nothing. An estimate, however it was come by."""

    lag: Ticks = ASSUMED_LAG
    bound: Ticks = ASSUMED_BOUND  #: of its error
    by_reports: bool = False  #: the network's part was measured by RTCP; else all of it is assumed


def way_by_reports(*, round_trip_ms: float, jitter_ms: float) -> Way:
    """The assumed way, longer by what the network is known to take beyond what was assumed of it; never shorter: what
    the listener's own buffers take is in no receiver report.

    The way there may be all of the round trip or half of it, so the bound grows as much as the lag.
    """
    round_trip = min(max(0.0, round_trip_ms), ROUND_TRIP_MAX_MS)
    jitter = min(max(0.0, jitter_ms), JITTER_MAX_MS)
    # A jitter buffer holds two to three times the jitter that it sees.
    beyond = ticks_from_ms(max(0.0, round_trip / 2 + 2 * jitter - ASSUMED_NETWORK_MS))
    return Way(Ticks(ASSUMED_LAG + beyond), Ticks(ASSUMED_BOUND + beyond), by_reports=True)


class HoldOrder(msgspec.Struct, frozen=True):
    hold: int
    epoch: Epoch


class ResumeOrder(msgspec.Struct, frozen=True):
    hold: int
    epoch: Epoch
    pts: int  #: unmute when this is heard


class FlushOrder(msgspec.Struct, frozen=True):
    hold: int
    epoch: Epoch
    pts: int
    at: Ticks  #: where the old epoch was cut


class StateShown(msgspec.Struct, frozen=True):
    """What the session shows has changed without the engine's saying so."""

    state: TurnState


class LatencyReady(msgspec.Struct, frozen=True):
    """One turn's latency in contiguous parts, milliseconds; they sum to the total."""

    turn: TurnId
    response: ResponseId
    parts: tuple[tuple[str, float], ...]


class Hold(msgspec.Struct):
    hold: int
    since: Nanos
    position: Ticks
    epoch: Epoch
    is_answered: bool = False  #: the page has muted itself for it
    is_cut: bool = False  #: the client stopped the reply: whatever the engine says, its rest is not played


class Muted(msgspec.Struct, frozen=True):
    """Where the sound ended, says a page that has muted itself."""

    pts: int
    bound: Ticks = BOUND  #: error the page publishes for it


class EarReport(msgspec.Struct, frozen=True):
    """What the page says it hears."""

    pts: int  #: heard at `observed_at`
    observed_at: Nanos
    network: Ticks  #: one way
    jitter_buffer: Ticks
    output: Ticks
    input: Ticks = Ticks(0)  #: from the microphone until a sample can leave


class Detector(Protocol):
    def probability(self, block: NDArray[np.float32]) -> float: ...


class Line:
    """One session's ears and mouth in the front end."""

    def __init__(
        self,
        *,
        session: SessionId,
        rate: int,
        detector: Detector,
        echo: EchoReference | None,
        allow_barge_in: bool,
        pts_at: Callable[[Nanos], int],
        gate: VoiceGate | None = None,
        hold_max: Nanos = HOLD_MAX,
        echo_warmup: Nanos = Nanos(0),
        rest: Nanos = REST,
        holds: bool = True,
    ) -> None:
        self.session = session
        self.playout = Playout(rate=rate)
        self.allow_barge_in = allow_barge_in
        self.holds = holds  #: a voice over the reply freezes it; else the reply plays on while the voice is judged
        self.silent = False  #: the page's sound is blocked: nothing is being heard
        self.client_stalled = False  #: the client reads nothing, or has gone and may come back
        self.speaking = SpeakingWatch()
        self.way = Way()  #: while nobody reports
        self.hold: Hold | None = None
        self.framer = Framer()
        self._detector = detector
        self._echo = echo
        self._gate = gate or VoiceGate()
        self._pts_at = pts_at
        self._hold_max = hold_max
        self._echo_warmup = echo_warmup  #: from the first sound on, the server's detector holds nothing
        self._first_sound_at: Nanos | None = None
        self._out: deque[Any] = deque()
        self._holds = 0
        self._page_voice = 0
        self._stops = 0
        self.next_pts = 0
        self._last_report: EarReport | None = None
        self._last_report_at = Nanos(0)
        self._last_audio_at = Nanos(0)
        self._input_at = (Nanos(0), Ticks(0))
        self._next_assumed = Nanos(0)
        self._rest = rest
        self._rest_until = Nanos(0)
        self._waiting_voice: Ticks | None = None  #: onset of a voice over the reply that could hold nothing yet
        self._after_advance: deque[TextArrived] = deque()
        self._latency: LatencyMeasured | None = None
        self._sent_at = Nanos(0)
        self._first_pts = 0  #: of the first sample of the reply whose latency is measured, once it was sent
        self._uplink = Uplink()
        self._late = Nanos(0)  #: of the newest packet, over the fastest
        #: what was measured lately, for whoever counts and clears it: end of a turn -> first sound of its reply in the
        #: track; order to a page -> it has muted itself
        self.first_sounds: deque[Nanos] = deque(maxlen=MEASURED_MAX)
        self.stops: deque[Nanos] = deque(maxlen=MEASURED_MAX)
        self._sent: deque[tuple[Nanos, int]] = deque(maxlen=SENT_REMEMBERED)  #: when content left, and how many samples
        self._seen = False
        self._voicing: Epoch | None = None  #: of the sound the engine has been told the place of
        self._placed: VoicePlaced | None = None  #: what it was told last

    def drain(self) -> list[Any]:
        """Facts for the engine and orders for the page, in order."""
        out = list(self._out)
        self._out.clear()
        return out

    def set_echo_cancellation(self, on: bool) -> None:
        """What the page's microphone really has: with a canceller far less can come back."""
        if self._echo is not None:
            self._echo.rule = EchoRule(gain_max=ECHO_GAIN_CANCELLED) if on else EchoRule()

    # The person's audio --------------------------------------------------------------------------------------------

    def on_audio(self, pcm: NDArray[np.int16], rtp: int, now: Nanos, *, late: Nanos = Nanos(0)) -> None:
        """Decoded audio, int16 (n,) at 16 kHz, with its RTP timestamp. `late`: over the fastest packet lately."""
        self._last_audio_at, self._late = now, late
        blocks = self.framer.push(pcm, rtp)
        self._input_at = (now, self.framer.position)
        self._take_blocks(blocks, now)

    def _take_blocks(self, blocks: list[AudioBlock], now: Nanos) -> None:
        for block in blocks:
            pcm = block.pcm.astype(np.float32) / 32768.0
            voice = 0.0 if block.gap else self._detector.probability(pcm)
            echo = self._echo.hear(pcm, block.start).share if self._echo is not None else 0.0
            if not block.gap:
                self._note_uplink(pcm, block.span, voice, now)
            # The voice decides first: when the block that made it a fact reaches the engine, the utterance is open.
            self._hear(self._gate.push(voice, block.span, echo=echo, gap=block.gap), now)
            self._out.append(Block(block.pcm, block.span, now, voice, echo, block.gap))

    def _note_uplink(self, pcm: NDArray[np.float32], span: Span, voice: float, now: Nanos) -> None:
        voiced = voice >= VOICE_THRESHOLD
        self._uplink.note(pcm, span, voiced=voiced, newest=self.framer.newest, late=self._late, now=now)

    def _hear(self, fact: Started | Stopped | None, now: Nanos) -> None:
        if isinstance(fact, Stopped):
            self._waiting_voice = None  # Its end concerns nobody else: the engine's silence clock runs on the blocks.
        elif isinstance(fact, Started):
            if self._may_hold(now):
                self._order_hold(now, at=fact.at, source="server")
            else:
                if self.holds and self.hold is None and self.audible(now):
                    self._waiting_voice = fact.at
                self._out.append(self._voice_started(now, at=fact.at, source="server", place=self._ear(now)))

    def _order_hold(self, now: Nanos, *, at: Ticks, source: str) -> None:
        """Freeze, and have the page mute itself and say where the ear stood."""
        self._begin_hold(now, at=at, source=source, place=self._ear(now))
        assert self.hold is not None
        self._out.append(HoldOrder(self.hold.hold, self.playout.epoch))

    def _may_hold(self, now: Nanos) -> bool:
        warm = self._first_sound_at is not None and now - self._first_sound_at >= self._echo_warmup
        return (
            self.holds
            and self.allow_barge_in
            and self.hold is None
            and warm
            and now >= self._rest_until
            and self.audible(now)
        )

    # The page ------------------------------------------------------------------------------------------------------

    def on_page_voice(self, voice_id: int, *, at: Muted | None, now: Nanos) -> None:
        """The page heard its own microphone; when it has muted itself, the ear stands `at`."""
        if voice_id <= self._page_voice:
            return
        self._page_voice = voice_id
        if at is None:
            return  # A hint the server's own detector confirms within a block or two.
        self._freeze(at, source="page", now=now)

    def on_stop(self, stop_id: int, *, at: Muted | None, now: Nanos) -> None:
        if stop_id <= self._stops:
            return
        self._stops = stop_id
        if self.hold is not None:
            self._insist(at, now)
        elif at is not None:
            self._freeze(at, source="stop", now=now)
        elif self.audible(now):
            self._order_hold(now, at=self.framer.position, source="stop")
        else:
            self._out.append(self._voice_started(now, at=self.framer.position, source="stop", place=self._ear(now)))

    def cut(self, position: Ticks | None, now: Nanos) -> None:
        """The client stops the reply: silence from here on. `position`: where its ear stands; None: it does not say.

        The engine's answer is a new epoch, or, when the reply had ended by itself meanwhile, a resume that plays
        nothing.
        """
        if self.hold is not None:
            self.hold.is_cut = True
            if position is not None:
                self.hold.position = position
            at = Place(self.hold.epoch, self.hold.position, Ticks(0))
            where = self.framer.position
            self._out.append(self._voice_started(now, at=where, source="stop", place=at, hold=self.hold.hold))
            return
        place = self._ear(now)
        epoch = self.playout.epoch
        if position is not None:
            place = Place(epoch, position, Ticks(0))
        elif place is None or place.epoch != epoch:
            place = Place(epoch, self.playout.begin, Ticks(0))  # Nothing of this epoch has been heard yet.
        bound = Ticks(0) if position is not None else self._bound_now(now)
        self._begin_hold(now, at=self.framer.position, source="stop", place=place, bound=bound, known=position)
        assert self.hold is not None
        self.hold.is_cut = True
        if position is None:
            self.answer_hold(self.hold.hold, now)

    def answer_hold(self, hold: int, now: Nanos) -> None:
        """Nobody at the other end can say where the ear stands: the estimate is the answer, and says that it is one."""
        if self.hold is None or self.hold.hold != hold:
            return
        assumed = self._reports_missed(now)
        cursor = Cursor(self.hold.epoch, self.hold.position, now)
        self._out.append(HoldAnswered(self.session, hold, cursor, self._bound_now(now), assumed=assumed))

    def _bound_now(self, now: Nanos) -> Ticks:
        return self.way.bound if self._reports_missed(now) else BOUND

    def heard_until(self, position: Ticks, now: Nanos) -> None:
        """The client says that its ear stands at this position of the present epoch."""
        pts = self.playout.pts_of(self.playout.epoch, position)
        if pts is not None:
            report = EarReport(pts, now, network=Ticks(0), jitter_buffer=Ticks(0), output=Ticks(0))
            self.on_report(report, now, muted=False, silent=False)

    def listen_anew(self, *, threshold: float | None = None) -> None:
        """What was being said ends here as far as the gate is concerned; a voice that goes on begins again."""
        rule = self._gate.rule
        if threshold is not None:
            rule = GateRule(start=max(threshold, 0.05), stop=max(0.04, min(threshold, threshold * 0.7)))
        self._gate = VoiceGate(rule)
        self._waiting_voice = None

    def settle_turn(self, news: TurnSettled) -> None:
        """The engine has settled the turn that was being spoken: where that has ended it, what goes on begins anew. Of
        a false alarm's voice the detector has heard enough for a while.
        """
        if news.outcome in (TurnOutcome.TAKEN, TurnOutcome.EMPTY):
            self._gate.close(news.span.end)

    def end_input(self, now: Nanos) -> None:
        """Nothing more comes for the moment: the samples that wait for a whole block leave as one."""
        rest = self.framer.newest - self.framer.position
        if rest > 0:
            self._take_blocks(self.framer.advance(Ticks(self.framer.position + _BLOCK)), now)

    def _insist(self, at: Muted | None, now: Nanos) -> None:
        """A stop during a hold: the hold stands, and its voice is not judged any more (a cough would be resumed)."""
        assert self.hold is not None
        place = None if at is None else self.playout.place(self._clamp(at.pts))
        if place is None or place.epoch != self.hold.epoch:
            place = Place(self.hold.epoch, self.hold.position, Ticks(0))
        self.hold.position = place.position
        hold = self.hold.hold
        bound = at.bound if at is not None else BOUND
        where = self.framer.position
        self._out.append(self._voice_started(now, at=where, source="stop", place=place, hold=hold, bound=bound))

    def _freeze(self, muted: Muted, *, source: str, now: Nanos) -> None:
        if self.hold is not None:
            # The server froze first; the page's word on where the ear stands is the better one.
            self.on_hold_answer(self.hold.hold, at=muted, now=now)
            return
        at = Ticks(max(0, self.framer.position - ticks_from_ms(96)))
        place = self.playout.place(self._clamp(muted.pts))
        self._begin_hold(now, at=at, source=source, place=place, bound=muted.bound)

    def _begin_hold(
        self,
        now: Nanos,
        *,
        at: Ticks,
        source: str,
        place: Place | None,
        bound: Ticks = BOUND,
        known: Ticks | None = None,
    ) -> None:
        self._holds += 1
        self._waiting_voice = None
        position = place.position if place is not None else Ticks(0)
        self.hold = Hold(self._holds, now, position, self.playout.epoch)
        self.playout.hold()
        self._stop_voice()
        started = self._voice_started(now, at=at, source=source, place=place, hold=self._holds, bound=bound)
        self._out.append(started if known is None else msgspec.structs.replace(started, assumed=False))

    def _voice_started(
        self, now: Nanos, *, at: Ticks, source: str, place: Place | None, hold: int = 0, bound: Ticks = BOUND
    ) -> VoiceStarted:
        return VoiceStarted(
            self.session,
            at,
            self._cursor(place, now),
            hold > 0,
            hold,
            source,
            now,
            assumed=self._reports_missed(now),
            bound=_bound(place, bound),
        )

    def on_hold_answer(self, hold: int, *, at: Muted, now: Nanos) -> None:
        """The page muted for this hold and says where the ear stands."""
        if self.hold is None or self.hold.hold != hold:
            return
        place = self.playout.place(self._clamp(at.pts))
        if not self.hold.is_answered:
            self.hold.is_answered = True
            self.stops.append(Nanos(now - self.hold.since))
        if place is not None and place.epoch == self.hold.epoch:
            self.hold.position = place.position
        self._out.append(HoldAnswered(self.session, hold, self._cursor(place, now), _bound(place, at.bound)))

    def on_report(self, report: EarReport, now: Nanos, *, muted: bool, silent: bool) -> None:
        """Ten times a second: what is heard now. A muted page hears nothing, whatever its clock says."""
        before = self._last_report
        self._last_report, self._last_report_at = report, now
        self.silent = silent
        if muted or silent or self.hold is not None:
            return
        place = self.playout.place(self._clamp(report.pts))
        # What lies between transport and ear, network included: the two clocks of one and the same sample.
        way = Ticks(max(0, self._pts_at(report.observed_at) - report.pts))
        self._report(place, report.observed_at, now, buffer=way, bound=BOUND, assumed=False)
        self._finish_latency(report, before)

    def say(self, text: str, key: str, now: Nanos) -> None:
        """Typed words interrupt like a voice that needs no judgement, so the ear's position is asked for first."""
        fact = TextArrived(self.session, text, key)
        if self.hold is None and self.audible(now) and self.allow_barge_in:
            self._wait_for_cut(fact)
            self._order_hold(now, at=self.framer.position, source="stop")
        elif self.hold is not None:
            self._wait_for_cut(fact)
        else:
            self._out.append(fact)

    def _wait_for_cut(self, fact: TextArrived) -> None:
        if len(self._after_advance) >= TEXTS_MAX:
            self._release_texts()
        self._after_advance.append(fact)

    # The engine ----------------------------------------------------------------------------------------------------

    def publish(self, news: PublishChunk, pcm: Pcm) -> bool:
        accepted = self.playout.publish(epoch=news.epoch, span=news.span, pcm=pcm, last=news.last)
        self._foresee_voice()
        return accepted

    def advance(self, news: AdvanceEpoch) -> None:
        if news.epoch > self.playout.epoch:
            self._stop_voice()
            self.playout.stale_samples += sum(samples for at, samples in self._sent if at > news.decided_at)
            self._sent.clear()
        self.playout.advance(news.epoch, news.at)
        # Also when the front end had begun this epoch by itself: what is played next is not held by anybody.
        self.playout.held = False
        self.hold = self._waiting_voice = None
        self._latency = None
        self._out.append(FlushOrder(news.hold, news.epoch, self.next_pts, news.at))
        self._release_texts()

    def resume(self, news: ResumePlayback, now: Nanos) -> None:
        if self.hold is None or self.hold.hold != news.hold:
            return
        if self.hold.is_cut:
            self.playout.discard()
            self.hold = self._waiting_voice = None
            self._release_texts()
            return
        self._resume(now)

    def _resume(self, now: Nanos) -> None:
        assert self.hold is not None
        self.playout.resume(self.hold.position)
        self._foresee_voice()
        self._out.append(ResumeOrder(self.hold.hold, self.playout.epoch, self.next_pts))
        self._rest_until = Nanos(now + self._rest)
        self.hold = self._waiting_voice = None
        self._release_texts()

    def _release_texts(self) -> None:
        self._out.extend(self._after_advance)
        self._after_advance.clear()

    def enter(self, state: TurnState, now: Nanos) -> None:
        """The session is in this state from now on, says the engine."""
        self.speaking.enter(state, now)

    def measure(self, news: LatencyMeasured) -> None:
        """The engine's part of a turn's latency; the rest is added when its first sample has been heard."""
        self._latency, self._sent_at = news, Nanos(0)

    def _note_first_sound(self, news: LatencyMeasured, pts: int, now: Nanos) -> None:
        self._sent_at, self._first_pts = now, pts
        self.first_sounds.append(Nanos(now - news.ended_at))

    # The transport and the clock -----------------------------------------------------------------------------------

    def pull(self, pts: int, now: Nanos) -> Pcm:
        """The frame at `pts`: content or silence."""
        before = self.playout.sent_samples
        frame = self.playout.pull(pts)
        self._note_sent(now, before)
        self.next_pts = pts + FRAME
        self._place_voice(pts)
        if self._echo is not None and frame.any():
            self._echo.play(_at_input_rate(frame, self.playout.rate), self._input_index(now))
        if self._latency is not None and self._sent_at == 0 and not self.playout.held and frame.any():
            silent = int(np.flatnonzero(frame)[0])
            self._note_first_sound(self._latency, pts + int(ticks_from_samples(silent, self.playout.rate)), now)
        if self._first_sound_at is None and frame.any():
            self._first_sound_at = now
        return frame

    def _note_sent(self, now: Nanos, before: int) -> None:
        """Remembers what left, for an epoch that turns out to have ended before it did."""
        if self.playout.sent_samples > before:
            self._sent.append((now, self.playout.sent_samples - before))

    # What is seen ----------------------------------------------------------------------------------------------------

    def begin_view(self) -> None:
        """Somebody sees the character from now on: places of its voice are facts for the engine (module rule 5)."""
        self._seen, self._voicing = True, None

    def end_view(self) -> None:
        self._seen, self._voicing = False, None

    def _foresee_voice(self) -> None:
        """Sound that has just come enters the track with the next frame: the face is told up to 20 ms earlier so."""
        entry = self.playout.coming(self.next_pts) if self._seen else None
        if entry is not None:
            self._tell_place(entry)

    def _place_voice(self, pts: int) -> None:
        """What entered the track with the frame at `pts`; also what plays on there and the engine does not know of."""
        if not self._seen:
            return
        placed = self.playout.placed
        if not placed and self._voicing is None:
            playing = self.playout.playing(pts)
            placed = [playing] if playing is not None else []
        for entry in placed:
            self._tell_place(entry)

    def _tell_place(self, entry: Entry) -> None:
        fact = VoicePlaced(self.session, entry.epoch, entry.position, Ticks(entry.pts))
        if self._voicing is None or fact != self._placed:
            self._out.append(fact)
        self._voicing, self._placed = entry.epoch, fact

    def _stop_voice(self) -> None:
        """Nothing of the sound that plays is sent from the next frame on."""
        if self._seen and self._voicing is not None:
            self._out.append(VoiceStopped(self.session, self._voicing, Ticks(self.next_pts)))
        self._voicing = None

    # The clock -------------------------------------------------------------------------------------------------------

    def take(self, now: Nanos) -> Taken | None:
        """All content that waits, piece by piece, for a transport without a clock: it is played behind what was taken
        before, or now.
        """
        pts = max(self.next_pts, self._pts_at(now))
        before = self.playout.sent_samples
        taken = self.playout.take(pts)
        if taken is None:
            return None
        self._note_sent(now, before)
        self.next_pts = pts + int(ticks_from_samples(len(taken.pcm), self.playout.rate))
        if self._echo is not None:
            ahead = nanos_from_ticks(max(0, pts - self._pts_at(now)))
            sound = _at_input_rate(taken.pcm, self.playout.rate)
            self._echo.play(sound, self._input_index(Nanos(now + ahead)))
        if self._latency is not None and self._sent_at == 0:
            self._note_first_sound(self._latency, pts, now)
        self._first_sound_at = self._first_sound_at or now
        return taken

    def _input_index(self, now: Nanos) -> int:
        """Sample of the person's audio that arrives now. What is sent now comes back a round trip later."""
        since, position = self._input_at
        return samples_from_ticks(position + ticks_from_nanos(max(0, now - since)), INPUT_RATE)

    def tick(self, now: Nanos) -> None:
        """Deadlines: a hold nobody decided, a voice that may hold now, reports that stay away, a microphone that fell
        silent, a character that says that it speaks and is not heard.
        """
        if self.hold is not None and now - self.hold.since >= self._hold_max:
            self._expire_hold(now)
        if self._waiting_voice is not None and self._may_hold(now):
            self._order_hold(now, at=self._waiting_voice, source="server")
        if now >= self._next_assumed and self._reports_missed(now):
            self._assume(now)
        if self._last_audio_at and now - self._last_audio_at >= INPUT_LOST_AFTER:
            since, position = self._input_at
            lost = ticks_from_nanos(now - since - INPUT_LOST_AFTER // 2)
            self._take_blocks(self.framer.advance(Ticks(position + max(0, lost))), now)
        has_reason = self.hold is not None or self.silent or self.client_stalled
        if self.speaking.look(self._silent_for(now), now, has_reason=has_reason):
            self._out.append(StateShown(self.speaking.shown))

    def _silent_for(self, now: Nanos) -> Nanos:
        """How long ago the ear reached the end of what there was; since ever, where there was nothing."""
        place = self.playout.place(self._ear_pts(now))
        return now if place is None else nanos_from_ticks(place.past)

    def _expire_hold(self, now: Nanos) -> None:
        """The engine did not decide in time: the front end alone resumes, or flushes while the voice goes on."""
        assert self.hold is not None
        resumed = not self._gate.speaking
        self._out.append(HoldExpired(self.session, self.hold.hold, resumed))
        if resumed:
            self._resume(now)
        else:
            self.playout.advance(Epoch(self.playout.epoch + 1), self.hold.position)
            self._out.append(FlushOrder(self.hold.hold, self.playout.epoch, self.next_pts, self.hold.position))
            self.hold = self._waiting_voice = None
            self._release_texts()

    def _assume(self, now: Nanos) -> None:
        self._next_assumed = Nanos(now + 100 * NANOS_PER_MS)
        if self.hold is None and not self.silent:
            place = self.playout.place(self._pts_at(now) - self.way.lag)
            self._report(place, now, now, buffer=self.way.lag, bound=self.way.bound, assumed=True)

    # Positions -----------------------------------------------------------------------------------------------------

    def _report(
        self, place: Place | None, observed_at: Nanos, now: Nanos, *, buffer: Ticks, bound: Ticks, assumed: bool
    ) -> None:
        if place is None:
            return
        self._out.append(
            CursorReported(
                self.session,
                Cursor(place.epoch, place.position, observed_at),
                buffer,
                Nanos(max(0, now - observed_at)),
                _bound(place, bound),
                assumed,
            )
        )

    def _ear(self, now: Nanos) -> Place | None:
        """Where the ear is now."""
        return self.playout.place(self._clamp(self._ear_pts(now)))

    def _ear_pts(self, now: Nanos) -> int:
        """What the ear hears now, by the last report carried forward, or by the conservative clock."""
        report = self._last_report
        if report is None or self._reports_missed(now):
            return self._pts_at(now) - self.way.lag
        return report.pts + ticks_from_nanos(now - report.observed_at)

    def _clamp(self, pts: int) -> int:
        """Nothing is heard that was not sent."""
        return min(pts, self.next_pts)

    def _reports_missed(self, now: Nanos) -> bool:
        return self._last_report is None or now - self._last_report_at >= REPORTS_MISSED_AFTER

    def _cursor(self, place: Place | None, now: Nanos) -> Cursor:
        if place is None:
            return Cursor(self.playout.epoch, Ticks(0), now)
        return Cursor(place.epoch, place.position, now)

    def audible(self, now: Nanos) -> bool:
        """Content is playing, or may still be on its way to the ear."""
        if not self.playout.quiet:
            return True
        place = self._ear(now)
        return place is not None and place.position < self.playout.delivered and place.past == 0

    # Latency -------------------------------------------------------------------------------------------------------

    def _finish_latency(self, report: EarReport, before: EarReport | None) -> None:
        """Once the ear has reached the reply's first sample: when it did is measured, not added up."""
        if self._latency is None or self._sent_at == 0 or report.pts < self._first_pts:
            return
        news, self._latency = self._latency, None
        heard_at = _reached_at(self._first_pts, before, report)
        behind = self._uplink.behind(news.ended_at)
        parts = _parts_before(behind, report) + _parts_made(news, behind, sent_at=self._sent_at)
        parts += _parts_after(report, Nanos(heard_at - self._sent_at))
        self._out.append(LatencyReady(news.turn, news.response, tuple((name, round(ms, 1)) for name, ms in parts)))


def _reached_at(pts: int, before: EarReport | None, after: EarReport) -> Nanos:
    """When the ear reached `pts`, by the reports around it: between two of them sound may have stood still."""
    if before is None or not before.pts < pts <= after.pts or before.observed_at >= after.observed_at:
        return Nanos(after.observed_at - nanos_from_ticks(Ticks(after.pts - pts)))
    took = after.observed_at - before.observed_at
    return Nanos(before.observed_at + took * (pts - before.pts) // (after.pts - before.pts))


Parts = list[tuple[str, float]]  #: names and milliseconds


def _parts_before(behind: Behind | None, report: EarReport) -> Parts:
    """From the microphone to here; nothing of a turn that was typed."""
    if behind is None:
        return []
    capture = ms_from_ticks(Ticks(report.input + behind.filling))
    return [("capture", capture), ("uplink", ms_from_ticks(report.network) + ms_from_nanos(behind.late))]


def _parts_made(news: LatencyMeasured, behind: Behind | None, *, sent_at: Nanos) -> Parts:
    """What the engine took. It counts from the last block with voice; the voice itself ended a little before."""
    began = news.ended_at if behind is None else news.ended_at - nanos_from_ticks(behind.tail)
    marks = [began, news.decided_at, news.prefilled_at, news.worded_at, news.published_at, sent_at]
    names = ["end_of_turn", "prefill", "first_word", "first_audio", "pacing"]
    spans = zip(names, marks, marks[1:], strict=False)
    return [(name, ms_from_nanos(Nanos(max(0, later - earlier)))) for name, earlier, later in spans]


def _parts_after(report: EarReport, downlink: Nanos) -> Parts:
    """From the track to the ear: the jitter buffer has what neither network nor output device explain."""
    network, output = ms_from_ticks(report.network), ms_from_ticks(report.output)
    buffer = max(0.0, ms_from_nanos(downlink) - network - output)
    return [("network", network), ("jitter_buffer", buffer), ("output", output)]


def _at_input_rate(pcm: Pcm, rate: int) -> NDArray[np.float32]:
    """The frame at 16 kHz, float32: good enough to compare loudness by band."""
    count = len(pcm) * INPUT_RATE // rate
    at = np.arange(count) * (rate / INPUT_RATE)
    return np.asarray(np.interp(at, np.arange(len(pcm)), pcm) / 32768.0, dtype=np.float32)


def _bound(place: Place | None, bound: Ticks) -> Ticks:
    """Once silence has been heard for longer than the error, everything before it certainly was."""
    return Ticks(0) if place is not None and place.past > bound else bound
