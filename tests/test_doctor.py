"""What the doctor says of a machine, a port and a model, and what its exit code is."""

from __future__ import annotations

import socket

import pytest

from duplexd import weights
from duplexd.__main__ import main
from duplexd.config import Config
from duplexd.doctor import checks
from duplexd.errors import WeightsError


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


def test_a_machine_that_can_serve_the_word_clock_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    code = exit_code("doctor", "--model", "clock", "--port", "0")
    said = capsys.readouterr().out

    assert code == 0, said
    for name in ("Python", "torch device", "port", "UDP on loopback", "weights", "face"):
        assert f"ok   {name} " in said


def test_a_taken_port_makes_the_exit_code_1_and_names_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = exit_code("doctor", "--model", "clock", "--port", str(taken.getsockname()[1]))

    assert code == 1
    assert "choose another with --port" in capsys.readouterr().out


def test_weights_that_are_not_there_are_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("DUPLEXD_HOME", str(tmp_path))
    lacking = {check.name: check for check in checks(Config(face="none", port=0)) if check.name.startswith("weights")}

    assert set(lacking) == {f"weights {name}" for name in weights.WEIGHTS}
    for name in weights.WEIGHTS:
        assert not lacking[f"weights {name}"].fine
        assert f"duplexd fetch {name}" in lacking[f"weights {name}"].text


def test_a_device_that_torch_does_not_have_is_a_fault_and_the_other_checks_go_on() -> None:
    found = {check.name: check for check in checks(Config(model="clock", port=0, device="no-such-device"))}

    assert not found["torch"].fine
    assert found["torch"].needed
    assert found["port"].fine


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--model", "clock"), set()),
        (("--thinker", "mine.gguf"), set(weights.WEIGHTS) - {"smollm2"}),
        ((), set(weights.WEIGHTS)),
    ],
    ids=["clock", "another thinker", "pocket"],
)
def test_serving_fetches_what_its_own_model_needs_and_nothing_else(
    flags: tuple[str, ...], wanted: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Without a network the word clock must start. Nobody listens here: the port is taken, or weights are missing."""
    asked: set[str] = set()
    monkeypatch.setenv("DUPLEXD_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "fetch", lambda names, **_: asked.update(names))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = exit_code("serve", "--fetch", "--port", str(taken.getsockname()[1]), *flags)

    assert code == 2
    assert asked == wanted


def test_serving_fetches_nothing_unless_it_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    def refuse(names: object, **_: object) -> None:
        raise WeightsError(f"asked for {names}")

    monkeypatch.setenv("DUPLEXD_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "fetch", refuse)

    assert exit_code("serve", "--port", "0") == 2
