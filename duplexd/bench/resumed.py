"""Whether held replies went on where they were, heard at the loudspeaker: nothing twice, nothing left out.

The word clock's reply: a word that a hold splits sounds in parts. All its parts together are as long as the word,
unless the reply went on too early (some of it is heard twice) or too late (some is never heard).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from duplexd.bench.bargein import TONE_MS, words_heard
from duplexd.bench.stage import Event
from duplexd.bench.tap import Recording
from duplexd.units import Nanos


class Resumed(msgspec.Struct, frozen=True):
    """One reply that was held and let go on, as the loudspeaker played it."""

    holds: int
    words: list[int]  #: places of the words heard, in the order in which each began
    told: int  #: how many words the reply has
    off_ms: list[float]  #: of each word that was told: how long it sounded, less how long it is

    @property
    def is_whole(self) -> bool:
        return self.words == list(range(self.told))


def resumed(heard: Recording, log: Sequence[Event], *, response: int, after: Nanos, before: Nanos) -> Resumed:
    """What was heard of a reply between two moments. `log`: the page's, with the holds and the words of the reply."""
    told: list[dict[str, Any]] = [
        word for e in log if e["kind"] == "words" and e["response"] == response for word in e["words"]
    ]
    parts = words_heard(heard, told, after=after, before=before)
    sounded = [sum(part.samples_count for part in parts if part.index == place) for place in range(len(told))]
    return Resumed(
        holds=sum(after <= e.at < before for e in log if e["kind"] == "resume"),
        words=list(dict.fromkeys(part.index for part in parts)),
        told=len(told),
        off_ms=[round(samples * 1000 / heard.rate - TONE_MS, 1) for samples in sounded],
    )
