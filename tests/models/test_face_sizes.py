"""The printed plans of larger faces, against arithmetic on what the papers say of them."""

from __future__ import annotations

import pytest

from duplexd.plan import footprint_of, show

#: Tokens of a chunk: six latent frames a second of 30 x 52 patches.
CHUNK = 6 * 30 * 52
#: Slots of a session and stage: three sinks, two recent chunks, one in work, one ahead, three that retire.
SLOTS = 10


@pytest.mark.parametrize(
    ("name", "layers", "width", "billions"), [("face-17b", 40, 5120, (16.5, 18.5)), ("face-1.3b", 30, 1536, (1.3, 1.8))]
)
def test_a_larger_face_takes_what_its_shape_says(
    name: str, layers: int, width: int, billions: tuple[float, float]
) -> None:
    footprint = footprint_of(name, {})
    parts = {spec.name: spec for spec in footprint.partitions(2)}
    slot = layers * CHUNK * 2 * width * 2  # keys and values, bfloat16

    assert {parts["noisy"].slot_bytes, parts["clean"].slot_bytes} == {slot}
    assert {parts["noisy"].rows, parts["clean"].rows} == {2 * SLOTS}
    assert billions[0] < footprint.weights_bytes / 4 / 1e9 < billions[1]  # two networks of two bytes a number


def test_the_printed_table_says_how_many_sessions_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    show(model="face-1.3b", options=[], memory="140GB", host_memory="0", file=None)
    said = capsys.readouterr().out
    session = 2 * SLOTS * 1_725_235_200
    resident = (140 * 10**9 - footprint_of("face-1.3b", {}).weights_bytes - 4 * 10**9) // session

    assert "generator and refiner, 1.64 billion each, bfloat16" in said
    assert f"sessions: {resident} resident" in said
