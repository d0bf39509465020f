"""The person of the scripts here: when they speak, what their microphone brings, and what is printed at the end.

A script prints one JSON object: `audio` is what it was given to play, in parts of (ms, id, base64 of 16-bit PCM at
`rate`); `history` is the client's own view of the conversation; `remembered` is what the daemon answers when it is
asked for its items; `truncated` are the positions the client itself reported, (id, ms), of which the last one holds;
`told` are the words as they came, (id, text).
"""

import array
import asyncio
import base64
import json
import math
import time

FIRST_S = 0.6  #: how long the first turn lasts
OVER, NEXT = (2.0, 2.9), (11.0, 11.6)  #: s after the first sound of a reply: over it, and when the next one has ended
LOUD = 1000  #: of 32768
FRAME_S = 0.02
TONE_HZ, LEVEL, NOISE = 700, 8000, 20


class Person:
    """One conversation: its clock, its microphone and its record."""

    def __init__(self, rate=24_000, *, first_at=1.0):
        self.rate = rate
        self.started = time.monotonic()
        self.first = (first_at, first_at + FIRST_S)
        self.answered = None  #: when the first sound of the reply to that was played
        self.found = {"rate": 24_000, "errors": [], "events": []}
        for name in ("audio", "history", "remembered", "truncated", "interrupted", "told"):
            self.found[name] = []

    def now(self):
        """Seconds since the beginning."""
        return time.monotonic() - self.started

    def note(self, kind):
        self.found["events"].append([self.now() * 1000, kind])

    def play(self, name, pcm):
        if (
            self.answered is None
            and self.now() > self.first[1]
            and max(map(abs, array.array("h", pcm)), default=0) > LOUD
        ):
            self.answered = self.now()
        self.found["audio"].append([self.now() * 1000, name, base64.b64encode(pcm).decode()])

    def tell(self, name, text):
        self.found["told"].append([name, text])

    def cut(self, name, ms):
        self.found["interrupted"].append([self.now() * 1000, ms])
        self.found["truncated"].append([name, ms])

    def frame(self, index):
        """20 ms of the microphone, 16-bit PCM: a tone while the person speaks, faint noise else."""
        at = index * FRAME_S
        count = round(self.rate * FRAME_S)
        since = -1.0 if self.answered is None else at - self.answered
        if any(begin <= t < end for t, (begin, end) in ((at, self.first), (since, OVER), (since, NEXT))):
            turn = 2 * math.pi * TONE_HZ
            return array.array(
                "h", [int(LEVEL * math.sin(turn * (at + i / self.rate))) for i in range(count)]
            ).tobytes()
        return array.array("h", [NOISE * (i % 2) for i in range(count)]).tobytes()

    async def speak(self, seconds, say):
        """Bring every frame when it is due, by `await say(pcm)`."""
        index = 0
        while self.now() < seconds:
            while index * FRAME_S < self.now():
                await say(self.frame(index))
                index += 1
            await asyncio.sleep(FRAME_S / 2)

    def print(self):
        print(json.dumps(self.found))
