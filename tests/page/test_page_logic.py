"""Runs the page's own tests (node's test runner over the page's modules; no browser)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["gate", "model", "detector", "session"])
def test_page_modules_pass_their_node_tests(name: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    done = subprocess.run([node, "--test", f"{HERE}/{name}.test.mjs"], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
