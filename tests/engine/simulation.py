"""A word clock, simulated people, and what they really heard."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.channel import MediaShape
from duplexd.engine.core import EngineCore
from duplexd.engine.loop import drive
from duplexd.engine.process import EngineConfig, core_of, layout_of, stages_of
from duplexd.engine.simulator import SimListener, SimNetwork, SimWorld
from duplexd.engine.work import Launch
from duplexd.ids import SessionId
from duplexd.media import tones
from duplexd.memory.arena import Arena
from duplexd.memory.guards import Freed
from duplexd.messages import AdvanceEpoch, HistoryChanged, PublishChunk, ReplyWords, ResponseChanged, ResponseState
from duplexd.models.clock import plan as clock_plan
from duplexd.models.clock.stages import TONE, WORD
from duplexd.units import NANOS_PER_MS, Nanos, Ticks, ms_from_ticks

RATE = 24_000
PICTURE_BYTES = 2 * 64 * 96  #: of a slot; two pictures of the flash
#: How much of a word's tone may be missing for the word to have been heard: a resumed word may leave a rest of up to 20
#: ms, which the tone ear does not report (tones rule 5).
MISSING_MS = 28.0


def ms(value: float) -> Nanos:
    return Nanos(round(value * NANOS_PER_MS))


def beep(length_ms: float, level: int = 8000) -> NDArray[np.int16]:
    """A voice, as far as the word clock is concerned."""
    at = np.arange(round(16 * length_ms)) / 16_000
    return (np.sin(2 * np.pi * 700 * at) * level).astype(np.int16)


class Simulation:
    """One engine in virtual time. Say what happens when, then `run`. `rows`: of one talk or render launch."""

    def __init__(
        self,
        *,
        seed: int = 1,
        until_ms: float = 20_000,
        sessions_max: int = 4,
        sessions_resident: int = 0,
        place_wait_ms: float = 3000.0,
        policy: str = "interaction",
        speculation: bool = True,
        policy_options: dict[str, str] | None = None,
        rows: int = 1,
        lanes_target: float = 0.7,
        fails: Callable[[Launch], str] | None = None,
        face: str = "none",
        world: Callable[..., SimWorld] = SimWorld,
        freed: Freed | None = None,
    ) -> None:
        self.plan = clock_plan({"face": face})
        for name in ("talk", "render"):
            self.plan.stages[name] = msgspec.structs.replace(self.plan.stages[name], batch_max=rows)
        layout = layout_of(self.plan, sessions_max, sessions_resident)
        media = MediaShape(
            in_slots=64,
            in_samples=512,
            out_slots=8 * sessions_max,
            out_samples=RATE,
            picture_slots=12 * sessions_max if face != "none" else 0,
            picture_bytes=PICTURE_BYTES,
        )
        config = EngineConfig(
            model="clock",
            media=media,
            sessions_max=sessions_max,
            sessions_resident=sessions_resident,
            place_wait_ms=place_wait_ms,
            policy=policy,
            speculation=speculation,
            policy_options=policy_options or {},
            lanes_target=lanes_target,
            model_options={"face": face},
        )
        self.core: EngineCore = core_of(config, self.plan, layout, freed=freed)
        self.arena = Arena(layout)
        self.config = config
        stages = stages_of(self.plan, layout, sessions_max)
        for stage in stages.values():
            stage.load(self.arena)
        self.world = world(stages=stages, rng=Random(seed), until=ms(until_ms), fails=fails)

    def connect(
        self, session: int = 1, *, at_ms: float = 50, network: SimNetwork | None = None, barge_in: bool = True
    ) -> SimListener:
        return self.world.connect(SessionId(session), at=ms(at_ms), rate=RATE, network=network, barge_in=barge_in)

    def run(self) -> None:
        drive(self.core, self.world)
        self.core.stores.check()

    # What happened --------------------------------------------------------------------------------------------------

    def news(self, kind: type[Any], session: int = 1) -> list[Any]:
        return [n for _, n in self.world.news if isinstance(n, kind) and n.session == session]

    def times(self, kind: type[Any], session: int = 1) -> list[float]:
        return [at / NANOS_PER_MS for at, n in self.world.news if isinstance(n, kind) and n.session == session]

    def history(self, session: int = 1) -> dict[int, HistoryChanged]:
        """Last word on each response."""
        return {n.response: n for n in self.news(HistoryChanged, session)}

    def words(self, session: int = 1) -> dict[int, list[str]]:
        """All words of each response, heard or not."""
        words: dict[int, list[str]] = {}
        for news in self.news(ReplyWords, session):
            words.setdefault(news.response, []).extend(w.text for w in news.words)
        return words

    def final_states(self, session: int = 1) -> dict[int, list[ResponseState]]:
        ends = {ResponseState.COMPLETED, ResponseState.CANCELLED, ResponseState.FAILED}
        states: dict[int, list[ResponseState]] = {}
        for news in self.news(ResponseChanged, session):
            states.setdefault(news.response, [])
            if news.state in ends:
                states[news.response].append(news.state)
        return states


def heard_words(listener: SimListener, *, missing_ms: float = MISSING_MS) -> list[int]:
    """Tone numbers of the words that were heard whole, in order; parts of a word that was resumed are joined."""
    parts = tones.decode(listener.sound(), RATE)
    whole: list[int] = []
    length: dict[int, int] = {}
    for part in parts:
        length[part.index] = length.get(part.index, 0) + part.end_sample - part.start_sample
        enough = (ms_from_ticks(TONE) - missing_ms) * RATE / 1000
        if length[part.index] >= enough and (not whole or whole[-1] != part.index):
            whole.append(part.index)
            length[part.index] = 0
    return whole


def history_words(simulation: Simulation, session: int = 1) -> list[int]:
    """Tone numbers of everything the thinker remembers having said."""
    dialogue = simulation.core.sessions[SessionId(session)].dialogue
    tokens = [t for e in dialogue.exchanges for t in e.tokens if t >= 1000]
    return [tone_of_token(t) for t in tokens]


def tone_of_token(token: int) -> int:
    number = (token - 1000) // 2
    return (number // 64) * 32 + number % 64


__all__ = [
    "TONE",
    "WORD",
    "AdvanceEpoch",
    "PublishChunk",
    "Simulation",
    "Ticks",
    "beep",
    "heard_words",
    "history_words",
    "ms",
    "ms_from_ticks",
]
