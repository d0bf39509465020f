"""Nothing of what is said is written down: not the sound of either side, not its base64, and no words of the person."""

from __future__ import annotations

import asyncio
import base64
import logging

import numpy as np
import pytest

from tests.webrtc.realtime.daemon import Talk
from tests.webrtc.realtime.inside import inside
from tests.webrtc.realtime.simulated import b64, beep24

pytestmark = pytest.mark.slow
PIECE = 32  #: characters of base64 that are nobody's by chance
SECRET = "a-word-that-nobody-else-says"


def pieces(encoded: str) -> set[str]:
    return {encoded[at : at + PIECE] for at in range(0, len(encoded) - PIECE, PIECE)}


def test_at_its_most_talkative_the_daemon_logs_no_sound_and_no_words(capfd: pytest.CaptureFixture[str]) -> None:
    """Both processes at DEBUG; a spoken turn, a typed one, a reply, an event that is refused with sound in it."""
    rng = np.random.default_rng(1)
    hum = (beep24(600) + rng.integers(-300, 300, len(beep24(600)))).astype(np.int16)
    spoken = b64(np.concatenate([hum, beep24(900, 30)]))
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(self.format(record))

    async def story() -> str:
        async with (
            inside(log_level="DEBUG", sessions_max=2) as place,
            place.http.ws_connect(place.url("/v1/realtime?model=clock"), max_msg_size=0) as socket,
        ):
            talk = Talk(socket)
            await talk.until("session.created")
            await talk.send("input_audio_buffer.append", audio=spoken)
            await talk.until("response.done", seconds=20)
            await talk.ask(f"{SECRET} say 2")
            await talk.until("response.done")
            await talk.send("input_audio_buffer.append", audio=spoken + "!")
            await talk.until("error")
            return base64.b64encode(talk.sound).decode()

    root, keep = logging.getLogger(), Keep(logging.DEBUG)
    before = root.level
    root.setLevel(logging.DEBUG)
    root.addHandler(keep)
    try:
        made = asyncio.run(story())
    finally:
        root.removeHandler(keep)
        root.setLevel(before)
    captured = capfd.readouterr()
    logged = "\n".join([*records, captured.out, captured.err])

    assert "duplexd" in logged
    assert len(made) > 10_000
    assert not [piece for piece in pieces(spoken) | pieces(made) if piece in logged]
    assert SECRET not in logged
