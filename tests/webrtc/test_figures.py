"""What Prometheus is told: buckets that add up, counters that are said to be counters, at a daemon that talks."""

from __future__ import annotations

import asyncio
import re

import pytest

from duplexd.ids import Epoch, SessionId
from duplexd.messages import AdvanceEpoch, Progress
from duplexd.units import NANOS_PER_MS, Nanos, Ticks, ticks_from_ms
from duplexd.webrtc.figures import Figures, Histogram, prometheus
from tests.webrtc.realtime.simulated import beep24
from tests.webrtc.test_daemon import Visitor, at_a_daemon, from_now, message, say

ME = SessionId(1)
_SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="[^"\\\n]*",?)+)\})? (\S+)')


class Exposition:
    """Prometheus' text format, read as strictly as its own parser does; anything else raises."""

    def __init__(self, text: str) -> None:
        assert text.endswith("\n")
        self.types: dict[str, str] = {}
        self.samples: dict[str, dict[str, float]] = {}  #: by name, then by labels
        for line in text.splitlines():
            self._read(line)
        for name, kind in self.types.items():
            if kind == "histogram":
                self._check(name)

    def _read(self, line: str) -> None:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in ("counter", "gauge", "histogram")
            assert name not in self.types, f"{name} is told twice, or not in one block"
            self.types[name] = kind
            self._told = name
            return
        if line.startswith("# HELP "):
            return
        found = _SAMPLE.fullmatch(line)
        assert found, f"no sample: {line!r}"
        name, labels, value = found[1], found[2] or "", float(found[3])
        base = self._told
        suffixes = ("_bucket", "_sum", "_count") if self.types[base] == "histogram" else ("",)
        assert name in [base + suffix for suffix in suffixes], f"{name} stands in the block of {base}"
        assert labels not in self.samples.setdefault(name, {}), f"{line!r} is told twice"
        self.samples[name][labels] = value

    def _check(self, name: str) -> None:
        """Every histogram: buckets rise to +Inf, and what is in the last is the count."""
        for labels, count in self.samples[f"{name}_count"].items():
            buckets = self.buckets(name, labels)
            assert [bound for bound, _ in buckets] == sorted(bound for bound, _ in buckets)
            assert [n for _, n in buckets] == sorted(n for _, n in buckets)
            assert buckets[-1] == (float("inf"), count)
            assert labels in self.samples[f"{name}_sum"]

    def buckets(self, name: str, labels: str = "") -> list[tuple[float, float]]:
        found = []
        for told, count in self.samples[f"{name}_bucket"].items():
            rest, _, bound = told.rpartition("le=")
            if rest.rstrip(",") == labels:
                found.append((float(bound.strip('"')), count))
        return found

    def value(self, name: str, labels: str = "") -> float:
        return self.samples[f"duplexd_{name}"][labels]


def test_an_observation_counts_in_every_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)

    assert list(histogram.samples("x", 'part="a"')) == [
        'x_bucket{part="a",le="1"} 2\n',
        'x_bucket{part="a",le="2"} 3\n',
        'x_bucket{part="a",le="5"} 3\n',
        'x_bucket{part="a",le="+Inf"} 4\n',
        'x_sum{part="a"} 10\n',
        'x_count{part="a"} 4\n',
    ]


def test_an_interruption_is_told_by_its_parts_and_one_without_a_voice_was_not_decided_on() -> None:
    figures = Figures()
    voiced = AdvanceEpoch(ME, Epoch(1), Ticks(0), 1, Nanos(300 * NANOS_PER_MS), Nanos(100 * NANOS_PER_MS))
    typed = AdvanceEpoch(ME, Epoch(2), Ticks(0), 0, Nanos(900 * NANOS_PER_MS))
    figures.note_advance(voiced, Nanos(303 * NANOS_PER_MS))
    figures.note_advance(typed, Nanos(901 * NANOS_PER_MS))
    figures.note_progress(Progress(ME, Epoch(2), ticks_from_ms(900), ticks_from_ms(200), Ticks(0), False))
    told = Exposition(figures.text())

    assert told.value("frontend_barge_in_ms_sum", 'part="decide"') == 200
    assert told.value("frontend_barge_in_ms_count", 'part="decide"') == 1
    assert told.value("frontend_barge_in_ms_sum", 'part="flush"') == 4
    assert told.value("frontend_barge_in_ms_count", 'part="flush"') == 2
    assert told.value("engine_lead_ms_sum") == 700


def test_one_name_is_one_block_whatever_its_labels() -> None:
    values = {'a_bytes{class="x"}': 1.0, "a_bytes_max": 3.0, 'a_bytes{class="y"}': 2.0, "b_total": 4.0}
    told = Exposition(prometheus(values))

    assert told.types == {"duplexd_a_bytes": "gauge", "duplexd_a_bytes_max": "gauge", "duplexd_b_total": "counter"}


@pytest.mark.slow
def test_a_conversation_with_an_interruption_shows_in_every_family() -> None:
    async def read(visitor: Visitor) -> Exposition:
        async with visitor.http.get(visitor.daemon.url + "metrics") as answer:
            assert answer.status == 200
            return Exposition(await answer.text())

    async def story(visitor: Visitor) -> None:
        client = await visitor.connect()
        before = await read(visitor)
        client.mic = from_now(beep24(900))
        await message(client, "reply", state="created")
        await asyncio.sleep(1.5)
        client.mic = from_now(beep24(900))
        await message(client, "reply", state="cancelled")
        await message(client, "reply", state="completed", seconds=20)
        say(client, "say 1", "k")
        await message(client, "reply", state="completed", seconds=20)
        await client.close()
        await visitor.until_sessions(0, seconds=5)
        await asyncio.sleep(1.2)  # The engine tells its figures once a second.
        told = await read(visitor)
        assert before.value("frontend_first_audio_ms_count") == 0
        assert told.value("frontend_first_audio_ms_count") >= 3
        assert told.value("frontend_barge_in_ms_count", 'part="decide"') >= 1
        assert told.value("frontend_barge_in_ms_count", 'part="flush"') >= 1
        decided = told.value("frontend_barge_in_ms_sum", 'part="decide"')
        assert 50 < decided / told.value("frontend_barge_in_ms_count", 'part="decide"') < 1500
        assert told.value("engine_lead_ms_count") >= 20
        assert 0 < told.value("engine_lead_ms_sum") / told.value("engine_lead_ms_count") < 3000
        assert told.value("frontend_loop_lag_ms_count") >= 100
        assert told.value("engine_wasted_ms_total") > 0
        assert told.value("engine_heard_ms_total") > 1000
        assert told.value("frontend_gaps_total") == 0
        assert told.types["duplexd_engine_misses_total"] == "counter"
        assert {'class="anchor"', 'class="dialogue"'} & set(told.samples["duplexd_engine_kv_bytes"])
        assert told.samples["duplexd_engine_kv_bytes"].keys() == told.samples["duplexd_engine_kv_tokens"].keys()

    at_a_daemon(story)
