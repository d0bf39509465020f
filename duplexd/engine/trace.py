"""Traces: every event the core was given, with its `now`, and every command that came out, in one file (DESIGN §4).

1. One record a step of the loop. Start and timers are steps too. Media is not in it, only the numbers of its slots.
2. The engine's thread encodes and appends to a buffer; a thread of its own compresses and writes it, four times a
   second. A kill -9 loses what was not written then; a power failure more, for nothing is synced.
3. The file is bounded (`bytes_max`), and so is what waits for the disk (`PENDING_MAX`). At either bound, and when the
   disk refuses, the trace ends with a sentence that says why, and the engine goes on without it: a trace with a hole
   could not be run again.
4. Nothing is overwritten: a second engine that was told the same name writes `talk.2.trace` beside `talk.trace`.

    | magic | block: header | block: records | block: records | ... |
    block: u32 bytes of what follows | u32 crc32 of it | zlib(msgpack array of records)
    record: [kind, now, event or nil, [command, ...]], or for END and CRASH the reason in place of the event
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Union

import msgspec

from duplexd import __version__, clock
from duplexd.engine.loop import Core
from duplexd.engine.work import Launch, StageFailed, StageFinished
from duplexd.errors import TraceError
from duplexd.messages import Fact, News
from duplexd.streams.graph import ModelPlan
from duplexd.streams.stage import Job, Result
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

MAGIC = b"duplexd-trace\n"
FORMAT = 2
WRITE_EVERY = Nanos(250 * NANOS_PER_MS)
PENDING_MAX = 8 << 20  #: encoded bytes that may wait for the disk
BLOCK_MAX = 64 << 20  #: a longer block is not read: the file is damaged
END_ROOM = 2048  #: bytes of the bound kept free for the sentence that ends a trace
REASON_MAX = 300  #: characters of that sentence
NAMES_MAX = 100  #: traces of one name beside each other
CLOSE_WITHIN = Nanos(2 * NANOS_PER_SECOND)
_FRAME = struct.Struct("<II")
_ARRAY_32 = struct.Struct(">BI")  # msgpack: 0xdd and a count

log = logging.getLogger("duplexd.trace")


class Kind(IntEnum):
    START = 0  #: `core.start(now)`
    TIMER = 1  #: `core.handle_timer(now)`
    EVENT = 2  #: `core.handle(event, now)`
    CRASH = 3  #: this event made the core raise; the engine died of it
    END = 4  #: the trace ends here, and says why


class Header(msgspec.Struct, frozen=True):
    """What is needed to build the core again, and to notice that it is another one."""

    format: int
    version: str  #: of the package
    source: str  #: digest of the core's source text
    plan: str  #: digest of what the core reads of the model's plan
    engine: dict[str, Any]  #: EngineConfig, as plain values
    cores: int | None  #: that the lanes share; None in a world whose lanes do not
    written_at: float  #: seconds since 1970, for people; nothing is ordered by it
    stages: dict[str, tuple[str, str]] = {}  #: stage -> (role, lane), so that a trace can be drawn without its model


def engine_settings(config: msgspec.Struct) -> dict[str, Any]:
    """The engine's configuration as it stands in a header; where the trace itself went is nobody's business there."""
    settings: dict[str, Any] = msgspec.to_builtins(config)
    settings.pop("trace", None)
    return settings


def header_of(config: msgspec.Struct, plan: ModelPlan, *, cores: int | None, written_at: float = 0.0) -> Header:
    stages = {spec.name: (spec.role.value, spec.lane) for spec in plan.stages.values()}
    settings = engine_settings(config)
    return Header(FORMAT, __version__, source_digest(), plan_digest(plan), settings, cores, written_at, stages)


def source_digest() -> str:
    """Of the text of everything the core is made of: when it differs, other commands are no surprise."""
    root = Path(__file__).parent.parent
    effects = {"live.py", "process.py", "simulator.py", "trace.py", "replay.py", "story.py", "arena.py", "tiers.py"}
    files = [root / "streams/stage.py", root / "streams/graph.py", root / "media/endpoint.py", root / "messages.py"]
    for package in ("engine", "memory"):
        files += [path for path in sorted((root / package).glob("*.py")) if path.name not in effects]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def plan_digest(plan: ModelPlan) -> str:
    """Of what the core reads of a plan: stages, sizes, lengths, and the first tokens of its language."""
    left_out = {"dialect", "faceless"}  #: the second is in the configuration, as what was found on that machine
    read = {name: value for name, value in sorted(vars(plan).items()) if name not in left_out and not callable(value)}
    parts = [read, plan.partitions(1), plan.dialect.anchor(), tuple(plan.dialect.stop)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# Writing ----------------------------------------------------------------------------------------------------------


class TraceWriter:
    """Appends records; a thread of its own writes them. Nothing here raises into the engine once it is open.

    Args:    path: a file that does not exist yet; its numbered neighbour is taken when it does (`self.path`).
             bytes_max: of the file. At the bound the trace ends (rule 3).
    Raises:  TraceError when the file cannot be made.
    """

    def __init__(
        self, path: Path, header: Header, *, bytes_max: int, pending_max: int = PENDING_MAX, every: Nanos = WRITE_EVERY
    ) -> None:
        self.path, self._fd = _create(path)
        self._bytes_max = bytes_max
        self._pending_max = pending_max
        self._every = every
        self._encode = msgspec.msgpack.Encoder(order="deterministic").encode
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._ended = ""  #: why nothing more is written
        self._shut = False  #: the file takes nothing more
        self._closing = threading.Event()
        self.written_bytes = 0
        self._write(MAGIC + _block([self._encode(header)]))
        self._thread = threading.Thread(target=self._run, name="duplexd-trace", daemon=True)
        self._thread.start()

    def step(self, kind: Kind, now: Nanos, event: Any, commands: Sequence[Any]) -> None:
        """One step of the loop. Called on the engine's thread; it encodes and appends, and never waits for a disk."""
        if self._ended:
            return
        try:
            record = self._encode((kind, now, event, commands))
        except (TypeError, OverflowError) as error:
            self._end(f"a record cannot be written: {error}")
            return
        with self._lock:
            fits = self._pending_bytes + len(record) <= self._pending_max
            if fits:
                self._pending.append(record)
                self._pending_bytes += len(record)
        if not fits:
            self._end(f"the disk is too slow: {self._pending_max} bytes waited for it")

    def close(self, reason: str = "the engine was ended") -> None:
        """Write what is left and an end; waits at most `CLOSE_WITHIN`."""
        self._end(reason)
        self._closing.set()
        self._thread.join(CLOSE_WITHIN / NANOS_PER_SECOND)
        if self._thread.is_alive():
            log.error("trace %s: the disk did not take its end", self.path)

    @property
    def ended(self) -> str:
        """Why nothing more is written; '' while it goes on."""
        return self._ended

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = reason
            self._pending.append(self._end_record(reason))
        if not self._closing.is_set():
            log.info("trace %s ends: %s", self.path, reason)

    def _end_record(self, reason: str) -> bytes:
        return self._encode((Kind.END, clock.now(), reason[:REASON_MAX], ()))

    # The writing thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = clock.now() + self._every
        while not self._closing.wait(max(0, due - clock.now()) / NANOS_PER_SECOND):
            due += self._every
            self._flush()
        self._flush()
        os.close(self._fd)

    def _flush(self) -> None:
        with self._lock:
            records, self._pending, self._pending_bytes = self._pending, [], 0
        if not records or self._shut:
            return
        block = _block(records)
        if self.written_bytes + len(block) > self._bytes_max - END_ROOM:
            block = self._last_block(records)
        try:
            self._write(block)
        except OSError as error:
            self._shut = True
            self._end(f"the disk refused: {error.strerror}")

    def _last_block(self, records: list[bytes]) -> bytes:
        """As many records as still fit under the bound, and the sentence that ends the trace."""
        room = self._bytes_max - END_ROOM - self.written_bytes
        while records and len(_block(records)) > room:
            records = records[: len(records) // 2]
        reason = f"the bound of {self._bytes_max} bytes is reached"
        self._shut = True
        self._end(reason)
        return _block([*records, self._end_record(reason)])

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = os.write(self._fd, view)
            self.written_bytes += count
            view = view[count:]


def _create(path: Path) -> tuple[Path, int]:
    """The file and its descriptor; readable by its owner alone, for it holds what people said."""
    for number in range(1, NAMES_MAX + 1):
        candidate = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            return candidate, os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise TraceError(f"cannot write the trace {candidate}: {error.strerror}") from error
    raise TraceError(f"there are {NAMES_MAX} traces named like {path} already; name another file or remove some")


def _block(records: Sequence[bytes]) -> bytes:
    packed = zlib.compress(_ARRAY_32.pack(0xDD, len(records)) + b"".join(records), 1)
    return _FRAME.pack(len(packed), zlib.crc32(packed)) + packed


# The core under a witness -----------------------------------------------------------------------------------------


class TracedCore:
    """A core whose every step is written down. An event that makes the core raise is written before it is raised."""

    def __init__(self, core: Core, writer: TraceWriter) -> None:
        self._core = core
        self._writer = writer
        self._step: tuple[Kind, Nanos, Any] = (Kind.START, Nanos(0), None)

    def start(self, now: Nanos) -> None:
        self._step = (Kind.START, now, None)
        self._core.start(now)

    def handle(self, event: Any, now: Nanos) -> None:
        self._step = (Kind.EVENT, now, event)
        try:
            self._core.handle(event, now)
        except Exception as error:
            self._crash(error)
            raise

    def handle_timer(self, now: Nanos) -> None:
        self._step = (Kind.TIMER, now, None)
        try:
            self._core.handle_timer(now)
        except Exception as error:
            self._crash(error)
            raise

    def timer(self) -> Nanos | None:
        return self._core.timer()

    def commands(self) -> list[Any]:
        commands = self._core.commands()
        self._writer.step(*self._step, commands)
        return commands

    def _crash(self, error: Exception) -> None:
        """The step that failed, and what it raised in place of its commands."""
        _, now, event = self._step
        self._writer.step(Kind.CRASH, now, event, (describe_error(error),))
        self._writer.close("the core raised an error")


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:REASON_MAX]


# Reading ----------------------------------------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True):
    """One step. `commands` are as they stand in the file: equal bytes are equal commands."""

    kind: Kind
    now: Nanos
    event: Any  #: a fact for EVENT (and for CRASH, unless a timer raised); the reason for END; else None
    commands: tuple[bytes, ...]  #: none for CRASH
    error: str = ""  #: what the core raised, for CRASH


def _kinds(base: type[msgspec.Struct]) -> Any:
    """The union of everything a stage may be given, or give back."""
    return Union[tuple(_leaves(base))]  # noqa: UP007


def _leaves(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """Classes that nothing is derived from: those of which there are jobs or results."""
    for kind in base.__subclasses__():
        if kind.__subclasses__():
            yield from _leaves(kind)
        else:
            yield kind


_record_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    list[tuple[Kind, int, msgspec.Raw, list[msgspec.Raw]]]
)
_header_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_event_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Fact | StageFinished | StageFailed | None)
_command_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(News | Launch)
_command_encoder = msgspec.msgpack.Encoder(order="deterministic")


def encode_command(command: Any) -> bytes:
    """The canonical encoding of a command: what a trace holds and what a digest is made of."""
    return _command_encoder.encode(command)


def decode_command(command: bytes) -> Any:
    """Raises TraceError for what no command of this version looks like."""
    try:
        found = _command_decoder.decode(command)
        if isinstance(found, Launch):
            jobs = msgspec.convert(found.jobs, tuple[_kinds(Job), ...])  # type: ignore[misc]
            return msgspec.structs.replace(found, jobs=jobs)
        return found
    except msgspec.MsgspecError as error:
        raise TraceError(f"a command is not of this version: {error}") from error


def _decode_event(event: msgspec.Raw) -> Any:
    found = _event_decoder.decode(event)
    if isinstance(found, StageFinished):
        results = msgspec.convert(found.results, tuple[_kinds(Result), ...])  # type: ignore[misc]
        return msgspec.structs.replace(found, results=results)
    return found


def _record(kind: Kind, now: Nanos, event: msgspec.Raw, commands: list[msgspec.Raw]) -> Record:
    if kind is Kind.CRASH:
        return Record(kind, now, _decode_event(event), (), msgspec.msgpack.decode(commands[0], type=str))
    return Record(kind, now, _decode_event(event), tuple(map(bytes, commands)))


class Trace:
    """A trace file, open for reading once through. `ending` says how it ended when `records` is used up.

    Raises:  TraceError for what is no trace, is of another format, or is damaged; the sentence names the offset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ending = ""
        try:
            self._data = path.read_bytes()
        except OSError as error:
            raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
        if not self._data.startswith(MAGIC):
            raise TraceError(f"{path} is no trace: it does not begin with {MAGIC.decode().strip()!r}")
        self._blocks = self._read_blocks()
        self.header = self._read_header()
        self.began_at = Nanos(0)  #: `now` of the first record, once it was read

    def records(self) -> Iterator[Record]:
        for offset, block in self._blocks:
            try:
                for kind, now, event, commands in _record_decoder.decode(block):
                    if kind is Kind.END:
                        self.ending = msgspec.msgpack.decode(event, type=str)
                        return
                    self.began_at = self.began_at or Nanos(now)
                    yield _record(kind, Nanos(now), event, commands)
            except msgspec.MsgspecError as error:
                raise self._damaged(offset, f"a record is not of this version: {error}") from error
        self.ending = self.ending or "the file breaks off: its engine was killed, or still writes it"

    def _read_blocks(self) -> Iterator[tuple[int, bytes]]:
        """Whole blocks with their offsets. A last one that is not whole is what a kill leaves: it is passed over."""
        at = len(MAGIC)
        while at + _FRAME.size <= len(self._data):
            length, checksum = _FRAME.unpack_from(self._data, at)
            start = at + _FRAME.size
            if length > BLOCK_MAX:
                raise self._damaged(at, f"a block claims {length} bytes, {BLOCK_MAX} are allowed")
            packed = self._data[start : start + length]
            if len(packed) < length:
                break
            if zlib.crc32(packed) != checksum:
                raise self._damaged(at, "the checksum of a block is wrong")
            yield at, _inflated(packed)
            at = start + length
        if at < len(self._data):
            self.ending = f"the file breaks off inside a block at byte {at}"

    def _read_header(self) -> Header:
        offset, block = next(self._blocks, (len(MAGIC), b""))
        if not block:
            raise TraceError(f"{self.path} holds no header: it was cut off at its beginning")
        try:
            raw = _header_decoder.decode(block)[0]
            found = msgspec.msgpack.decode(raw, type=dict[str, Any]).get("format")
            if found != FORMAT:
                raise TraceError(f"{self.path} is a trace of format {found}; this version reads format {FORMAT}")
            header: Header = msgspec.msgpack.decode(raw, type=Header)
        except (msgspec.MsgspecError, IndexError) as error:
            raise self._damaged(offset, f"its header cannot be read: {error}") from error
        return header

    def _damaged(self, offset: int, what: str) -> TraceError:
        return TraceError(f"{self.path} is damaged at byte {offset}: {what}")


def _inflated(packed: bytes) -> bytes:
    """The checksum was right, so this is no damage of the disk: a block that inflates past the bound was made so."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(packed, BLOCK_MAX)
    except zlib.error as error:
        raise TraceError(f"a block cannot be unpacked: {error}") from error
    if not inflater.eof:
        raise TraceError(f"a block is longer than {BLOCK_MAX} bytes")
    return data
