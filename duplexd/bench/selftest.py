"""The rig measures itself: `python -m duplexd.bench.selftest [--browser] [--network]`.

    microphone   call of `say` -> first sample in the microphone; is what arrived a copy, sample for sample?
    clock        two taps on one source: by how much do they differ about the time of one and the same sample?
    echo         is the loudspeaker heard in the microphone, how late and how loud?
    browser      Chromium -> loudspeaker tap: schedule -> sound, and against the browser's own idea of its output time
    tones        words played by the page: are they heard, in order, and how exact are their edges?
    network      round trip of UDP packets over the impaired wire, against what was ordered

Exit status 1 when a check fails. Figures are printed as median [least .. most].
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from duplexd.bench.browser import Browser, page_clock
from duplexd.bench.netem import ADDRESS_A, BadNetwork, Impairment
from duplexd.bench.programs import RigError, end, start
from duplexd.bench.pulse import LOUDSPEAKER_SINK, MICROPHONE_SINK, Echo, PulseRig
from duplexd.bench.tap import RATE, Device, Tap, locate
from duplexd.clock import now
from duplexd.media.tones import SAMPLE_RATE, decode, word_pcm, word_samples
from duplexd.units import NANOS_PER_MS, Nanos, ms_from_nanos

if TYPE_CHECKING:
    from playwright.async_api import Page

_CLOCK_ERROR_MAX_MS = 1.0
_EDGE_ERROR_MAX_MS = 8.0
_ECHO_LOSS_MAX_DB = 1.0

_PAGE_SCRIPT = """async ({words, rate}) => {
  const bytes = Uint8Array.from(atob(words), c => c.charCodeAt(0));
  const samples = new Float32Array(bytes.buffer);
  globalThis.context = new AudioContext({latencyHint: 'interactive'});
  await context.resume();
  globalThis.sound = context.createBuffer(1, samples.length, rate);
  sound.copyToChannel(samples, 0);
  return context.sampleRate;
}"""
_PLAY_SCRIPT = """() => {
  const source = context.createBufferSource();
  source.buffer = sound;
  source.connect(context.destination);
  const called = performance.now(), at = context.currentTime + 0.1;
  source.start(at);
  const output = context.getOutputTimestamp();
  const due = output.performanceTime + (at - output.contextTime) * 1000;
  return {called, due, latency: context.outputLatency * 1000};
}"""
_ECHO_SERVER = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 9000))
print("ready", flush=True)
while True:
    s.sendto(*s.recvfrom(2048))
"""
_PINGER = """
import json, socket, sys
from duplexd.clock import now
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.1)
trips = []
for number in range(int(sys.argv[2])):
    begin = now()
    s.sendto(str(number).encode(), (sys.argv[1], 9000))
    try:
        while s.recv(2048) != str(number).encode():
            pass
        trips.append((now() - begin) / 1e6)
    except TimeoutError:
        pass
print(json.dumps(trips))
"""


class _Report:
    """Prints figures and remembers failures."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def say(self, name: str, values: Sequence[float], unit: str = "ms") -> None:
        array = np.asarray(values)
        print(f"{name:58} {np.median(array):8.2f} [{array.min():.2f} .. {array.max():.2f}] {unit}, n={len(array)}")

    def check(self, name: str, held: bool) -> None:
        print(f"{name:58} {'ok' if held else 'FAILED'}")
        if not held:
            self.failures.append(name)


def _noise(ms: int, seed: int) -> NDArray[np.int16]:
    return np.random.default_rng(seed).normal(0, 3000, ms * RATE // 1000).astype(np.int16)


def measure_microphone(rig: PulseRig, report: _Report, *, rounds: int = 10) -> None:
    waits: list[float] = []
    copies = 0
    for index in range(rounds):
        sound = _noise(300, seed=index)
        called = now()
        said = rig.say(sound)
        said.finish()
        waits.append(ms_from_nanos(said.start - called))
        heard = rig.microphone.since(said.first_sample)[: len(sound)]
        copies += bool(np.array_equal(heard, sound))
    report.say("microphone: call of say -> first sample", waits)
    report.check(f"microphone: {copies} of {rounds} utterances arrived sample for sample", copies == rounds)


def measure_clock(rig: PulseRig, report: _Report, *, rounds: int = 10) -> None:
    errors: list[float] = []
    with Tap(f"{MICROPHONE_SINK}.monitor", device=Device.MICROPHONE, env=rig.env) as other:
        other.wait_for(RATE, limit_s=5.0)
        for index in range(rounds):
            sound = _noise(200, seed=100 + index)
            said = rig.say(sound)
            said.finish()
            begin = other.samples_count - 2 * RATE
            match = locate(sound, other.since(max(0, begin)))
            if match is None or match.similarity < 0.99:
                raise RigError("the second tap did not hear what the first one heard")
            here = other.clock().time_of(max(0, begin) + match.offset)
            errors.append(abs(ms_from_nanos(here - said.start)))
        steps = other.recording().clock.steps_count + rig.microphone.recording().clock.steps_count
    report.say("clock: two taps about one sample differ by", errors)
    report.check(f"clock: within {_CLOCK_ERROR_MAX_MS:g} ms", max(errors) <= _CLOCK_ERROR_MAX_MS)
    report.check("clock: no samples were lost", steps == 0)


def measure_echo(report: _Report) -> None:
    echo = Echo(latency_ms=30, gain=0.25)
    with PulseRig(echo=echo) as rig:
        sound = _noise(500, seed=7)
        begin_out, begin_in = rig.loudspeaker.samples_count, rig.microphone.samples_count
        _play(rig, LOUDSPEAKER_SINK, sound)
        loudest = locate(sound[: RATE // 5], rig.loudspeaker.since(begin_out))
        echoed = locate(sound[: RATE // 5], rig.microphone.since(begin_in))
        if loudest is None or echoed is None or min(loudest.similarity, echoed.similarity) < 0.6:
            report.check("echo: the microphone hears the loudspeaker", False)
            return
        left = rig.loudspeaker.clock().time_of(begin_out + loudest.offset)
        arrived = rig.microphone.clock().time_of(begin_in + echoed.offset)
        heard = rig.microphone.since(begin_in + echoed.offset)[: RATE // 5].astype(np.float64)
        played = rig.loudspeaker.since(begin_out + loudest.offset)[: RATE // 5].astype(np.float64)
    loss = 20 * float(np.log10(heard.std() / played.std()))
    report.say("echo: loudspeaker -> microphone", [ms_from_nanos(arrived - left)])
    report.say("echo: gain", [loss], "dB")
    wanted = 20 * float(np.log10(echo.gain))
    report.check("echo: as loud as ordered", abs(loss - wanted) < _ECHO_LOSS_MAX_DB)


def _play(rig: PulseRig, sink: str, sound: NDArray[np.int16]) -> None:
    command = ["pacat", "--playback", "--raw", "--format=s16le", f"--rate={RATE}", "--channels=1", "--device", sink]
    padded = np.concatenate((np.zeros(RATE // 10, np.int16), sound, np.zeros(RATE // 5, np.int16)))
    subprocess.run(command, input=padded.astype("<i2").tobytes(), env=rig.env, timeout=10, check=True)


async def measure_browser(rig: PulseRig, report: _Report, *, rounds: int = 20) -> None:
    indexes = list(range(1, 4))
    words = np.concatenate([word_pcm(index) for index in indexes])
    async with Browser(env=rig.env) as browser:
        page = await browser.page("about:blank")
        encoded = base64.b64encode(words.astype("<f4").tobytes()).decode()
        rate = await page.evaluate(_PAGE_SCRIPT, {"words": encoded, "rate": SAMPLE_RATE})
        print(f"Chromium {browser.version}, AudioContext at {rate} Hz")
        scheduled: list[float] = []
        own_idea: list[float] = []
        latency: list[float] = []
        edges: list[float] = []
        in_order = 0
        await _play_in_page(page, rig, len(words))  # the first sound of an output stream may stutter
        for _ in range(rounds):
            clock = await page_clock(page, pings=5)
            played = await _play_in_page(page, rig, len(words))
            called = clock.time_of(played["called"])
            recording = rig.loudspeaker.recording()
            onset = recording.first_audible(after=called)
            if onset is None:
                raise RigError("the browser played, but nothing came to the loudspeaker")
            scheduled.append(ms_from_nanos(onset - called) - 100)
            own_idea.append(ms_from_nanos(onset - clock.time_of(played["due"])))
            latency.append(played["latency"])
            before = Nanos(onset - 20 * NANOS_PER_MS)
            heard = decode(recording.part(before, None), RATE)
            in_order += [word.index for word in heard] == indexes
            zero = heard[0].start_sample if heard else 0
            pitch = word_samples(RATE)
            edges += [abs(word.start_sample - zero - k * pitch) / RATE * 1000 for k, word in enumerate(heard)]
    report.say("browser: currentTime -> loudspeaker", scheduled)
    report.say("browser: of this, AudioContext.outputLatency", latency)
    report.say("browser: sound after getOutputTimestamp says so", own_idea)
    report.check(f"tones: {in_order} of {rounds} times all words were heard in order", in_order == rounds)
    report.say("tones: error of a word's start", edges)
    report.check(f"tones: within {_EDGE_ERROR_MAX_MS:g} ms", max(edges) <= _EDGE_ERROR_MAX_MS)


async def _play_in_page(page: Page, rig: PulseRig, samples: int) -> dict[str, float]:
    """Plays the page's sound of so many samples and waits until it is over at the loudspeaker."""
    played: dict[str, float] = await page.evaluate(_PLAY_SCRIPT)
    wanted = rig.loudspeaker.samples_count + RATE * (samples + SAMPLE_RATE // 2) // SAMPLE_RATE
    await asyncio.to_thread(rig.loudspeaker.wait_for, wanted, limit_s=5.0)
    return played


def measure_network(report: _Report) -> None:
    with BadNetwork() as network:
        server = start([*network.inside("a"), sys.executable, "-c", _ECHO_SERVER], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            if server.stdout.readline() != b"ready\n":
                raise RigError("the echo server inside the namespace did not start")
            report.say("network: round trip of a perfect wire", _trips(network, 200))
            network.impair(Impairment(delay_ms=20))
            delayed = _trips(network, 50)
            report.say("network: round trip with 20 ms each way", delayed)
            report.check("network: 40 ms, not less", min(delayed) >= 40)
            network.impair(Impairment(loss=0.1, burst=3), direction="ab")
            network.impair(Impairment(), direction="ba")
            _trips(network, 300)
            forth, _ = network.stats()
            print(f"network: lost {forth.packets_lost} of {forth.packets_count} packets")
            report.check("network: some packets were lost", forth.packets_lost > 0)
        finally:
            end(server)


def _trips(network: BadNetwork, count: int) -> list[float]:
    command = [*network.inside("b"), sys.executable, "-c", _PINGER, ADDRESS_A, str(count)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    trips = [float(part) for part in done.stdout.decode().strip(" []\n").split(",") if part]
    if not trips:
        raise RigError("no packet came back over the wire")
    return trips


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m duplexd.bench.selftest", description="the rig measures itself")
    parser.add_argument("--browser", action="store_true", help="also Chromium's way to the loudspeaker, and the tones")
    parser.add_argument("--network", action="store_true", help="also the impaired network (root and /dev/net/tun)")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args(arguments)
    report = _Report()
    try:
        with PulseRig() as rig:
            measure_microphone(rig, report, rounds=given.rounds)
            measure_clock(rig, report, rounds=given.rounds)
            if given.browser:
                asyncio.run(measure_browser(rig, report, rounds=given.rounds))
        measure_echo(report)
        if given.network:
            measure_network(report)
    except RigError as error:
        print(f"the rig does not work here: {error}", file=sys.stderr)
        return 1
    print(f"{len(report.failures)} checks failed" if report.failures else "all checks held")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
