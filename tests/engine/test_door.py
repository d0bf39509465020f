"""Who is let in: bytes and lane time of all stages decide; whoever is not is told what is short, and by how much."""

from __future__ import annotations

import msgspec
import pytest

from duplexd.channel import MediaShape
from duplexd.config import FACE_LEVELS
from duplexd.engine.admission import Door, Places, places_of
from duplexd.engine.governor import LEVELS, Seen, levels_down_to, share_of
from duplexd.engine.process import EngineConfig, core_of, layout_of, resident_of
from duplexd.errors import ConfigError
from duplexd.messages import AdmitSession, RefuseSession, Shortage
from duplexd.models.clock import plan as clock_plan
from duplexd.streams.stage import CostModel, PayloadKind, Role, StageSpec
from tests.engine.simulation import Simulation

#: As the default model declares them (models/pocket, models/face), lane and load.
POCKET = (
    (Role.COPY, "copy", 0.01),
    (Role.LISTEN, "ears", 0.06),
    (Role.JUDGE, "ears", 0.02),
    (Role.THINK, "think", 0.09),
    (Role.TALK, "voice", 0.01),
    (Role.RENDER, "voice", 0.04),
)
FACE = (
    (Role.OVERHEAR, "copy", 0.002),
    (Role.GENERATE, "face", 0.04),
    (Role.REFINE, "face", 0.04),
    (Role.DECODE, "draw", 0.19),
)
MANY = Places(1024, "")


def stage(role: Role, lane: str, load: float) -> StageSpec:
    return StageSpec(role.value, role, lane, PayloadKind.TOKEN, PayloadKind.TOKEN, CostModel(), load=load)


def door(
    *,
    sessions_max: int = 1024,
    contexts: int = 1024,
    cores: int | None = 2,
    least: str = "still",
    stages: tuple[tuple[Role, str, float], ...] = POCKET + FACE,
) -> Door:
    return Door(
        [stage(*one) for one in stages],
        sessions_max=sessions_max,
        contexts=contexts,
        context_bytes=1_000_000,
        session_bytes=3_000_000,
        cores=cores,
        least=levels_down_to(least)[-1],
    )


def places(cores: int | None, least: str = "still") -> Places:
    specs = [stage(*one) for one in POCKET + FACE]
    return places_of(specs, contexts=1024, cores=cores, least=levels_down_to(least)[-1])


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_the_default_of_four_with_a_face_is_let_in(cores: int) -> None:
    assert door(sessions_max=4, contexts=4, cores=cores).count(places(cores)) == 4


def test_two_cores_do_not_let_a_thousand_in() -> None:
    """Forty are served: five of them talk at once. The refusal says what one more would take."""
    two = door()
    count = two.count(places(2))
    refused = two.refuses(open_count=count, closing_count=0, places=places(2))

    assert count == 40
    assert refused is not None
    assert refused.code == "no_lane_time"
    assert refused.shortage == Shortage("2 cores", 1.73, 1.6, "of real time")
    assert (
        "41 sessions, of which every 8th talks and whose faces are lowered to 'still', would take 1.73 of the 1.60 of "
        "real time that 2 cores may give"
    ) in refused.sentence


def test_a_lane_may_be_scarcer_than_the_cores() -> None:
    refused = door(cores=None).refuses(open_count=79, closing_count=0, places=MANY)

    assert refused is not None
    assert refused.shortage.of == "lane think"


def test_a_face_that_must_move_is_reserved_for() -> None:
    """Least first. At a quarter a face draws every fourth picture, whoever speaks; at full, all of them."""
    counts = {least: door(least=least).count(MANY) for least in ("still", "quarter", "half", "full")}

    assert counts == {"still": 40, "quarter": 8, "half": 7, "full": 4}
    assert [places(2, least).count for least in counts] == [6, 4, 3, 3]
    refused = door(least="quarter").refuses(open_count=8, closing_count=0, places=MANY)
    assert refused is not None
    assert "whose faces are lowered to 'quarter'" in refused.sentence


def test_what_a_level_of_the_face_takes() -> None:
    assert [share_of(level, Role.DECODE) for level in LEVELS] == [1.0, 0.5, 0.25, 0.25, 0.0]
    assert [share_of(level, Role.REFINE) for level in LEVELS] == [1.0, 1.0, 1.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match="face_least is 'blurred'; it is one of full, half, quarter, coarse, still"):
        levels_down_to("blurred")


def test_at_most_eight_take_turns_in_the_room_of_one() -> None:
    narrow = door(contexts=2, stages=())
    refused = narrow.refuses(open_count=16, closing_count=0, places=MANY)

    assert narrow.count(MANY) == 16
    assert refused is not None
    assert (refused.code, refused.shortage) == ("no_memory", Shortage("arena", 3_000_000, 2_000_000, "bytes"))
    assert "one more context takes 1.0 MB" in refused.sentence


def test_places_that_were_measured_away_count_at_the_door() -> None:
    measured = Places(1, "the lanes, as measured, have time for 1")
    refused = door().refuses(open_count=8, closing_count=0, places=measured)

    assert door().count(measured) == 8
    assert refused is not None
    assert refused.sentence.startswith("the lanes, as measured, have time for 1 at once")
    assert refused.shortage == Shortage("places", 2, 1, "places")


def test_somebody_is_always_let_in() -> None:
    slow = door(stages=((Role.THINK, "think", 3.0),), cores=1)

    assert slow.count(Places(1, "")) == 1


def test_a_session_that_is_still_closing_is_counted_and_said() -> None:
    refused = door(sessions_max=4).refuses(open_count=3, closing_count=1, places=MANY)

    assert refused is not None
    assert refused.sentence.startswith("3 of 4 sessions are open, 1 more still closing; one more needs 3.0 MB")
    assert (refused.code, refused.shortage) == ("busy", Shortage("sessions", 5, 4, "sessions"))


def test_the_engine_refuses_at_the_door_and_counts_why() -> None:
    """Two have room for their contexts in turn of eight each; the seventeenth is told what is missing."""
    simulation = Simulation(until_ms=600, sessions_max=20, sessions_resident=2)
    for session in range(1, 18):
        simulation.connect(session, at_ms=50 + session)
    simulation.run()
    core = simulation.core
    pages = core.stores.pages.spec
    (refusal,) = simulation.news(RefuseSession, 17)

    assert sum(isinstance(news, AdmitSession) for _, news in simulation.world.news) == 16
    context_bytes = pages.session_slots * pages.slot_bytes
    assert refusal.code == "no_memory"
    assert refusal.shortage == Shortage("arena", 3 * context_bytes, 2 * context_bytes, "bytes")
    assert core.monitor["sessions_refused_no_memory"] == core.monitor["sessions_refused"] == 1
    assert core.metrics().values["sessions_admitted_max"] == 16


def test_a_budget_of_bytes_says_how_many_are_resident() -> None:
    """Six sessions in room for two whole contexts: the arena keeps to the bytes, and idle ones leave."""
    plan = clock_plan({"face": "none"})
    budget = layout_of(plan, 6, 2).total_bytes
    media = MediaShape(in_slots=1, in_samples=1, out_slots=1, out_samples=1)
    config = EngineConfig(model="clock", media=media, sessions_max=6, memory_bytes=budget)

    assert resident_of(config, plan) == 2
    assert resident_of(msgspec.structs.replace(config, memory_bytes=0), plan) == 0
    with pytest.raises(ConfigError, match=r"clock with sessions_max 6 does not fit .*lower sessions_max to 2"):
        resident_of(msgspec.structs.replace(config, memory_bytes=budget // 2), plan)


def test_the_levels_one_may_name_are_those_of_the_governor() -> None:
    assert tuple(level.name for level in LEVELS) == FACE_LEVELS


def test_a_face_that_must_move_is_lowered_no_further() -> None:
    config = Simulation(face="flash").config
    plan = clock_plan({"face": "flash"})
    core = core_of(msgspec.structs.replace(config, face_least="half"), plan, layout_of(plan, config.sessions_max))
    for _ in range(20):
        core.governor.look(Seen(planned=25, missed=25, busy=1.0))

    assert core.governor.fidelity.name == "half"
