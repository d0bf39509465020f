"""The core under random people: a Hypothesis machine on the word clock, the rules that never bend as invariants."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplexd.engine.simulator import SimListener, SimNetwork
from duplexd.engine.work import Launch
from duplexd.ids import SessionId
from duplexd.messages import AdvanceEpoch, HistoryChanged, PublishChunk, ResponseChanged, ResponseState
from tests.engine.simulation import Simulation, beep, heard_words, history_words, ms

#: (what, session, when in ms, number)
actions = st.tuples(
    st.sampled_from(["type", "speak", "click", "stop", "leave", "deafen"]),
    st.integers(1, 2),
    st.integers(200, 9000),
    st.integers(1, 12),
)


def act(simulation: Simulation, listeners: dict[int, SimListener], action: tuple[str, int, int, int], key: int) -> None:
    what, session, at, number = action
    listener = listeners[session]
    match what:
        case "type":
            listener.type(f"say {number}", at=ms(at), key=f"k{key}")
        case "speak":
            listener.say(beep(250 + 60 * number), at=ms(at))
        case "click":
            listener.say(beep(100), at=ms(at))
        case "stop":
            listener.stop(at=ms(at))
        case "leave":
            simulation.world.at(ms(9500 + number), listener.leave)
        case "deafen":
            simulation.world.at(ms(at), lambda: setattr(listener, "reports", False))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(actions, max_size=10),
    st.integers(0, 2**16),
    st.floats(0, 0.5),
    st.sampled_from([0, 0, 0, 17, 40]),
)
def test_the_rules_hold_under_random_people(
    plan: list[tuple[str, int, int, int]], seed: int, loss: float, fail_every: int
) -> None:
    """Whatever two people do, in any order, on a lossy path, with stages that sometimes fail."""
    count = {"launches": 0}

    def fails(launch: Launch) -> str:
        count["launches"] += 1
        due = (
            fail_every and launch.stage != "copy" and launch.jobs[0].session == 1 and not count["launches"] % fail_every
        )
        return "made to fail" if due else ""

    simulation = Simulation(seed=seed, until_ms=14_000, sessions_max=2, fails=fails)
    network = SimNetwork(delay=ms(5 + 40 * loss), buffer=ms(60), report_loss=loss)
    listeners = {session: simulation.connect(session, network=network) for session in (1, 2)}
    for key, action in enumerate(plan):
        act(simulation, listeners, action, key)
    simulation.run()

    for session in (1, 2):
        check_epochs(simulation, session)
        check_responses(simulation, session)
        check_history(simulation, session, listeners[session])
    check_ledgers(simulation)


def check_epochs(simulation: Simulation, session: int) -> None:
    """Epochs count up by one, and no chunk of a dead one is published."""
    epoch, chunks = 0, set()
    for _, news in simulation.world.news:
        if getattr(news, "session", None) != session:
            continue
        if isinstance(news, AdvanceEpoch):
            assert news.epoch == epoch + 1
            epoch = news.epoch
        if isinstance(news, PublishChunk):
            assert news.epoch == epoch
            assert news.chunk not in chunks
            chunks.add(news.chunk)
            # Samples out are the span's, exactly (DESIGN §5 rule 11).
            assert news.samples * 2 == news.span.length


def check_responses(simulation: Simulation, session: int) -> None:
    """Every response that began ends exactly once, unless the world ended first; history within one only grows."""
    live = simulation.core.sessions.get(SessionId(session))
    open_response = live.reply.response if live is not None and live.reply is not None else None
    begun = [n.response for n in simulation.news(ResponseChanged, session) if n.state is ResponseState.ACCEPTED]
    for response, ends in simulation.final_states(session).items():
        assert len(ends) == (0 if response == open_response else 1)
    assert begun == list(range(1, len(begun) + 1))
    words: dict[int, int] = {}
    for news in simulation.news(HistoryChanged, session):
        assert news.words >= words.get(news.response, 0)
        words[news.response] = news.words


def check_history(simulation: Simulation, session: int, listener: SimListener) -> None:
    """What the thinker remembers was heard, or is marked: nothing else may be in its context."""
    live = simulation.core.sessions.get(SessionId(session))
    if live is None:
        return
    heard = set(heard_words(listener))
    marked = any(n.estimated for n in simulation.news(HistoryChanged, session))
    remembered = history_words(simulation, session)
    if not marked:
        assert set(remembered) <= heard
    wanted = live.dialogue.tokens()
    assert wanted[: len(live.growing.ids)] == live.growing.ids or live.contest is not None
    assert simulation.core.stores.pages.length(live.context.id) >= len(live.context.ids)


def check_ledgers(simulation: Simulation) -> None:
    simulation.core.stores.check()
    values = simulation.core.metrics().values
    if not simulation.core.sessions and not values["work_in_flight"]:
        assert values["latents_held"] == values["ingest_held"] == values["pages_retiring"] == 0
        assert values["out_slots_free"] == simulation.core.stores.out_slots_count
