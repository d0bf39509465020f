"""Where the model's own face cannot be drawn, there is none, and everybody who asks is told why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from duplexd.channel import MediaShape
from duplexd.config import AUTO_FACE, Config
from duplexd.doctor import Check, checks
from duplexd.engine.process import EngineConfig, core_of, layout_of, load_plan, with_face_of
from duplexd.models.pocket import shown_face

LACK = "libGL.so.1: cannot open shared object file"
MEDIA = MediaShape(in_slots=8, in_samples=512, out_slots=8, out_samples=24_000, picture_slots=0, picture_bytes=0)


@pytest.fixture
def no_skia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "skia.py").write_text(f"raise ImportError({LACK!r})\n")
    here = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([here] if here else [])]))


@pytest.mark.usefixtures("no_skia")
def test_the_own_face_gives_way_with_the_reason_and_a_named_one_is_left_alone() -> None:
    shown, reason = shown_face(AUTO_FACE)

    assert shown == "none"
    assert LACK in reason
    assert "apt-get install libegl1 libgl1" in reason
    assert shown_face("theo") == ("theo", "")


def test_the_own_face_is_shown_where_it_can_be_drawn() -> None:
    pytest.importorskip("skia")

    assert shown_face(AUTO_FACE) == ("mira", "")


@pytest.mark.parametrize(("face", "needed"), [("auto", False), ("mira", True)])
@pytest.mark.usefixtures("no_skia")
def test_the_doctor_says_what_the_face_lacks(face: str, needed: bool) -> None:
    found = face_check(Config(face=face))

    assert not found.fine
    assert LACK in found.text
    assert found.needed == needed


@pytest.mark.parametrize("config", [Config(face="none"), Config(model="clock")], ids=["none", "clock"])
@pytest.mark.usefixtures("no_skia")
def test_the_doctor_misses_nothing_where_nothing_is_drawn(config: Config) -> None:
    assert face_check(config).fine


def face_check(config: Config) -> Check:
    from duplexd.doctor import _face

    return _face(config)


def test_the_doctor_looks_at_the_face() -> None:
    assert "face" in [check.name for check in checks(Config(model="clock", port=0))]


@pytest.mark.parametrize(
    ("faceless", "shown", "picture"), [("", "flash", True), (LACK, "none", False)], ids=["drawn", "faceless"]
)
def test_what_was_found_stands_in_the_engines_configuration(faceless: str, shown: str, picture: bool) -> None:
    """A trace carries that configuration: it replays where another face can be drawn."""
    config = EngineConfig("clock", MEDIA, 1, model_options={"face": AUTO_FACE})
    plan: Any = load_plan("clock", {"face": "none" if faceless else AUTO_FACE})
    plan.faceless = faceless

    config = with_face_of(plan, config)
    replayed = load_plan(config.model, config.model_options)

    assert config.model_options == {"face": shown}
    assert config.faceless == faceless
    assert (replayed.face is not None) == picture


def test_the_front_end_is_told_why() -> None:
    config = EngineConfig("clock", MEDIA, 1, model_options={"face": "none"}, faceless=LACK)
    plan = load_plan(config.model, config.model_options)

    assert core_of(config, plan, layout_of(plan, 1))._engine_ready().faceless == LACK
