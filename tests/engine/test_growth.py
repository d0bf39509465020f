"""One session's memory never dies: at every bound of its context the oldest goes, and the person is answered."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from duplexd.engine.simulator import SimNetwork
from duplexd.ids import SessionId
from duplexd.messages import ResponseState
from tests.engine.simulation import Simulation, beep, ms

CONTEXT_TOKENS = 256
#: In the default model's proportions: what the tokens of a whole context take, and 24 spare ones for 1024 tokens.
SESSION_PAGES = CONTEXT_TOKENS // 16 + 6
BOUNDS: dict[str, Any] = {"sessions_max": 1, "context_tokens": CONTEXT_TOKENS, "session_pages": SESSION_PAGES}


@pytest.mark.parametrize("seed", range(2))
def test_forty_quick_interruptions_are_all_answered(seed: int) -> None:
    """Every turn leaves pages partly filled: the pages are full long before the tokens are."""
    rng = Random(seed)
    simulation = Simulation(seed=seed, until_ms=122_000, **BOUNDS)
    listener = simulation.connect(network=SimNetwork(delay=ms(8), buffer=ms(60)))
    for turn in range(40):
        listener.say(beep(1000), at=ms(500 + 3000 * turn + rng.uniform(0, 200)))
    simulation.run()

    session = simulation.core.sessions[SessionId(1)]
    print(simulation.core.monitor.values(), len(session.dialogue.tokens()), simulation.core.stores.pages.owned(SessionId(1)))
    ends = simulation.final_states()
    assert len(ends) >= 40
    assert not [response for response, states in ends.items() if ResponseState.FAILED in states]
