"""Scenarios: who comes, how they talk, over what network, on which calibration, for how long. TOML; no unknown keys."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from duplexd.errors import ConfigError
from duplexd.simulation.arrivals import Arrivals
from duplexd.simulation.link import Network
from duplexd.simulation.people import Faults, Talk


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's own options, as `duplexd serve` has them."""

    sessions_max: int = 64
    sessions_resident: int = 0  #: 0: all
    place_wait_ms: float = 10_000.0
    silence_max_ms: float = 500.0  #: silence that ends a spoken turn
    context_tokens_max: int = 0  #: of one session; 0: as the calibration has it
    speculation: bool = True  #: answer a spoken turn that is probably over before that is certain
    #: Utilisation beyond which late listeners cost places. Lanes that run batches can be fuller than `serve` assumes.
    lanes_target: float = 0.9


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    calibration: str
    talk: Talk
    arrivals: Arrivals
    duration_s: float  #: turns begin within it; what is under way then is carried to its end
    warmup_s: float = 30.0  #: turns that end earlier are not counted
    drain_s: float = 300.0  #: what is under way gets so long to end
    patience_s: float = 60.0
    barge_in: float = 0.0  #: probability that a reply is interrupted
    network: Network = Network()
    faults: Faults = Faults()
    engine: Engine = Engine()
    about: str = ""


def load(file: Path) -> Scenario:
    """Raises ConfigError naming the file, the key and what is allowed."""
    try:
        values = tomllib.loads(file.read_text())
        return check(msgspec.convert(values, Scenario), file=file)
    except OSError as error:
        raise ConfigError(f"scenario {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"scenario {file}: {error}") from error


def check(scenario: Scenario, *, file: Path = Path("scenario")) -> Scenario:
    talk, engine = scenario.talk, scenario.engine
    rules = [
        (talk.input in ("voice", "text"), f"talk.input is {talk.input!r}; it is voice or text"),
        (1 <= talk.turns_mean <= 1000, f"talk.turns_mean is {talk.turns_mean}; it lies in 1..1000"),
        (0.5 <= talk.words_per_second <= 10, "talk.words_per_second lies in 0.5..10"),
        (0 <= scenario.barge_in <= 1, f"barge_in is {scenario.barge_in}; it lies in 0..1"),
        (0 < scenario.duration_s <= 86_400, f"duration_s is {scenario.duration_s}; it lies in 0..86400"),
        (0 <= scenario.warmup_s < scenario.duration_s, "warmup_s is not below duration_s"),
        (0 <= scenario.drain_s <= 3600 and scenario.patience_s > 0, "drain_s lies in 0..3600, patience_s above 0"),
        (1 <= engine.sessions_max <= 4096, "engine.sessions_max lies in 1..4096"),
        (0 <= engine.sessions_resident <= engine.sessions_max, "engine.sessions_resident is above sessions_max"),
        (450 <= engine.silence_max_ms <= 5000, "engine.silence_max_ms lies in 450..5000"),
        (0 <= talk.false_ends <= 1, f"talk.false_ends is {talk.false_ends}; it lies in 0..1"),
        (0 <= talk.past_words <= 1_000_000, "talk.past_words lies in 0..1000000"),
        (
            engine.context_tokens_max == 0 or engine.context_tokens_max >= 512,
            "engine.context_tokens_max is at least 512",
        ),
        (0 <= engine.lanes_target <= 1, "engine.lanes_target lies in 0..1"),
        (0 <= engine.place_wait_ms <= 60_000, "engine.place_wait_ms lies in 0..60000"),
    ]
    for name, value in msgspec.structs.asdict(scenario.faults).items():
        rules.append((0 <= value <= 1, f"faults.{name} is {value}; it lies in 0..1"))
    for name in ("reply_s", "words_in", "gap_ms"):
        fault = getattr(talk, name).faults()
        rules.append((not fault, f"talk.{name}: {fault}"))
    for part, fault in (("arrivals", scenario.arrivals.faults()), ("network", scenario.network.faults())):
        rules.append((not fault, f"{part}: {fault}"))
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(f"scenario {file}: {sentence}")
    return scenario
