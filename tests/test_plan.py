"""`duplexd plan`: the question a person asks before buying memory."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from duplexd.__main__ import main
from duplexd.errors import ConfigError
from duplexd.memory.layout import ArenaLayout
from duplexd.models import published
from duplexd.plan import footprint_of

GB = 10**9


def plan(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_word_clock_is_laid_out_for_a_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = plan(
        "--model", "clock", "--memory", "64MiB", "--host-memory", "64 MB", "--json", str(tmp_path / "plan.json")
    )

    table = capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    footprint = footprint_of("clock", {})
    count = written["sessions_resident"]
    assert code == 0
    assert footprint.device_bytes(count) <= 64 << 20 < footprint.device_bytes(count + 1)
    assert [row["section"] for row in written["rows"]] == ["anchors", "windows", "ingest", "pages", "payloads"]
    assert f"sessions: {count} resident in 67.1 MB" in table
    assert f"in all: {written['sessions_all']}, {written['sessions_resident_of_all']} of them resident" in table
    assert "scarcest: ingest" in table


def test_the_pair_that_no_single_card_holds_is_refused_with_its_sum(capsys: pytest.CaptureFixture[str]) -> None:
    """Two models of 17 B with two histories; in eight bits it fits the largest card, once."""
    assert plan("--model", "lpm-17b", "--memory", "80GB") == 2
    assert "lpm-17b does not fit 80.0 GB: weights 68.0 GB + " in capsys.readouterr().err
    assert plan("--model", "lpm-17b", "--memory", "141GB", "--option", "kv=fp8") == 0
    assert "sessions: 1 resident in 141.0 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--memory", "24G"), "'24G' is no size: write a number and one of B, kB,"),
        (("--memory", "24GiB", "--host-memory", "much"), "'much' is no size"),
        (("--memory", "24GiB", "--model", "gpt"), "no model 'gpt'; installed are clock, pocket; published sizes are"),
        (("--memory", "24GiB", "--model", "clock", "--option", "fast"), "--option 'fast' is no NAME=VALUE"),
        (("--memory", "24GiB", "--model", "clock", "--option", "fast=1"), "model clock has no option fast"),
        (("--memory", "1kB", "--model", "clock"), "one session 1.6 MB need 1.6 MB (1611008 bytes)"),
    ],
    ids=["no-unit", "no-number", "unknown-model", "no-value", "unknown-option", "too-small"],
)
def test_a_wrong_question_is_answered_with_what_is_allowed(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("footprint", "partition", "row_bytes"),
    [
        (published.lpm, "generator window", 9360 * 819_200),
        (published.lpm, "refiner sink", 9360 * 819_200),
        (published.qwen3_omni, "thinker", 98_304),
        (published.qwen3_omni, "talker", 20_480),
        (published.qwen2_5_omni, "thinker", 57_344),
        (published.qwen2_5_omni, "talker", 49_152),
        (published.minicpm_o, "thinker", 147_456),
        (published.minicpm_o, "talker", 61_440),
        (published.minicpm_o, "ears", 1500 * 98_304),
        (published.moshi, "steps", 524_288),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_published_size_has_the_bytes_its_source_states(
    footprint: published.Published, partition: str, row_bytes: int
) -> None:
    """Bytes of one chunk, token, step or frame, over all layers."""
    assert ArenaLayout(footprint({}).partitions(1)).partitions[partition].row_bytes == row_bytes


def test_eight_bits_and_a_coarser_grid_make_the_history_smaller() -> None:
    def history(**options: str) -> int:
        return ArenaLayout(published.lpm(options).partitions(1)).session_bytes

    assert history() == 2 * 8 * 9360 * 819_200
    assert [history(kv="fp8"), history(vae="16"), history(kv="fp8", vae="16")] == [
        history() // 2,
        history() // 4,
        history() // 8,
    ]


def test_every_published_size_answers_for_the_cards_people_ask_about() -> None:
    fits = {
        (entry.name, card): footprint_of(entry.name, {}).device_bytes(1) <= card * GB
        for entry in entry_points(group="duplexd.sizes")
        for card in (24, 80, 141)
    }

    assert {card for (name, card), fine in fits.items() if name == "moshi" and fine} == {24, 80, 141}
    assert {card for (name, card), fine in fits.items() if name == "qwen3-omni-30b" and fine} == {80, 141}
    assert not any(fine for (name, _), fine in fits.items() if name == "lpm-17b")


def test_an_option_a_published_size_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="lpm-17b has no option grid; it has: kv, vae"):
        published.lpm({"grid": "720p"})
    with pytest.raises(ConfigError, match="option vae is '12'; it is one of 8, 16"):
        published.lpm({"vae": "12"})
