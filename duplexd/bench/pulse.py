"""A private sound server: a loudspeaker, a microphone and, if wanted, the air between them.

    say() -> pacat -> sink "mic" -> mic.monitor -> source "vmic" (what browsers and the CLI capture)
                                         +-> tap `microphone`
    browser -> sink "spk" (default) -> spk.monitor -> tap `loudspeaker`
                                            +-> loopback (echo) -> sink "mic"

1. The server is private: own directory, own socket, no system configuration, no dbus, no pid file. Several rigs run
   side by side, also as root.
2. An idle null sink works in blocks of 2 s and stalls the first stream that comes. Both taps record from the first
   moment on, which keeps both sinks at 10 ms; the rig is ready when both taps have heard something.
3. A new stream makes its sink rewind up to one block: the first milliseconds of a stream may never reach the monitor,
   and the last block is cut when a stream drains. `say` puts silence around the sound, so that only silence is lost.
4. When the rig's process dies without a goodbye, the taps lose their reader and end, and the server follows when it has
   had no client for some seconds. Only a small directory under the temporary one is left.
5. What the rig adds between a browser and the ear: nothing that the browser does not count itself. Chromium 156 says by
   `getOutputTimestamp` when a sound leaves; the loudspeaker tap stamps it 0.5 to 1.2 ms later (median; two cores of an
   AMD EPYC, 20 sounds a run, `selftest --browser`; up to 15 ms off for single sounds). From `currentTime` to the tap it
   takes 37 to 39 ms, of which 31 to 34 ms are the browser's own `outputLatency`: its stream's buffer and the sink's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.bench.programs import RigError, end, find_program, run, start, wait_until
from duplexd.bench.scoped import Scoped
from duplexd.bench.tap import RATE, Device, Match, Pcm, Tap, locate
from duplexd.clock import now
from duplexd.units import NANOS_PER_SECOND, Nanos

LOUDSPEAKER_SINK = "spk"
MICROPHONE_SINK = "mic"
MICROPHONE_SOURCE = "vmic"

# Without it the server names 44100 Hz as the machine's rate, and browsers resample to it and back (measured: 16 ms more
# from page to loudspeaker); a file of its own also keeps the machine's settings out.
_SERVER_CONFIG = f"default-sample-rate = {RATE}\nalternate-sample-rate = {RATE}\ndefault-sample-format = s16le\n"
_SOCKET_PATH_MAX = 107  # of sockaddr_un, without the final zero
_IDLE_EXIT_S = 10
_START_LIMIT_S = 15.0  # a first stream on an idle null sink alone takes 2 s
_PLAYER_BUFFER_MS = 500  # a busy machine may keep the player from its turn for that long without a hole in the sound
_LEAD_MS = 60  # rule 3; more than the block that is lost
_TAIL_MS = 200
_NEEDLE_MS = 100
_HUSH_MS = 20
_SIMILAR = 0.6
_COPY = 0.999
_FOUND_LIMIT_S = 3.0


class Echo(msgspec.Struct, frozen=True):
    """The air between loudspeaker and microphone."""

    latency_ms: int = 30  #: of the loopback; sound stamped t at the loudspeaker is stamped about t + this - 10 ms here
    gain: float = 0.25  #: linear, 0..1; 0.25 is -12 dB

    def __post_init__(self) -> None:
        if not (self.latency_ms >= 1 and 0 < self.gain <= 1):
            raise ValueError(f"echo needs latency_ms >= 1 and 0 < gain <= 1, not {self}")


class Said:
    """One utterance on its way into the microphone; `start` and `end` are times of its first and last sample."""

    def __init__(self, player: subprocess.Popen[bytes], tap: Tap, pcm: Pcm, *, first_sample: int, match: Match) -> None:
        self._player = player
        self._tap = tap
        self._pcm = pcm
        self.first_sample = first_sample  #: number of the utterance's first sample at the microphone tap
        self.similarity = match.similarity  #: of what the tap heard and what was said; 1.0 without echo
        clock = tap.clock()
        self.start: Nanos = clock.time_of(first_sample)
        self.end: Nanos = clock.time_of(first_sample + len(pcm))

    @property
    def samples_count(self) -> int:
        """Length at 48000 Hz."""
        return len(self._pcm)

    def finish(self, *, limit_s: float = 30.0) -> None:
        """Waits until the last sample was said and checks that it came in its place.

        Raises:  RigError when it took longer than `limit_s`, or when the machine was so busy that the sound had a hole.
        """
        needle = self._pcm[-_samples(_NEEDLE_MS) :]
        slack = _samples(_NEEDLE_MS)
        expected = self.first_sample + len(self._pcm) - len(needle)
        if not self._tap.wait_for(expected + len(needle) + slack, limit_s=limit_s):
            raise RigError(f"the utterance of {len(self._pcm) / RATE:.1f} s was not over within {limit_s:g} s")
        begin = max(self.first_sample, expected - slack)
        match = locate(needle, self._tap.since(begin)[: len(needle) + 2 * slack])
        if match is None:  # the last 100 ms are digital silence: nothing can be misplaced
            return
        off = begin + match.offset - expected
        if match.similarity < _SIMILAR or abs(off) > 1:
            raise RigError(
                f"the utterance was broken on its way into the microphone (end off by {off / RATE * 1000:+.1f} ms, "
                f"similarity {match.similarity:.2f}): the machine is too busy for a measurement"
            )

    def stop(self) -> None:
        """Falls silent at once; what the player's buffer holds is dropped."""
        end(self._player, grace_s=0.5)


class PulseRig(Scoped):
    """A private PulseAudio with the sinks "spk" and "mic", the source "vmic" and a tap on each sink.

    A context manager; everything is taken down at its end, also after an error.

    Args:    echo: what the microphone hears of the loudspeaker; seconds_max: how much the two taps keep.
    Raises:  ProgramMissing (with the apt command); RigError when the server is not ready within 15 s.
    """

    def __init__(self, *, echo: Echo | None = None, seconds_max: float = 1200.0) -> None:
        self._echo = echo
        self._seconds_max = seconds_max
        self._players: list[subprocess.Popen[bytes]] = []
        self._saying = threading.Lock()

    @property
    def env(self) -> dict[str, str]:
        """Environment of a client: a browser, PortAudio or a Pulse tool that is to use this rig."""
        return dict(self._env)

    @property
    def loudspeaker(self) -> Tap:
        return self._loudspeaker

    @property
    def microphone(self) -> Tap:
        return self._microphone

    def say(self, pcm: NDArray[np.int16] | NDArray[np.floating[Any]], rate: int = RATE) -> Said:
        """Speaks into the microphone and returns once the first sample was seen there, about 0.2 s later.

        Blocking: an asyncio bench calls it in a thread. One utterance begins at a time; they may overlap.

        Args:    pcm: (samples,), int16 or float in -1..1; rate: of pcm, converted to 48000 Hz here.
        Returns: Said, with `start` exact to the sample at the tap `microphone`.
        Raises:  ValueError for a shape or an all-silent sound; RigError when the sound never came.
        """
        sound = to_rig(pcm, rate)
        audible = np.flatnonzero(sound)
        if not len(audible):
            raise ValueError("an utterance needs at least one sample that is not zero")
        with self._saying:
            begin = self._microphone.samples_count
            player = self._play(sound)
            match = self._find(sound, first=int(audible[0]), begin=begin)
        return Said(player, self._microphone, sound, first_sample=begin + match.offset, match=match)

    def disturb(self, pcm: NDArray[np.int16] | NDArray[np.floating[Any]], rate: int = RATE) -> None:
        """Plays into the microphone and returns when it has been played; nobody looks when exactly it arrived.

        For sounds that cannot be found again in what the microphone hears, such as soft noise under an echo.
        """
        self._play(to_rig(pcm, rate)).wait(len(pcm) / rate + _FOUND_LIMIT_S)

    def _find(self, sound: Pcm, *, first: int, begin: int) -> Match:
        """Where in the tap, from `begin` on, `sound` starts; `first` is its first sample that is not zero.

        A periodic sound is like itself one period off and like its own half-arrived beginning. Therefore the needle
        starts with silence, and anything short of a copy waits for something better: with an echo there is no copy.
        """
        hush = _samples(_HUSH_MS)
        needle = np.concatenate((np.zeros(hush, np.int16), sound[first : first + _samples(_NEEDLE_MS)]))
        deadline = now() + round(_FOUND_LIMIT_S * NANOS_PER_SECOND)
        wanted = begin + len(needle)
        settled: int | None = None
        best: Match | None = None
        while now() < deadline and self._microphone.wait_for(wanted, limit_s=_FOUND_LIMIT_S):
            best = locate(needle, self._microphone.since(begin))
            wanted = self._microphone.samples_count + 1
            if best is None or best.similarity < _SIMILAR:
                continue
            settled = settled or wanted + len(needle)
            if best.similarity > _COPY or wanted > settled:
                return Match(offset=best.offset + hush - first, similarity=best.similarity)
        closest = "nothing" if best is None else f"similarity {best.similarity:.2f}"
        raise RigError(f"what was said did not arrive at the microphone within {_FOUND_LIMIT_S:g} s ({closest} found)")

    def _play(self, sound: Pcm) -> subprocess.Popen[bytes]:
        self._players = [player for player in self._players if player.poll() is None]
        with tempfile.TemporaryFile(dir=self._directory) as file:
            file.write(_silence(_LEAD_MS).tobytes() + sound.astype("<i2").tobytes() + _silence(_TAIL_MS).tobytes())
            file.seek(0)
            command = [find_program("pacat"), "--playback", "--raw", "--format=s16le", f"--rate={RATE}", "--channels=1"]
            command += [f"--latency-msec={_PLAYER_BUFFER_MS}", "--device", MICROPHONE_SINK]
            player = start(command, env=self._env, stdin=file)
        self._players.append(player)
        return player

    def _open(self, cleanup: contextlib.ExitStack) -> None:
        for program in ("pulseaudio", "pactl", "pacat", "parec"):
            find_program(program)
        self._directory = Path(tempfile.mkdtemp(prefix="duplexd-rig-"))
        cleanup.callback(shutil.rmtree, self._directory, ignore_errors=True)
        socket = self._directory / "native"
        if len(os.fsencode(socket)) > _SOCKET_PATH_MAX:
            raise RigError(f"{socket} is too long for a socket; set TMPDIR to a shorter directory")
        self._env = _client_env(self._directory, socket)
        server = self._start_server(socket, cleanup)
        cleanup.callback(self._stop_players)
        self._loudspeaker = self._tap(LOUDSPEAKER_SINK, Device.LOUDSPEAKER, cleanup)
        self._microphone = self._tap(MICROPHONE_SINK, Device.MICROPHONE, cleanup)
        self._ask("set-default-sink", LOUDSPEAKER_SINK)
        self._ask("set-default-source", MICROPHONE_SOURCE)
        if self._echo is not None:
            self._connect_echo(self._echo)
        taps = (self._loudspeaker, self._microphone)
        if not wait_until(lambda: all(tap.samples_count for tap in taps), limit_s=_START_LIMIT_S):
            raise RigError(f"the sound server moves no sound: {self._log(server)}")

    def _tap(self, sink: str, device: Device, cleanup: contextlib.ExitStack) -> Tap:
        tap = Tap(f"{sink}.monitor", device=device, env=self._env, seconds_max=self._seconds_max)
        cleanup.callback(tap.close)
        return tap

    def _start_server(self, socket: Path, cleanup: contextlib.ExitStack) -> subprocess.Popen[bytes]:
        environment = {key: value for key, value in self._env.items() if key != "PULSE_SERVER"}
        config = self._directory / "daemon.conf"
        config.write_text(_SERVER_CONFIG)
        environment["PULSE_CONFIG"] = str(config)
        with (self._directory / "log").open("wb") as log:
            server = start(_server_command(socket), env=environment, stderr=log)
        cleanup.callback(end, server)
        ready = wait_until(lambda: socket.exists() or server.poll() is not None, limit_s=_START_LIMIT_S)
        if not ready or server.poll() is not None:
            raise RigError(f"the private sound server did not start: {self._log(server)}")
        return server

    def _log(self, server: subprocess.Popen[bytes]) -> str:
        said = (self._directory / "log").read_text(errors="replace").strip()
        state = "is running" if server.poll() is None else f"exit status {server.returncode}"
        return f"pulseaudio {state}, its log: {said[-2000:] or 'empty'}"

    def _ask(self, *arguments: str) -> str:
        return run([find_program("pactl"), *arguments], env=self._env)

    def _connect_echo(self, echo: Echo) -> None:
        index = self._ask(
            "load-module",
            "module-loopback",
            f"source={LOUDSPEAKER_SINK}.monitor",
            f"sink={MICROPHONE_SINK}",
            f"latency_msec={echo.latency_ms}",
            "source_dont_move=true",
            "sink_dont_move=true",
        ).strip()
        inputs: list[dict[str, Any]] = msgspec.json.decode(self._ask("--format=json", "list", "sink-inputs"))
        mine = [item["index"] for item in inputs if str(item.get("owner_module")) == index]
        if not mine:
            raise RigError(f"the echo path (module {index}) has no stream in {inputs}")
        # pactl takes a plain number with a point as a linear factor; without the point it would be 1/65536ths.
        self._ask("set-sink-input-volume", str(mine[0]), f"{echo.gain:.4f}")

    def _stop_players(self) -> None:
        for player in self._players:
            end(player, grace_s=0.5)


def to_rig(pcm: NDArray[np.int16] | NDArray[np.floating[Any]], rate: int) -> Pcm:
    """int16 at 48000 Hz of a mono sound, int16 or float in -1..1 (clipped), at any rate.

    Raises:  ValueError for another shape or type, or a float that is not finite.
    """
    if pcm.ndim != 1 or not len(pcm):
        raise ValueError(f"a sound is a non-empty array of one dimension, not of shape {pcm.shape}")
    whole = _to_int16(pcm)
    return whole if rate == RATE else _resample(whole, rate)


def _to_int16(pcm: NDArray[Any]) -> Pcm:
    if pcm.dtype == np.int16:
        return np.asarray(pcm, np.int16)
    if not np.issubdtype(pcm.dtype, np.floating):
        raise ValueError(f"a sound is int16 or float, not {pcm.dtype}")
    if not np.isfinite(pcm).all():
        raise ValueError("a sound has a sample that is not finite")
    whole: Pcm = np.round(np.clip(pcm, -1, 1) * 32767).astype(np.int16)
    return whole


def _resample(pcm: Pcm, rate: int) -> Pcm:
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm).reshape(1, -1), format="s16", layout="mono")
    frame.sample_rate = rate
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(np.int16)


def _samples(ms: float) -> int:
    return round(ms * RATE / 1000)


def _silence(ms: float) -> Pcm:
    return np.zeros(_samples(ms), "<i2")


def _client_env(directory: Path, socket: Path) -> dict[str, str]:
    """The caller's environment, with every place where Pulse looks or writes turned to the rig's directory."""
    own = str(directory)
    pulse = {"PULSE_SERVER": f"unix:{socket}", "PULSE_RUNTIME_PATH": own, "PULSE_STATE_PATH": own}
    # A cookie or a config of the user would be read from HOME; PULSE_LATENCY_MSEC would break the streams' buffers.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PULSE_")}
    return {**kept, **pulse, "XDG_RUNTIME_DIR": own, "PULSE_COOKIE": str(directory / "cookie")}


def _server_command(socket: Path) -> list[str]:
    properties = "sink_properties=device.description"
    modules = [
        f"module-null-sink sink_name={LOUDSPEAKER_SINK} format=s16le rate={RATE} channels=2 {properties}=Loudspeaker",
        f"module-null-sink sink_name={MICROPHONE_SINK} format=s16le rate={RATE} channels=1 {properties}=MicrophoneFeed",
        f"module-remap-source source_name={MICROPHONE_SOURCE} master={MICROPHONE_SINK}.monitor "
        "source_properties=device.description=Microphone",
        f"module-native-protocol-unix socket={socket} auth-anonymous=1",  # last: the socket says that all is there
    ]
    options = ["-n", "--daemonize=no", "--use-pid-file=no", "--disallow-exit=yes", f"--exit-idle-time={_IDLE_EXIT_S}"]
    options += ["--realtime=no", "--high-priority=no", "--log-target=stderr", "--log-level=error"]
    loads = [argument for module in modules for argument in ("-L", module)]
    return [find_program("pulseaudio"), *options, *loads]
