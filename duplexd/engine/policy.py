"""Scheduling policies: one class each, chosen by name. Here, and nowhere else, engines differ in what they do first.

A policy answers a few questions. It sees values alone (`Work`, `Moment`, `Gate`, `Load`; a test walks their types),
never a transport, a session or the core. What the monitor's snapshot (`Pressure`) holds reaches it here:

    playback, buffer a stage  Work.silence_at: when all that this very stage has made will have been heard;
                              sent_silence_at: the same by the server's clock; Gate.budget: how far ahead is enough
    speech activity           Work.need: INPUT, TURN, SPECULATION; who speaks keeps their memory (memory/eviction.py)
    barge-in                  nothing of a dead epoch is offered, nor a step of a reply that stands still
    pool occupancy            Moment.pool_occupancy, Work.pool_share, Load.pages
    lanes and places          Moment.load, Moment.reach, Load.lanes, Load.places_*

Its questions:

    rank               where an offer stands among those of its lane, and whether it may begin a launch by itself
    may_ride           whether an offer may share the launch of a more urgent one
    lookahead          how far a stage may run ahead of the ear; None: as far as memory allows
    delivers_ahead     how far what is made may be handed over ahead of the ear
    eviction, preloads whose memory leaves first, and whether it comes back before it is needed
    sizes_chunks       whether chunks follow the playback that is left; places_follow: whether places follow the load
    spares_beginnings  whether launches stay short, and first chunks wait, where a gap would follow the first words
    feeds_by_cost      whether a step of prefill may take as long as one of decoding; else it has a count of tokens
    admits_speculation whether work may be done for a turn that may not have ended
    prefills_speech    whether words enter the context while they are spoken (DESIGN §5 rule 7), or with the turn's end
    yields_fidelity    whether faces are made coarser before anybody loses a place
    urgency            what a rank is called where people look at it

    name              order                 lookahead   eviction   preload   like
    fcfs              ready age             none        LRU        no        vLLM-Omni
    window-k          ready age             K pieces    LRU        no        vLLM-Omni with a bounded window (#3592)
    edf               sent deadline         none        LRU        no        vLLM-Omni's `edf` stream policy (#6600)
    delivery-paced    ready age             none        LRU        no        SGLang-Omni
    interaction       U0, U1, U2            budget      next use   yes       LiveServe, with DESIGN §5 rule 1

A rank is a key that holds until the clock changes it (`until`), so that nothing is sorted anew while nothing happens.
A signal that is missing turns off the term that needs it, and no other (fail closed).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

import msgspec

from duplexd.engine.monitor import Load
from duplexd.engine.timeline import BUDGET_MAX
from duplexd.engine.work import CHUNK, INPUT, PATIENT, SPECULATION, Work
from duplexd.errors import ConfigError
from duplexd.streams.stage import Role
from duplexd.units import NANOS_PER_MS, Nanos, Ticks, nanos_from_ms, ticks_from_ms

INPUT_AGE_MAX = Nanos(300 * NANOS_PER_MS)  #: arriving input older than this is as urgent as a first chunk (DESIGN §7)
#: A rank that rests on how full memory is, or on how much lane time others had, is looked at again after this.
RANK_AGE_MAX = Nanos(250 * NANOS_PER_MS)
#: What the front end's playout takes ahead of the ear, less what may be on its way (media/playout.py `queued_max`).
DELIVERED_MAX = ticks_from_ms(8_000)
#: `delivery-paced`: enough for any network that a conversation can be held over.
PACED_DELIVERY = ticks_from_ms(1_000)


class Eviction(Enum):
    """Whose memory leaves first."""

    LRU = "lru"  #: who was used least recently
    NEXT_USE = "next_use"  #: who will be needed last (LiveServe eq. 4)


class Misfit(Enum):
    """What follows when the most urgent offer of a lane cannot start, since memory is short."""

    STOP = "stop"  #: the lane waits for it (LiveServe algorithm 1)
    SKIP = "skip"  #: the next one is tried


class Moment(msgspec.Struct, frozen=True):
    """What a rank rests on beside the offer itself."""

    now: Nanos
    pool_occupancy: float | None = None  #: share of the page pool that is taken; None: not known
    served: float = 0.0  #: lane time this session had, over its weight (EEVDF's v), ns
    owed: bool = True  #: it had no more than the mean of those who want the lane (EEVDF: lag >= 0)
    quantum: Nanos = Nanos(NANOS_PER_MS)  #: one step of the stage: deadlines closer than this are equal
    reach: Nanos = Nanos(0)  #: from wanting a launch of the stage to its end, as long as one must expect
    load: float | None = None  #: share of its time that the lane works; None: not measured yet


class Rank(msgspec.Struct, frozen=True):
    key: tuple[float, ...]  #: the least goes first
    until: Nanos | None = None  #: the clock alone changes the key, or `leads`, then
    leads: bool = True  #: it may begin a launch; False: it waits for company, with a key behind all that may


class Gate(msgspec.Struct, frozen=True):
    """A stage asks how far it may run ahead of the ear, the piece it is about to make included."""

    role: Role
    unit: Ticks  #: playback length of one piece of this stage, at most
    budget: Ticks  #: what keeps playback whole, the piece included (DESIGN §5 rule 1)
    rows: int = 1  #: sessions that may share a launch of the stage


class SchedulingPolicy(Protocol):
    name: str
    eviction: Eviction
    preloads: bool
    delivers_ahead: Ticks
    misfit: Misfit
    sizes_chunks: bool  #: the length of a chunk follows the playback that is left; else the ramp of the plan
    places_follow: bool  #: how many may talk at once follows what is measured (admission.py `Aimd`)
    spares_beginnings: bool  #: a reply begins when it can go on, and what it goes on with shares no long launch
    feeds_by_cost: bool  #: a step of prefill is no longer than a step of decoding; else it is FEED_MAX tokens
    prefills_speech: bool  #: words are prefilled as they are understood; False only to compare with engines that wait
    yields_fidelity: bool  #: before a place is taken away the fidelity ladder is asked (admission.py `Ladder`)

    def rank(self, work: Work, at: Moment) -> Rank:
        """Where one offer stands on its lane; pure."""

    def may_ride(self, rider: Work, leader: Work) -> bool:
        """Whether another session's offer may share this launch, which takes longer for it; pure."""

    def lookahead(self, gate: Gate) -> Ticks | None:
        """How far a stage may run ahead of the ear, the next piece included; None: no bound but memory's."""

    def admits_speculation(self, load: Load) -> bool:
        """Whether to work on a reply to a turn that may not have ended."""

    def urgency(self, rank: Rank) -> str:
        """The class a rank stands in, for people; '' where there are no classes."""


def _shares_think_step(rider: Work, leader: Work) -> bool:
    """What nobody waits for yet, such as a long prefill, must not ride on a step that somebody does wait for."""
    return leader.need in PATIENT or rider.need not in PATIENT


class Fcfs:
    """First come, first served on every stage, at full speed, whatever the listener hears.

    Args:    prefill: False: what is said reaches the thinker when the turn has ended, as in an engine of requests.
    """

    name = "fcfs"
    eviction = Eviction.LRU
    preloads = False
    delivers_ahead = DELIVERED_MAX
    misfit = Misfit.SKIP
    sizes_chunks = False
    places_follow = False
    spares_beginnings = False
    feeds_by_cost = False
    yields_fidelity = False

    def __init__(self, *, prefill: bool = True) -> None:
        self.prefills_speech = prefill

    def rank(self, work: Work, at: Moment) -> Rank:
        return Rank((work.need is SPECULATION, work.ready_at, work.session))

    def may_ride(self, rider: Work, leader: Work) -> bool:
        return _shares_think_step(rider, leader)

    def lookahead(self, gate: Gate) -> Ticks | None:
        return None

    def admits_speculation(self, load: Load) -> bool:
        return False

    def urgency(self, rank: Rank) -> str:
        return ""


class WindowK(Fcfs):
    """First come, first served, and no stage has more than K pieces that nobody has heard."""

    name = "window-k"

    def __init__(self, *, k: int = 4, prefill: bool = True) -> None:
        if k < 1:
            raise ConfigError(f"policy window-k was given k={k}; it must be at least 1, or nothing is ever made")
        super().__init__(prefill=prefill)
        self.k = k

    def lookahead(self, gate: Gate) -> Ticks | None:
        return Ticks(self.k * gate.unit)


class Edf(Fcfs):
    """Earliest deadline first by the server's clock: as if everything had been heard from the moment it was sent."""

    name = "edf"

    def rank(self, work: Work, at: Moment) -> Rank:
        due = work.ready_at if work.sent_deadline is None else work.sent_deadline
        return Rank((work.need is SPECULATION, due, work.ready_at, work.session))


class DeliveryPaced(Fcfs):
    """First come, first served at full speed; what is made is handed over no faster than it is heard."""

    name = "delivery-paced"
    delivers_ahead = PACED_DELIVERY


#: Steps that take no time to speak of, and that others wait for.
AT_ONCE = frozenset((Role.COPY, Role.JUDGE))
#: Classes of urgency, most urgent first. With company U2 comes last: it waits, and suspicion may use the lane.
U0, U1, DUE, ARRIVING, U2, U2_NOT_OWED, SPECULATIVE, WAITING, WAITING_NOT_OWED = range(9)
URGENCIES = ("U0", "U1", "due", "arriving", "U2", "U2", "guess", "waiting", "waiting")  #: as they are shown
#: A lane that works more than this share of its time is busy.
LANES_BUSY = 0.7
#: On a lane that is not busy, what is due lets first sounds pass until this share of the time it needs is left.
HASTE = 0.5


class Interaction:
    """U0 nearly silent, U1 waiting for the first sound, U2 by utility, suspicion last (seed 002 §3.2, DESIGN §7).

    Within U0 and U1, offers that are due within one step of the stage are equal, and who had less lane time goes first.
    Within U2, who had more than the mean comes after those who had not. Each mechanism can be switched off alone.

    Company: a batch costs little more than one row, and behind the gate chunks come one at a time. So an offer may be
    made earlier than it must (`lookahead`), and until it is due it begins no launch: it rides on those of others, or
    begins one when as many wait as share a launch. It is due when only P_safe and the time it needs are left, `reach`:
    the launch that runs, its own, and how they stray. While the lane is busy it is U0 then, by deadline; on a lane with
    time to spare first sounds still pass (DUE) until half of that is left.

    Args:    p_safe_ms: so much left to play is safe; alpha, beta: weights of equation 1, see `_utility`.
             misfit: "stop" or "skip", see `Misfit`.
             company_ms: how much earlier than it must a chunk may be rendered in company, within the longest budget.
             order, gate, next_use, preload, speculation, slack_chunks, admission, company, beginnings, feed, prefill:
             False takes that mechanism away: then the order is by ready age, nothing holds generation back, memory
             leaves by LRU, comes back when it is needed, no turn is anticipated, chunks have the lengths of the plan's
             ramp, places stay as declared, everything begins a launch at once, beginnings are not spared
             (`spares_beginnings`), prefill takes steps of a fixed count of tokens, and speech is prefilled when it has
             ended.
             ladder: True: faces are made coarser before anybody loses a place; see `Governor.lower`.
    """

    name = "interaction"
    delivers_ahead = DELIVERED_MAX

    def __init__(
        self,
        *,
        p_safe_ms: float = 200.0,
        alpha: float = 1.0,
        beta: float = 1.0,
        misfit: str = Misfit.SKIP.value,
        company_ms: float = 300.0,
        order: bool = True,
        gate: bool = True,
        next_use: bool = True,
        preload: bool = True,
        speculation: bool = True,
        slack_chunks: bool = True,
        admission: bool = True,
        company: bool = True,
        beginnings: bool = True,
        feed: bool = True,
        prefill: bool = True,
        ladder: bool = False,
    ) -> None:
        if p_safe_ms <= 0 or alpha < 0 or beta < 0 or company_ms < 0:
            raise ConfigError(
                f"policy interaction was given p_safe_ms={p_safe_ms}, alpha={alpha}, beta={beta}, "
                f"company_ms={company_ms}; p_safe_ms must be more than 0, the others at least 0"
            )
        if misfit not in (known := [m.value for m in Misfit]):
            raise ConfigError(f"policy interaction was given misfit={misfit!r}; it is {' or '.join(known)}")
        self.p_safe = nanos_from_ms(p_safe_ms)
        self.alpha = alpha
        self.beta = beta
        self.misfit = Misfit(misfit)
        self.eviction = Eviction.NEXT_USE if next_use else Eviction.LRU
        self.preloads = preload
        self.sizes_chunks = slack_chunks
        self.places_follow = admission
        self.spares_beginnings = beginnings
        self.feeds_by_cost = feed
        self.prefills_speech = prefill
        self.yields_fidelity = ladder
        self._order = order
        self._gate = gate
        self._speculation = speculation
        self._company = company and order and gate
        self._earlier = ticks_from_ms(company_ms)

    def rank(self, work: Work, at: Moment) -> Rank:
        if not self._order:
            return Rank((work.need is SPECULATION, work.ready_at, work.session))
        if work.need is SPECULATION:
            return Rank((SPECULATIVE, work.ready_at, work.session))
        if work.role in AT_ONCE:
            return self._by_age(U0, work, at)
        if work.need is CHUNK and work.started and (deadline := work.deadline) is not None:
            return self._playing(work, deadline, at)
        if work.need is INPUT and at.now - work.ready_at < INPUT_AGE_MAX:
            return self._by_age(ARRIVING, work, at, until=Nanos(work.ready_at + INPUT_AGE_MAX))
        return self._by_age(U1, work, at)

    def _by_age(self, urgency: int, work: Work, at: Moment, until: Nanos | None = None) -> Rank:
        due = _step(work.ready_at, at)
        return Rank((urgency, -work.priority, due, at.served, work.ready_at, work.session), until)

    def _playing(self, work: Work, deadline: Nanos, at: Moment) -> Rank:
        reach = at.reach if self._company else 0
        due = deadline - self.p_safe - reach
        if at.now < due:
            return self._ahead(work, deadline, due, at)
        spare = reach and at.load is not None and at.load <= LANES_BUSY
        near = due + int((1 - HASTE) * reach) if spare else due
        key = (_step(deadline, at), -work.priority, at.served, deadline, work.session)
        return Rank((U0, *key)) if at.now >= near else Rank((DUE, *key), Nanos(near))

    def _ahead(self, work: Work, deadline: Nanos, due: int, at: Moment) -> Rank:
        utility = self._utility(work, deadline, at)
        if self._company:
            waiting = WAITING if at.owed else WAITING_NOT_OWED
            return Rank((waiting, -utility, work.ready_at, work.session), Nanos(due), False)
        urgency = U2 if at.owed else U2_NOT_OWED
        return Rank((urgency, -utility, work.ready_at, work.session), Nanos(min(due, at.now + RANK_AGE_MAX)))

    def _utility(self, work: Work, deadline: Nanos, at: Moment) -> float:
        """Equation 1 but for a term that grows with the clock for everybody alike: beta U_kv - alpha C_barge.

        Equation 2 says C_barge = (deadline - now - P_safe) / P_safe for whoever is beyond P_safe, as all in U2 are;
        what orders them is deadline / P_safe.
        """
        return self.beta * _kv_relief(work, at) - self.alpha * deadline / self.p_safe

    def urgency(self, rank: Rank) -> str:
        return URGENCIES[int(rank.key[0])] if self._order else ""

    def may_ride(self, rider: Work, leader: Work) -> bool:
        # Every row makes a launch longer: who waits for the first sound waits for nobody's later chunk, nor for one
        # that may never be heard.
        return _shares_think_step(rider, leader) and (leader.started or not rider.started)

    def lookahead(self, gate: Gate) -> Ticks | None:
        """The budget; where launches are shared, what may ride on others' before it must be begun comes on top. Text is
        made for a piece of speech: it is one more ahead.

        That changes DESIGN §5 rule 1 for upstream stages: there the budget ends with one piece of the worst length,
        here with two of talk and three of thought. What can be heard, the chunks, never passes the longest budget.
        """
        if not self._gate:
            return None
        if not self._company or gate.rows == 1:
            return gate.budget
        if gate.role is Role.RENDER:
            return Ticks(max(gate.budget, min(BUDGET_MAX, gate.budget + self._earlier)))
        return Ticks(gate.budget + (2 if gate.role is Role.THINK else 1) * gate.unit)

    def admits_speculation(self, load: Load) -> bool:
        """While nobody else needs the time or the memory. Pages nobody knows of count as taken; a lane that was never
        measured counts as idle. Whoever is alone fills the lanes by guessing, and competes with nobody.
        """
        if not self._speculation or load.pages is None or load.pages > SPECULATION_PAGES_MAX:
            return False
        busiest = load.busiest if load.places_taken > 1 else None
        # A lane that nobody has measured yet has not worked for a whole window: it is idle.
        return load.places_waited_for == 0 and (busiest is None or busiest <= LANES_BUSY)


#: Beyond this, memory for work that may be for nothing would be at somebody's cost.
SPECULATION_PAGES_MAX = 0.9


def _step(due: Nanos, at: Moment) -> Nanos:
    """Equal for all that are due within one step of the stage; comparable between stages, whose steps differ."""
    return Nanos(due - due % at.quantum)


def _kv_relief(work: Work, at: Moment) -> float:
    """Equation 3, both factors as fractions: what finishing would free, and how much that is worth now."""
    if work.pool_share is None or at.pool_occupancy is None:
        return 0.0
    return work.pool_share * at.pool_occupancy


POLICIES: dict[str, type[SchedulingPolicy]] = {
    kind.name: kind for kind in (Fcfs, WindowK, Edf, DeliveryPaced, Interaction)
}


def policy_of(name: str, options: Mapping[str, str] | None = None) -> SchedulingPolicy:
    """A policy by name, with options as text. Raises ConfigError with the names, options or types there are."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    kind: Any = POLICIES[name]
    known = _options(kind)
    values: dict[str, Any] = {}
    for option, text in (options or {}).items():
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ConfigError(f"policy {name} has no option {option!r}; {takes}")
        try:
            values[option] = msgspec.convert(text, known[option], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"policy {name}: option {option}={text!r} is of the wrong type: {error}") from error
    policy: SchedulingPolicy = kind(**values)
    return policy


def _options(kind: Any) -> dict[str, type]:
    """Options of a policy and their types: the keyword arguments of its constructor."""
    defaults = getattr(kind.__init__, "__kwdefaults__", None) or {}
    return {option: type(default) for option, default in defaults.items()}


def spelled(text: str) -> tuple[str, dict[str, str]]:
    """A policy and its options as one text: "interaction gate=false" -> its name and {"gate": "false"}.

    Raises:  ConfigError for a word that is no option.
    """
    name, *words = text.split() or [""]
    pairs = [word.partition("=") for word in words]
    if wrong := [word for word, (key, equals, _) in zip(words, pairs, strict=True) if not key or not equals]:
        raise ConfigError(f"policy {text!r}: {wrong[0]!r} is no option; options are written name=value")
    return name, {key: value for key, _, value in pairs}
