"""Decides what a voice over the reply is: an interruption, or a false alarm (DESIGN §6).

Playout is frozen while this is being decided, but for a moment after a false alarm and while the echo canceller learns.
So a wrong *wait* costs a pause and a wrong *advance* costs the reply.
The rules are tried in order; the first that applies decides:

    1. the person pressed stop                                       -> ADVANCE
    2. no word of the reply was heard yet, and the voice is no echo  -> ADVANCE once the voice is `voice_min` long:
                                                                        the person simply goes on
       a client that wants any voice to interrupt: a voice of `voice_min` that is no echo -> ADVANCE
    3. the sound is over, and most of it was the character itself    -> RESUME
    4. a command ("stop"), or words that are more than an acknowledgement and not the reply's own: two that two
       partials agree on while the voice goes on, one when it is over -> ADVANCE
    5. the voice is over, and it was short, an acknowledgement or no words  -> RESUME
    6. `decide_max` has passed                                       -> ADVANCE with words, RESUME without
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from duplexd.units import Ticks, ticks_from_ms


class Decision(Enum):
    WAIT = "wait"
    ADVANCE = "advance"
    RESUME = "resume"


class VoiceView(msgspec.Struct, frozen=True):
    """What is known of the voice over the reply."""

    source: str
    elapsed: Ticks  #: since the onset, on the input timeline
    voiced: Ticks  #: voiced and not explained by the character's own sound
    echo: Ticks  #: explained by the character's own sound
    quiet: Ticks  #: since the last loud block, whoever made the sound
    text: str  #: newest transcript
    stable: str  #: the part of it that will not change any more
    certainty: float  #: how sure the ears are of it: mean log-probability, 0 is certain
    transcribed: bool  #: the transcript covers everything voiced
    reply_heard: bool  #: at least one word of the reply was heard
    audible: bool  #: something of the reply was there to be heard when the voice began
    cancelled: bool  #: the person's echo is cancelled before it gets here
    learning: bool  #: the canceller has heard too little of the character yet: some of `voiced` is the character
    reply_tail: str  #: what the character said last, up to the cursor and a little beyond
    eager: bool = False  #: the client wants any voice to interrupt


class BargeInTunables(msgspec.Struct, frozen=True):
    voice_min: Ticks = ticks_from_ms(200)  #: a shorter voice is no interruption
    silence_end: Ticks = ticks_from_ms(300)  #: the voice is over after this much silence
    settle_min: Ticks = ticks_from_ms(600)  #: before that a partial is not trusted while the voice goes on
    short_max: Ticks = ticks_from_ms(600)  #: voice up to this long is an acknowledgement unless its words say more
    #: the same while the character's own sound comes back with it, or the ears are unsure
    short_max_wary: Ticks = ticks_from_ms(800)
    #: the same while the canceller learns (measured: 510 ms of "mm-hm" are 740 ms of voice, whose words are anything)
    short_max_learning: Ticks = ticks_from_ms(850)
    learning_max: Ticks = ticks_from_ms(1500)  #: the canceller has learned after so much of the character's sound
    #: below it the ears are unsure (measured: "mm-hm" written as words -0.4 to -0.8, whole sentences above -0.2)
    certainty_min: float = -0.4
    patience: Ticks = ticks_from_ms(650)  #: how long the server may take to hear what the page heard
    decide_max: Ticks = ticks_from_ms(1600)  #: under the front end's `hold_max` of 2 s


ACKNOWLEDGEMENTS = frozenset(
    ("er", "huh", "ah", "aha", "oh", "ooh", "aw", "wow", "okay", "ok", "yeah", "yep", "yes", "yup", "right", "sure")
)
_PHRASES = (
    *("i see", "i know", "i understand", "i agree", "got it", "of course", "go on", "makes sense", "sounds good"),
    *("that's right", "that's true", "all right", "very good", "thank you", "thanks", "no way", "you're right"),
)
#: What acknowledgements of more than one word leave when the words above have been taken out of them.
ACKNOWLEDGING_PHRASES = frozenset(" ".join(w for w in p.split() if w not in ACKNOWLEDGEMENTS) for p in _PHRASES)
#: Said over a reply, these are meant, however short.
COMMANDS = frozenset(("stop", "wait", "pause", "quiet", "enough"))
#: Short turns that people do take over somebody's words.
SHORT_TURNS = COMMANDS | frozenset(
    ("no", "why", "what", "who", "how", "where", "when", "which", "hey", "hello", "sorry", "excuse", "really")
)
_HUM = re.compile(r"[mh]+|u+[mh]+(u+h+)?")  # mm, mhm, mmhmm, hmm, um, uh, uhuh, uhhuh
_WORD = re.compile(r"[a-z0-9']+")


class BargeInRule:
    def __init__(self, tunables: BargeInTunables) -> None:
        self.tunables = tunables

    def decide(self, view: VoiceView) -> Decision:
        t = self.tunables
        if view.source == "stop":
            return Decision.ADVANCE
        goes_on = not view.reply_heard and view.cancelled and view.echo == 0
        if view.eager and view.voiced >= max(t.voice_min, view.echo):
            return Decision.ADVANCE
        if (goes_on or not view.audible) and view.voiced >= t.voice_min:
            return Decision.ADVANCE
        # The page hears a soft beginning before the server does: until then quiet proves nothing.
        over = view.quiet >= t.silence_end and (view.voiced > 0 or view.echo > 0 or view.elapsed >= t.patience)
        # While playout is frozen nothing new comes back: an echo is over within half a second, a person is not.
        if view.echo > view.voiced and over:
            return Decision.RESUME
        if view.voiced >= t.voice_min and self._means_it(view, over=over):
            return Decision.ADVANCE
        if over and (view.transcribed or view.voiced < t.voice_min):
            return Decision.RESUME
        return Decision.RESUME if view.elapsed >= t.decide_max else Decision.WAIT

    def _means_it(self, view: VoiceView, *, over: bool) -> bool:
        """Whether what was understood so far is an interruption. Early partials invent words: the less was heard, the
        more must agree."""
        t = self.tunables
        words = content_words(view.text)
        if COMMANDS.intersection(words):
            return True
        fresh = [word for word in words if word not in own_words(view.reply_tail)] if self._may_be_own(view) else words
        if (over and view.transcribed) or view.elapsed >= t.decide_max:
            # An acknowledgement through an echo canceller is written as any short word ("Yo", "The hammer"): a voice
            # that short is believed only where such a word makes sense by itself.
            short = view.voiced < self._wary_until(view, t.short_max)
            return bool(SHORT_TURNS.intersection(fresh)) if short else bool(fresh)
        settled = bool(content_words(view.stable)) and view.voiced >= self._wary_until(view, t.settle_min)
        return settled and len(fresh) >= 2

    def is_said(self, view: VoiceView) -> bool:
        """Whether the words of a false alarm were said by the person, and are worth remembering: more than an
        acknowledgement, not the character's own, and none that the ears doubt (they write "mm-hm" as any short word).
        """
        words = content_words(view.text)
        own = view.echo > view.voiced or (self._may_be_own(view) and own_words(view.reply_tail).issuperset(words))
        return bool(words) and not own and view.certainty >= self.tunables.certainty_min

    def _wary_until(self, view: VoiceView, least: Ticks) -> Ticks:
        """How long a voice must be for its words to be believed; `least` when nothing makes them doubtful."""
        t = self.tunables
        if view.learning:
            return t.short_max_learning
        return t.short_max_wary if not view.cancelled or view.certainty < t.certainty_min else least

    def _may_be_own(self, view: VoiceView) -> bool:
        """The words may be the character's: sound came back, or they are several of its own in a row."""
        words = content_words(view.text)
        return view.echo > 0 or (len(words) > 1 and echoes(words, view.reply_tail))


def own_words(tail: str) -> frozenset[str]:
    return frozenset(_WORD.findall(tail.lower()))


def content_words(text: str) -> list[str]:
    """Words that are more than an acknowledgement."""
    words = _WORD.findall(text.lower().replace("-", ""))
    left = [w for w in words if w.strip("'") not in ACKNOWLEDGEMENTS and not _HUM.fullmatch(w)]
    return [] if " ".join(left) in ACKNOWLEDGING_PHRASES else left


def echoes(words: list[str], tail: str) -> bool:
    """True when nearly all words are what the character itself was just saying."""
    own = set(_WORD.findall(tail.lower()))
    return bool(words) and sum(w in own for w in words) >= max(1, round(0.75 * len(words)))
