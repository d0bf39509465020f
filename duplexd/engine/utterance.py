"""What the person is saying: which stretch of audio the ears re-encode, which words are stable, when the turn may end.

1. The ears re-encode a growing window that never exceeds `listen_max`; earlier speech is frozen as text at a pause,
   so a partial costs after a minute what it did after eight seconds (DESIGN §5 rule 7).
2. A word is stable when two consecutive partials of one window agree on it and it is not the last (§5 rule 17). What
   was stable is not taken back by a reading that finds no word at all: then the words known so far stand. Over a reply
   it is: there words may be an echo's, and taking them back is what keeps a false alarm one.
3. The silence clock starts at the last voiced block and is reset by voice.
4. Positions are ticks of the input timeline.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from duplexd.media.endpoint import Judged, ending_of
from duplexd.units import Nanos, Span, Ticks, ticks_from_ms

PREFIX = ticks_from_ms(320)  #: audio before the onset that belongs to the first word
HELD_PREFIX = ticks_from_ms(100)  #: the same over a reply, where earlier audio may be an echo
PARTIAL_EVERY = ticks_from_ms(320)  #: new audio before the window is encoded again
#: the same while nothing else needs the machine: the sooner the last words are known, the sooner they are answered
PARTIAL_EAGER = ticks_from_ms(160)
PAUSE_MIN = ticks_from_ms(160)  #: silence at which a window may be cut
FREEZE_AT = ticks_from_ms(6000)  #: a window longer than this is frozen at its last pause
#: A voice detector lets go some 0.1 s late, and the ears read each 160 ms: what is unread behind the words when silence
#: begins is not a word.
LATE_RELEASE = ticks_from_ms(160)
TAIL = ticks_from_ms(200)  #: silence after the last voiced block that the final window includes
FROZEN_MAX = 8000  #: characters of one turn that are kept; beyond it a quarter is forgotten at once, oldest first
FINAL_MISSES_MAX = 2  #: times the last words of a turn are tried; then the turn ends without them

_WORD = re.compile(r"[\w']+")


class ListenKind(Enum):
    PARTIAL = "partial"
    FREEZE = "freeze"  #: the words of this window will not be heard again
    FINAL = "final"  #: everything voiced is inside the window


class ListenWindow(msgspec.Struct, frozen=True):
    kind: ListenKind
    span: Span


class Utterance:
    """One turn of the person while it is being spoken."""

    def __init__(self, *, onset: Ticks, start: Ticks, listen_max: Ticks) -> None:
        self.onset = onset
        self.window_start = start
        self.listen_max = listen_max
        self.frozen = ""  #: text whose audio is not encoded any more
        self.partial = ""  #: newest text of the window
        self.stable = ""  #: agreed prefix of the window's text
        self.repeated = False  #: the newest two texts of the window are the same words
        self.certainty = 0.0  #: how sure the ears are of the newest text; 0 is certain
        self.voiced_until = onset
        self.loud_until = onset  #: like `voiced_until`, but sound explained as the character's own counts too
        self.voiced_at = Nanos(0)  #: when the last voiced sample was captured
        self.voiced_ticks = 0
        self.echo_ticks = 0
        self.heard_until = start  #: end of the newest encoded window
        self.input_end = onset
        self.judged: list[Judged] = []  #: answers of the judge since the last voice
        self.judging: Ticks | None = None  #: silence at which the running judgement was asked
        self.answered: tuple[Ticks, float] | None = None  #: an answer that waits for the words of the same audio
        self.listening: ListenWindow | None = None
        self.ended = False  #: the client says that nothing more belongs to it
        self._final_misses = 0
        self._pauses: list[Ticks] = []
        self._quietest: tuple[float, Ticks] = (2.0, start)

    # audio ---------------------------------------------------------------------------------------------------------

    def take(self, span: Span, *, voiced: bool, echo: bool, voice: float, captured_at: Nanos) -> None:
        """One block of input audio has arrived."""
        self.input_end = span.end
        if voiced or echo:
            self.loud_until = span.end
        if voiced:
            if span.start - self.voiced_until >= PAUSE_MIN:
                self._pauses.append(Ticks((span.start + self.voiced_until) // 2))
            self.voiced_until, self.voiced_at = span.end, captured_at
            self.voiced_ticks += span.length
            self.judged.clear()
            self.answered = None
        elif echo:
            self.echo_ticks += span.length
        if span.end - self.window_start > self.listen_max // 2 and voice < self._quietest[0]:
            self._quietest = (voice, Ticks((span.start + span.end) // 2))

    @property
    def silence(self) -> Ticks:
        return Ticks(max(0, self.input_end - self.voiced_until))

    @property
    def quiet(self) -> Ticks:
        """Since any sound, the person's or the character's own."""
        return Ticks(max(0, self.input_end - self.loud_until))

    # windows -------------------------------------------------------------------------------------------------------

    def wanted(self, copied_until: Ticks, *, final: bool, every: Ticks = PARTIAL_EVERY) -> ListenWindow | None:
        """The next window to encode, or None while there is less than `every` new audio in it."""
        if self.listening is not None:
            return None
        end = min(copied_until, self.input_end)
        if end - self.window_start > FREEZE_AT and (cut := self._cut_point(end)) is not None:
            return ListenWindow(ListenKind.FREEZE, Span(self.window_start, cut))
        if final:
            end = min(end, Ticks(self.voiced_until + TAIL))
            done = not self.unheard or end < self.voiced_until
            return None if done else ListenWindow(ListenKind.FINAL, Span(self.window_start, end))
        fresh = min(end, Ticks(self.voiced_until + TAIL)) - self.heard_until
        if fresh < every or self.voiced_until <= self.heard_until:
            return None
        return ListenWindow(ListenKind.PARTIAL, Span(self.window_start, end))

    def _cut_point(self, end: Ticks) -> Ticks | None:
        """The last pause, or at the bound the quietest block of the window's second half."""
        pauses = [p for p in self._pauses if self.window_start + self.listen_max // 8 < p < end - PAUSE_MIN]
        if pauses:
            return pauses[-1]
        return self._quietest[1] if end - self.window_start >= self.listen_max - 2 * PARTIAL_EVERY else None

    def listen(self, window: ListenWindow) -> None:
        self.listening = window

    def hear(self, text: str, certainty: float = 0.0, *, over_reply: bool = False) -> None:
        """The running window came back as text."""
        if not text and self.stable and not over_reply:
            self._stand()
            return
        window, self.listening = self.listening, None
        if window is None:
            return
        self.certainty, self._final_misses = certainty, 0
        if window.kind is ListenKind.FREEZE:
            self.frozen = newest(join(self.frozen, text), FROZEN_MAX)
            self.window_start = window.span.end
            self._pauses = [p for p in self._pauses if p > window.span.end]
            self._quietest = (2.0, window.span.end)
            self.partial = self.stable = ""
            self.repeated = False
            self.heard_until = window.span.end  # The rest was encoded as part of a longer window: encode it again.
            return
        self.stable = agreed(self.partial, text)
        self.repeated = wording(self.partial) == wording(text)
        self.partial = text
        self.heard_until = window.span.end

    def miss(self) -> None:
        """The running window failed. A final one is tried again, else the words known so far stand for it, and none
        becomes stable by that.
        """
        kind = self.listening.kind if self.listening is not None else None
        if kind is ListenKind.FINAL:
            self._final_misses += 1
            if self._final_misses < FINAL_MISSES_MAX:
                self.listening = None
                return
        self._stand()

    def _stand(self) -> None:
        """The running window counts as read, with the words known so far; none becomes stable by that."""
        kind = self.listening.kind if self.listening is not None else None
        stable = self.stable
        self.hear(self.partial, self.certainty)
        if kind is not ListenKind.FREEZE:
            self.stable = stable

    # end of turn ----

    def answer(self, probability: float) -> None:
        """The judge has answered; void when speech has resumed meanwhile, since it was about another silence."""
        asked, self.judging = self.judging, None
        if asked is not None and self.silence >= asked:
            self.answered = (asked, probability)

    def weigh(self) -> None:
        """Both witnesses have spoken: the judge, and the words as they stand now that all is transcribed."""
        if self.answered is not None:
            silence, probability = self.answered
            self.answered = None
            self.judged.append(Judged(silence, probability, ending_of(self.text)))

    # words ---------------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return join(self.frozen, self.partial)

    @property
    def stable_text(self) -> str:
        return join(self.frozen, self.stable)

    @property
    def complete(self) -> bool:
        """Everything voiced has been turned into words."""
        # The silence behind them belongs to the words: without it ears write a full stop where a comma is meant.
        return self.listening is None and not self.unheard

    @property
    def unheard(self) -> Ticks:
        """Voice that the words do not cover yet."""
        return Ticks(max(0, self.voiced_until - self.heard_until))


def wording(text: str) -> list[str]:
    """The words alone: ears move commas and capitals about while the words stand."""
    return _WORD.findall(text.lower())


def join(left: str, right: str) -> str:
    return f"{left} {right}".strip() if right else left


def newest(text: str, count: int) -> str:
    """The text, or when it is longer than `count` its newest three quarters of that, from a whole word on."""
    return text if len(text) <= count else text[-count * 3 // 4 :].partition(" ")[2]


def agreed(before: str, after: str) -> str:
    """Words both partials begin with, the last word of the newer one excluded."""
    old, new = before.split(), after.split()
    count = 0
    while count < min(len(old), len(new) - 1) and old[count] == new[count]:
        count += 1
    return " ".join(new[:count])
