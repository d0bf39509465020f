"""What every test with a browser needs of the system."""

from __future__ import annotations

import pytest

from duplexd.bench.programs import find_program


@pytest.fixture(autouse=True)
def _programs() -> None:
    for program in ("chromium", "pulseaudio", "parec"):
        try:
            find_program(program)
        except Exception as missing:
            pytest.skip(str(missing))
