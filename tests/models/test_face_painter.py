"""The painter draws what the studio draws, outlives an accident, and never outlives the engine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from duplexd.errors import ModelError
from duplexd.models.face.drawing.character import load_character
from duplexd.models.face.drawing.picture import Studio
from duplexd.models.face.motion import CHANNELS, Channel
from duplexd.models.face.painter import Painter

SIZE = 64


@pytest.fixture(scope="module")
def painter() -> Iterator[Painter]:
    painter = Painter(size=SIZE, frames_max=3)
    painter.start()
    yield painter
    painter.close()


def motions(character: str, count: int) -> npt.NDArray[np.float32]:
    rest = load_character(character).identity.neutral()
    frames = np.tile(rest, (count, 1))
    frames[:, Channel.OPENING] += np.linspace(0, 0.8, count)
    return frames.astype(np.float32)


@pytest.mark.parametrize("character", ["mira", "theo"])
def test_it_draws_what_the_studio_draws(painter: Painter, character: str) -> None:
    studio = Studio(size=SIZE, portraits_max=1)
    wanted = [studio.picture(character, motion) for motion in motions(character, 3)]

    drawn = painter.draw(character, motions(character, 3))

    assert np.array_equal(drawn, wanted)
    assert not np.array_equal(drawn[0], drawn[2])


def test_one_that_was_killed_is_replaced_and_nothing_is_missing(painter: Painter) -> None:
    before = painter.draw("mira", motions("mira", 2)).copy()
    first = painter.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)

    assert np.array_equal(painter.draw("mira", motions("mira", 2)), before)
    assert painter.pid != first
    assert not Path(f"/proc/{first}").exists()  # Its end was taken note of: no zombie stays.


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tries time out while the process goes on: the next request is answered by a process that got it alone."""
    painter = Painter(size=SIZE, frames_max=3)
    painter.start()
    wanted = painter.draw("mira", motions("mira", 1)).copy()
    monkeypatch.setattr("duplexd.models.face.painter.DRAW_WITHIN_S", 1e-6)
    with pytest.raises(ModelError, match="failed twice over the same frames"):
        painter.draw("theo", motions("theo", 3))
    assert painter.pid is None
    monkeypatch.undo()

    assert np.array_equal(painter.draw("mira", motions("mira", 1)), wanted)
    painter.close()


def test_a_character_that_does_not_exist_is_named_and_the_painter_lives(painter: Painter) -> None:
    pid = painter.pid
    with pytest.raises(ModelError, match="no character 'nobody'"):
        painter.draw("nobody", motions("mira", 1))

    assert painter.draw("mira", motions("mira", 1)).shape == (1, SIZE * 3 // 2, SIZE)
    assert painter.pid == pid


@pytest.mark.parametrize("shape", [(0, CHANNELS), (4, CHANNELS), (2, CHANNELS - 1)])
def test_motion_of_another_shape_is_refused(painter: Painter, shape: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match="a painter takes 1 to 3 of 24"):
        painter.draw("mira", np.zeros(shape, np.float32))


def test_it_ends_when_its_owner_is_killed() -> None:
    """However an engine ends, nothing of it keeps running."""
    program = (
        "from duplexd.models.face.painter import Painter\n"
        f"painter = Painter(size={SIZE}, frames_max=1)\n"
        "painter.start()\n"
        "print(painter.pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        painter = int(owner.stdout.readline())
        pidfd = os.pidfd_open(painter)
        owner.kill()
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)  # Readable: that process has ended.
    try:
        assert poll.poll(10_000)
    finally:
        os.close(pidfd)


def test_without_its_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "skia.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')\n")
    here = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([here] if here else [])]))

    with pytest.raises(ModelError, match=r"libGL.*apt-get install libegl1 libgl1"):
        Painter(size=SIZE, frames_max=1).start()
