"""`duplexd top`: a live view of a running daemon, over its HTTP port; it reads one snapshot a second, nothing else."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from duplexd import clock
from duplexd.config import Config, is_loopback
from duplexd.errors import DuplexdError
from duplexd.units import NANOS_PER_SECOND, Nanos, text_from_bytes
from duplexd.webrtc.watch import ROWS_MAX, Snapshot, Watched

EVERY_NS = NANOS_PER_SECOND
ANSWER_WITHIN_S = 3.0
ANSWER_BYTES_MAX = 4_000_000
BAR = 30  #: characters of a session's cursors
SHARE_BAR = 24
SCALE_MIN_MS = 600.0  #: what a full cursor bar stands for, at least
FIGURES = (
    ("underruns", "frontend_underruns", "gaps a person could hear"),
    ("deadline misses", "engine_chunks_late", "chunks that came after the one before had been heard"),
    ("starved", "engine_works_starved", "steps that somebody waited for and no lane took for a second"),
    ("stale samples", "frontend_stale_samples_sent", "of a dead epoch, sent before the front end knew"),
    ("interruptions", "engine_interruptions", ""),
    ("false alarms", "engine_false_alarms", "voices over a reply that were none"),
    ("responses done", "engine_responses_completed", ""),
    ("responses failed", "engine_responses_failed", ""),
    ("turns refused", "engine_turns_refused", ""),
    ("waiting for a place", "engine_places_waited_for", "sessions"),
    ("loop lag p99", "frontend_loop_lag_ms_p99", "ms, front end"),
    ("engine restarts", "frontend_engine_restarts", ""),
)


class WatchError(DuplexdError):
    """No daemon answers, or it does not want to."""


class Watcher:
    """Asks one daemon for snapshots.

    Raises:  WatchError with what to do when nobody listens, the token is wrong, or it is no duplexd.
    """

    def __init__(self, url: str, *, token: str, rows: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WatchError(f"{url!r} is no URL of a daemon; it looks like http://127.0.0.1:8787")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.rows = rows
        self._request = urllib.request.Request(
            f"{self.url}/api/watch?rows={rows}", headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        # Never through a proxy. A self-signed certificate is new at every start; on loopback nobody can stand between.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if parts.scheme == "https" and is_loopback(parts.hostname):
            handlers.append(urllib.request.HTTPSHandler(context=ssl._create_unverified_context()))
        self._opener = urllib.request.build_opener(*handlers)

    def ask(self) -> Snapshot:
        try:
            with self._opener.open(self._request, timeout=ANSWER_WITHIN_S) as answer:
                body = answer.read(ANSWER_BYTES_MAX)
            return msgspec.json.decode(body, type=Snapshot)
        except urllib.error.HTTPError as error:
            with error:
                raise WatchError(self._refusal(error)) from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError.
            reason = getattr(error, "reason", error)
            raise WatchError(
                f"no daemon answers at {self.url} ({reason}); start one with `duplexd serve`, or name it with --url"
            ) from error
        except msgspec.MsgspecError as error:
            raise WatchError(f"what answers at {self.url} is no duplexd of this version: {error}") from error

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        if error.code == 401:
            return f"the daemon at {self.url} asks for its token; give it with --token"
        try:
            said = json.loads(error.read(ANSWER_BYTES_MAX))["error"]["message"]
        except (ValueError, KeyError, TypeError):
            said = "it is no duplexd of this version"
        return f"{self.url} answers {error.code}: {said}"


def url_of(config: Config) -> str:
    """Where a daemon with this configuration listens, seen from its own machine."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.tls else 'http'}://{shown}:{config.port}"


def watch(url: str, *, token: str, rows: int, once: bool, console: Console | None = None) -> int:
    """Show frames until interrupted, or one. The first answer must come; later ones may fail and are tried again."""
    if not 1 <= rows <= ROWS_MAX:
        raise WatchError(f"--rows is {rows}; it lies in 1..{ROWS_MAX}")
    console = console or Console(highlight=False)
    watcher = Watcher(url, token=token, rows=rows)
    seen = watcher.ask()
    if once:
        console.print(frame(seen, watcher.url))
        return 0
    due, pause = clock.now(), threading.Event()
    with Live(frame(seen, watcher.url), console=console, screen=True, auto_refresh=False) as live:
        while True:
            due = Nanos(due + EVERY_NS)
            pause.wait(max(0, due - clock.now()) / NANOS_PER_SECOND)
            lost = ""
            try:
                seen = watcher.ask()
            except WatchError as error:
                lost = str(error)
                due = Nanos(max(due, clock.now()))  # What took long to fail is not made up for.
            live.update(frame(seen, watcher.url, lost=lost), refresh=True)


# One frame --------------------------------------------------------------------------------------------------------


def frame(seen: Snapshot, url: str, *, lost: str = "") -> RenderableType:
    parts: list[RenderableType] = [_head(seen, url)]
    if lost:
        parts.append(Text(f"{lost}; trying again", style="bold red"))
    parts += [Text(), _sessions(seen), Text(), _lanes(seen), Text(), _arena(seen), Text(), _figures(seen)]
    return Group(*parts)


def _head(seen: Snapshot, url: str) -> Text:
    style = "green" if seen.engine == "ready" else "bold red"
    return Text.assemble(
        ("duplexd ", "bold"),
        f"{seen.version}  {seen.model}, {seen.policy}  engine ",
        (seen.engine, style),
        f"  {seen.sessions_count} of {seen.sessions_max} sessions  ",
        (url, "dim"),
    )


def urgency(session: Watched) -> str:
    """What the scheduler is about to do for this session, in its own words; '' while nothing is to be made."""
    if session.state == "held":
        return "held"  # Suspended: while playout is frozen nothing gets nearer to silence.
    return session.urgency if session.state in ("thinking", "speaking") else ""


#: Of classes that ask for attention; others are as they are.
_STYLES = {"U0": "bold red", "due": "red", "U1": "yellow", "ahead": "dim", "waiting": "dim", "held": "magenta"}


def _sessions(seen: Snapshot) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("id", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("class", no_wrap=True)
    table.add_column("ahead of the ear", no_wrap=True)
    for heading in ("ms", "budget", "epoch", "gaps"):
        table.add_column(heading, justify="right", no_wrap=True)
    for session in seen.sessions:
        kind = urgency(session)
        table.add_row(
            str(session.session),
            session.state,
            Text(kind, style=_STYLES.get(kind, "green")),
            cursors(session),
            f"{'~' if session.assumed else ''}{session.generation - session.playback:.0f}",
            f"{session.budget:.0f}" if session.budget else "-",
            str(session.epoch),
            str(session.underruns),
        )
    if not seen.sessions:
        return Text("no session is open", style="dim")
    more = seen.sessions_count - len(seen.sessions)
    parts: list[RenderableType] = [table]
    if more > 0:
        parts.append(Text(f"and {more} more; --rows shows more of them", style="dim"))
    return Group(*parts, Text("█ delivered ▓ published ░ being made | budget ~ playback is an estimate", style="dim"))


def cursors(session: Watched) -> Text:
    """What lies ahead of the ear, left to right: delivered, published, generated; the mark is the budget."""
    scale = max(SCALE_MIN_MS, session.budget * 1.15, session.generation - session.playback)

    def cells(position: float) -> int:
        return max(0, min(BAR, round((position - session.playback) / scale * BAR)))

    ends = [cells(session.delivery), cells(session.published), cells(session.generation)]
    text = Text()
    at = 0
    for end, mark, style in zip(ends, "█▓░", ("blue", "cyan", "green"), strict=True):
        text.append(mark * max(0, end - at), style)
        at = max(at, end)
    text.append("·" * (BAR - at), "dim")
    if session.budget:
        place = min(BAR - 1, cells(session.playback + session.budget))
        text = text[:place] + Text("|", "bold yellow") + text[place + 1 :]
    return text


def _lanes(seen: Snapshot) -> RenderableType:
    if not seen.lanes:
        return Text("lanes: nothing was measured in the last seconds (figures come while a session is open)", "dim")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("lane")
    table.add_column("share of the last second", no_wrap=True)
    table.add_column("", justify="right")
    for lane, share in sorted(seen.lanes.items()):
        table.add_row(lane, _bar(share, "red" if share > 0.9 else "green"), f"{share:.0%}")
    return table


def _bar(share: float, style: str) -> Text:
    filled = max(0, min(SHARE_BAR, round(share * SHARE_BAR)))
    return Text("█" * filled, style) + Text("·" * (SHARE_BAR - filled), "dim")


def _arena(seen: Snapshot) -> RenderableType:
    values = seen.engine_values
    kinds = {name.removeprefix("bytes_"): count for name, count in values.items() if name.startswith("bytes_")}
    if not kinds:
        return Text("arena: no figures yet", "dim")
    total = sum(kinds.values()) or 1.0
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("arena")
    table.add_column("share of what is held", no_wrap=True)
    for heading in ("", "tokens"):
        table.add_column(heading, justify="right")
    for kind, count in kinds.items():
        table.add_row(
            kind, _bar(count / total, "blue"), text_from_bytes(int(count)), f"{values.get(f'tokens_{kind}', 0):.0f}"
        )
    said = f"free pages {values.get('pages_free', 0):.0f}, retiring {values.get('pages_retiring', 0):.0f}, "
    said += f"in host memory {values.get('pages_away', 0):.0f}"
    return Group(table, Text(said, "dim"))


def waste(values: dict[str, float]) -> float | None:
    """Share of what was made and nobody heard, of the sessions that are open; None before anything was made."""
    heard, dropped = values.get("heard_ticks_open", 0.0), values.get("discarded_ticks_open", 0.0)
    return dropped / (heard + dropped) if heard + dropped else None


def _figures(seen: Snapshot) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    share = waste(seen.engine_values)
    table.add_row("waste", "-" if share is None else f"{share:.1%}", "made and not heard, open sessions")
    for name, value, meaning in _counts(seen):
        table.add_row(name, value, meaning)
    return table


def _counts(seen: Snapshot) -> Iterator[tuple[str, str, str]]:
    values: dict[str, Any] = {f"engine_{name}": value for name, value in seen.engine_values.items()}
    values |= seen.frontend_values
    for name, key, meaning in FIGURES:
        yield name, f"{values.get(key, 0):g}", meaning
