"""Run a scenario: the engine's own core, a simulated model, a world of people. Returns what happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from duplexd.channel import MediaShape
from duplexd.engine.core import EngineCore
from duplexd.engine.loop import drive
from duplexd.engine.policy import spelled
from duplexd.engine.process import EngineConfig, core_of, host_of, layout_of
from duplexd.engine.stores import PAGES
from duplexd.ids import SessionId
from duplexd.simulation import calibration as calibrations
from duplexd.simulation import model
from duplexd.simulation.arrivals import TraceTurn, open_times, read_trace
from duplexd.simulation.calibration import Calibration
from duplexd.simulation.people import Turn, Visit, draw_turn, draw_visit
from duplexd.simulation.scenario import Scenario
from duplexd.simulation.world import LoadWorld, place
from duplexd.streams.stage import Role, SimulatedCost, StageSpec
from duplexd.units import NANOS_PER_SECOND, TICKS_PER_SECOND, Nanos, Ticks, ticks_from_ms

OUT_SLOTS_PER_SESSION = 64
MOVER = "mover"
READY_AT = Nanos(100_000_000)  #: the engine has prefilled its anchor by then
LINK = "copy-link"  #: the device of the mover where a calibration names none


class Simulation:
    """One run, ready to be driven."""

    def __init__(self, scenario: Scenario, *, policy: str, seed: int, folder: Path = Path()) -> None:
        """Args:    policy: a name, and options behind it: "interaction gate=false".
                 folder: what a trace file of the scenario is relative to.

        Raises:  ConfigError for a policy, calibration or trace that does not exist or does not fit.
        """
        self.scenario = scenario
        self.seed = seed
        self.calibration = _remembering(calibrations.load(scenario.calibration), scenario.engine.context_tokens_max)
        plan = model.plan(self.calibration)
        speech = self.speech = model.speech_of(self.calibration)
        name, options = spelled(policy)
        engine = scenario.engine
        sessions = max(engine.sessions_max, scenario.arrivals.concurrency)
        config = EngineConfig(
            model=plan.name,
            media=MediaShape(
                in_slots=1, in_samples=512, out_slots=OUT_SLOTS_PER_SESSION * sessions, out_samples=plan.sample_rate
            ),
            sessions_max=sessions,
            sessions_resident=engine.sessions_resident,
            place_wait_ms=engine.place_wait_ms,
            policy=name,
            policy_options=options,
            silence_max_ms=engine.silence_max_ms,
            speculation=engine.speculation,
            lanes_target=engine.lanes_target,
        )
        layout = layout_of(plan, sessions, engine.sessions_resident)
        host = host_of(layout, sessions)
        self.core: EngineCore = core_of(
            config,
            plan,
            layout,
            cores=self.calibration.cores,
            copy_bytes_per_second=speech.copy_bytes_per_second,
        )
        pages = layout.partitions[PAGES]
        stages = plan.build()
        costs = {name: self.calibration.stages[name].cost for name in stages}
        if host is not None:
            mover = model.mover(pages, bandwidth=speech.copy_bytes_per_second)
            stages[mover.spec.name] = mover
            costs[mover.spec.name] = _mover_cost(self.calibration, mover.spec)
        memory = model.Memory(rows=pages.rows, host_slots=host.count if host is not None else 0)
        for stage in stages.values():
            stage.load(memory)
        duration = _nanos(scenario.duration_s)
        self.world = LoadWorld(
            placed=place(stages, costs, model.sizes_of(speech.frame_ms)),
            capacities=self.calibration.capacities,
            seed=seed,
            turns_until=duration,
            until=Nanos(duration + _nanos(scenario.drain_s)),
            network=scenario.network,
            voice=scenario.talk.input == "voice",
            word=ticks_from_ms(speech.word_ms),
            spoken_word=Ticks(round(TICKS_PER_SECOND / scenario.talk.words_per_second)),
            patience=_nanos(scenario.patience_s),
            failure=scenario.faults.stage_failure,
        )
        self.world.away = self._away
        self._invite(folder)

    def run(self) -> None:
        drive(self.core, self.world)
        self.core.stores.check()

    def _away(self, session: SessionId) -> bool:
        known = self.core.sessions.get(session)
        return known is not None and not known.context.readable

    # Who comes ------------------------------------------------------------------------------------------------------

    def _invite(self, folder: Path) -> None:
        arrivals = self.scenario.arrivals
        if arrivals.kind == "closed":
            rng = Random(f"{self.seed}/ramp")
            for seat in range(arrivals.concurrency):
                self._seat(seat, 0, Nanos(READY_AT + round(rng.random() * arrivals.ramp_s * NANOS_PER_SECOND)))
        elif arrivals.kind == "trace":
            for visit, at in self._traced(read_trace(folder / arrivals.file)):
                self.world.visit(visit, at=Nanos(READY_AT + at), left=_nobody)
        else:
            times = open_times(arrivals, seed=self.seed, until=self.world.turns_until)
            for number, at in enumerate(times):
                self.world.visit(self._visit(f"visit-{number}"), at=Nanos(READY_AT + at), left=_nobody)

    def _seat(self, seat: int, number: int, at: Nanos) -> None:
        """A closed loop: when one visit is over the next one begins on the same seat."""

        def left() -> None:
            if self.world.now() < self.world.turns_until:
                self._seat(seat, number + 1, self.world.now())

        self.world.visit(self._visit(f"seat-{seat}-{number}"), at=at, left=left)

    def _visit(self, name: str) -> Visit:
        return draw_visit(
            name,
            seed=self.seed,
            talk=self.scenario.talk,
            p=self.scenario.barge_in,
            faults=self.scenario.faults,
            word_ms=self.speech.word_ms,
            words_max=self.speech.reply_words_max,
        )

    def _traced(self, visits: list[list[TraceTurn]]) -> Iterator[tuple[Visit, Nanos]]:
        """Visits of a trace: its lengths and times, our interruptions and faults."""
        for number, rows in enumerate(visits):
            rng = Random(f"{self.seed}/trace-{number}")
            yield Visit(f"trace-{number}", tuple(self._traced_turn(rng, row, rows[0].at) for row in rows)), rows[0].at

    def _traced_turn(self, rng: Random, row: TraceTurn, since: Nanos) -> Turn:
        drawn = draw_turn(
            rng,
            talk=self.scenario.talk,
            p=self.scenario.barge_in,
            faults=self.scenario.faults,
            word_ms=self.speech.word_ms,
            words_max=self.speech.reply_words_max,
        )
        return msgspec.structs.replace(
            drawn,
            gap=Nanos(0) if row.at == since else drawn.gap,
            words_in=max(1, row.request_tokens // self.speech.input_tokens_per_word),
            reply_words=min(row.response_tokens, self.speech.reply_words_max),
            not_before=Nanos(row.at - since),
        )


def _remembering(calibration: Calibration, context_tokens_max: int) -> Calibration:
    """The same with contexts of another length; 0: as it is."""
    speech = calibration.speech
    if speech is None or not context_tokens_max:
        return calibration
    longer = msgspec.structs.replace(speech, context_tokens_max=context_tokens_max)
    return calibrations.checked(msgspec.structs.replace(calibration, speech=longer))


def _mover_cost(calibration: Calibration, spec: StageSpec) -> SimulatedCost:
    """The copy link: its own cost when the calibration measured one, else what its bandwidth says."""
    assert spec.role is Role.MOVE
    figures = calibration.stages.get(MOVER)
    return figures.cost if figures is not None else SimulatedCost(spec.cost, LINK)


def _nanos(seconds: float) -> Nanos:
    return Nanos(round(seconds * NANOS_PER_SECOND))


def _nobody() -> None:
    """In an open loop nobody comes because somebody left."""
