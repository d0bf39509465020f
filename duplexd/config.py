"""Configuration: defaults < TOML file < `DUPLEXD_*` environment < flags. Unknown keys are errors."""

from __future__ import annotations

import ipaddress
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from duplexd.errors import ConfigError
from duplexd.units import bytes_from_text

ENVIRONMENT_PREFIX = "DUPLEXD_"
#: Environment variables that are not options: where caches lie, and what tests set.
ENVIRONMENT_OTHERS = frozenset({"DUPLEXD_HOME", "DUPLEXD_CONFIG", "DUPLEXD_TEST_KEEP"})
SESSIONS_MAX = 1024  #: more than one engine thread can schedule within its round (DESIGN §11)
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
SECRET = "(set)"  #: shown instead of a secret
NO_FACE = "none"
AUTO_FACE = "auto"  #: the model's own, where it can be drawn
OWN_FACES = {"pocket": "mira", "clock": "flash"}
FACE_LEVELS = ("full", "half", "quarter", "coarse", "still")  #: as `engine/governor.py` has them


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every option of the daemon, with its unit in its name."""

    host: str = "127.0.0.1"  #: address the page is served on; anything but loopback needs a token or --insecure
    port: int = 8787  #: 0: any free port
    public_address: str = ""  #: announced for media instead of this machine's own addresses (NAT, containers)
    loopback_media: bool = False  #: media over 127.0.0.1 only; Chromium needs --allow-loopback-in-peer-connection
    ice_servers: tuple[str, ...] = ()  #: stun:host:port or turn:user:password@host:port; none: nothing outside is asked
    tls: bool = False  #: serve https with a self-signed certificate, so that a phone may use its microphone
    token: str = ""  #: bearer token that a page or a client of the API must give
    cors_origins: tuple[str, ...] = ()  #: pages of other origins that may use the API: https://host, or * for all
    session_life_s: float = 0.0  #: a session of the Realtime API ends after this; 0: never
    requests_per_minute: float = 600.0  #: responses one session may ask for, and requests one address may make
    insecure: bool = False  #: allow a public address without a token
    sessions_max: int = 4
    sessions_resident: int = (
        0  #: whose whole contexts fit into the arena beside each other; 0: all; fewer: idle ones leave
    )
    #: bytes of the device for weights and arena, such as 24GiB, from which sessions_resident follows; none: not bounded
    memory: str = ""
    place_wait_ms: float = 3000.0  #: how long a turn waits for a place in the arena before it is told busy
    #: share of its time a lane may work before late listeners cost places; 0: places stay as the model declares them
    lanes_target: float = 0.7
    model: str = "pocket"  #: model family, by entry point
    thinker: str = ""  #: pocket: another thinker, a GGUF file or a Hugging Face folder (Llama or Qwen architecture)
    batch_max: int = 0  #: pocket: sessions that think in one launch; 0: the model's own
    long_term: int = 0  #: pocket: tokens that what slides out of a full context is folded into; 0: it is forgotten
    #: whose face the person sees: a character of the model, a TOML file of one, none; auto: the model's own, where it
    #: can be drawn
    face: str = AUTO_FACE
    #: the least a face is lowered to when time is short: full, half, quarter, coarse or still; what moves is reserved
    face_least: str = "still"
    device: str = "cpu"
    policy: str = "interaction"  #: order of work: fcfs, window-k, edf, delivery-paced or interaction
    policy_options: tuple[str, ...] = ()  #: of the policy, NAME=VALUE each, such as k=4
    barge_in: bool = True  #: whether a new session can be interrupted by voice; a page may change it
    speculation: bool = True  #: answer a turn that is probably over before that is certain; unheard until it is
    voice_detector: str = "auto"  #: what tells voice: "silero", "energy", or the model's own choice
    voice_min_ms: float = 200.0  #: a shorter voice interrupts nobody
    echo_warmup_ms: float = 1500.0  #: at the start of a session the echo canceller is still learning: be slower to hold
    silence_max_ms: float = 700.0  #: silence that ends a turn whatever the judge says
    hold_max_ms: float = 2000.0  #: longest freeze without a decision
    judge_max_ms: float = 1600.0  #: longest judgement of a voice over the reply: then it interrupts with words only
    voice_end_ms: float = 300.0  #: silence after which such a voice is over, and a false alarm goes on
    rest_ms: float = 600.0  #: after a false alarm the server's detector pauses nothing for so long
    response_deadline_ms: float = 10_000.0  #: a reply without a sound by then fails; 0: never
    trace: str = ""  #: file the engine writes every event and command to, for `duplexd replay`; none: no trace
    trace_mb_max: int = 256  #: of that file, in MB; at the bound the trace ends and the engine goes on
    log_level: str = "INFO"


def face_of(config: Config) -> str:
    """Whose face a session is to have; `NO_FACE`: none. Whether this machine can draw it, the engine finds out."""
    return OWN_FACES.get(config.model, NO_FACE) if config.face == AUTO_FACE else config.face


def load(*, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, file: str | None = None) -> Config:
    """The effective configuration. Raises ConfigError naming the key, where it stands and what is allowed."""
    environment = os.environ if environment is None else environment
    path = file or environment.get("DUPLEXD_CONFIG", "")
    values: dict[str, Any] = {}
    if path:
        values |= _checked(_read(Path(path)), f"file {path}")
    values |= _checked(_from_environment(environment), "environment")
    values |= _checked({k: v for k, v in flags.items() if v is not None}, "flags")
    return check(msgspec.convert(values, Config))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name, text in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in ENVIRONMENT_OTHERS:
            found[name.removeprefix(ENVIRONMENT_PREFIX).lower()] = text
    return found


def _checked(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Known keys with values of their type; text is converted, as in the environment."""
    types = get_type_hints(Config)
    for key in values:
        if key not in types:
            raise ConfigError(f"{where}: there is no option {key!r}; there are {', '.join(sorted(types))}")
    return {key: _converted(key, value, types[key], where) for key, value in values.items()}


def _converted(key: str, value: Any, kind: Any, where: str) -> Any:
    if kind == tuple[str, ...] and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        # The value is not repeated: it may be a token that stands at the wrong key.
        raise ConfigError(f"{where}: {key} is of the wrong type: {error}") from error


def check(config: Config) -> Config:
    """Ranges, and what must not be combined. Raises ConfigError."""
    named_options(config.policy_options)
    if config.memory:
        bytes_from_text(config.memory)
    rules = [
        (0 <= config.port < 65_536, f"port is {config.port}; it lies in 0..65535"),
        (
            1 <= config.sessions_max <= SESSIONS_MAX,
            f"sessions_max is {config.sessions_max}; it lies in 1..{SESSIONS_MAX}",
        ),
        (
            0 <= config.sessions_resident <= config.sessions_max,
            f"sessions_resident is {config.sessions_resident}; it lies in 0..{config.sessions_max} (sessions_max)",
        ),
        (
            not (config.memory and config.sessions_resident),
            f"memory is {config.memory!r} and sessions_resident {config.sessions_resident}: the one follows from the "
            "other; set one of them",
        ),
        (
            config.face_least in FACE_LEVELS,
            f"face_least is {config.face_least!r}; it is one of {', '.join(FACE_LEVELS)}",
        ),
        (0 <= config.batch_max <= 64, f"batch_max is {config.batch_max}; it lies in 0..64"),
        (0 <= config.long_term <= 64, f"long_term is {config.long_term}; it lies in 0..64"),
        (0 <= config.lanes_target <= 1, f"lanes_target is {config.lanes_target}; it lies in 0..1"),
        (0 <= config.place_wait_ms <= 60_000, f"place_wait_ms is {config.place_wait_ms}; it lies in 0..60000"),
        (
            config.voice_detector in ("auto", "silero", "energy"),
            f"voice_detector is {config.voice_detector!r}; it is auto, silero or energy",
        ),
        (50 <= config.voice_min_ms <= 2000, f"voice_min_ms is {config.voice_min_ms}; it lies in 50..2000"),
        (450 <= config.silence_max_ms <= 5000, f"silence_max_ms is {config.silence_max_ms}; it lies in 450..5000"),
        (0 <= config.echo_warmup_ms <= 60_000, f"echo_warmup_ms is {config.echo_warmup_ms}; it lies in 0..60000"),
        (
            0 <= config.response_deadline_ms <= 600_000,
            f"response_deadline_ms is {config.response_deadline_ms}; it lies in 0..600000",
        ),
        (1 <= config.trace_mb_max <= 100_000, f"trace_mb_max is {config.trace_mb_max}; it lies in 1..100000"),
        (config.log_level in LOG_LEVELS, f"log_level is {config.log_level!r}; it is one of {', '.join(LOG_LEVELS)}"),
        (0 <= config.session_life_s <= 86_400, f"session_life_s is {config.session_life_s}; it lies in 0..86400"),
        (
            1 <= config.requests_per_minute <= 1_000_000,
            f"requests_per_minute is {config.requests_per_minute}; it lies in 1..1000000",
        ),
        (300 <= config.judge_max_ms <= 10_000, f"judge_max_ms is {config.judge_max_ms}; it lies in 300..10000"),
        (100 <= config.voice_end_ms <= 2000, f"voice_end_ms is {config.voice_end_ms}; it lies in 100..2000"),
        (0 <= config.rest_ms <= 10_000, f"rest_ms is {config.rest_ms}; it lies in 0..10000"),
        (500 <= config.hold_max_ms <= 10_000, f"hold_max_ms is {config.hold_max_ms}; it lies in 500..10000"),
        (
            is_loopback(config.host) or bool(config.token) or config.insecure,
            f"host {config.host} can be reached from outside and no token is set; set token, or insecure to allow it",
        ),
    ]
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(sentence)
    return config


def named_options(options: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE texts by name. Raises ConfigError for one without a name or without a value."""
    named = {}
    for option in options:
        name, found, value = option.partition("=")
        if not (name and found and value):
            raise ConfigError(f"option {option!r} is not written NAME=VALUE")
        named[name.strip()] = value.strip()
    return named


def is_loopback(host: str) -> bool:
    """Only this machine reaches it. A name that merely begins like such an address is none."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def describe(config: Config) -> str:
    """The effective configuration as TOML; the token and the passwords of TURN servers are not shown."""
    servers = tuple(_without_password(server) for server in config.ice_servers)
    shown = msgspec.structs.replace(config, token=SECRET if config.token else "", ice_servers=servers)
    return "\n".join(f"{key} = {_toml(value)}" for key, value in msgspec.structs.asdict(shown).items())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    # A TOML basic string is a JSON one, but for DEL, which must be escaped as well (TOML 1.0, "String").
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F") if isinstance(value, str) else str(value)


def _without_password(server: str) -> str:
    """turn:user:password@host -> turn:user:(set)@host."""
    account, at, host = server.rpartition("@")
    if account.count(":") < 2:
        return server
    kind, user, _ = account.split(":", 2)
    return f"{kind}:{user}:{SECRET}{at}{host}"
