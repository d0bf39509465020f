"""What the uplink bench makes of arrivals, losses and tones; times in milliseconds."""

from __future__ import annotations

import pytest

from duplexd.bench.netem import Loss
from duplexd.bench.uplink import after_loss, figures, microphone_to_application_ms, pieces
from duplexd.media.lateness import Arrival
from duplexd.units import NANOS_PER_MS, Nanos

ORIGIN = 2**32 - 4800  #: the timestamps wrap on the way
DELAY = 30


def arrivals(late_ms: dict[int, float], *, count: int = 200, loud: dict[int, int] | None = None) -> list[Arrival]:
    """Packets of 20 ms, each DELAY ms under way, some later; `loud`: first loud sample by packet."""
    return [
        Arrival(
            (ORIGIN + 960 * number) % 2**32,
            Nanos(round((20 * number + DELAY + late_ms.get(number, 0)) * NANOS_PER_MS)),
            (loud or {}).get(number, -1),
        )
        for number in range(count)
    ]


def loss(at_ms: float) -> Loss:
    return Loss(Nanos(round(at_ms * NANOS_PER_MS)), 111, 0)


def test_lateness_is_over_the_fastest_of_the_run() -> None:
    late = [piece.late_ms for piece in pieces(arrivals({3: 45, 4: 25}))]

    assert late[2:6] == [0, 45, 25, 0]


def test_after_a_loss_the_line_is_calm_when_it_stays_under_60_ms() -> None:
    """A packet is lost at 1000 ms; the next are 65 and 30 ms late, one 70 ms late follows, then all is well."""
    series = pieces(arrivals({49: 65, 50: 30, 51: 70}))
    after = after_loss(series, Nanos(1000 * NANOS_PER_MS))

    assert after is not None
    assert after.until_ms == 20 * 52 + DELAY - 1000
    assert max(after.late_ms) == 70


def test_a_line_that_stays_behind_has_not_recovered() -> None:
    """Like a buffer that never drains: 280 ms from the first loss on."""
    behind = figures(arrivals(dict.fromkeys(range(50, 200), 280)), [loss(1000), loss(1500)])

    assert (behind["losses"], behind["not_under_60_ms_within_2_s"]) == (2, 2)
    assert behind["late_after_loss_ms"]["worst"] == 280


def test_a_loss_at_the_end_of_the_run_is_not_judged() -> None:
    assert figures(arrivals({}), [loss(3000)])["losses"] == 0


def test_a_sound_is_in_the_application_when_its_first_loud_piece_is() -> None:
    """Tones begin at 407, 807 and 1207 ms at the microphone. The second never came, and is not taken for the third;
    the first packet of the third did not come."""
    loud = {20: 112, 21: 0, 22: 0, 61: 0, 62: 0}
    found = microphone_to_application_ms(
        arrivals({20: 5}, loud=loud), [407 * NANOS_PER_MS, 807 * NANOS_PER_MS, 1207 * NANOS_PER_MS]
    )

    assert found == [pytest.approx(28), pytest.approx(43)]


def test_a_loss_beside_a_hole_in_what_was_gathered_is_not_judged() -> None:
    hole = (2500 * NANOS_PER_MS, 2600 * NANOS_PER_MS)

    assert figures(arrivals({}), [loss(100), loss(1000)], [hole])["losses"] == 1
