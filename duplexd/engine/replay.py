"""Replay: a core built from a trace's header is given the trace's events again, and must say the same (DESIGN §4).

1. The core is a pure function of its events: whatever it said then it says now, to the byte. What does not agree is a
   change of the code, of the model's plan, or a hidden input, and the first place where it shows is reported.
2. No stage is built and no tensor is read: a model's plan reads headers and vocabularies only.
3. A trace that ended with an error of the core is the same when the same event raises the same error again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import msgspec

from duplexd import __version__
from duplexd.engine.core import EngineCore
from duplexd.engine.process import EngineConfig, core_of, layout_of, load_plan
from duplexd.engine.trace import (
    Header,
    Kind,
    Record,
    Trace,
    decode_command,
    describe_error,
    encode_command,
    plan_digest,
    source_digest,
)
from duplexd.errors import TraceError
from duplexd.streams.graph import ModelPlan
from duplexd.units import NANOS_PER_SECOND, Nanos

CONTEXT_STEPS = 5  #: shown before the first difference
SHOWN_MAX = 600  #: characters of one event or command


class Difference(msgspec.Struct, frozen=True):
    """The first place where the core says something else than the trace."""

    step: int  #: index of the record, the start is 0
    command: int  #: index of the command within the whole trace
    record: Record
    then: tuple[Any, ...]  #: all commands of this step as the trace has them; an error as its text
    now: tuple[Any, ...]  #: and as the core gave them
    at: int  #: index within the step
    before: tuple[tuple[int, Record], ...]  #: steps that led here, oldest first


class Replayed(msgspec.Struct, frozen=True):
    """What came of it."""

    events: int  #: start and timers among them
    commands: int
    digest: str  #: sha256 of all commands the core gave, in their canonical encoding
    difference: Difference | None
    error: str  #: what the core raised at the last event, as the trace says; '' as a rule
    ending: str  #: why the trace ends
    notes: tuple[str, ...]  #: what is not as it was when the trace was written


def core_from(header: Header) -> tuple[EngineCore, ModelPlan]:
    """The core a trace was made with.

    Raises:  TraceError when the header is of another version; ConfigError, ModelError, WeightsError when the model
             is not installed or its files are not there.
    """
    try:
        config = msgspec.convert(header.engine, EngineConfig)
    except msgspec.ValidationError as error:
        raise TraceError(
            f"the trace was written by duplexd {header.version}, whose engine had another configuration: {error}"
        ) from error
    plan = load_plan(config.model, config.model_options, device=config.device)
    layout = layout_of(plan, config.sessions_max, config.sessions_resident)
    return core_of(config, plan, layout, cores=header.cores), plan


def replay(trace: Trace) -> Replayed:
    """Run a trace again, up to the first difference. Raises as `core_from` and `Trace` do."""
    core, plan = core_from(trace.header)
    run = _Run(core)
    difference = next((found for found in map(run.step, trace.records()) if found is not None), None)
    return Replayed(
        run.steps,
        run.commands,
        run.digest.hexdigest(),
        difference,
        run.error,
        trace.ending,
        notes(trace.header, plan),
    )


def notes(header: Header, plan: ModelPlan) -> tuple[str, ...]:
    """What has changed since the trace was written; only then is a difference no surprise."""
    changes = [
        (
            header.version != __version__,
            f"the trace was written by duplexd {header.version}, this is {__version__}",
        ),
        (header.source != source_digest(), "the core's source has changed since the trace was written"),
        (header.plan != plan_digest(plan), f"the plan of model {plan.name} has changed since the trace was written"),
    ]
    return tuple(said for changed, said in changes if changed)


class _Run:
    """The core, one step after the other."""

    def __init__(self, core: EngineCore) -> None:
        self.steps = 0
        self.commands = 0
        self.digest = hashlib.sha256()
        self.error = ""
        self._core = core
        self._before: deque[tuple[int, Record]] = deque(maxlen=CONTEXT_STEPS)

    def step(self, record: Record) -> Difference | None:
        given, raised = self._act(record)
        found = self._compare(record, given, raised)
        if found is None:
            self._before.append((self.steps, record))
            self.steps += 1
            self.commands += len(given)
        return found

    def _act(self, record: Record) -> tuple[list[Any], str]:
        try:
            if record.kind is Kind.START:
                self._core.start(record.now)
            elif record.event is None:
                self._core.handle_timer(record.now)
            else:
                self._core.handle(record.event, record.now)
        except Exception as error:
            return [], describe_error(error)
        return self._core.commands(), ""

    def _compare(self, record: Record, given: list[Any], raised: str) -> Difference | None:
        if raised or record.kind is Kind.CRASH:
            expected = record.error
            self.error = raised
            return None if raised == expected else self._difference(record, given, raised, at=0)
        encoded = [encode_command(command) for command in given]
        for data in encoded:
            self.digest.update(data)
        for at, (then, now) in enumerate(zip_longest(record.commands, encoded)):
            # Other bytes may be the same command still: a field that was added has its default in the old one.
            if then != now and (then is None or now is None or decode_command(then) != decode_command(now)):
                return self._difference(record, given, "", at=at)
        return None

    def _difference(self, record: Record, given: list[Any], raised: str, *, at: int) -> Difference:
        if record.kind is Kind.CRASH:
            then: tuple[Any, ...] = (f"raised {record.error}",)
        else:
            then = tuple(decode_command(command) for command in record.commands)
        now = (f"raised {raised}",) if raised else tuple(given)
        return Difference(self.steps, self.commands + at, record, then, now, at, tuple(self._before))


# What a person reads ----------------------------------------------------------------------------------------------


def sentences(replayed: Replayed, origin: Nanos) -> Iterator[str]:
    """The outcome, line by line. `origin`: `now` of the first record, so that times count from it."""
    yield from replayed.notes
    counts = f"{replayed.events} events, {replayed.commands} commands"
    if replayed.difference is not None:
        yield f"{counts} identical, then the core says something else"
        yield from _difference_lines(replayed.difference, origin)
        return
    yield f"{counts}, identical"
    if replayed.error:
        yield f"the last event makes the core raise {replayed.error}, as it did"
    if replayed.ending:
        yield f"the trace ends: {replayed.ending}"
    yield f"digest {replayed.digest}"


def _difference_lines(found: Difference, origin: Nanos) -> Iterator[str]:
    for index, record in found.before:
        yield f"  step {index:6} {_seconds(record.now, origin)}  {_event(record)}  -> {len(record.commands)} commands"
    yield f"> step {found.step:6} {_seconds(found.record.now, origin)}  {_event(found.record)}"
    then, now = _get(found.then, found.at), _get(found.now, found.at)
    said = f"the trace has {len(found.then)} of this step, now there are {len(found.now)}"
    yield f"  command {found.command}, number {found.at + 1} of its step ({said})"
    yield f"    trace  {_shown(then)}"
    yield f"    now    {_shown(now)}"
    if type(then) is type(now) and isinstance(then, msgspec.Struct):
        for name in then.__struct_fields__:
            was, is_now = getattr(then, name), getattr(now, name)
            if was != is_now:
                yield f"    differs in {name}: {_shown(was)} / {_shown(is_now)}"


def _get(commands: tuple[Any, ...], at: int) -> Any:
    return commands[at] if at < len(commands) else "nothing"


def _event(record: Record) -> str:
    if record.kind is Kind.START:
        return "start"
    return "timer" if record.event is None else _shown(record.event)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}... ({len(text)} characters)"


def _seconds(now: Nanos, origin: Nanos) -> str:
    return f"{(now - origin) / NANOS_PER_SECOND:9.3f} s"
