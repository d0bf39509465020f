"""Policies, each on its own: what goes first, how far a stage may run ahead, and what a missing signal turns off."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from inspect import isfunction
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.engine.monitor import Load
from duplexd.engine.policy import (
    ARRIVING,
    DUE,
    INPUT_AGE_MAX,
    PACED_DELIVERY,
    POLICIES,
    RANK_AGE_MAX,
    SPECULATIVE,
    U0,
    U1,
    U2,
    URGENCIES,
    WAITING_NOT_OWED,
    Edf,
    Eviction,
    Fcfs,
    Gate,
    Interaction,
    Misfit,
    Moment,
    SchedulingPolicy,
    policy_of,
    spelled,
)
from duplexd.engine.scheduler import Scheduler
from duplexd.engine.timeline import BUDGET_MAX
from duplexd.engine.work import Need, Work
from duplexd.errors import ConfigError
from duplexd.ids import SessionId
from duplexd.streams.stage import Role
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, Ticks, nanos_from_ms, ticks_from_ms

NOW = Nanos(1000 * NANOS_PER_SECOND)


def at_ms(ms: float) -> Nanos:
    """A moment, from NOW."""
    return Nanos(NOW + nanos_from_ms(ms))


def work(session: int, **changes: Any) -> Work:
    base: dict[str, Any] = {
        "session": SessionId(session),
        "stage": "render",
        "role": Role.RENDER,
        "need": Need.CHUNK,
        "ready_at": NOW,
        "started": True,
        "silence_at": NOW,
        "after": Nanos(0),
        "pool_share": 0.0,
    }
    return Work(**(base | changes))


def playing(session: int, left_ms: float, **changes: Any) -> Work:
    """A reply that plays, with so much made and not heard."""
    return work(session, silence_at=at_ms(left_ms), **changes)


def moment(now: Nanos = NOW, **changes: Any) -> Moment:
    return msgspec.structs.replace(Moment(now, pool_occupancy=0.5), **changes)


def order(*works: Work, policy: SchedulingPolicy | None = None, moments: dict[int, Moment] | None = None) -> list[int]:
    policy, moments = policy or Interaction(p_safe_ms=400), moments or {}
    return [w.session for w in sorted(works, key=lambda w: policy.rank(w, moments.get(w.session, moment())).key)]


# Interaction: the order ----------------------------------------------------------------------------------------------


def test_whoever_is_nearest_silence_goes_first_then_first_sounds_then_the_rest() -> None:
    """U0 by what is left, U1, arriving input, U2 by how far it is ahead, speculation last (DESIGN §7)."""
    nearly_silent = playing(1, 50)
    low = playing(2, 300)
    first_sound = work(3, started=False)
    listening = work(4, need=Need.INPUT, role=Role.THINK)
    ahead = playing(5, 800)
    far_ahead = playing(6, 1400)
    perhaps = work(7, need=Need.SPECULATION, role=Role.THINK, ready_at=at_ms(-900))

    works = (perhaps, far_ahead, ahead, listening, first_sound, low, nearly_silent)

    assert order(*works, policy=Interaction(p_safe_ms=400, company=False)) == [1, 2, 3, 4, 5, 6, 7]
    assert order(*works) == [1, 2, 3, 4, 7, 5, 6], "what waits for company leaves the lane even to suspicion"


def test_a_deadline_leaves_time_for_the_stages_that_follow() -> None:
    """Session 1 has more left to play, but its chunk must still be spoken and rendered."""
    early_stage = playing(1, 380, after=nanos_from_ms(250))
    last_stage = playing(2, 200)

    assert order(last_stage, early_stage) == [1, 2]


def test_old_input_is_not_starved() -> None:
    old = work(1, need=Need.INPUT, role=Role.THINK, ready_at=Nanos(NOW - INPUT_AGE_MAX))
    ahead = playing(2, 800)
    fresh_first_sound = work(3, started=False, ready_at=at_ms(-100))

    assert order(ahead, fresh_first_sound, old) == [1, 3, 2]


def test_memory_that_finishing_frees_counts_for_more_the_fuller_the_pool_is() -> None:
    """Equation 1: session 1 is 200 ms (half of P_safe) further ahead and holds half the pool."""
    holder, light = playing(1, 1000, pool_share=0.6), playing(2, 800)
    full, empty = moment(pool_occupancy=1.0), moment(pool_occupancy=0.1)

    assert order(holder, light, moments={1: full, 2: full}) == [1, 2]
    assert order(holder, light, moments={1: empty, 2: empty}) == [2, 1]


@pytest.mark.parametrize("make", [playing, lambda s, ms: work(s, started=False, ready_at=at_ms(ms - 500))])
def test_within_one_step_whoever_had_less_lane_time_goes_first(make: Any) -> None:
    """EEVDF breaks the tie in U0 and U1; beyond one step the deadline decides alone."""
    greedy, modest = make(1, 100), make(2, 110)
    step = nanos_from_ms(50)
    moments = {1: moment(quantum=step, served=9.0), 2: moment(quantum=step, served=1.0)}
    fine = {1: moment(served=9.0), 2: moment(served=1.0)}

    assert order(greedy, modest, moments=moments) == [2, 1]
    assert order(greedy, modest, moments=fine) == [1, 2]


def test_among_those_who_are_ahead_whoever_had_more_than_the_mean_comes_after() -> None:
    greedy, modest = playing(1, 600), playing(2, 900)

    assert order(greedy, modest, moments={1: moment(owed=False)}) == [2, 1]
    assert order(greedy, modest) == [1, 2]


def test_a_rank_says_when_the_clock_changes_it() -> None:
    """A buffer that drains becomes urgent; input grows old; both say when."""
    policy = Interaction(p_safe_ms=400, company=False)
    ahead, arriving = playing(1, 600), work(2, need=Need.INPUT, role=Role.THINK)
    far = policy.rank(playing(3, 5000), moment())

    assert policy.rank(ahead, moment()).until == at_ms(200)
    assert policy.rank(ahead, moment(at_ms(200))).key[0] == U0
    assert policy.rank(arriving, moment()).until == NOW + INPUT_AGE_MAX
    assert policy.rank(arriving, moment(Nanos(NOW + INPUT_AGE_MAX))).key[0] == U1
    assert far.until == NOW + RANK_AGE_MAX


@given(
    st.lists(
        st.tuples(st.integers(-500, 3000), st.booleans(), st.sampled_from(list(Need)), st.floats(0, 1)),
        min_size=2,
        max_size=12,
    ),
    st.integers(0, 900),
)
def test_the_order_does_not_depend_on_when_offers_were_ranked(
    offers: list[tuple[int, bool, Need, float]], later_ms: int
) -> None:
    """Keys made at different moments, each still valid by its `until`, sort as keys made now do; U0, U1, input, U2,
    speculation is their order.
    """
    policy = Interaction(p_safe_ms=400, company=False)
    works = [
        playing(i, left, started=started, need=need, pool_share=share, ready_at=at_ms(-i))
        for i, (left, started, need, share) in enumerate(offers)
    ]
    later = moment(at_ms(later_ms))
    fresh = {w.session: policy.rank(w, later).key for w in works}
    kept = {}
    for w in works:
        rank = policy.rank(w, moment())
        kept[w.session] = rank.key if rank.until is None or rank.until > later.now else fresh[w.session]

    assert kept == fresh
    for w in works:
        deadline = w.deadline
        assert deadline is not None
        near = deadline - later.now <= policy.p_safe
        if w.need is Need.CHUNK and w.started:
            assert fresh[w.session][0] == (U0 if near else U2)
        elif w.need is not Need.SPECULATION:
            assert fresh[w.session][0] in (U1, ARRIVING)
        else:
            assert fresh[w.session][0] == SPECULATIVE


# Company -------------------------------------------------------------------------------------------------------------

REACH = nanos_from_ms(600)


def test_a_chunk_begins_no_launch_until_it_is_due() -> None:
    """P_safe is 400 ms and a launch needs up to 600: at 1000 ms left it is due, before that it waits for company."""
    policy, busy = Interaction(p_safe_ms=400), moment(reach=REACH, load=0.9)
    waiting, due = policy.rank(playing(1, 1001), busy), policy.rank(playing(1, 1000), busy)

    assert (waiting.leads, waiting.until) == (False, at_ms(1))
    assert (due.leads, due.key[0], due.until) == (True, U0, None)


@pytest.mark.parametrize(("load", "urgency"), [(0.5, DUE), (0.9, U0), (None, U0)], ids=["spare", "busy", "not known"])
def test_on_a_lane_with_time_to_spare_first_sounds_go_before_what_is_only_due(load: float | None, urgency: int) -> None:
    """Not known counts as busy. When half of the time a launch needs is left, it is U0 whatever the load."""
    policy = Interaction(p_safe_ms=400)
    at_once, later = moment(reach=REACH, load=load), moment(at_ms(200), reach=REACH, load=load)
    chunk, first = playing(1, 900), work(2, started=False)
    both = order(chunk, first, policy=policy, moments={1: at_once, 2: at_once})

    assert policy.rank(chunk, at_once).key[0] == urgency
    assert policy.rank(chunk, later).key[0] == U0
    assert both == ([2, 1] if urgency == DUE else [1, 2])


@given(
    st.lists(
        st.tuples(st.integers(-500, 3000), st.booleans(), st.sampled_from(list(Need)), st.floats(0, 1), st.booleans()),
        max_size=12,
    ),
    st.sampled_from([None, 0.3, 0.9]),
)
def test_what_waits_for_company_ranks_behind_all_that_may_begin(
    offers: list[tuple[int, bool, Need, float, bool]], load: float | None
) -> None:
    """The scheduler relies on it: behind the first that waits it looks for nobody."""
    ranks = [
        Interaction().rank(
            playing(i, left, started=started, need=need, pool_share=share),
            moment(reach=REACH, load=load, owed=owed),
        )
        for i, (left, started, need, share, owed) in enumerate(offers)
    ]
    leading, waiting = [r.key for r in ranks if r.leads], [r.key for r in ranks if not r.leads]

    assert not leading or not waiting or max(leading) < min(waiting)
    assert all(rank.until is not None and rank.until > NOW for rank in ranks if not rank.leads)


def test_without_company_everything_begins_a_launch_at_once() -> None:
    """The ablation; and nothing waits where nothing holds generation back, or where no cursor says what is due."""
    far = playing(1, 5000)

    for options in ({"company": False}, {"gate": False}, {"order": False}):
        assert Interaction(**options).rank(far, moment(reach=REACH)).leads
    assert not Interaction().rank(far, moment(reach=REACH)).leads
    assert Interaction().rank(work(1, silence_at=None), moment(reach=REACH)).leads


# What it sees ---------------------------------------------------------------------------------------------------------


def strangers(kind: Any) -> list[str]:
    """Names of all types inside `kind` that are no values: no numbers, words, enums, mappings and frozen structs."""
    kind = getattr(kind, "__supertype__", kind)
    if origin := get_origin(kind):
        others = [] if origin in (Union, UnionType, Mapping, tuple) else [str(kind)]
        return others + [name for inner in get_args(kind) if inner is not ... for name in strangers(inner)]
    if kind in (int, float, str, bool, NoneType) or issubclass(kind, Enum):
        return []
    if issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen:
        return [name for field in get_type_hints(kind).values() for name in strangers(field)]
    return [kind.__qualname__]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_sees_values_and_answers_in_values(policy: type) -> None:
    """No transport, no session, no core in what any policy is asked with, all the way down."""
    questions = [
        getattr(policy, name) for name, found in vars(SchedulingPolicy).items() if isfunction(found) and name[0] != "_"
    ]

    assert len(questions) == 5
    assert [strangers(kind) for ask in questions for kind in get_type_hints(ask).values()] == [[]] * 12


def test_a_transport_would_be_found_among_them() -> None:
    assert strangers(tuple[Work, Mapping[SessionId, Scheduler]]) == ["Scheduler"]


# Fail closed: one test a signal --------------------------------------------------------------------------------------


def test_without_a_cursor_a_session_is_served_by_age_and_others_are_not_affected() -> None:
    unknown = work(1, silence_at=None, ready_at=at_ms(-5))
    older = work(2, silence_at=None, ready_at=at_ms(-10))
    first_sound = work(3, started=False, ready_at=at_ms(-7))
    nearly_silent, ahead = playing(4, 100), playing(5, 900)

    assert order(unknown, older, first_sound, ahead, nearly_silent) == [4, 2, 3, 1, 5]


@pytest.mark.parametrize("missing", ["occupancy", "share"])
def test_without_kv_figures_only_the_relief_of_memory_is_off(missing: str) -> None:
    """U2 goes on by how far ahead it is; with the figures, session 1 would go first."""
    holder = playing(1, 1000, pool_share=None if missing == "share" else 0.9)
    light = playing(2, 800)
    full = moment(pool_occupancy=None if missing == "occupancy" else 1.0)

    assert order(holder, light, moments={1: full, 2: full}) == [2, 1]


def test_without_stage_times_a_deadline_is_the_moment_of_silence() -> None:
    unmeasured = playing(1, 300, after=None)
    measured = playing(2, 350, after=nanos_from_ms(100))

    assert unmeasured.deadline == at_ms(300)
    assert order(unmeasured, measured) == [2, 1]


def test_without_a_sent_time_edf_goes_by_age() -> None:
    policy = Edf()
    unknown = work(1, sent_silence_at=None, ready_at=at_ms(-10))
    due_soon = work(2, sent_silence_at=at_ms(100), ready_at=at_ms(-50))
    overdue = work(3, sent_silence_at=at_ms(-100), ready_at=at_ms(-5))

    assert order(due_soon, unknown, overdue, policy=policy) == [3, 1, 2]


def test_without_utilities_the_rest_goes_by_age() -> None:
    """Alpha and beta of zero: nothing is known that makes one of those who are ahead better than another."""
    policy = Interaction(alpha=0, beta=0)
    old, new = playing(1, 1400, ready_at=at_ms(-20)), playing(2, 600, ready_at=at_ms(-10))

    assert order(new, old, policy=policy) == [1, 2]


# The others ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fcfs", "window-k", "delivery-paced"])
def test_first_come_first_served_knows_nothing_of_the_listener(name: str) -> None:
    late = playing(1, 0, ready_at=at_ms(-1))
    early = playing(2, 1400, ready_at=at_ms(-2))

    assert order(late, early, policy=policy_of(name)) == [2, 1]


def test_edf_believes_that_all_that_was_sent_is_being_heard() -> None:
    """Session 1 is held up by its network: its ear is nearly silent, and the server's clock does not know."""
    starving = work(1, silence_at=at_ms(10), sent_silence_at=at_ms(900))
    fine = work(2, silence_at=at_ms(500), sent_silence_at=at_ms(500))

    assert order(starving, fine, policy=Edf()) == [2, 1]
    assert order(starving, fine) == [1, 2]


BUDGET, UNIT = ticks_from_ms(700), ticks_from_ms(320)


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("fcfs", {}, None),
        ("edf", {}, None),
        ("delivery-paced", {}, None),
        ("window-k", {"k": "3"}, 3 * UNIT),
        ("interaction", {}, BUDGET),
        ("interaction", {"gate": "false"}, None),
    ],
)
def test_how_far_a_stage_may_run_ahead(name: str, options: dict[str, str], limit: Ticks | None) -> None:
    assert policy_of(name, options).lookahead(Gate(Role.RENDER, UNIT, BUDGET)) == limit


def test_only_the_interaction_policy_knows_who_is_needed_next() -> None:
    by_name = {name: policy_of(name) for name in POLICIES}

    assert {n for n, p in by_name.items() if p.eviction is Eviction.NEXT_USE} == {"interaction"}
    assert {n for n, p in by_name.items() if p.preloads} == {"interaction"}
    assert {n for n, p in by_name.items() if p.delivers_ahead == PACED_DELIVERY} == {"delivery-paced"}


def test_each_mechanism_can_be_taken_away_alone() -> None:
    whole = policy_of("interaction")
    lru, late = policy_of("interaction", {"next_use": "false"}), policy_of("interaction", {"preload": "false"})
    unordered = policy_of("interaction", {"order": "false"})
    near, old = playing(1, 10), playing(2, 1400, ready_at=at_ms(-9))

    assert (lru.eviction, lru.preloads) == (Eviction.LRU, True)
    assert (late.eviction, late.preloads) == (Eviction.NEXT_USE, False)
    assert order(near, old, policy=whole) == [1, 2]
    assert order(near, old, policy=unordered) == [2, 1]
    assert policy_of("interaction", {"misfit": "stop"}).misfit is Misfit.STOP


@pytest.mark.parametrize(
    ("role", "limit"),
    [
        (Role.RENDER, BUDGET + ticks_from_ms(300)),
        (Role.TALK, BUDGET + UNIT),
        (Role.THINK, BUDGET + 2 * UNIT),
    ],
    ids=lambda value: str(value),
)
def test_where_launches_are_shared_a_stage_may_ride_further_ahead(role: Role, limit: Ticks) -> None:
    """Alone on its launches, or without company, a stage has the budget and no more; rendering never has more than the
    longest budget there is.
    """
    assert Interaction().lookahead(Gate(role, UNIT, BUDGET, 4)) == limit
    assert Interaction().lookahead(Gate(role, UNIT, BUDGET, 1)) == BUDGET
    assert Interaction(company=False).lookahead(Gate(role, UNIT, BUDGET, 4)) == BUDGET
    assert Interaction().lookahead(Gate(Role.RENDER, UNIT, BUDGET_MAX, 4)) == BUDGET_MAX


# Riders --------------------------------------------------------------------------------------------------------------


def test_a_first_sound_waits_for_nobody_elses_later_chunk() -> None:
    policy = Interaction()
    first, other_first, later = work(1, started=False), work(2, started=False), playing(3, 50)

    assert policy.may_ride(other_first, first)
    assert not policy.may_ride(later, first)
    assert policy.may_ride(first, later)
    assert Fcfs().may_ride(later, first)


@pytest.mark.parametrize("policy", [Fcfs(), Interaction()], ids=lambda p: p.name)
def test_a_long_prefill_rides_on_no_step_that_somebody_waits_for(policy: SchedulingPolicy) -> None:
    step, prefill = work(1, role=Role.THINK), work(2, role=Role.THINK, need=Need.INPUT)

    assert not policy.may_ride(prefill, step)
    assert policy.may_ride(prefill, msgspec.structs.replace(prefill, session=SessionId(3)))


# Speculation ---------------------------------------------------------------------------------------------------------


def load(**changes: Any) -> Load:
    idle = Load(
        at=NOW,
        pages=0.2,
        latents=0.0,
        out_slots=0.0,
        lanes={"think": 0.3},
        places_taken=2,
        places_free=2,
        places_waited_for=0,
    )
    return msgspec.structs.replace(idle, **changes)


def test_a_lane_that_nobody_has_measured_is_idle() -> None:
    """It has not worked for a whole window. Memory that nobody knows of is another matter, see below."""
    policy = Interaction()

    assert policy.admits_speculation(load(lanes={}))
    assert policy.admits_speculation(load(lanes={"think": 0.3, "voice": None}))
    assert not policy.admits_speculation(load(lanes={"think": 0.8, "voice": None}))


@pytest.mark.parametrize(
    "loaded",
    [{"pages": 0.95}, {"pages": None}, {"lanes": {"think": 0.3, "voice": 0.8}}, {"places_waited_for": 1}],
    ids=["memory", "memory not known", "a lane", "a place"],
)
def test_speculation_stops_first_under_pressure(loaded: dict[str, Any]) -> None:
    policy = Interaction()

    assert policy.admits_speculation(load())
    assert not policy.admits_speculation(load(**loaded))
    lanes_only = "lanes" in loaded
    assert policy.admits_speculation(load(**loaded, places_taken=1)) is lanes_only, (
        "alone, the lanes' load is one's own"
    )
    assert not Interaction(speculation=False).admits_speculation(load())
    assert not any(policy_of(name).admits_speculation(load()) for name in POLICIES if name != "interaction")


# Choosing one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("lifo", {}, "there are fcfs, window-k, edf, delivery-paced, interaction"),
        ("fcfs", {"k": "3"}, "policy fcfs has no option 'k'; it takes prefill"),
        ("window-k", {"K": "3"}, "it takes k"),
        ("window-k", {"k": "many"}, "option k='many' is of the wrong type"),
        ("window-k", {"k": "0"}, "at least 1"),
        ("interaction", {"misfit": "halt"}, "misfit='halt'; it is stop or skip"),
        ("interaction", {"p_safe_ms": "0"}, "must be more than 0"),
    ],
)
def test_a_policy_that_there_is_not_is_refused_with_those_there_are(
    name: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        policy_of(name, options)

    assert said in str(refused.value)


def test_options_are_text() -> None:
    policy = policy_of("interaction", {"p_safe_ms": "250", "alpha": "0.5", "misfit": "stop"})

    assert isinstance(policy, Interaction)
    assert (policy.p_safe, policy.alpha) == (250 * NANOS_PER_MS, 0.5)


def test_a_policy_and_its_options_are_spelled_in_one_text() -> None:
    assert spelled("fcfs") == ("fcfs", {})
    assert spelled("interaction gate=false p_safe_ms=300") == ("interaction", {"gate": "false", "p_safe_ms": "300"})
    with pytest.raises(ConfigError, match="'gate' is no option"):
        spelled("interaction gate")


def test_classes_have_names_for_people() -> None:
    """As DESIGN §7 calls them; where there are no classes there is no name."""
    policy = Interaction(p_safe_ms=200)
    first, soon, later = work(1, started=False), playing(1, 10), playing(1, 1400)
    named = [policy.urgency(policy.rank(one, moment())) for one in (first, soon, later)]
    due = policy.rank(playing(1, 350), moment(reach=nanos_from_ms(200), load=0.1))
    alone = Interaction(company=False)

    assert named == ["U1", "U0", "waiting"]
    assert policy.urgency(due) == "due"
    assert alone.urgency(alone.rank(later, moment())) == "U2"
    assert len(URGENCIES) == WAITING_NOT_OWED + 1
    for nameless in (Interaction(order=False), Fcfs()):
        assert nameless.urgency(nameless.rank(first, moment())) == ""
