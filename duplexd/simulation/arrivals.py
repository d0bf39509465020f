"""Who comes when: a closed loop, Poisson, bursts, or a trace file.

A trace has BurstGPT's columns: Timestamp, Session ID, Elapsed time, Model, Request tokens, Response tokens, Total
tokens, Log Type. Rows of one session id are turns of one visit; rows without one are visits of a single turn. Seconds
count from the first row. Elapsed time and the model's name are read and not used: they tell how another engine did.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from duplexd.errors import ConfigError
from duplexd.units import NANOS_PER_SECOND, Nanos

COLUMNS = (
    *("Timestamp", "Session ID", "Elapsed time", "Model"),
    *("Request tokens", "Response tokens", "Total tokens", "Log Type"),
)
KINDS = ("closed", "poisson", "gamma", "trace")


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    concurrency: int = 0  #: closed: people who are always there
    rate: float = 0.0  #: poisson, gamma: visits per second
    shape: float = 1.0  #: gamma: 1 is Poisson, below it come bursts (BurstGPT-like: 0.25 to 0.5)
    file: str = ""  #: trace
    ramp_s: float = 10.0  #: closed: within which the first ones come

    def faults(self) -> str:
        """Why these figures describe no arrivals, '' if they do."""
        rules = [
            (self.kind in KINDS, f"kind is {self.kind!r}; it is one of {', '.join(KINDS)}"),
            (self.kind != "closed" or 1 <= self.concurrency <= 4096, "a closed loop needs concurrency, 1..4096"),
            (self.kind not in ("poisson", "gamma") or self.rate > 0, f"{self.kind} needs a rate above 0"),
            (self.kind != "gamma" or 0 < self.shape <= 100, f"shape is {self.shape}; it lies in 0..100"),
            (self.kind != "trace" or bool(self.file), "a trace needs a file"),
        ]
        return next((sentence for holds, sentence in rules if not holds), "")


class TraceTurn(msgspec.Struct, frozen=True):
    at: Nanos  #: since the first row
    request_tokens: int
    response_tokens: int


def open_times(arrivals: Arrivals, *, seed: int, until: Nanos) -> Iterator[Nanos]:
    """When visits begin in an open loop; Gamma gaps of mean 1/rate. A shape of 1 is Poisson."""
    rng = Random(f"{seed}/arrivals")
    shape = arrivals.shape if arrivals.kind == "gamma" else 1.0
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1.0 / (shape * arrivals.rate)) * NANOS_PER_SECOND
        if at >= until:
            return
        yield Nanos(round(at))


def read_trace(file: Path) -> list[list[TraceTurn]]:
    """Turns by visit, in the order of their first row.

    Raises:  ConfigError naming the file, the line and what is wrong with it.
    """
    try:
        with file.open(newline="") as lines:
            return _read_rows(file, csv.DictReader(lines))
    except OSError as error:
        raise ConfigError(f"trace {file}: {error.strerror}") from error


def _read_rows(file: Path, reader: csv.DictReader[str]) -> list[list[TraceTurn]]:
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"trace {file} lacks the columns {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
    visits: dict[str, list[TraceTurn]] = {}
    first, last = None, 0.0
    for number, row in enumerate(reader, start=2):
        try:
            at = float(row["Timestamp"])
            request, response = int(row["Request tokens"]), int(row["Response tokens"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"trace {file}, line {number}: {error}") from error
        first = at if first is None else first
        if at < last or min(request, response) < 0:
            raise ConfigError(f"trace {file}, line {number}: time goes back, or a count is negative")
        last = at
        if response == 0:
            continue  # BurstGPT keeps failed requests, without a response: nobody waited for sound.
        name = row["Session ID"].strip() or f"row {number}"
        turn = TraceTurn(Nanos(round((at - first) * NANOS_PER_SECOND)), max(1, request), response)
        visits.setdefault(name, []).append(turn)
    if not visits:
        raise ConfigError(f"trace {file} has no row with a response")
    return list(visits.values())
