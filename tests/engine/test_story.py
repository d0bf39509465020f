"""What a trace tells about its sessions, checked against what the world itself knows of the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duplexd.__main__ import main
from duplexd.drawing import PLACE, TEMPLATE, page, read
from duplexd.engine.story import SessionStory, Story, TurnStory
from duplexd.messages import AdvanceEpoch, LatencyMeasured, PublishChunk, ResponseChanged, ResponseState
from duplexd.units import NANOS_PER_MS, ms_from_ticks
from tests.engine.simulation import Simulation, beep, ms
from tests.engine.test_trace import conversation, traced


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulation, Path, Story]:
    simulation = conversation()
    path = traced(simulation, tmp_path_factory.mktemp("story") / "a.trace")
    return simulation, path, read(path, session=None)


Told = tuple[Simulation, Path, Story]


def of(story: Story, session: int) -> SessionStory:
    return next(found for found in story.sessions if found.session == session)


def test_every_launch_stands_on_its_lane(told: Told) -> None:
    simulation, _, story = told
    by_work = {launch.work: launch for launch in story.launches}

    assert set(by_work) == {launch.work for _, launch in simulation.world.launches}
    assert story.lanes == ["copy", "listen", "think", "voice"]
    for at, launch in simulation.world.launches:
        found = by_work[launch.work]
        assert found.ordered == pytest.approx((at - 1) / NANOS_PER_MS, abs=0.002)
        assert found.stage == launch.stage
        assert found.ended == 0 or found.ordered <= found.started <= found.ended <= found.noticed


def test_chunks_lie_where_they_were_published_and_end_as_they_did(told: Told) -> None:
    simulation, _, story = told
    for session in (1, 2):
        chunks = {chunk.chunk: chunk for chunk in of(story, session).chunks}
        for news in simulation.news(PublishChunk, session):
            found = chunks[news.chunk]
            assert (found.start, found.end) == (ms_from_ticks(news.span.start), ms_from_ticks(news.span.end))
            assert found.epoch == news.epoch
        unsaid = [chunk for chunk in chunks.values() if not chunk.published]
        assert all(chunk.fate in ("discarded", "") for chunk in unsaid)
        fates = [chunk.fate for chunk in chunks.values()]
        assert fates.count("split") <= len(simulation.news(AdvanceEpoch, session))
        assert "heard" in fates
        assert "split" in fates or "discarded" in fates
        table = simulation.core.sessions[session].chunks  # type: ignore[index]
        heard = sum(c.end - c.start for c in chunks.values() if c.fate == "heard")
        heard += sum(c.cut - c.start for c in chunks.values() if c.fate == "split")
        assert heard == pytest.approx(ms_from_ticks(table.heard_ticks), abs=0.1)


def test_cursors_keep_their_order(told: Told) -> None:
    """Playback never passes delivery, delivery never what was published, and time goes forward in each line."""
    _, _, story = told
    for found in story.sessions:
        for line in (found.playback, found.delivery, found.generation, found.published):
            assert [at for at, _ in line] == sorted(at for at, _ in line)
        assert len(found.playback) == len(found.delivery) > 10
        assert all(p <= d for (_, p), (_, d) in zip(found.playback, found.delivery, strict=True))
        assert max(p for _, p in found.delivery) <= max(p for _, p in found.published)


def test_interruptions_holds_and_voice(told: Told) -> None:
    simulation, _, story = told
    found = of(story, 1)
    (advance,) = simulation.news(AdvanceEpoch, 1)

    assert [epoch for _, epoch, _ in found.epochs] == [advance.epoch]
    assert found.epochs[0][2] == pytest.approx(ms_from_ticks(advance.at), abs=0.001)
    assert [hold.kind for hold in found.holds] == ["advanced"]
    assert found.holds[0].end == found.epochs[0][0]
    spoken = [stretch for stretch in found.voice if stretch.kind == "voice"]
    assert [s.end - s.begin for s in spoken] == pytest.approx([700, 1200], abs=80)  # Whole blocks of 32 ms, and a rest.
    kinds = [response.kind for response in found.responses]
    ended = [n.state for n in simulation.news(ResponseChanged, 1)]
    assert kinds[0] == "cancelled"
    assert kinds.count("cancelled") == ended.count(ResponseState.CANCELLED)


def check_turn(turn: TurnStory, news: LatencyMeasured) -> None:
    assert turn.total_ms == pytest.approx((news.published_at - news.ended_at) / NANOS_PER_MS, abs=0.01)
    assert sum(turn.parts.values()) == pytest.approx(turn.total_ms, abs=0.1)
    assert [step.ms for step in turn.steps] == sorted(step.ms for step in turn.steps)
    own = [step.event for step in turn.steps if step.session == turn.session]
    assert own.index("talk launched") > own.index("think finished")
    assert own.index("render finished", own.index("talk finished")) > own.index("talk finished")
    names = [step.event for step in turn.steps]
    assert names[-1] == "first chunk published"
    assert turn.steps[-1].ms == pytest.approx(turn.total_ms, abs=0.01)


def test_a_turn_lists_what_happened_until_its_first_sound(told: Told) -> None:
    simulation, _, story = told
    for session in (1, 2):
        measured = simulation.news(LatencyMeasured, session)
        turns = of(story, session).turns
        assert len(turns) == len(measured) > 0
        for turn, news in zip(turns, measured, strict=True):
            check_turn(turn, news)
    spoken = of(story, 1).turns[0]
    names = [step.event for step in spoken.steps]
    assert "last voiced block arrived" in names
    assert names.index("ears finished") < names.index("end of turn decided")
    assert {step.session for step in spoken.steps} == {1, 2}  # A neighbour's work on the same lanes is shown.


def test_a_guess_that_came_to_nothing_is_discarded_where_it_was_made(tmp_path: Path) -> None:
    """A pause looks like an end, a reply is begun ahead, and the person goes on: its chunks never take a place that a
    later one has.
    """
    simulation = Simulation(until_ms=9000)
    listener = simulation.connect(1)
    for at in (600, 1750, 2900):
        listener.say(beep(700), at=ms(at))
    story = read(traced(simulation, tmp_path / "a.trace"), session=1)
    chunks = of(story, 1).chunks

    assert simulation.core.monitor["speculations_dropped"] > 0
    assert any(chunk.fate == "discarded" and chunk.ready and not chunk.published for chunk in chunks)
    published = [chunk for chunk in chunks if chunk.published]
    assert [c.start for c in published[1:]] == [c.end for c in published[:-1]]
    assert max(p for _, p in of(story, 1).generation) == max(c.end for c in chunks)


def test_the_summary_is_json(told: Told, tmp_path: Path) -> None:
    _, path, story = told
    with pytest.raises(SystemExit) as left:
        main(["trace", str(path), "--json", str(tmp_path / "a.json")])
    found = json.loads((tmp_path / "a.json").read_text())

    assert left.value.code == 0
    assert len(found["turns"]) == sum(len(s.turns) for s in story.sessions)
    assert {"event", "ms", "lane", "took_ms", "detail"} <= set(found["turns"][0]["steps"][0])


def test_the_table_is_printed(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    _, path, _ = told
    with pytest.raises(SystemExit):
        main(["trace", str(path)])
    out = capsys.readouterr().out

    assert "first chunk published" in out
    assert "copy launched" not in out
    assert "from the last voiced sample to the first sound out" in out


def test_the_drawing_needs_nothing_and_holds_words_as_data(told: Told) -> None:
    """What a person said must not become markup of the file."""
    _, path, _ = told
    story = read(path, session=1)
    story.sessions[0].turns[0].text = "</script><img src=x onerror=alert(1)>"
    text = page(story)
    data = text.split('<script type="application/json" id="story">')[1].split("</script>")[0]

    assert PLACE not in text
    assert json.loads(data)["sessions"][0]["turns"][0]["text"] == "</script><img src=x onerror=alert(1)>"
    assert "<img" not in text
    assert "default-src 'none'" in text
    assert not any(word in TEMPLATE.read_text() for word in ("http://", "https://", "@import", "src=", "url("))


def test_a_session_that_is_not_there_is_named(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    _, path, _ = told
    with pytest.raises(SystemExit) as left:
        main(["trace", str(path), "--session", "9"])

    assert left.value.code == 2
    assert "has no session 9; it has 1, 2" in capsys.readouterr().err
