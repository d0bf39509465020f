"""A speculative turn: the reply to words that may not be the person's last, made ahead and shown to nobody (DESIGN §6).

1. It is thought on a fork of the context, and so is the rest of its turn: a wrong guess is a cut of the branch, so that
   the next one keeps the words they share. When the turn ends the branch becomes the trunk; a turn that comes to
   nothing drops it, and the trunk is as it was before the first guess.
2. It is worth something for exactly one wording. When the turn ends with these words it becomes the reply; the person
   who goes on speaking, or words that are understood differently, end it.
3. Until then nothing of it leaves the session: no response, no word, no sound. What is made waits.
4. It makes at most its first clause.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from duplexd.engine.dialogue import Dialogue
from duplexd.engine.reply import Reply
from duplexd.engine.utterance import LATE_RELEASE, Utterance, wording
from duplexd.media.endpoint import Ending, ending_of
from duplexd.units import Ticks, ticks_from_ms


class SpeculationTunables(msgspec.Struct, frozen=True):
    """When a turn is likely enough to be over to answer it on suspicion."""

    turn_max: int = 16  #: speculations one turn may cost; 0 switches them off
    #: of these, how many may begin in the middle of a voice: in a long turn every whole sentence looks like the last
    early_max: int = 4
    #: voice at the end of a turn that words which came twice, or end a sentence, may not cover
    unheard_max: Ticks = ticks_from_ms(200)
    #: tokens fed in one launch: what the right words wait for when they come after the wrong ones
    feed_max: int = 6
    load_max: float = 0.5  #: share of the places that others hold; beyond it nobody's suspicion is served


class Speculation(msgspec.Struct):
    """`text` is the whole turn it answers, with what an unheard reply before it left open."""

    text: str
    reply: Reply
    dialogue: Dialogue  #: what the session's would be

    def answers(self, text: str) -> bool:
        """The same words. Asked at every event of a turn, so the same text is not taken apart."""
        return text == self.text or wording(self.text) == wording(text)

    @property
    def first_clause_thought(self) -> bool:
        return self.reply.thought or bool(self.reply.to_talk or self.reply.words)


class Likelihood(Enum):
    """What speaks for the words being the last ones."""

    NONE = "none"
    EARLY = "early"  #: they end a sentence, though the voice goes on: a detector lets go late, and ears are ahead of it
    QUIET = "quiet"  #: silence has begun just behind them, or they have come twice


def likelihood_of_end(utterance: Utterance, tunables: SpeculationTunables) -> Likelihood:
    """How likely the words known now are the whole turn."""
    ending = ending_of(utterance.text)
    covered = utterance.unheard <= tunables.unheard_max
    if not utterance.voiced_ticks or not covered or ending not in (Ending.ASKED, Ending.CLOSED):
        return Likelihood.NONE
    if utterance.repeated or (utterance.silence > 0 and utterance.unheard <= LATE_RELEASE):
        return Likelihood.QUIET
    whole = ending is Ending.ASKED or utterance.text.endswith(".")
    return Likelihood.EARLY if whole else Likelihood.NONE
