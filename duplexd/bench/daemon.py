"""A daemon of its own for a bench or a test: started, waited for, asked for its metrics, ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from duplexd.bench.programs import RigError
from duplexd.bench.scoped import AsyncScoped

READY_LIMIT_S = 90.0
END_LIMIT_S = 10.0
HELD = (
    "frontend_sessions",
    "frontend_tasks",
    "engine_pages_free",
    "engine_latents_held",
    "engine_ingest_held",
    "engine_out_slots_free",
)
HELD_BY_FACES = ("engine_face_pictures_free", "engine_face_motion_held", "engine_face_noisy_held")
_URL = re.compile(r"is ready: (\S+)")


class Daemon(AsyncScoped):
    """`duplexd serve` as a subprocess; an async context manager.

    Args:    flags: of `duplexd serve`. inside: words before the command, e.g. `BadNetwork.inside("a")`. token: that the
             flags give it; `get` shows it.
    Raises:  RigError with the daemon's own words when it does not come up within 90 s.
    """

    def __init__(self, *flags: str, inside: Sequence[str] = (), token: str = "") -> None:
        self._command = [*inside, sys.executable, "-m", "duplexd", "serve", "--port", "0", *flags]
        self._inside = list(inside)
        self._token = token
        self.url = ""

    async def _open(self, cleanup: contextlib.AsyncExitStack) -> None:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="duplexd-daemon-"))
        self.log = Path(folder) / "log"
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
            )
        cleanup.push_async_callback(self._end)
        await self._wait_ready()

    async def _wait_ready(self) -> None:
        for _ in range(round(READY_LIMIT_S / 0.1)):
            if found := _URL.search(self.said()):
                self.url = found.group(1)
                return
            if self._process.returncode is not None:
                break
            await asyncio.sleep(0.1)
        raise RigError(f"the daemon did not come up within {READY_LIMIT_S:.0f} s; it said:\n{self.said()[-2000:]}")

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    def engine_pid(self) -> int:
        """The engine process of this daemon. Raises RigError when it has none."""
        found = _child(self.pid, "duplexd.engine.process")
        if found is None:
            raise RigError(f"daemon {self.pid} has no engine process")
        return found

    def processes(self) -> dict[str, int]:
        """Process ids: the front end's, the engine's, and of what draws the face, if there is one."""
        engine = self.engine_pid()
        painter = _child(engine, "duplexd.models.face.painter")
        return {"frontend": self.pid, "engine": engine} | ({} if painter is None else {"painter": painter})

    async def held(self) -> dict[str, float]:
        """What a session takes and must give back: threads, tasks, descriptors, slots and pages of both processes."""
        metrics = await self.metrics()
        found = {name: metrics[f"duplexd_{name}"] for name in HELD}
        found |= {name: metrics[f"duplexd_{name}"] for name in HELD_BY_FACES if f"duplexd_{name}" in metrics}
        for name, pid in self.processes().items():
            found[f"{name}_fds"] = float(len(list(Path(f"/proc/{pid}/fd").iterdir())))
            found[f"{name}_threads"] = float(len(list(Path(f"/proc/{pid}/task").iterdir())))
        return found

    async def held_at_rest(self, *, within_s: float = 10.0) -> dict[str, float]:
        """The same when nobody is left in either process (the engine tells its figures once a second).

        Raises RigError when something of a session is still held after `within_s`.
        """
        for _ in range(round(within_s / 0.2)):
            found = await self.held()
            if found["frontend_sessions"] == found["engine_ingest_held"] == 0:
                return found
            await asyncio.sleep(0.2)
        raise RigError(f"after {within_s:g} s sessions are still held: {found}")

    async def metrics(self) -> dict[str, float]:
        text = await self.get("/metrics")
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.split() for line in lines)}

    async def get(self, path: str) -> str:
        """Body of a GET, asked from where the daemon runs."""
        code = (
            "import sys, urllib.request as r; url, token = sys.argv[1:]; "
            "asked = r.Request(url, headers={'Authorization': f'Bearer {token}'} if token else {}); "
            "sys.stdout.write(r.urlopen(asked, timeout=5).read().decode())"
        )
        asking = await asyncio.create_subprocess_exec(
            *self._inside,
            *(sys.executable, "-c", code, self.url.rstrip("/") + path, self._token),
            stdout=asyncio.subprocess.PIPE,
        )
        body, _ = await asking.communicate()
        return body.decode()

    async def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), END_LIMIT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _child(parent: int, program: str) -> int | None:
    """The process of this parent that runs a program."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if found == parent and program in (folder / "cmdline").read_text():
                return int(folder.name)
    return None
