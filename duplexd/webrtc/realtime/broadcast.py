"""WHIP and WHEP: a session whose person is a publisher, and views of any session that has a track.

POST   /v1/whip                  RFC 9725: an offer that sends a voice, and a camera if it likes -> a session
DELETE /v1/whip/ID               ends it
POST   /v1/whep?session=ID       draft-ietf-wish-whep: an offer that receives -> the voice and face of a session
DELETE /v1/whep/ID               ends the view

1. A publisher is sent nothing (RFC 9725: our answer only receives). Its session plays all the same, on a clock of
   its own: whoever watches hears it, and the cursor follows that clock.
2. A session is named by its view id, which is good for watching and nothing else; by the id of its call, which is good
   for everything, so that its owner hands on the other; or by its number, which anybody guesses: for that the daemon's
   own token is needed, not a client secret.
3. Candidates stand in the offer and in the answer. There is no trickle and no restart: PATCH gets 501 (RFC 9725 §4.3).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from aiohttp import web

from duplexd import clock
from duplexd.ids import SessionId
from duplexd.media.line import Line
from duplexd.media.person import Sighting
from duplexd.messages import PersonSeen
from duplexd.units import Nanos, Ticks
from duplexd.webrtc.audience import Audience, AudienceFull
from duplexd.webrtc.frontend import Frontend, Guest, Refused, ice_server
from duplexd.webrtc.opus import VOICE_FRAME, Pcm
from duplexd.webrtc.peer import MessageFault, Peer
from duplexd.webrtc.realtime.requests import Refusal, bearer, read_body
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.visit import RealtimeVisit
from duplexd.webrtc.tracks import MediaClock, VoiceTrack

if TYPE_CHECKING:
    from duplexd.webrtc.realtime.routes import RealtimeRoutes

SDP = "application/sdp"
OFFER_BYTES_MAX = 1024 * 1024


class WhipVisit(RealtimeVisit):
    """A session whose person publishes and is sent nothing."""

    def __init__(self, owner: Frontend, session: SessionId, line: Line, core: RealtimeSession) -> None:
        super().__init__(owner, session, line, core)
        self.clock = MediaClock()
        self.view = owner.view(session, line)
        self.eye = owner.eye(self._on_person) if owner.has_face else None

    def begin(self, peer: Peer) -> None:
        """The publisher's offer is answered: the session plays from now on."""
        self.peer = peer
        if self.eye is not None and peer.takes_camera:
            self.eye.switch(on=True, now=clock.now())
        voice = VoiceTrack(self.clock, self.pull, on_fault=self._fail)
        self.audience = Audience(
            clock=self.clock, voice=voice, face=None, make_face=lambda at: self._owner.face(self.view, at), pumped=True
        )
        self.open()

    def _fail(self, error: Exception) -> None:
        """As a peer does for the voice of its own track: the session ends, rather than go on without a voice."""
        self._owner.end(self, f"internal error in playout: {type(error).__name__}: {error}")

    def now_pts(self, now: Nanos) -> int:
        return 0 if self.clock.origin is None else int(self.clock.position(now))

    def _tick_view(self, now: Nanos) -> None:
        if self.eye is not None:
            self.eye.tick(now)
        if self.view is not None:
            self.view.tick(self.audience.own_face if self.audience is not None else None, self.clock.origin, now)

    def _on_person(self, seen: Sighting) -> None:
        self._owner.supervisor.send(PersonSeen(self.session, seen.present, seen.place.x, seen.place.y))


class BroadcastRoutes:
    def __init__(self, realtime: RealtimeRoutes) -> None:
        self._realtime = realtime
        self._views: dict[str, Peer] = {}

    def routes(self) -> list[web.AbstractRouteDef]:
        found: list[web.AbstractRouteDef] = [
            web.post("/v1/whip", self.publish),
            web.delete("/v1/whip/{id}", self.unpublish),
            web.post("/v1/whep", self.watch),
            web.delete("/v1/whep/{id}", self.unwatch),
        ]
        for path in ("/v1/whip", "/v1/whip/{id}", "/v1/whep", "/v1/whep/{id}"):
            found += [web.options(path, self.options), web.route("*", path, self.not_allowed)]
        return found

    # WHIP -------------------------------------------------------------------------------------------------------------

    async def publish(self, request: web.Request) -> web.Response:
        realtime, frontend = self._realtime, self._realtime.frontend
        realtime.door.check(request)
        settings, locked = realtime.door.settings(request, model=realtime.served(request))
        offer = await _offer_of(request)
        whip_id = f"whip_{secrets.token_urlsafe(18)}"

        def make(number: SessionId, line: Line) -> WhipVisit:
            core = realtime.protocol(number, settings, locked, Transport.WEBRTC)
            return WhipVisit(frontend, number, line, core)

        visit = await frontend.admit(make)

        def closed(reason: str) -> None:
            realtime.calls.pop(whip_id, None)
            frontend.leave(visit, reason)
            visit.ending = asyncio.ensure_future(visit.hang_up(reason))

        config = msgspec.structs.replace(frontend.peer_config(), labels=(), heartbeat_ns=Nanos(0), speaks=False)
        try:
            peer = await Peer.accept(
                offer,
                config=config,
                on_audio=visit.on_audio,
                pull_audio=_silence,
                on_message=_hear_nothing,
                on_closed=closed,
                eye=visit.eye,
            )
        except BaseException:
            frontend.leave(visit, "the publisher's offer could not be answered")
            raise
        if visit.session not in frontend.visits:
            await peer.close("the session has ended")
            raise Refused(503, "loading", "the engine restarted meanwhile; try again in a few seconds")
        visit.call_id = whip_id
        realtime.calls[whip_id] = visit
        visit.begin(peer)
        created = self._created(f"/v1/whip/{whip_id}", peer.answer_sdp)
        created.headers.update(visit.view_header)
        return created

    async def unpublish(self, request: web.Request) -> web.Response:
        self._enter(request)
        visit = self._realtime.calls.get(request.match_info["id"])
        if not isinstance(visit, WhipVisit):
            raise Refusal(404, "session_not_found", "There is no such WHIP session; it may have ended.")
        self._realtime.calls.pop(visit.call_id, None)
        self._realtime.frontend.hang_up(visit.session)
        return web.Response(status=200)

    # WHEP -------------------------------------------------------------------------------------------------------------

    async def watch(self, request: web.Request) -> web.Response:
        self._enter(request)
        guest = self._guest(request)
        offer = await _offer_of(request)
        frontend = self._realtime.frontend
        audience = frontend.audience(guest)
        try:
            relay = audience.join()
        except AudienceFull as full:
            raise Refusal(503, "busy", f"{full}.") from full
        view_id = f"whep_{secrets.token_urlsafe(18)}"
        config = msgspec.structs.replace(
            frontend.peer_config(), labels=(), heartbeat_ns=Nanos(0), hears=False, one_stream=True
        )

        def closed(reason: str) -> None:
            self._views.pop(view_id, None)
            audience.part(relay)

        try:
            peer = await Peer.accept(
                offer,
                config=config,
                on_audio=_hear_no_sound,
                pull_audio=_silence,
                on_message=_hear_nothing,
                on_closed=closed,
                relay=relay,
            )
        except BaseException:
            audience.part(relay)
            raise
        self._views[view_id] = peer
        audience.bind(relay, lambda reason: frontend.later(peer.close(reason)))
        if guest.session not in frontend.visits:
            frontend.later(peer.close("the session has ended"))
            raise Refusal(404, "session_not_found", "The session has ended meanwhile.")
        return self._created(f"/v1/whep/{view_id}", peer.answer_sdp)

    async def unwatch(self, request: web.Request) -> web.Response:
        self._enter(request)
        peer = self._views.pop(request.match_info["id"], None)
        if peer is None:
            raise Refusal(404, "view_not_found", "There is no such view; it may have ended.")
        await peer.close("the viewer left")
        return web.Response(status=200)

    def _guest(self, request: web.Request) -> Guest:
        """The session that is asked for (module rule 2)."""
        name = request.query.get("session", "")
        if not name:
            raise Refusal(400, "missing_required_parameter", "Say which session: ?session=ID.", param="session")
        visits = self._realtime.frontend.visits
        guest: Guest | None
        if name.isascii() and name.isdigit():
            if not self._realtime.door.keeper.is_master(bearer(request)):
                said = "By its number a session is watched with the daemon's own token; a client secret needs its id."
                raise Refusal(403, "token_required", said, param="session")
            guest = visits.get(SessionId(int(name[:18])))
        else:
            sessions = (g for g in visits.values() if isinstance(g, RealtimeVisit))
            guest = next((g for g in sessions if name in (g.call_id, g.view_id)), None)
        if guest is None:
            raise Refusal(404, "session_not_found", f"There is no session '{name[:80]}'.", param="session")
        return guest

    # Both -------------------------------------------------------------------------------------------------------------

    def _enter(self, request: web.Request) -> None:
        self._realtime.door.check(request)
        self._realtime.door.settings(request, model="")

    def _created(self, location: str, answer: str) -> web.Response:
        # As bytes: of a text aiohttp names the charset, which this type has no parameter for (RFC 8866 §8.1).
        response = web.Response(status=201, body=answer.encode(), content_type=SDP, headers={"Location": location})
        for link in links(self._realtime.frontend.config.ice_servers):
            response.headers.add("Link", link)
        return response

    async def options(self, request: web.Request) -> web.Response:
        asked = "Origin" in request.headers
        answer = await self._realtime.preflight(request) if asked else web.Response()
        answer.set_status(200)  # RFC 9725 §4.2 names this one.
        if not _names_one(request):
            answer.headers["Accept-Post"] = SDP
        answer.headers["Allow"] = _allowed(request)
        return answer

    async def not_allowed(self, request: web.Request) -> web.Response:
        if request.method == "PATCH" and _names_one(request):
            said = "Candidates stand in offer and answer: there is no trickle and no restart; end this and POST anew."
            refusal = Refusal(501, "not_supported", said)
        else:
            said = f"{request.method} is not served here; {_allowed(request)} are."
            refusal = Refusal(405, "method_not_allowed", said)
        answer = refusal.answer()
        answer.headers["Allow"] = _allowed(request)
        return answer


def links(servers: Iterable[str]) -> Iterator[str]:
    """STUN and TURN servers of the configuration as values of `Link` (RFC 9725)."""
    for server in map(ice_server, servers):
        link = f'<{server.url}>; rel="ice-server"'
        if server.username:
            link += f"; username={_quoted(server.username)}; credential={_quoted(server.credential)}"
            link += '; credential-type="password"'
        yield link


def _names_one(request: web.Request) -> bool:
    """Whether the address is that of one session or view."""
    return "id" in request.match_info


def _allowed(request: web.Request) -> str:
    return "DELETE, OPTIONS" if _names_one(request) else "POST, OPTIONS"


def _quoted(text: str) -> str:
    """RFC 9110 §5.6.4."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


async def _offer_of(request: web.Request) -> str:
    if request.content_type != SDP:
        raise Refusal(415, "unsupported_media_type", f"Send the offer as {SDP}.")
    try:
        return (await read_body(request, bytes_max=OFFER_BYTES_MAX)).decode()
    except UnicodeDecodeError as error:
        raise Refusal(400, "invalid_value", f"The offer is not UTF-8: {error.reason}.", param="sdp") from error


def _silence(pts: Ticks) -> Pcm:
    return np.zeros(VOICE_FRAME, np.int16)


def _hear_nothing(label: str, data: str | MessageFault) -> None:
    """No channel is served."""


def _hear_no_sound(pcm: Pcm, rtp: int, how: str) -> None:
    """No voice is taken."""
