"""How many may talk at once is said by the scarcest of pages, lanes and cores, and a refusal names it."""

from __future__ import annotations

import pytest

from duplexd.engine.admission import LOAD_MAX, LOOKS_AFTER_RETREAT, Aimd, Places, places_of, taken
from duplexd.engine.governor import LEVELS, Governor
from duplexd.streams.stage import CostModel, PayloadKind, Role, StageSpec


def stage(name: str, lane: str, load: float) -> StageSpec:
    return StageSpec(name, Role.THINK, lane, PayloadKind.TOKEN, PayloadKind.TOKEN, CostModel(), load=load)


def test_pages_are_the_limit_where_stages_take_no_time() -> None:
    places = places_of([stage("think", "think", 0.0)], contexts=8, cores=2)

    assert (places.count, places.shortage) == (8, "the arena has room for 8 whole contexts")


def test_stages_of_one_lane_add_up() -> None:
    places = places_of([stage("talk", "voice", 0.1), stage("render", "voice", 0.1)], contexts=8, cores=None)

    assert (places.count, places.shortage) == (int(LOAD_MAX / 0.2), "lane voice has time for 4")


def test_lanes_of_a_cpu_share_its_cores() -> None:
    stages = [stage("think", "think", 0.2), stage("talk", "voice", 0.2)]

    assert places_of(stages, contexts=8, cores=None).count == 4
    assert places_of(stages, contexts=8, cores=1).shortage == "the one core has time for 2"
    assert places_of([*stages, stage("ears", "listen", 0.2)], contexts=8, cores=2).shortage == "2 cores have time for 2"
    assert places_of(stages, contexts=1, cores=2).shortage == "the arena has room for 1 whole context"


def test_somebody_is_always_served() -> None:
    assert places_of([stage("think", "think", 2.0)], contexts=8, cores=1).count == 1


# Places that follow what is measured ---------------------------------------------------------------------------------


def aimd(*, declared: int = 10, contexts: int = 16, target: float = 0.7) -> tuple[Aimd, Places]:
    places = Places(declared, "lane voice has time for 10")
    return Aimd(places, contexts=contexts, target=target), places


def look(rule: Aimd, places: Places, utilisation: float | None, **facts: int) -> Places:
    return rule.look(places, utilisation=utilisation, **({"harmed": 0, "seated": 10, "waiting": 0} | facts))


def test_places_shrink_by_a_tenth_when_lanes_are_full_and_somebody_was_served_late() -> None:
    rule, places = aimd()
    shrunk = look(rule, places, 0.71, harmed=1)

    assert (shrunk.count, shrunk.shortage) == (9, "the lanes, as measured, have time for 9")


@pytest.mark.parametrize(
    ("utilisation", "harmed"), [(0.99, 0), (0.69, 5), (None, 5)], ids=["late for nobody", "there is time", "unmeasured"]
)
def test_places_stay_unless_both_say_so(utilisation: float | None, harmed: int) -> None:
    rule, places = aimd()

    assert look(rule, places, utilisation, harmed=harmed) is places


def test_a_retreat_counts_from_the_places_in_use() -> None:
    """Three of ten talk and are late: two, not nine."""
    rule, places = aimd()

    assert look(rule, places, 0.9, harmed=1, seated=3).count == 2


def test_there_is_always_one_place() -> None:
    rule, places = aimd(declared=2)
    for _ in range(40):
        places = look(rule, places, 1.0, harmed=9, seated=places.count)

    assert places.count == 1


def test_a_retreat_waits_for_its_effect_before_the_next() -> None:
    rule, places = aimd()
    counts = []
    for _ in range(11):
        places = look(rule, places, 0.9, harmed=1, seated=places.count)
        counts.append(places.count)

    assert counts == [9] * 5 + [8] * 5 + [7]


def test_places_grow_one_by_one_while_somebody_waits_up_to_what_memory_holds() -> None:
    rule, places = aimd(declared=14)
    assert look(rule, places, 0.5, waiting=0) is places
    counts = []
    for _ in range(4):
        places = look(rule, places, 0.5, waiting=3)
        counts.append(places.count)

    assert counts == [15, 16, 16, 16]


def test_a_target_of_zero_leaves_places_as_declared() -> None:
    rule, places = aimd(target=0.0)

    assert look(rule, places, 1.0, harmed=9) is places
    assert look(rule, places, 0.0, waiting=9) is places


def test_the_scarcest_is_a_lane_or_all_cores_together() -> None:
    lanes = {"think": 0.5, "voice": 0.6, "listen": None}

    assert taken(lanes, cores=None) == 0.6
    assert taken(lanes, cores=1) == 1.1
    assert taken({"think": None}, cores=2) is None


# The fidelity ladder -------------------------------------------------------------------------------------------------


def test_faces_are_made_coarser_before_a_place_is_taken_away() -> None:
    """Every retreat costs the ladder a level while it has one; then places shrink as they do without it."""
    governor = Governor()
    rule, places = aimd()
    counts, levels = [], []
    for _ in range(len(LEVELS) * LOOKS_AFTER_RETREAT):
        places = rule.look(places, utilisation=0.9, harmed=1, seated=10, waiting=0, ladder=governor)
        counts.append(places.count)
        levels.append(governor.level)

    assert counts[: 4 * LOOKS_AFTER_RETREAT] == [10] * (4 * LOOKS_AFTER_RETREAT)
    assert sorted(set(levels)) == levels[::LOOKS_AFTER_RETREAT][: len(LEVELS) - 1] == [1, 2, 3, 4]
    assert counts[-1] == 9


def test_what_harms_nobody_costs_a_face_nothing() -> None:
    governor = Governor()
    rule, places = aimd()
    look_at = rule.look(places, utilisation=0.99, harmed=0, seated=10, waiting=0, ladder=governor)

    assert (look_at.count, governor.level) == (10, 0)
