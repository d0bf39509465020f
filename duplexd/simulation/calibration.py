"""Calibrations: cost files, one a source, never mixed. Each says where its figures are from and what was fitted.

A file is TOML. `stages` name what runs (think, talk, render, copy, ears, mover; generate, refine, decode for video), on
which device, at what affine cost; `speech` says how tokens become sound and is absent where nothing is spoken.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import msgspec

from duplexd.errors import ConfigError
from duplexd.streams.stage import CostModel, SimulatedCost

CHUNK_MS_MAX = 1200  #: the budget is 1.5 s at most and holds the listener's buffer as well


class Speech(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a reply of so many words becomes sound, and what its memory weighs."""

    frame_ms: int  #: one codec frame: the unit of talk and render
    word_ms: int  #: one token of the thinker; a whole number of frames
    first_clause_words: int  #: 1 to 8: what is spoken first, so that somebody hears something soon
    clause_words: int  #: 2 to 8: one launch of the talker
    chunk_ms: int  #: one launch of the vocoder, and what is handed to the listener at once
    think_steps: int  #: tokens of one launch of the thinker
    reply_words_max: int
    context_tokens_max: int  #: tokens of one session's whole context
    token_bytes: int  #: keys and values of one token
    chunk_ramp_ms: tuple[int, ...] = ()  #: lengths of a reply's first chunks, the last for all others; (): chunk_ms
    input_tokens_per_word: int = 1  #: what one word of the person takes in the context
    copy_bytes_per_second: float = 54e9  #: between host and device, one way


class StageFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    fixed_us: int = 0
    per_row_us: int = 0
    per_unit_us: int = 0
    per_step_us: int = 0
    share: float = 1.0
    sigma: float = 0.0
    batch_max: int = 1
    load: float = 0.0  #: lane time of one session that talks, as its stage declares it; 0: none is declared

    @property
    def mean(self) -> CostModel:
        return CostModel(self.fixed_us, self.per_row_us, self.per_unit_us, self.per_step_us)

    @property
    def cost(self) -> SimulatedCost:
        return SimulatedCost(self.mean, self.device, self.share, self.sigma)


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    source: str  #: whose figures, where they stand
    fitted: str  #: what no source says, and how it was chosen
    stages: dict[str, StageFigures]
    speech: Speech | None = None
    capacities: dict[str, float] = {}  #: of devices that can do more than one launch at full speed

    @property
    def cores(self) -> int | None:
        """What all lanes share, when they share one device; None when they have devices of their own."""
        devices = {figures.device for figures in self.stages.values()}
        return max(1, int(self.capacities.get(devices.pop(), 1.0))) if len(devices) == 1 else None


def names() -> list[str]:
    """Calibrations that come with duplexd."""
    folder = files("duplexd.simulation") / "calibrations"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name: str) -> Calibration:
    """A calibration by its name, or by the path of its file.

    Raises:  ConfigError with the names there are, the key that is unknown, or the figure that is out of range.
    """
    if name in names():
        text = (files("duplexd.simulation") / "calibrations" / f"{name}.toml").read_text()
    elif name.endswith(".toml") and Path(name).is_file():
        text = Path(name).read_text()
    else:
        raise ConfigError(f"there is no calibration {name!r}; there are {', '.join(names())}, or give a .toml file")
    try:
        return checked(msgspec.convert(tomllib.loads(text), Calibration, strict=True))
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"calibration {name}: {error}") from error


def checked(calibration: Calibration) -> Calibration:
    """Raises ConfigError naming the stage or key and the range."""
    for name, figures in calibration.stages.items():
        rules = [
            (0 < figures.share <= 1, f"share is {figures.share}; it lies in 0..1"),
            (0 <= figures.sigma <= 1, f"sigma is {figures.sigma}; it lies in 0..1"),
            (0 <= figures.load <= 1, f"load is {figures.load}; it lies in 0..1"),
            (figures.batch_max >= 1, f"batch_max is {figures.batch_max}; it is at least 1"),
            (min(_costs(figures)) >= 0, "a cost is negative"),
        ]
        _enforce(f"calibration {calibration.name}, stage {name}", rules)
    for device, capacity in calibration.capacities.items():
        _enforce(f"calibration {calibration.name}", [(capacity > 0, f"device {device} has capacity {capacity}")])
    if (speech := calibration.speech) is not None:
        _enforce(f"calibration {calibration.name}, speech", _speech_rules(speech))
    return calibration


def _costs(figures: StageFigures) -> tuple[int, ...]:
    return (figures.fixed_us, figures.per_row_us, figures.per_unit_us, figures.per_step_us)


def _speech_rules(speech: Speech) -> list[tuple[bool, str]]:
    room = speech.context_tokens_max - speech.reply_words_max - 32
    whole = speech.frame_ms > 0 and speech.word_ms % speech.frame_ms == 0
    return [
        (whole, f"word_ms is {speech.word_ms}; it is a multiple of frame_ms ({speech.frame_ms})"),
        (1 <= speech.first_clause_words <= 8, "first_clause_words lies in 1..8: a clause has at most eight words"),
        (2 <= speech.clause_words <= 8, "clause_words lies in 2..8: a clause has at most eight words"),
        (
            speech.frame_ms <= speech.chunk_ms <= CHUNK_MS_MAX and speech.chunk_ms % speech.frame_ms == 0,
            f"chunk_ms is {speech.chunk_ms}; it is a multiple of frame_ms up to {CHUNK_MS_MAX}, since a longer chunk "
            "never fits the lookahead budget",
        ),
        (
            all(speech.frame_ms <= ms <= CHUNK_MS_MAX and ms % speech.frame_ms == 0 for ms in speech.chunk_ramp_ms),
            f"chunk_ramp_ms holds multiples of frame_ms up to {CHUNK_MS_MAX}",
        ),
        (1 <= speech.think_steps <= 64, "think_steps lies in 1..64"),
        (room >= 64, f"context_tokens_max leaves {room} tokens beside a reply; it leaves at least 64"),
        (1 <= speech.reply_words_max <= 4000, "reply_words_max lies in 1..4000"),
        (speech.token_bytes >= 2 and speech.token_bytes % 2 == 0, "token_bytes is even and at least 2"),
        (speech.input_tokens_per_word >= 1, "input_tokens_per_word is at least 1"),
        (speech.copy_bytes_per_second > 0, "copy_bytes_per_second is positive"),
    ]


def _enforce(where: str, rules: list[tuple[bool, str]]) -> None:
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(f"{where}: {sentence}")
