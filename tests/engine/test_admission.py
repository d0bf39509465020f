"""How many may talk at once is said by the scarcest of pages, lanes and cores, and a refusal names it."""

from __future__ import annotations

from duplexd.engine.admission import LOAD_MAX, places_of
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
