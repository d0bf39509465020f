"""The page in headless Chromium against a scripted front end: real permission, real WebRTC, real sound path.

Each wait is for a state of the page or of the mock, with playwright's own deadline; nothing sleeps.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CONNECTED = "duplexd.session !== null && !['idle', 'connecting'].includes(duplexd.state)"
Visit = Callable[..., Any]
Serve = Callable[..., Any]


def connected(page: Any) -> Any:
    page.click("#connect")
    page.wait_for_function(CONNECTED)
    return page


def say(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def speaking_after(page: Any, words: int = 3) -> None:
    """Until the character has spoken some words (by the page's own cursor and the words' times)."""
    page.wait_for_function(
        "n => duplexd.state === 'speaking' && [...document.querySelectorAll('.word.heard')].length >= n", arg=words
    )


def mock(page: Any, number: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = page.evaluate("n => fetch('/mock/' + n).then(r => r.json())", number or session(page))
    return answer


def until(page: Any, condition: str, number: int = 0) -> None:
    """Until the mock's record `x` of a session fulfils a condition; asked again and again, 20 s at most."""
    page.evaluate(
        """async ([n, condition]) => {
            const fulfilled = new Function("x", `return ${condition}`);
            const end = performance.now() + 20_000;
            for (;;) {
                const x = await (await fetch(`/mock/${n}`)).json();
                if (fulfilled(x)) return;
                if (performance.now() > end) throw new Error(`${condition}: ${JSON.stringify(x).slice(-2000)}`);
                await new Promise((again) => setTimeout(again, 50));
            }
        }""",
        [number or session(page), condition],
    )


def session(page: Any) -> int:
    number: int = page.evaluate("duplexd.session")
    return number


def order(page: Any, label: str, **message: Any) -> None:
    page.evaluate(
        "([n, body]) => fetch('/mock/' + n, {method: 'POST', body})",
        [session(page), json.dumps({"label": label, "message": message})],
    )


def events(page: Any, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate("k => duplexd.events.filter(e => e.kind === k)", kind)
    return found


def sent(page: Any, kind: str) -> list[dict[str, Any]]:
    return [m for m in mock(page)["log"] if m["t"] == kind]


def last_reply(page: Any) -> dict[str, Any]:
    reply: dict[str, Any] = page.evaluate("duplexd.transcript().filter(e => e.role === 'character').at(-1)")
    return reply


def test_a_person_who_speaks_silences_the_character_before_the_server_says_so(serve: Serve, visit: Visit) -> None:
    """The microphone file speaks five seconds after it is opened, in the middle of the first reply."""
    page = connected(visit(serve("--decide", "flush").url))
    say(page, "Tell me about the harbour")
    page.wait_for_function("duplexd.events.some(e => e.kind === 'muted')")
    page.wait_for_function("duplexd.transcript().some(e => e.struck)")

    kinds = page.evaluate("duplexd.events.map(e => e.kind)")
    hints = [m for m in sent(page, "voice") if m["on"] and m["muted"]]
    first = page.evaluate("duplexd.transcript().find(e => e.role === 'character')")
    assert kinds.index("muted") < kinds.index("hold")
    assert len({m["id"] for m in hints}) == 1
    assert 1 <= len(hints) <= 3
    assert len({(m["rtp"], m["passed_ms"]) for m in hints}) == 1
    assert first["heard"]
    assert first["struck"]
    assert first["text"] == f"{first['heard']} {first['struck']}"
    assert mock(page)["invalid"] == []

    page.wait_for_function("duplexd.events.some(e => e.kind === 'unmuted')")
    page.wait_for_function("duplexd.state === 'speaking' && !duplexd.muted && duplexd.cursor.epoch === 1")


def test_a_false_alarm_resumes_and_every_word_is_heard(serve: Serve, visit: Visit) -> None:
    page = connected(visit(serve("--decide", "resume").url))
    say(page, "Tell me about the harbour")
    page.wait_for_function("duplexd.events.some(e => e.kind === 'unmuted')")
    page.wait_for_function("duplexd.transcript().some(e => e.state === 'completed' && e.final)")

    reply = last_reply(page)
    answers = [m for m in sent(page, "pos") if m["hold"]]
    assert reply["heard"] == reply["text"]
    assert reply["struck"] == ""
    assert answers[0]["muted"] is True
    assert {m["id"] for m in sent(page, "played")} >= {1, 2}
    assert events(page, "unmuted")[0]["late_ms"] < 40


def test_stop_silences_at_once_and_tells_where_the_sound_ended(serve: Serve, visit: Visit) -> None:
    page = connected(visit(serve().url + "?vad=0"))
    say(page, "Tell me about the harbour")
    speaking_after(page)
    page.click("#stop")
    muted = page.evaluate("duplexd.muted && document.querySelector('#audio').muted")
    page.wait_for_function("duplexd.transcript().some(e => e.struck)")

    stops = sent(page, "stop")
    assert muted is True
    assert {m["id"] for m in stops} == {1}
    assert stops[0]["muted"] is True
    assert stops[0]["rtp"] > 0


def test_positions_are_reported_ten_times_a_second_and_move_like_time(serve: Serve, visit: Visit) -> None:
    page = connected(visit(serve().url + "?vad=0"))
    until(page, "x.log.filter(m => m.t === 'pos' && m.rtp && m.playout_ms).length > 25")

    reports = [m for m in sent(page, "pos") if m["rtp"]][-20:]
    span_s = reports[-1]["received"] - reports[0]["received"]
    heard_ms = ((reports[-1]["rtp"] - reports[0]["rtp"]) % 2**32) / 48 + reports[-1]["age_ms"] - reports[0]["age_ms"]
    assert 5 < (len(reports) - 1) / span_s < 15
    assert heard_ms == pytest.approx(span_s * 1000, abs=80)
    assert all(0 < m["playout_ms"] < 500 and 0 < m["buffer_ms"] < 2000 for m in reports[-5:])
    assert len(sent(page, "ping")) >= 2


def test_without_a_microphone_one_can_type_and_listen(serve: Serve, visit: Visit) -> None:
    page = connected(visit(serve().url + "?mic=0"))
    say(page, "Hello")
    speaking_after(page)

    assert page.evaluate("duplexd.transcript()[0].text") == "Hello"
    assert page.is_disabled("#mic")
    assert "echo_cancellation" not in sent(page, "set")[0]


def test_a_refused_microphone_is_explained_and_text_goes_on(serve: Serve, visit: Visit) -> None:
    page = visit(serve().url, allow_microphone=False)
    page.click("#connect")
    page.wait_for_selector("#notice:visible")
    title = page.inner_text("#notice-title")
    page.click("#listen")
    page.wait_for_function(CONNECTED)

    assert title in ("The microphone is not allowed", "No microphone was found")
    assert page.is_hidden("#notice")


def test_an_insecure_address_is_explained_before_anything_is_clicked(serve: Serve, visit: Visit) -> None:
    page = visit(serve().url.replace("127.0.0.1", "duplexd.test"))

    assert "secure pages" in page.inner_text("#notice-text")
    page.click("#listen")
    page.wait_for_function(CONNECTED)


def test_a_full_server_is_named_with_its_own_words(serve: Serve, visit: Visit) -> None:
    server = serve("--slots", "1")
    connected(visit(server.url + "?vad=0"))
    late = visit(server.url + "?vad=0")
    late.click("#connect")
    late.wait_for_selector("#notice:visible")

    assert late.inner_text("#notice-title") == "All places are taken"
    assert "Try again in 5 s" in late.inner_text("#notice-detail")
    assert late.evaluate("duplexd.state") == "idle"


def test_a_token_is_asked_for_and_used(serve: Serve, visit: Visit) -> None:
    page = visit(serve("--token", "open").url + "?vad=0")
    page.click("#connect")
    page.wait_for_selector("#token:visible")
    page.fill("#token", "wrong")
    page.press("#token", "Enter")
    page.wait_for_function("document.querySelector('#notice-detail').textContent.includes('wrong')")
    page.fill("#token", "open")
    page.press("#token", "Enter")
    page.wait_for_function(CONNECTED)


def test_blocked_autoplay_counts_nothing_as_heard_until_the_tap(serve: Serve, visit: Visit) -> None:
    server = serve()
    page = visit(server.url + "?auto=1&mic=0", untouched=True, allow_autoplay=False)
    told = page.request.get(f"{server.url}mock/1/silence", timeout=25_000)
    page.wait_for_selector("#hear:visible")
    say(page, "Hello")
    until(page, "x.log.filter(m => m.t === 'pos').slice(-5).every(m => m.silent)")
    unheard = page.evaluate("duplexd.transcript().every(e => e.role === 'user' || e.heard === '')")
    page.click("#hear")
    page.wait_for_selector("#hear", state="hidden")
    until(page, "x.log.filter(m => m.t === 'pos').slice(-3).every(m => !m.silent)")
    speaking_after(page)

    assert told.ok
    assert unheard
    assert page.is_hidden("#notice")


@pytest.mark.parametrize("way", ["leave", "away"])
def test_leaving_frees_the_place_on_the_server(serve: Serve, visit: Visit, way: str) -> None:
    page = connected(visit(serve().url + "?vad=0"))
    number = session(page)
    if way == "leave":
        page.click("#leave")
    else:
        page.goto(page.url.split("?")[0] + "?away=1")
        page.wait_for_function("window.duplexd !== undefined")
    until(page, "x.closed", number)

    assert page.evaluate("duplexd.state") == "idle"


def test_a_restarted_engine_is_said_and_one_click_begins_anew(serve: Serve, visit: Visit) -> None:
    page = connected(visit(serve().url + "?vad=0"))
    order(page, "duplexd", t="closed", reason="engine restarted")
    page.wait_for_selector("#notice:visible")
    text = page.inner_text("#notice-text")
    page.click("#retry")
    page.wait_for_function(CONNECTED)

    assert "engine restarted" in text
    assert session(page) == 2


def test_a_server_that_falls_silent_is_said_and_the_page_connects_again(serve: Serve, visit: Visit) -> None:
    """T-RC-05: the server's process stands still for three seconds; the microphone that was muted stays so."""
    server = serve()
    page = connected(visit(server.url + "?vad=0"))
    page.click("#mic")
    until(page, "x.log.filter(m => m.t === 'pos' && m.rtp).length > 5")
    say(page, "Before")
    speaking_after(page)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        page.wait_for_function(
            "document.querySelector('#frozen').textContent.startsWith('The connection is interrupted')"
        )
        page.wait_for_function("duplexd.events.some(e => e.kind === 'again' && e.tries === 1 && !e.waits)")
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    page.wait_for_function(f"{CONNECTED} && duplexd.session !== 1")
    page.wait_for_function("duplexd.events.at(-1) && duplexd.events.some(e => e.kind === 'again' && e.done)")

    assert page.is_hidden("#frozen")
    assert page.inner_text("#notice-title") == "Connected again"
    assert page.get_attribute("#mic", "aria-pressed") == "true"
    say(page, "After")
    page.wait_for_function("duplexd.transcript().filter(e => e.role === 'character').length === 2")
    said_all = page.evaluate("duplexd.transcript().filter(e => e.role === 'user').map(e => e.text)")
    assert said_all == ["Before", "After"]
    assert page.locator(".utterance.user").count() == 2


def test_a_server_that_is_gone_is_tried_three_times_and_then_the_person_is_asked(serve: Serve, visit: Visit) -> None:
    server = serve()
    page = connected(visit(server.url + "?vad=0"))
    server.process.kill()
    page.wait_for_selector("#notice:visible")

    assert [e["waits"] for e in events(page, "again") if e.get("waits")] == [1000, 2000, 4000]
    assert page.is_visible("#retry")
    assert page.is_hidden("#frozen")
    assert page.evaluate("duplexd.state") == "idle"


def test_no_udp_path_is_explained_within_fifteen_seconds(serve: Serve, visit: Visit) -> None:
    page = visit(serve("--no-udp").url + "?vad=0")
    page.click("#connect")
    page.wait_for_selector("#notice:visible", timeout=18_000)

    assert "UDP" in page.inner_text("#notice-text")


def test_a_message_that_is_not_json_changes_nothing(serve: Serve, visit: Visit) -> None:
    page = connected(visit(serve().url + "?vad=0"))
    order(page, "duplexd", t="something_new", anything=[1, 2])
    say(page, "Hello")
    speaking_after(page)

    assert events(page, "something_new")


def test_what_moves_all_the_time_restyles_no_word_of_a_long_conversation(serve: Serve, visit: Visit) -> None:
    """Levels were a property of the body: every 50 ms all words were styled anew, half a core after four minutes."""
    page = connected(visit(serve().url))
    words = [{"text": f" word{i}", "start": i, "end": i + 1} for i in range(20)]
    for reply in range(1000, 1030):
        order(page, "duplexd", t="words", response=reply, first=0, words=words)
    page.wait_for_function("document.querySelectorAll('.word').length === 600")
    page.context.browser.start_tracing(page=page, categories=["devtools.timeline"])
    # Until the microphone's noise has shown four levels.
    page.wait_for_function(
        """() => {
            const shown = (window.levelsShown ??= new Set());
            return shown.add(getComputedStyle(document.querySelector('#mic .meter')).transform).size >= 4;
        }"""
    )
    trace = json.loads(page.context.browser.stop_tracing())
    styled = [e["args"]["elementCount"] for e in trace["traceEvents"] if e["name"] == "UpdateLayoutTree"]

    assert styled
    assert max(styled) < 100


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_runs_out_of_the_screen(serve: Serve, visit: Visit, width: int) -> None:
    page = connected(visit(serve().url + "?vad=0", width=width, height=780))
    say(page, "Tell me about the harbour")
    speaking_after(page)

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_can_be_done_by_keyboard_and_has_a_name(serve: Serve, visit: Visit) -> None:
    page = visit(serve().url + "?vad=0")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    focused = page.evaluate("document.activeElement.id")
    page.keyboard.press("Enter")
    page.wait_for_function(CONNECTED)
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, input, canvas')].filter(e => e.offsetParent && !e.textContent.trim()
            && !e.getAttribute('aria-label') && !e.labels?.length).map(e => e.outerHTML)"""
    )

    assert focused == "connect"
    assert nameless == []


def test_the_page_asks_nobody_but_its_own_server(serve: Serve, visit: Visit) -> None:
    server = serve()
    page = visit(server.url + "?vad=0")
    hosts: set[str] = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.reload()
    page.wait_for_function("window.duplexd !== undefined")
    connected(page)

    assert hosts == {f"127.0.0.1:{server.port}"}


def test_the_daemon_says_whether_voice_interrupts_until_the_person_chooses(serve: Serve, visit: Visit) -> None:
    page = connected(visit(serve("--no-barge-in").url + "?vad=0"))
    until(page, "x.log.some(m => m.t === 'set')")
    shown = page.evaluate("document.querySelector('#barge-in').checked")
    told = [m.get("barge_in") for m in sent(page, "set")]
    page.evaluate("document.querySelector('#barge-in').click()")
    until(page, "x.log.some(m => m.t === 'set' && m.barge_in === true)")

    assert shown is False
    assert told == [None]


def test_a_face_that_cannot_be_drawn_is_told_with_the_reason_and_the_talk_goes_on(serve: Serve, visit: Visit) -> None:
    page = connected(visit(serve("--faceless", "libGL.so.1 is missing").url + "?vad=0"))
    page.wait_for_selector("#notice:not([hidden])")
    said = page.inner_text("#notice")
    say(page, "Tell me about the harbour")
    speaking_after(page)

    assert "no face" in said
    assert "libGL.so.1 is missing" in said
