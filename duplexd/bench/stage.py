"""What a bench measures on: a daemon, a browser, a loudspeaker and a microphone, and perhaps a bad network between."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.bench import recordings
from duplexd.bench.browser import Browser, PageClock, page_clock
from duplexd.bench.daemon import Daemon
from duplexd.bench.netem import ADDRESS_A, BadNetwork, Impairment
from duplexd.bench.programs import RigError
from duplexd.bench.pulse import Echo, PulseRig, Said
from duplexd.bench.scoped import AsyncScoped
from duplexd.bench.tap import Recording
from duplexd.units import Nanos

if TYPE_CHECKING:
    from playwright.async_api import Page

#: The network of the issue: 40 ms round trip, jitter 10 ms, 3 % loss.
BAD = Impairment(delay_ms=20, jitter_ms=10, loss=0.03)
CONNECT_LIMIT_S = 30.0
LEAVE_LIMIT_S = 10.0
IDLE_STATES = ("idle", "connecting", "ready")


def impairment_of(
    *, impaired: bool, link_kbps: float | None = None, loss_percent: float | None = None
) -> Impairment | None:
    """What `--impaired`, `--link` and `--loss` ask for together; None: nothing lies between."""
    asked = {"rate_kbps": link_kbps, "loss": None if loss_percent is None else loss_percent / 100}
    given = {name: value for name, value in asked.items() if value is not None}
    if not given:
        return BAD if impaired else None
    return msgspec.structs.replace(BAD if impaired else Impairment(), **given)


class Event(dict[str, Any]):
    """One entry of the page's log, with `at` on the host's clock."""

    @property
    def at(self) -> Nanos:
        return Nanos(self["at"])


class Stage(AsyncScoped):
    """Everything a bench needs, up and connected; an async context manager."""

    def __init__(
        self,
        *daemon_flags: str,
        query: str = "auto=1",
        impaired: Impairment | None = None,
        echo: Echo | None = None,
        seconds_max: float = 1800.0,
    ) -> None:
        self._flags = daemon_flags
        self._query = query
        self._impaired = impaired
        self._echo = echo
        self._seconds_max = seconds_max

    async def _open(self, cleanup: contextlib.AsyncExitStack) -> None:
        self.rig = cleanup.enter_context(PulseRig(echo=self._echo, seconds_max=self._seconds_max))
        network = cleanup.enter_context(BadNetwork()) if self._impaired is not None else None
        flags = [*self._flags]
        token = ""
        if network is not None:
            token = secrets.token_urlsafe(9)  # Who asks for the uplink's figures is no loopback there.
            flags += ["--host", ADDRESS_A, "--token", token]
        self.daemon = await cleanup.enter_async_context(
            Daemon(*flags, inside=network.inside("a") if network is not None else (), token=token)
        )
        origin = self.daemon.url.rstrip("/")
        self.browser = await cleanup.enter_async_context(
            Browser(
                env=self.rig.env,
                namespace=network.b if network is not None else None,
                insecure_origins=[origin] if network is not None else [],
            )
        )
        self.network = network
        self._address = f"{origin}/?{self._query}" + (f"&token={token}" if token else "")
        self.page: Page = await self.browser.page(self._address)
        await self.wait_connected()
        if network is not None and self._impaired is not None:
            network.impair(self._impaired)
        self.clock: PageClock = await page_clock(self.page)

    async def wait_connected(self) -> None:
        for _ in range(round(CONNECT_LIMIT_S / 0.1)):
            if await self.state() not in IDLE_STATES:
                return
            await asyncio.sleep(0.1)
        raise RigError(f"the page did not connect; it shows {await self.state()}, and said {self.browser.page_errors}")

    async def leave(self) -> None:
        """The person closes the page; returns when the daemon has forgotten them."""
        await self.page.goto("about:blank")
        for _ in range(round(LEAVE_LIMIT_S / 0.1)):
            if (await self.daemon.metrics())["duplexd_frontend_sessions"] == 0:
                return
            await asyncio.sleep(0.1)
        raise RigError(f"the session was still there {LEAVE_LIMIT_S:.0f} s after its page had gone")

    async def enter(self) -> None:
        """The person opens the page again."""
        await self.page.goto(self._address)
        await self.wait_connected()
        self.clock = await page_clock(self.page)

    # The page -----------------------------------------------------------------------------------------

    async def state(self) -> str:
        return str(await self.page.evaluate("window.duplexd.state"))

    async def transcript(self) -> list[dict[str, Any]]:
        return list(await self.page.evaluate("window.duplexd.transcript()"))

    async def latencies(self) -> list[dict[str, Any]]:
        return list(await self.page.evaluate("window.duplexd.latencies"))

    async def type(self, text: str) -> None:
        await self.page.evaluate("text => window.duplexd.say(text)", text)

    async def speculate(self, on: bool) -> None:
        """Whether the session answers turns that are probably over before that is certain."""
        await self.page.evaluate("on => window.duplexd.speculate(on)", on)

    async def events(self, *kinds: str, since: Nanos = Nanos(0)) -> list[Event]:
        """The page's log entries of these kinds, on the host's clock."""
        return [event for event in await self.log(since=since) if event["kind"] in kinds]

    async def log(self, *, since: Nanos = Nanos(0)) -> list[Event]:
        """All of the page's log that it still holds (its last 2000 entries)."""
        answer = await self.page.evaluate("({origin: performance.timeOrigin, found: window.duplexd.events})")
        events = [Event(e) for e in answer["found"]]
        for event in events:
            event["at"] = self.clock.time_of(float(event["clock"]) - answer["origin"])
        return [event for event in events if event.at >= since]

    async def now(self) -> Nanos:
        """The page's own moment, on the host's clock."""
        return self.clock.time_of(float(await self.page.evaluate("performance.now()")))

    async def wait_for(self, state: str, *, limit_s: float = 20.0) -> bool:
        for _ in range(round(limit_s / 0.05)):
            if await self.state() == state:
                return True
            await asyncio.sleep(0.05)
        return False

    async def stretched_ms(self) -> float:
        """Sound the browser has made up or left out since it connected, because packets came late or not at all."""
        script = "async () => (await window.duplexd.stats()).find(s => s.type === 'inbound-rtp' && s.kind === 'audio')"
        stats = await self.page.evaluate(script) or {}
        made_up = stats.get("concealedSamples", 0) - stats.get("silentConcealedSamples", 0)
        hurried = stats.get("insertedSamplesForDeceleration", 0) + stats.get("removedSamplesForAcceleration", 0)
        return float(made_up + hurried) / 48

    # Sound --------------------------------------------------------------------------------------------

    async def say(self, pcm: NDArray[Any], rate: int) -> Said:
        return await asyncio.to_thread(self.rig.say, pcm, rate)

    async def ask(self, question: recordings.Recording, *, limit_s: float = 6.0) -> bool:
        """Speak it to its end; True when the answer begins within the limit."""
        said = await self.say(question.pcm(), recordings.RATE)
        await self.finish(said)
        return await self.wait_for("speaking", limit_s=limit_s)

    async def disturb(self, pcm: NDArray[Any], rate: int) -> None:
        await asyncio.to_thread(self.rig.disturb, pcm, rate)

    async def finish(self, said: Said) -> None:
        await asyncio.to_thread(said.finish)

    def heard(self) -> Recording:
        """Everything the loudspeaker has played so far."""
        return self.rig.loudspeaker.recording()

    def require_whole_recordings(self) -> None:
        """No figure is published from a recording with lost samples (tap.py, rule 3): raises RigError."""
        for name, tap in (("loudspeaker", self.rig.loudspeaker), ("microphone", self.rig.microphone)):
            if lost := tap.recording().clock.steps_count:
                raise RigError(
                    f"the recording of the {name} lost samples {lost} times, so its times are not to be trusted; "
                    "run again with less running beside it"
                )

    async def require_living_engine(self) -> None:
        """No figure is published from a run in which the engine died: raises RigError with the daemon's own words."""
        if deaths := (await self.daemon.metrics()).get("duplexd_frontend_engine_deaths", 0.0):
            raise RigError(f"the engine died {deaths:.0f} times during the run; the daemon said:\n{self.daemon.said()}")

    def path(self) -> str:
        """What lies between the browser and the daemon."""
        if self._impaired is None:
            return "loopback of one machine, nothing impaired"
        return f"two network namespaces of one machine: {self._impaired.text()}"

    def client(self) -> str:
        return f"Chromium {self.browser.version}, media element, PulseAudio null sink tap"


def keep(folder: Path, name: str, recording: Recording) -> None:
    """Save a recording with its clock, for others to compute the figures again."""
    folder.mkdir(parents=True, exist_ok=True)
    recording.save(folder / name)


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile, rounded to 0.1; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(float(ordered[min(len(ordered) - 1, int(np.ceil(share * len(ordered))) - 1)]), 1)
