"""Runs the page's own tests (node's test runner over the page's modules; no browser)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["gate", "model", "detector", "camera"])
def test_page_modules_pass_their_node_tests(name: str) -> None:
    passes(name)


def test_a_picture_that_stands_still_is_told_and_a_broken_connection_made_anew() -> None:
    """T-RC-05: the page says what has stopped; where all has, it connects again after 1, 2 and 4 s."""
    passes("broken")


def test_ten_visits_leave_no_microphone_open() -> None:
    """T-RC-07: a second start failed where the first had not let go of its microphone."""
    passes("session")


def passes(name: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    done = subprocess.run([node, "--test", f"{HERE}/{name}.test.mjs"], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
