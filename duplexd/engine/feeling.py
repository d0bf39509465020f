"""The mood of a clause: what its words and its marks tell, by a table the model family declares (`FacePlan.moods`).

1. A face that feels nothing is better than one that laughs at a funeral: a clause has the one mood that most of it
   tells, and none where two tell as much.
2. `sure` words tell a mood wherever they stand; `mild` ones only where somebody speaks of themselves or to somebody
   ("That is great!", not "a great wall").
3. A word that is denied ("not happy", "no danger", "never sad") tells nothing.
4. A question asks after a mood and does not have it: it is felt as `MoodWords.asked` says, or not at all.
5. An exclamation mark makes a mood stronger; without such a word, where somebody speaks of themselves or to somebody,
   it tells a little of the table's first ("I can help!", not "Watch out!").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from duplexd.streams.graph import MoodWords

SURE, MILD, CRIED = 0.6, 0.4, 0.2
STRONGEST = 0.8  #: further than this a mood pulls at lips that have to speak
#: Words back in which a denial is looked for.
DENIED_WITHIN = 3
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_DENIALS = frozenset({"not", "no", "never", "nothing", "nobody", "neither", "nor", "without", "cannot", "hardly"})
_DENIED_VERB = re.compile(r"n't$")
#: Whoever says one of these speaks of themselves, to the person, or of what was just said.
_NEAR = frozenset({"i", "me", "my", "we", "us", "our", "you", "your"})
_NEAR_BEGINNING = re.compile(r"^(?:i|we|you|it|that)'\w+$")


def mood_of(clause: str, moods: Sequence[MoodWords]) -> dict[str, float]:
    """Strength of what a clause tells, 0..`STRONGEST`: one mood or none."""
    words = [word.lower().replace("’", "'") for word in _WORD.findall(clause)]
    asked, cried = clause.rstrip("\"')]}’”").endswith("?"), "!" in clause
    near = any(word in _NEAR or _NEAR_BEGINNING.match(word) for word in words)
    told = [_told(words, mood, near=near or cried) for mood in moods]
    strongest = max(told, default=0.0)
    if strongest == 0.0:
        friendly = cried and near and not asked and not _denied(words, len(words))
        return {moods[0].mood: CRIED} if friendly and moods else {}
    names = {mood.asked if asked else mood.mood for mood, share in zip(moods, told, strict=True) if share == strongest}
    name = names.pop()
    return {name: min(STRONGEST, strongest + CRIED * cried)} if name and not names else {}


def _told(words: Sequence[str], mood: MoodWords, *, near: bool) -> float:
    """The strongest word that is not denied."""
    return max(
        (
            SURE if word in mood.sure else MILD
            for index, word in enumerate(words)
            if (word in mood.sure or (near and word in mood.mild)) and not _denied(words, index)
        ),
        default=0.0,
    )


def _denied(words: Sequence[str], index: int) -> bool:
    before = words[max(0, index - DENIED_WITHIN) : index]
    return any(word in _DENIALS or _DENIED_VERB.search(word) for word in before)
