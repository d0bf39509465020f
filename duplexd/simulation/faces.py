"""Faces without a voice, in virtual time: the engine's pipeline, gate and scheduler on a calibration's video costs.

1. `Pipeline`, `Scheduler`, policies and measured stage times are those that serve people. A launch makes one chunk of
   one person; its cost counts one row and one unit. Devices are shared as everywhere in this package.
2. What is made is handed over at once: of a policy its order and its lookahead count here, its delivery does not.
3. The eye is an `Ear`: a published chunk is a stretch of time behind a network, and its position comes back in reports.
4. People wish for something else, and interrupt, at moments drawn before anything runs: the same for every policy.

What the figures count:

    first_pixel_ms       a person has come -> their first chunk is published
    period_ms            between two chunks of one epoch, as they are published
    reaction_ms          a condition changes -> the first chunk that has it is published
    reaction_wait_ms     of that: until the chunk is begun, at the next boundary
    reaction_way_ms      and: from there through all stages
    reaction_seen_ms     a condition changes -> the first chunk that has it is seen
    again_ms             a person interrupts -> the first chunk of the new epoch is published
    lookahead_ms         generation less what has been seen, as a chunk is begun, its own length included
    over_gate            chunks that were begun beyond what the policy allowed by what the engine knew: must be 0
    gaps, gap_ms_longest pictures that stood still for more than 100 ms, in the middle of an epoch
    waste                of what was published, what an interruption took away before it was seen
    device_busy          share of its time that each device worked
"""

from __future__ import annotations

import tomllib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from duplexd.engine.governor import Fidelity
from duplexd.engine.monitor import StageTimes
from duplexd.engine.pipeline import Made, Pipeline
from duplexd.engine.policy import Gate, policy_of, spelled
from duplexd.engine.scheduler import Scheduler
from duplexd.engine.virtual import VirtualTime
from duplexd.engine.work import Work
from duplexd.errors import ConfigError
from duplexd.ids import ChunkId, ConditionVersion, ResponseId, SessionId, WorkId
from duplexd.media.line import BOUND
from duplexd.messages import Cursor, CursorReported
from duplexd.simulation import calibration as calibrations
from duplexd.simulation.calibration import CHUNK_MS_MAX, Calibration
from duplexd.simulation.device import Device
from duplexd.simulation.ear import Ear, Gap, Place
from duplexd.simulation.link import Network
from duplexd.simulation.report import GAP_MAX, percentiles
from duplexd.streams.stage import PayloadKind, Role, StageSpec
from duplexd.units import (
    NANOS_PER_MS,
    NANOS_PER_SECOND,
    TICKS_PER_SECOND,
    Nanos,
    Ticks,
    nanos_from_ms,
    nanos_from_ticks,
    ticks_from_ms,
    ticks_from_nanos,
)

#: Stages of a calibration in the order in which a chunk passes them.
ROLES = {"generate": Role.GENERATE, "refine": Role.REFINE, "decode": Role.DECODE}
FIDELITY = Fidelity(0)  #: as many steps as the costs stand for
#: What the table shows, in its order.
SHOWN = (
    *("chunks", "first_pixel_ms", "period_ms", "reaction_ms", "reaction_wait_ms", "reaction_way_ms"),
    *("reaction_seen_ms", "again_ms", "lookahead_ms", "over_gate", "gaps", "gap_ms_longest", "waste", "device_busy"),
)


class Faces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who looks on, and what they do."""

    people: int = 1
    chunk_ms: int = 1000
    condition_every_s: float = 0.0  #: a person wishes for something else so often, on average; 0: never
    interrupt_every_s: float = 0.0  #: and interrupts so often; 0: never
    come_within_s: float = 0.0  #: people come one by one within it; 0: all at once


class FaceScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    calibration: str
    face: Faces
    duration_s: float
    network: Network = Network()
    about: str = ""


def describes(file: Path) -> bool:
    """Whether a scenario is one of faces: it has a table `face`. What cannot be read is not."""
    try:
        return "face" in tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return False


def load(file: Path) -> FaceScenario:
    """Raises ConfigError naming the file, the key and what is allowed."""
    try:
        scenario = msgspec.convert(tomllib.loads(file.read_text()), FaceScenario)
    except OSError as error:
        raise ConfigError(f"scenario {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"scenario {file}: {error}") from error
    face = scenario.face
    often = (face.condition_every_s, face.interrupt_every_s)
    rules = [
        (1 <= face.people <= 64, f"face.people is {face.people}; it lies in 1..64"),
        (40 <= face.chunk_ms <= CHUNK_MS_MAX, f"face.chunk_ms is {face.chunk_ms}; it lies in 40..{CHUNK_MS_MAX}"),
        (all(s == 0 or s >= 1 for s in often), "face.condition_every_s and interrupt_every_s are 0 or at least 1"),
        (0 < scenario.duration_s <= 86_400, f"duration_s is {scenario.duration_s}; it lies in 0..86400"),
        (0 <= face.come_within_s < scenario.duration_s, "face.come_within_s is not below duration_s"),
    ]
    if fault := scenario.network.faults():
        rules.append((False, f"network: {fault}"))
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(f"scenario {file}: {sentence}")
    return scenario


def stages_of(calibration: Calibration) -> list[StageSpec]:
    """One lane a stage. Raises ConfigError when the calibration has not all three."""
    if missing := [name for name in ROLES if name not in calibration.stages]:
        raise ConfigError(f"calibration {calibration.name} has no stage {missing[0]!r}: it describes no video")
    latent = PayloadKind.LATENT
    return [StageSpec(name, role, name, latent, latent, calibration.stages[name].mean) for name, role in ROLES.items()]


class Change(msgspec.Struct, frozen=True):
    """A person wished for something else."""

    condition: ConditionVersion
    at: Nanos


class Reaction(msgspec.Struct, frozen=True):
    """And the first chunk that has it."""

    changed: Nanos
    begun: Nanos
    published: Nanos
    seen: Nanos


class FaceLink:
    """One person before one face: their eye, the network to it, and what they do."""

    def __init__(self, session: SessionId, face: Pipeline, *, network: Network, seed: int, now: Nanos) -> None:
        self.session = session
        self.face = face
        self.eye = Ear(way=nanos_from_ms(network.delay_ms + network.buffer_ms))
        self.came_at = now
        self.published: list[tuple[int, Nanos]] = []  #: (epoch, at) of every chunk
        self.reactions: list[Reaction] = []
        self.again: list[Nanos] = []  #: from an interruption to the first chunk of its epoch
        self.lookaheads: list[Ticks] = []
        self.gaps: list[Gap] = []
        self.made = Ticks(0)  #: published
        self.wasted = Ticks(0)  #: published and taken away before it was seen
        self.over_gate = 0
        self._network = network
        self._rng = Random(f"{seed}/face-{session}/network")
        self._begun: dict[ChunkId, Nanos] = {}
        self._changes: deque[Change] = deque()
        self._stopped_at: Nanos | None = None

    # What it shows ---------------------------------------------------------------------------------------------------

    def begin(self, chunk: ChunkId, limit: Ticks | None, now: Nanos) -> None:
        """The first stage has been given a chunk; `limit`: how far ahead the policy let it run."""
        timeline = self.face.timeline
        self._begun[chunk] = now
        self.lookaheads.append(Ticks(timeline.generation - self.eye.where(now).position))
        self.over_gate += limit is not None and timeline.generation - timeline.playback(now) > limit

    def publish(self, made: Made, now: Nanos) -> None:
        """A chunk has passed the last stage."""
        chunk = made.chunk
        self.published.append((chunk.epoch, now))
        self.made = Ticks(self.made + chunk.span.length)
        response = ResponseId(chunk.epoch + 1)
        stretch = self.eye.publish(epoch=chunk.epoch, response=response, span=chunk.span, now=now, delay=self.delay())
        assert stretch is not None, "a pipeline hands over nothing of a dead epoch"
        if (gap := self.eye.gap_before(stretch)) is not None and not self.eye.frozen:
            self.gaps.append(gap)
        begun = self._begun.pop(chunk.chunk_id)
        while self._changes and self._changes[0].condition <= made.condition:
            self.reactions.append(Reaction(self._changes.popleft().at, begun, now, stretch.at))
        if self._stopped_at is not None and not self.eye.frozen:  # Until the cut it is still the old epoch's.
            self.again.append(Nanos(now - self._stopped_at))
            self._stopped_at = None

    # What the person does --------------------------------------------------------------------------------------------

    def wish(self, now: Nanos) -> None:
        """From the next boundary on the face is to be another."""
        self.face.condition = ConditionVersion(self.face.condition + 1)
        self._changes.append(Change(self.face.condition, now))

    def stop(self, now: Nanos) -> Place | None:
        """The page freezes the picture; returns where, None while there is nothing to interrupt."""
        if self.eye.frozen or not self.published or self._stopped_at is not None:
            return None
        self._stopped_at = now
        return self.eye.freeze(now)

    def cut(self, at: Ticks, now: Nanos) -> None:
        """The engine has learnt of it: a new epoch begins where the picture stood."""
        timeline = self.face.timeline
        self.wasted = Ticks(self.wasted + timeline.published - at)
        self.face.advance(at, now)
        self.eye.flush(epoch=timeline.epoch, at=at, now=now)
        alive = {chunk.chunk_id for chunk in self.face.chunks.alive()}
        self._begun = {chunk: begun for chunk, begun in self._begun.items() if chunk in alive}

    # Reports ---------------------------------------------------------------------------------------------------------

    def delay(self) -> Nanos:
        """Of one packet, one way."""
        network = self._network
        jitter = self._rng.expovariate(1.0 / network.jitter_ms) if network.jitter_ms else 0.0
        return nanos_from_ms(network.delay_ms + jitter)

    def report(self, now: Nanos) -> tuple[Nanos, CursorReported] | None:
        """What the page says now, and how long that travels; None: nothing, or it is lost."""
        network = self._network
        if self.eye.frozen or self._rng.random() < network.report_loss:
            return None
        late = self._rng.random() < network.report_late
        delay = Nanos(self.delay() + (nanos_from_ms(network.report_late_ms) if late else 0))
        place = self.eye.where(now)
        bound = Ticks(0) if place.past > nanos_from_ticks(BOUND) else BOUND
        cursor = Cursor(place.epoch, place.position, now)
        return delay, CursorReported(self.session, cursor, ticks_from_nanos(self.eye.way), delay, bound, False)

    def hear(self, fact: CursorReported, now: Nanos) -> None:
        """The engine has a report."""
        self.face.timeline.report(fact, now)
        self.face.chunks.hear(self.face.timeline.heard)


class FaceWorld:
    """One run. Args: policy: a name, and options behind it.

    Raises:  ConfigError for a policy or calibration that does not exist or does not fit.
    """

    def __init__(self, scenario: FaceScenario, *, policy: str, seed: int) -> None:
        self.scenario = scenario
        self.calibration = calibrations.load(scenario.calibration)
        self.policy = policy_of(*spelled(policy))
        self.stages = stages_of(self.calibration)
        self.times = StageTimes(pairwise(spec.name for spec in self.stages))
        self.scheduler = Scheduler({spec.name: spec for spec in self.stages}, self.policy)
        self.links: dict[SessionId, FaceLink] = {}
        capacities = self.calibration.capacities
        names = {self.calibration.stages[spec.name].device for spec in self.stages}
        self.devices = {name: Device(name, capacity=capacities.get(name, 1.0)) for name in sorted(names)}
        self._seed = seed
        self._noise = {spec.name: Random(f"{seed}/cost/{spec.name}") for spec in self.stages}
        self._time = VirtualTime()
        self._until = Nanos(round(scenario.duration_s * NANOS_PER_SECOND))
        self._limits: dict[SessionId, Ticks | None] = {}  # what the policy answered last
        self._running: dict[WorkId, tuple[SessionId, Nanos]] = {}
        self._due: dict[str, Nanos] = {}  # what each device's pending wake-up is for
        self._wakes: Nanos | None = None
        self._last_work = 0
        arrivals = Random(f"{seed}/arrivals")
        for number in range(1, scenario.face.people + 1):
            at = round(arrivals.random() * scenario.face.come_within_s * NANOS_PER_SECOND)
            self._time.at(at, partial(self._come, SessionId(number)))

    @property
    def now(self) -> Nanos:
        return self._time.now

    def run(self) -> None:
        """To the end of the scenario; what is under way then is left."""
        while (at := self._time.next_at()) is not None and at <= self._until:
            self._time.step()
            self._fill_lanes()
            self._wake()
        self._time.pass_to(self._until)

    # People ----------------------------------------------------------------------------------------------------------

    def _come(self, session: SessionId) -> None:
        face = Pipeline(
            session=session,
            stages=self.stages,
            length=ticks_from_ms(self.scenario.face.chunk_ms),
            lookahead=self._gate_of(session),
            times=self.times,
            fidelity=FIDELITY,
            now=self.now,
        )
        link = FaceLink(session, face, network=self.scenario.network, seed=self._seed, now=self.now)
        self.links[session] = link
        self._report(link)
        for at in self._moments(f"face-{session}/wishes", self.scenario.face.condition_every_s):
            self._time.at(self.now + at, lambda: link.wish(self.now))
        for at in self._moments(f"face-{session}/stops", self.scenario.face.interrupt_every_s):
            self._time.at(self.now + at, lambda: self._stop(link))

    def _moments(self, name: str, every_s: float) -> Iterator[Nanos]:
        """When a person does something, counted from their coming; drawn by themselves, so that nothing moves them."""
        rng, at = Random(f"{self._seed}/{name}"), 0.0
        while every_s and (at := at + rng.expovariate(1.0 / every_s)) < self.scenario.duration_s:
            yield Nanos(round(at * NANOS_PER_SECOND))

    def _gate_of(self, session: SessionId) -> Callable[[Gate], Ticks | None]:
        def ask(gate: Gate) -> Ticks | None:
            limit = self._limits[session] = self.policy.lookahead(gate)
            return limit

        return ask

    def _stop(self, link: FaceLink) -> None:
        place = link.stop(self.now)
        if place is not None:
            self._time.at(self.now + link.delay(), lambda: link.cut(place.position, self.now))

    def _report(self, link: FaceLink) -> None:
        network = self.scenario.network
        self._time.at(self.now + nanos_from_ms(network.report_every_ms), lambda: self._report(link))
        said = link.report(self.now) if link.published else None
        if said is not None:
            delay, fact = said
            self._time.at(self.now + delay, lambda: link.hear(fact, self.now))

    # Work ------------------------------------------------------------------------------------------------------------

    def _fill_lanes(self) -> None:
        """Until nothing more can start: a launch may make room for another in the stage before it."""
        started = True
        while started:
            started = self._launch_one()

    def _launch_one(self) -> bool:
        """Give the first idle lane that has something to do its most urgent work; False: none has."""
        now = self.now
        for link in self.links.values():
            self.scheduler.offer(link.session, list(link.face.offers(now)), now)
        for lane in self.scheduler.idle_lanes():
            offers = self.scheduler.urgent(lane, now)
            work = next(offers, None)
            offers.close()
            if work is not None:
                self._launch(work, now)
                return True
        return False

    def _launch(self, work: Work, now: Nanos) -> None:
        self._last_work += 1
        work_id, link = WorkId(self._last_work), self.links[work.session]
        passing = link.face.launch(work, work_id, now)
        if work.role is Role.GENERATE:
            link.begin(passing.chunk.chunk_id, self._limits[work.session], now)
        self.scheduler.begin(work_id, work.stage, [(work.session, work.priority)])
        self._running[work_id] = (work.session, now)
        cost = self.calibration.stages[work.stage].cost
        alone = cost.draw_us(self._noise[work.stage], rows=1, units=1, steps=0)
        device = self.devices[cost.device]
        device.begin(work_id, share=cost.share, alone=Nanos(alone * 1000), now=now)
        self._expect(device)

    def _expect(self, device: Device) -> None:
        """The device's next end is due; a launch that began meanwhile has moved the one before."""
        when = device.next_end()
        if when is not None and self._due.get(device.name) != when:
            self._due[device.name] = when
            self._time.at(when, lambda: self._done(device, when))

    def _done(self, device: Device, due: Nanos) -> None:
        if self._due.get(device.name) != due:
            return
        del self._due[device.name]
        for work in device.ended(self.now):
            self._finish(work)
        self._expect(device)

    def _finish(self, work: WorkId) -> None:
        session, started = self._running.pop(work)
        took = Nanos(self.now - started)
        _, stage = self.scheduler.end(work, took)
        times = self.times
        times.note(stage, took)
        self.scheduler.note_times(stage, took=times.mean(stage) or took, reach=times.reach(stage) or took)
        link = self.links[session]
        made = link.face.finish(work, self.now)
        if made is not None:
            link.publish(made, self.now)

    def _wake(self) -> None:
        """Look again when the clock alone opens a gate, or lets somebody begin a launch."""
        gates = (link.face.begins_at(self.now) for link in self.links.values())
        moments = [at for at in (*gates, self.scheduler.wakes_at()) if at is not None and at > self.now]
        if moments and (when := min(moments)) != self._wakes:
            self._wakes = when
            self._time.at(when, lambda: None)


# Figures --------------------------------------------------------------------------------------------------------------


def report_of(scenario: FaceScenario, *, policy: str, seed: int) -> dict[str, Any]:
    """One run as figures, the same for the same seed on any machine; what they count stands at the head."""
    world = FaceWorld(scenario, policy=policy, seed=seed)
    world.run()
    return {"policy": policy, "seed": seed, "calibration": scenario.calibration, **figures(world)}


def figures(world: FaceWorld) -> dict[str, Any]:
    links = list(world.links.values())
    reactions = [reaction for link in links for reaction in link.reactions]
    gaps = [gap.length for link in links for gap in link.gaps if gap.length > GAP_MAX]
    made = sum(link.made for link in links)
    return {
        "people": len(links),
        "chunks": sum(len(link.published) for link in links),
        "first_pixel_ms": percentiles(_ms(link.published[0][1] - link.came_at) for link in links if link.published),
        "period_ms": percentiles(_ms(period) for link in links for period in _periods(link)),
        "reaction_ms": percentiles(_ms(one.published - one.changed) for one in reactions),
        "reaction_wait_ms": percentiles(_ms(one.begun - one.changed) for one in reactions),
        "reaction_way_ms": percentiles(_ms(one.published - one.begun) for one in reactions),
        "reaction_seen_ms": percentiles(_ms(one.seen - one.changed) for one in reactions),
        "again_ms": percentiles(_ms(took) for link in links for took in link.again),
        "lookahead_ms": percentiles(1000 * ahead / TICKS_PER_SECOND for link in links for ahead in link.lookaheads),
        "over_gate": sum(link.over_gate for link in links),
        "gaps": len(gaps),
        "gap_ms_longest": round(_ms(max(gaps, default=0)), 2),
        "waste": round(sum(link.wasted for link in links) / made, 5) if made else None,
        "device_busy": {name: round(device.busy_ns / world.now, 4) for name, device in world.devices.items()},
    }


def _periods(link: FaceLink) -> Iterator[int]:
    """Between two chunks that follow each other in one epoch."""
    for (before, earlier), (epoch, later) in pairwise(link.published):
        if before == epoch:
            yield later - earlier


def _ms(nanos: int) -> float:
    return nanos / NANOS_PER_MS
