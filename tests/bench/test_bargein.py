"""What the barge-in bench counts: a word of the old reply that leaks is never hidden by the answer after it."""

from __future__ import annotations

import numpy as np

from duplexd.bench.bargein import newest_reply, words_heard
from duplexd.bench.tap import RATE, ClockMap, Recording
from duplexd.media import tones
from duplexd.units import Nanos


def test_words_of_two_replies_are_all_heard_and_the_newest_told_apart() -> None:
    pcm = np.concatenate([tones.word_pcm(index, rate=RATE) * 32767 for index in (0, 1, 2, 32)]).astype(np.int16)
    clock = ClockMap(rate=RATE, starts=(0,), origins_ns=(0,), spread_ns=0)
    heard = Recording(pcm=pcm, rate=RATE, first_sample=0, clock=clock)

    words = words_heard(heard, after=Nanos(0), before=heard.end)

    assert [w.index for w in words] == [0, 1, 2, 32]
    assert [w.index for w in newest_reply(words)] == [32]
    assert newest_reply([]) == []
