"""Where an option's value comes from, what is refused, and what is never shown."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplexd.__main__ import _parser
from duplexd.config import Config, describe, is_loopback, load
from duplexd.errors import ConfigError


def written(folder: Path, text: str) -> str:
    path = folder / "duplexd.toml"
    path.write_text(text)
    return str(path)


def flagged(**flags: Any) -> Config:
    return load(flags=flags, environment={})


def test_without_anything_the_defaults_hold() -> None:
    assert load(flags={}, environment={}) == Config()


def test_flags_beat_the_environment_beats_the_file_beats_the_defaults(tmp_path: Path) -> None:
    """Each place sets one option more than the next: the last word is the nearest one's."""
    file = written(tmp_path, 'port = 1001\nsessions_max = 11\nmodel = "clock"\n')
    config = load(
        flags={"port": "3003", "host": None},
        environment={"DUPLEXD_PORT": "2002", "DUPLEXD_SESSIONS_MAX": "22", "PATH": "/bin"},
        file=file,
    )

    assert (config.port, config.sessions_max, config.model, config.host) == (3003, 22, "clock", "127.0.0.1")


def test_a_flag_that_was_not_given_beats_nothing() -> None:
    assert load(flags={"port": None}, environment={"DUPLEXD_PORT": "2002"}).port == 2002


def test_the_environment_may_name_the_file_and_a_flag_another(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    named = {"DUPLEXD_CONFIG": written(tmp_path, "port = 1001")}
    other = written(tmp_path / "other", "port = 1002")

    assert load(flags={}, environment=named).port == 1001
    assert load(flags={}, environment=named, file=other).port == 1002


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tls", "true", True),
        ("barge_in", "0", False),
        ("voice_min_ms", "250", 250.0),
        ("sessions_max", "7", 7),
        ("token", "12345", "12345"),
        ("ice_servers", "stun:a:1, turn:u:p@b:2,", ("stun:a:1", "turn:u:p@b:2")),
        ("ice_servers", "", ()),
    ],
)
def test_text_becomes_the_options_type(name: str, text: str, value: object) -> None:
    """The environment and flags know only text."""
    found = load(flags={}, environment={f"DUPLEXD_{name.upper()}": text})

    assert getattr(found, name) == value
    assert getattr(flagged(**{name: text}), name) == value


def test_what_is_no_option_may_stand_in_the_environment() -> None:
    environment = {"DUPLEXD_HOME": "/somewhere", "DUPLEXD_TEST_KEEP": "1", "DUPLEX": "x", "HOME": "/root"}

    assert load(flags={}, environment=environment) == Config()


# Refused ------------------------------------------------------------------------------------------------------------


def loaded_from(place: str, key: str, value: str, folder: Path) -> Config:
    if place == "environment":
        return load(flags={}, environment={f"DUPLEXD_{key.upper()}": value})
    if place == "flags":
        return flagged(**{key: value})
    return load(flags={}, environment={}, file=written(folder, f'{key} = "{value}"'))


PLACES = ["environment", "flags", "duplexd.toml"]


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_option_is_named_with_its_place_and_the_known_ones(place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded_from(place, "prot", "1", tmp_path)
    said = str(caught.value)

    assert place in said
    assert "'prot'" in said
    assert all(field.name in said for field in msgspec.structs.fields(Config))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("key", "wants"), [("port", "int"), ("tls", "bool"), ("voice_min_ms", "float")])
def test_a_value_of_the_wrong_type_is_named_with_its_key_and_place(
    place: str, key: str, wants: str, tmp_path: Path
) -> None:
    """And not repeated: somebody may have put a secret there."""
    with pytest.raises(ConfigError, match=rf"{place}: {key}.*{wants}") as caught:
        loaded_from(place, key, "s3cret", tmp_path)

    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        ("port", 0, 65_535),
        ("sessions_max", 1, 1024),
        ("batch_max", 0, 64),
        ("voice_min_ms", 50, 2000),
        ("silence_max_ms", 450, 5000),
        ("hold_max_ms", 500, 10_000),
        ("judge_max_ms", 300, 10_000),
        ("voice_end_ms", 100, 2000),
        ("rest_ms", 0, 10_000),
        ("trace_mb_max", 1, 100_000),
        ("echo_warmup_ms", 0, 60_000),
        ("response_deadline_ms", 0, 600_000),
    ],
)
def test_a_range_includes_its_ends_and_nothing_beyond(key: str, low: int, high: int) -> None:
    assert getattr(flagged(**{key: low}), key) == low
    assert getattr(flagged(**{key: high}), key) == high
    for beyond in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"{key} is {beyond}.*{low}..{high}"):
            flagged(**{key: beyond})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("key", [f.name for f in msgspec.structs.fields(Config) if f.name.endswith("_ms")])
def test_no_duration_is_a_number_that_is_none(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        flagged(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("voice_detector", "loud"), ("log_level", "CHATTY"), ("face_least", "blurred")]
)
def test_a_choice_that_is_none_is_refused_with_the_choices(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is '{value}'; it is"):
        flagged(**{key: value})


def test_memory_is_a_size_and_the_one_answer_to_how_many_are_resident() -> None:
    assert flagged(memory="24GiB").memory == "24GiB"
    with pytest.raises(ConfigError, match="'24G' is no size"):
        flagged(memory="24G")
    with pytest.raises(ConfigError, match="memory is '1GB' and sessions_resident 2: the one follows from the other"):
        flagged(memory="1GB", sessions_resident=2)


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*nowhere\.toml"):
        load(flags={}, environment={}, file=str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match=r"duplexd\.toml is not TOML"):
        load(flags={}, environment={}, file=written(tmp_path, "port = = 1"))


# Who may reach it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", "127.0.0.1.example.org", ""])
def test_an_address_that_others_reach_needs_a_token_or_consent(host: str) -> None:
    """A name that begins like loopback is somebody's name."""
    with pytest.raises(ConfigError, match="no token is set"):
        flagged(host=host)

    assert not is_loopback(host)
    assert flagged(host=host, token="t").host == host
    assert flagged(host=host, insecure=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_alone_needs_none(host: str) -> None:
    assert is_loopback(host)
    assert flagged(host=host).token == ""


# Showing it ---------------------------------------------------------------------------------------------------------


def test_secrets_are_not_shown() -> None:
    shown = describe(flagged(token="s3cret", ice_servers="turn:me:pa:s@s3cret@turn.example.org:3478,stun:a.b:1"))

    assert "s3cret" not in shown
    assert "pa:s" not in shown
    assert 'token = "(set)"' in shown
    assert "turn:me:(set)@turn.example.org:3478" in shown
    assert "stun:a.b:1" in shown
    assert 'token = ""' in describe(Config())


text = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.builds(Config, thinker=text, model=text, public_address=text, ice_servers=st.lists(text).map(tuple)))
def test_what_is_shown_can_be_read_back(config: Config) -> None:
    """Quotes, backslashes and control characters included."""
    shown = describe(config)
    back = msgspec.convert(tomllib.loads(shown), Config)

    assert (back.thinker, back.model, back.public_address) == (config.thinker, config.model, config.public_address)
    assert len(back.ice_servers) == len(config.ice_servers)
    assert describe(back) == shown


def test_every_default_is_shown_with_its_value() -> None:
    assert msgspec.convert(tomllib.loads(describe(Config())), Config) == Config()


def test_every_option_stands_in_the_readme() -> None:
    table = (Path(__file__).parent.parent / "README.md").read_text()
    told = re.findall(r"^\| `([a-z_]+)` \| ", table, re.MULTILINE)

    assert [field.name for field in msgspec.structs.fields(Config) if field.name not in told] == []


def test_every_command_stands_in_the_readme() -> None:
    table = (Path(__file__).parent.parent / "README.md").read_text()
    commands = _commands(_parser())
    missing = [name for name in commands if f"| `{name}" not in table]

    assert {"serve", "check-model", "bench face"} <= set(commands)
    assert missing == []


def _commands(parser: argparse.ArgumentParser) -> list[str]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                under = _commands(command)
                found += [f"{name} {one}" for one in under] or [name]
    return found
