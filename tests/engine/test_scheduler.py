"""The scheduler: heaps give the order that sorting gives, nobody starves, lane time is shared."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplexd.engine.policy import POLICIES, Interaction, Moment, Rank, SchedulingPolicy, policy_of
from duplexd.engine.scheduler import LAG_MAX, Accounts, Scheduler
from duplexd.engine.work import Need, Work
from duplexd.ids import SessionId, WorkId
from duplexd.memory.agenda import SMALL, Agenda
from duplexd.streams.stage import CostModel, PayloadKind, Role, StageSpec
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, nanos_from_ms

T0 = 1000 * NANOS_PER_SECOND
ROWS = 4
#: Stages of one lane, as a model has them on a single device.
STAGES = {
    name: StageSpec(name, role, "gpu", PayloadKind.TEXT, PayloadKind.TEXT, CostModel(), batch_max=ROWS)
    for name, role in (("think", Role.THINK), ("talk", Role.TALK), ("render", Role.RENDER))
}


def at(ms: float) -> Nanos:
    return Nanos(T0 + nanos_from_ms(ms))


def work(
    session: int,
    stage: str = "render",
    *,
    need: Need = Need.CHUNK,
    ready_ms: float = 0,
    left_ms: float | None = None,
    started: bool = True,
    share: float = 0.0,
    priority: int = 1,
) -> Work:
    return Work(
        session=SessionId(session),
        stage=stage,
        role=STAGES[stage].role,
        need=need,
        ready_at=at(ready_ms),
        started=started,
        silence_at=None if left_ms is None else at(left_ms),
        sent_silence_at=None if left_ms is None else at(left_ms),
        after=Nanos(0),
        priority=priority,
        pool_share=share,
    )


def urgent(scheduler: Scheduler, now: Nanos) -> list[Work]:
    offers = scheduler.urgent("gpu", now)
    found = list(offers)
    offers.close()
    return found


# The heap ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "due", "lift"]), st.integers(0, 9), st.integers(0, 50))))
def test_an_agenda_is_a_sorted_table(acts: list[tuple[str, int, int]]) -> None:
    """Whatever is put, put again, taken out and looked behind, the first is the least, and its size is bounded."""
    agenda: Agenda[int] = Agenda()
    table: dict[int, tuple[int, int]] = {}
    for serial, (act, name, key) in enumerate(acts):
        match act:
            case "put":
                agenda.put(name, key)
                table[name] = (key, serial)
            case "remove":
                agenda.remove(name)
                table.pop(name, None)
            case "due":
                expected = min(table, key=lambda n: table[n], default=None)
                if expected is not None and table[expected][0] > key:
                    expected = None
                assert agenda.due(key) == expected
                table.pop(expected, None)  # type: ignore[arg-type]
            case "lift":
                lifted = [agenda.lift() for _ in range(min(2, len(table))) if agenda.first() is not None]
                for entry in lifted:
                    agenda.lower(entry)
        first = agenda.first()
        assert (first and first[2]) == min(table, key=lambda n: table[n], default=None)
        assert len(agenda) == len(table)
        assert agenda.entries_count <= max(SMALL, 2 * len(table)) + 2


# The order -----------------------------------------------------------------------------------------------------------

changes = st.lists(
    st.tuples(
        st.integers(1, 6),  # session
        st.sampled_from(["think", "talk", "render", "nothing"]),
        st.sampled_from(list(Need)),
        st.one_of(st.none(), st.integers(-200, 2500)),  # left to play, ms from now
        st.booleans(),
        st.integers(0, 400),  # ms until the next change
    ),
    max_size=25,
)


@settings(deadline=None)
@given(changes, st.sampled_from(list(POLICIES)))
def test_the_heaps_give_the_order_that_sorting_gives(acts: list[tuple], name: str) -> None:  # type: ignore[type-arg]
    """Offers come, change and age; at every moment the lane's order is that of all keys made anew. What may begin no
    launch is not in it, unless as many wait as share one: then it comes last.

    Without lane time there is nobody to be owed any, and pool figures do not change: those two a rank may keep for a
    while (`RANK_AGE_MAX`).
    """
    policy = policy_of(name)
    scheduler = Scheduler(STAGES, policy)
    offers: dict[tuple[int, str, Need], Work] = {}
    ms = 0.0
    for session, stage, need, left, started, pause in acts:
        works = []
        if stage != "nothing":
            left_ms = None if left is None else ms + left
            works.append(work(session, stage, need=need, ready_ms=ms, left_ms=left_ms, started=started, share=0.01))
        scheduler.offer(SessionId(session), works, at(ms))
        offers = {key: w for key, w in offers.items() if key[0] != session}
        offers |= {(session, w.stage, w.need): w for w in works}
        ms += pause
        now = at(ms)
        ranks = {key: policy.rank(w, Moment(now)) for key, w in offers.items()}
        full = {stage for stage in STAGES if sum(key[1] == stage for key in offers) >= ROWS}
        wanted = [
            offers[key]
            for key, r in sorted(ranks.items(), key=lambda item: (not item[1].leads, item[1].key))
            if r.leads or key[1] in full
        ]

        assert [w.session for w in urgent(scheduler, now)] == [w.session for w in wanted]


def test_an_offer_that_is_replaced_during_a_scan_is_not_seen_twice() -> None:
    """A misfit is offered again while the lane is searched; the search goes on to the next, and ends."""
    scheduler = Scheduler(STAGES, Interaction(company=False))
    for session in (1, 2, 3):
        scheduler.offer(SessionId(session), [work(session, left_ms=100 * session)], at(0))
    seen = []
    offers = scheduler.urgent("gpu", at(0))
    for one in offers:
        seen.append(one.session)
        scheduler.offer(one.session, [work(one.session, left_ms=50)], at(0))
    offers.close()

    assert seen == [1, 2, 3]
    assert len(urgent(scheduler, at(0))) == 3


def test_a_lane_is_idle_while_it_is_offered_work_and_runs_none() -> None:
    scheduler = Scheduler(STAGES, Interaction())
    assert scheduler.idle_lanes() == []
    scheduler.offer(SessionId(1), [work(1)], at(0))
    assert scheduler.idle_lanes() == ["gpu"]
    scheduler.begin(WorkId(1), "render", [(SessionId(1), 1)])
    assert scheduler.idle_lanes() == []
    scheduler.end(WorkId(1), Nanos(0))
    scheduler.forget(SessionId(1))
    assert scheduler.idle_lanes() == []


# Company --------------------------------------------------------------------------------------------------------------


LANES = {"think": "brain", "talk": "mouth", "render": "mouth"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offer", "begin", "end", "forget"]), st.integers(1, 4), st.sampled_from(sorted(LANES))
        )
    )
)
def test_the_idle_lanes_are_those_that_are_offered_work_and_run_none(acts: list[tuple[str, int, str]]) -> None:
    """Whatever comes, goes, begins and ends: what is kept up to date is what looking at every lane finds."""
    stages = {
        name: StageSpec(name, STAGES[name].role, lane, PayloadKind.TEXT, PayloadKind.TEXT, CostModel())
        for name, lane in LANES.items()
    }
    scheduler = Scheduler(stages, policy_of("interaction"))
    offered: dict[int, set[str]] = {}
    running: dict[WorkId, str] = {}
    for serial, (act, session, stage) in enumerate(acts, start=1):
        if act == "offer":
            offered[session] = offered.get(session, set()) ^ {stage}
            scheduler.offer(SessionId(session), [work(session, name) for name in sorted(offered[session])], at(serial))
        elif act == "forget":
            offered.pop(session, None)
            scheduler.forget(SessionId(session))
        elif act == "begin":
            running[WorkId(serial)] = LANES[stage]
            scheduler.begin(WorkId(serial), stage)
        elif running:
            oldest = next(iter(running))
            del running[oldest]
            scheduler.end(oldest, Nanos(1))
        wanted = {LANES[name] for names in offered.values() for name in names} - set(running.values())

        assert scheduler.idle_lanes() == [lane for lane in ("brain", "mouth") if lane in wanted]


def test_what_waits_for_company_begins_a_launch_when_it_is_due_or_when_a_launch_is_full() -> None:
    """Three chunks of replies that play on for two seconds begin nothing; a fourth fills the launch of four. Alone, the
    first begins one when P_safe is left, and the scheduler says when that is.
    """
    scheduler = Scheduler(STAGES, Interaction(p_safe_ms=400))
    for session in (1, 2, 3):
        scheduler.offer(SessionId(session), [work(session, left_ms=2000)], at(0))
    waiting = urgent(scheduler, at(0))
    scheduler.offer(SessionId(4), [work(4, left_ms=2500)], at(0))
    full = urgent(scheduler, at(0))
    for session in (2, 3, 4):
        scheduler.forget(SessionId(session))

    assert waiting == []
    assert [w.session for w in full] == [1, 2, 3, 4]
    assert scheduler.wakes_at() == at(1600)
    assert urgent(scheduler, at(1599)) == []
    assert [w.session for w in urgent(scheduler, at(1600))] == [1]


def test_what_waits_for_company_rides_on_the_launch_of_whoever_is_due() -> None:
    scheduler = Scheduler(STAGES, Interaction(p_safe_ms=400))
    for session, left in ((1, 2000), (2, 100), (3, 1500)):
        scheduler.offer(SessionId(session), [work(session, left_ms=left)], at(0))
    beside = scheduler.beside("render")

    assert [w.session for w in urgent(scheduler, at(0))] == [2]
    assert [w.session for w in beside] == [2, 3, 1]


def test_what_waits_for_company_hides_nothing_that_may_begin() -> None:
    """Suspicion uses a lane on which everybody else waits for company; another stage's work does too."""
    scheduler = Scheduler(STAGES, Interaction())
    scheduler.offer(SessionId(1), [work(1, left_ms=3000)], at(0))
    scheduler.offer(SessionId(2), [work(2, "render", need=Need.SPECULATION)], at(0))
    scheduler.offer(SessionId(3), [work(3, "talk", started=False)], at(0))

    assert [w.session for w in urgent(scheduler, at(0))] == [3, 2]


# Lane time -----------------------------------------------------------------------------------------------------------


def test_absence_neither_earns_nor_costs_more_than_a_second() -> None:
    accounts = Accounts()
    for session in (1, 2, 3):
        accounts.join(SessionId(session))
    accounts.charge(SessionId(1), 50.0 * LAG_MAX)
    accounts.leave(SessionId(1))
    accounts.leave(SessionId(3))
    accounts.charge(SessionId(2), 40.0 * LAG_MAX)
    accounts.join(SessionId(1))
    accounts.join(SessionId(3))

    assert accounts.served(SessionId(1)) - accounts.served(SessionId(2)) == LAG_MAX
    assert accounts.served(SessionId(3)) <= accounts.mean


def test_a_session_that_weighs_more_may_use_more_before_it_is_not_owed() -> None:
    """Both are far ahead, the heavy one had twice the time: over their weights they are equal."""
    scheduler = Scheduler(STAGES, Interaction())
    weights = {1: 2, 2: 1}
    for session, weight in weights.items():
        scheduler.offer(SessionId(session), [work(session, left_ms=2000, priority=weight)], at(0))
    for session, weight in weights.items():
        scheduler.begin(WorkId(session), "render", [(SessionId(session), weight)])
        scheduler.end(WorkId(session), Nanos(weight * 10 * NANOS_PER_MS))
    accounts = scheduler._accounts["gpu"]

    assert accounts.served(SessionId(1)) == accounts.served(SessionId(2))


# Nobody starves ------------------------------------------------------------------------------------------------------


class Restless(Interaction):
    """A policy whose ranks change all the time: the scheduler must still end."""

    def rank(self, work: Work, at: Moment) -> Rank:
        return Rank((work.ready_at,), at.now)


def test_a_rank_that_is_always_about_to_change_does_not_hang_the_scheduler() -> None:
    scheduler = Scheduler(STAGES, Restless())
    scheduler.offer(SessionId(1), [work(1)], at(0))

    assert [w.session for w in urgent(scheduler, at(5))] == [1]


STEP_MS = 20.0


def play(policy: SchedulingPolicy, *, sessions: int, period_ms: float, seed: int, until_ms: float) -> dict[str, float]:
    """A lane shared by listeners (a chunk each `period_ms`), newcomers and arriving input; returns the longest wait of
    each kind, in ms. Each step of the lane takes STEP_MS.
    """
    rng, scheduler = Random(seed), Scheduler(STAGES, policy)
    due = {session: rng.uniform(0, period_ms) for session in range(1, sessions + 1)}
    newcomer = {session: rng.uniform(0, 4 * period_ms) for session in range(101, 101 + sessions // 4)}
    typing = {session: rng.uniform(0, 4 * period_ms) for session in range(201, 201 + sessions // 4)}
    offered: dict[int, tuple[float, str]] = {}
    worst = {"chunk": 0.0, "first": 0.0, "input": 0.0}
    ms, number = 0.0, 0
    while ms < until_ms:
        for clock, kind, every in (
            (due, "chunk", period_ms),
            (newcomer, "first", 4 * period_ms),
            (typing, "input", 4 * period_ms),
        ):
            for session, when in clock.items():
                if when <= ms and session not in offered:
                    # A listener's next chunk is ready while 2 to 4 periods are left to play: U2 first, U0 later.
                    one = work(
                        session,
                        "think" if kind == "input" else "render",
                        need=Need.INPUT if kind == "input" else Need.CHUNK,
                        ready_ms=ms,
                        left_ms=ms + rng.uniform(2, 4) * period_ms,
                        started=kind == "chunk",
                    )
                    scheduler.offer(SessionId(session), [one], at(ms))
                    offered[session] = (ms, kind)
                    clock[session] = when + every
        if scheduler.idle_lanes():
            offers = scheduler.urgent("gpu", at(ms))
            chosen = next(offers, None)
            offers.close()
            if chosen is None:  # All that is offered waits for company.
                ms += 1.0
                continue
            number += 1
            since, kind = offered.pop(int(chosen.session))
            worst[kind] = max(worst[kind], ms - since)
            scheduler.offer(chosen.session, [], at(ms))
            scheduler.begin(WorkId(number), chosen.stage, [(chosen.session, 1)])
            scheduler.end(WorkId(number), nanos_from_ms(STEP_MS))
            ms += STEP_MS
        else:
            ms += 1.0
    for since, kind in offered.values():
        worst[kind] = max(worst[kind], ms - since)
    return worst


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(list(POLICIES)), st.integers(0, 1000), st.integers(4, 16))
def test_under_bounded_load_all_work_runs_within_a_bound(name: str, seed: int, sessions: int) -> None:
    """The lane is asked for 90 % of its time; whatever the policy, nobody waits longer than four periods, the time
    within which everything that is offered fits the lane.
    """
    period = STEP_MS * sessions * 1.125 / 0.9
    worst = play(policy_of(name), sessions=sessions, period_ms=period, seed=seed, until_ms=12 * period)

    assert max(worst.values()) <= 4 * period


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_arriving_input_is_served_while_listeners_keep_the_lane_busy(seed: int) -> None:
    """The lane has just enough time for chunks that are always far ahead: input goes before them."""
    worst = play(Interaction(), sessions=8, period_ms=8 * STEP_MS * 1.3, seed=seed, until_ms=4000)

    assert worst["input"] <= 10 * STEP_MS


def test_classes_hold_whatever_the_seed() -> None:
    """U0 before U1 before arriving input before U2 before speculation, through the scheduler."""
    rng, policy = Random(5), Interaction(p_safe_ms=400, company=False)
    scheduler = Scheduler(STAGES, policy)
    for session in range(1, 200):
        kind = rng.randrange(5)
        need = (Need.CHUNK, Need.CHUNK, Need.INPUT, Need.CHUNK, Need.SPECULATION)[kind]
        left = rng.uniform(-100, 390) if kind == 0 else rng.uniform(420, 3000)
        one = work(session, "render", need=need, left_ms=left, started=kind in (0, 3), ready_ms=-rng.uniform(0, 200))
        scheduler.offer(SessionId(session), [one], at(0))
    classes = [policy.rank(w, Moment(at(0))).key[0] for w in urgent(scheduler, at(0))]

    assert len(classes) == 199
    assert all(a <= b for a, b in pairwise(classes))
