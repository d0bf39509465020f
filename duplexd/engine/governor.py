"""The governor: how much face there is time for. The voice never waits for it.

1. Once a second it looks at what became of the frames that were planned. Frames that came late or were never made,
   a lane without time left, or a front end that cannot encode, cost a level when they last for two looks, or at once
   when hardly a frame is in time; quiet seconds win it back, one level at a time. A level that was lost again soon is
   tried later and later, so that a face does not swing.
2. First there are fewer pictures of the same motion, then coarser motion, then a still picture: the last one shown.

    level    pictures a second (of 25)   steps of the generator
    full     all                         all
    half     every 2nd                   all
    quarter  every 4th                   all
    coarse   every 4th                   1
    still    none                        none
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from duplexd.errors import ConfigError
from duplexd.streams.stage import Role

LATE_MAX = 0.1  #: share of planned frames that may come late or not at all before it costs a level
LATE_FEW = 4  #: so many may, whatever their share: a voice that begins finds the next frames too near
SENT_MIN = 0.9  #: share of planned frames that the front end must be able to send
#: Bad looks in a row that cost a level: the second in which a reply begins is everybody's busiest, and passes.
BAD_LOOKS = 2
SEVERE = 0.6  #: share of planned frames whose loss costs a level at once
BUSY_MAX = 0.95  #: of a lane's time; nothing is left for what varies
BUSY_AGAIN = 0.75  #: a level up may double the work: only a lane with this much or less is asked to
PATIENCE = 5  #: quiet looks before the next level up
PATIENCE_MAX = 80


class Fidelity(msgspec.Struct, frozen=True):
    """How well a face is made."""

    steps: int  #: denoising steps of the generator; 0: as many as the model was made for
    stride: int = 1  #: every so many frames one is drawn
    name: str = ""

    @property
    def still(self) -> bool:
        """Nothing is made; the last picture stays."""
        return self.stride == 0


LEVELS = (
    Fidelity(0, 1, "full"),
    Fidelity(0, 2, "half"),
    Fidelity(0, 4, "quarter"),
    Fidelity(1, 4, "coarse"),
    Fidelity(0, 0, "still"),
)


def levels_down_to(name: str) -> tuple[Fidelity, ...]:
    """The levels a governor may use when a face must stay at least so good. Raises ConfigError for an unknown name."""
    names = [level.name for level in LEVELS]
    if name not in names:
        raise ConfigError(f"face_least is {name!r}; it is one of {', '.join(names)}")
    return LEVELS[: names.index(name) + 1]


def share_of(fidelity: Fidelity, role: Role) -> float:
    """Lane time of one stage of a face at this level, of what it takes at the best.

    Fewer pictures are less drawing and nothing else; coarser motion is counted as if it cost the same, since how much
    less it costs is the family's own affair.
    """
    if fidelity.still:
        return 0.0
    return 1.0 / fidelity.stride if role is Role.DECODE else 1.0


HUSHED = 1  #: level of a face, at best, while a person waits for its first sound


class Seen(msgspec.Struct, frozen=True):
    """What became of the frames of the last second."""

    planned: int  #: frames that were to be shown, of all faces
    missed: int  #: of them: late, or never made
    busy: float | None  #: of the busiest lane of the face; None: not measured


class Governor:
    """Args: levels: best first; the last is the floor. patience: quiet looks before the first level up."""

    def __init__(self, levels: Sequence[Fidelity] = LEVELS, *, patience: int = PATIENCE) -> None:
        if not levels:
            raise ValueError("a governor needs at least one level, the fidelity the family works at")
        self._levels = tuple(levels)
        self._patience_min = self._patience = patience
        self._quiet = 0
        self._since_up: int | None = None  # looks since a level was won back
        self._bad = 0  # bad looks in a row
        self._rest = False  # the look after a change: frames of the level before are still among what it sees
        self._sent = 1.0  # the least share a front end could send since the last look
        self.level = 0

    @property
    def fidelity(self) -> Fidelity:
        return self._levels[self.level]

    def note_sent(self, share: float) -> None:
        """A front end could send this share of the frames it was given in time."""
        self._sent = min(self._sent, share)

    def lower(self) -> bool:
        """Somebody's voice was served too late (admission.py `Ladder`): one level coarser; False at the last one."""
        if self.level == len(self._levels) - 1:
            return False
        self._lose()
        return True

    def look(self, seen: Seen) -> Fidelity:
        """The fidelity from now on; called once a second while somebody sees a face."""
        if self._since_up is not None:
            self._since_up += 1
        sent, self._sent = self._sent, 1.0
        self._bad = self._bad + 1 if sent < SENT_MIN or _harmed(seen) else 0
        if self._rest:
            self._rest, self._bad = False, 0
        elif self._bad >= BAD_LOOKS or _severe(seen):
            self._lose()
        elif self._bad:
            # One that costs no level does not bar the way up either: in a lively talk every fourth second is one.
            self._quiet = max(0, self._quiet - 1)
        elif self.level and (self.fidelity.still or seen.busy is None or seen.busy <= BUSY_AGAIN):
            self._quiet += 1
            if self._quiet >= self._patience:
                self._win()
        if self._since_up is not None and self._since_up > self._patience:
            self._patience, self._since_up = self._patience_min, None  # It held: the next one is tried soon.
        return self.fidelity

    def _lose(self) -> None:
        self._rest, self._bad = True, 0
        if self._since_up is not None:
            self._patience = min(PATIENCE_MAX, 2 * self._patience)
        self._quiet, self._since_up = 0, None
        self.level = min(self.level + 1, len(self._levels) - 1)

    def _win(self) -> None:
        self._quiet, self._since_up, self._rest = 0, 0, True
        self.level -= 1


def _severe(seen: Seen) -> bool:
    return seen.missed > max(2 * LATE_FEW, SEVERE * seen.planned)


def _harmed(seen: Seen) -> bool:
    missed = seen.missed > max(LATE_FEW, LATE_MAX * seen.planned)
    return missed or (seen.busy is not None and seen.busy > BUSY_MAX)
