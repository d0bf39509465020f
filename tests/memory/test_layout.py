"""Layout: every byte has one place, and the table says how many sessions fit."""

from __future__ import annotations

from itertools import pairwise

import pytest

from duplexd.errors import ConfigError
from duplexd.memory.layout import ALIGNMENT, ArenaLayout, FieldSpec, PartitionKind, PartitionSpec


def pages(**changes: object) -> PartitionSpec:
    fields = (FieldSpec("k", (2, 8), outer=(3,)), FieldSpec("v", (2, 8), "bfloat16", outer=(3,)))
    return PartitionSpec(
        **{  # type: ignore[arg-type]
            "name": "pages",
            "kind": PartitionKind.PAGES,
            "count": 20,
            "fields": fields,
            "page_tokens": 4,
            "session_slots": 6,
            "shared_slots": 2,
            **changes,
        }
    )


def latents() -> PartitionSpec:
    return PartitionSpec("latents", PartitionKind.SLOTS, 5, (FieldSpec("frames", (13, 7), "int16"),), session_slots=2)


def test_fields_start_aligned_and_do_not_overlap() -> None:
    layout = ArenaLayout([pages(), latents()])

    placements = list(layout.placements.values())
    assert all(place.offset % ALIGNMENT == 0 for place in placements)
    assert all(one.offset + one.nbytes <= other.offset for one, other in pairwise(placements))
    assert layout.total_bytes >= placements[-1].offset + placements[-1].nbytes
    assert sum(layout.partition_bytes(name) for name in layout.partitions) == layout.total_bytes


def test_keys_of_one_layer_lie_together_over_token_slots() -> None:
    place = ArenaLayout([pages()]).placement("pages", "k")

    assert (place.shape, place.slot_axis, place.nbytes) == ((3, 80, 2, 8), 1, 4 * 3 * 80 * 16)


def test_the_scarcest_partition_bounds_the_sessions() -> None:
    layout = ArenaLayout([pages(), latents()])

    assert [spec.sessions for spec in layout.partitions.values()] == [3, 2]
    assert layout.sessions == 2
    assert "sessions: 2 (bounded by latents)" in layout.describe()


def test_the_table_accounts_for_every_byte() -> None:
    layout = ArenaLayout([pages(), latents()])

    table = layout.describe().splitlines()
    assert table[0].split() == ["partition", "section", "what", "count", "anchors", "bytes", "per", "session"]
    total = next(line for line in table if line.startswith("total"))
    prompt = 2 * 4 * 3 * 16 * (4 + 2)
    assert total.split()[1:] == [f"{prompt:,}", f"{layout.total_bytes:,}", f"{layout.session_bytes:,}"]
    assert layout.session_bytes == 6 * 4 * 3 * 16 * (4 + 2) + 2 * 13 * 7 * 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"page_tokens": 0}, "page_tokens 0"),
        ({"kind": PartitionKind.SLOTS}, "page_tokens 4"),
        ({"count": 0}, "count 0"),
        ({"fields": ()}, "no field"),
        ({"session_slots": 19}, "promises each session 19"),
        ({"session_slots": -1}, "negative"),
        ({"fields": (FieldSpec("k", (2,), "float7"),)}, "unknown dtype float7"),
        ({"fields": (FieldSpec("k", (0,)),)}, "empty dimension"),
        ({"fields": (FieldSpec("k", (2,)), FieldSpec("k", (2,)))}, "twice"),
    ],
)
def test_an_impossible_partition_is_refused_by_name(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        ArenaLayout([pages(**changes)])

    assert "'pages'" in str(refused.value)


def test_an_unknown_field_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"pages\.k, pages\.v"):
        ArenaLayout([pages()]).placement("pages", "q")
