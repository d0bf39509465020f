"""`duplexd trace FILE`: where the time of every turn went, as text or JSON, and a session drawn as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from duplexd.engine.story import Story, TurnStory, tell
from duplexd.engine.trace import Trace
from duplexd.errors import TraceError

TEMPLATE = Path(__file__).parent / "drawing.html"
PLACE = "/*STORY*/"


class Summary(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    title: str
    length_ms: float
    ending: str
    turns: tuple[TurnStory, ...]


def show(file: Path, *, html: Path | None, json: Path | None, session: int | None, copies: bool) -> int:
    """Draw, write, or print the turns when neither is asked for.

    Raises:  TraceError for a file that is no trace, a session that is not in it, and a target that cannot be written.
    """
    story = read(file, session=session)
    if html is not None:
        _write(html, page(story))
    if json is not None:
        _write(json, msgspec.json.format(msgspec.json.encode(summary(story)), indent=1).decode() + "\n")
    if html is None and json is None:
        print("\n".join(lines(story, copies=copies)))
    return 0


def read(file: Path, *, session: int | None) -> Story:
    trace = Trace(file)
    story = tell(trace.header, trace.records(), session=session)
    story.ending = trace.ending
    if session is not None and not story.sessions:
        known = [found.session for found in tell(trace.header, Trace(file).records()).sessions]
        raise TraceError(f"{file} has no session {session}; it has {', '.join(map(str, known)) or 'none'}")
    return story


def page(story: Story) -> str:
    """One HTML file that needs nothing else. People's words stand in it as data, never as markup."""
    data = msgspec.json.encode(story).decode().replace("<", "\\u003c")
    return TEMPLATE.read_text().replace(PLACE, data)


def summary(story: Story) -> Summary:
    return Summary(story.title, story.length, story.ending, turns_of(story))


def turns_of(story: Story) -> tuple[TurnStory, ...]:
    """Turns of all sessions, in the order in which their first sound came out."""
    turns = [turn for told in story.sessions for turn in told.turns]
    return tuple(sorted(turns, key=lambda turn: turn.voiced_end + turn.total_ms))


def lines(story: Story, *, copies: bool) -> Iterator[str]:
    """A table a turn: milliseconds since the last voiced sample, and what happened. Copies of input are many and
    short; they are left out unless asked for.
    """
    yield f"{story.title}; {story.length / 1000:.1f} s, {len(story.launches)} launches; {story.ending}"
    for turn in turns_of(story):
        yield ""
        outcome = f", {turn.outcome}" if turn.outcome else ""
        yield f"session {turn.session}, turn {turn.turn}, response {turn.response}{outcome}: {turn.text!r}"
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in turn.parts.items())
        yield f"  {turn.total_ms:.1f} ms from the last voiced sample to the first sound out: {parts}"
        for step in turn.steps:
            if step.lane == "copy" and not copies:
                continue
            took = f"{step.took_ms:8.1f}" if step.took_ms else " " * 8
            whose = f"  (session {step.session})" if step.session != turn.session else ""
            yield f"  {step.ms:9.1f} {took}  {step.event:24} {step.detail}{whose}".rstrip()
    if not turns_of(story):
        yield "no turn was answered with a sound"


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text)
    except OSError as error:
        raise TraceError(f"cannot write {target}: {error.strerror}") from error
