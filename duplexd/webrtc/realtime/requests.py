"""Requests of the API: bodies in, refusals out, and the upgrade to a WebSocket."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from duplexd.webrtc.frontend import RETRY_AFTER_S
from duplexd.webrtc.realtime.limits import EVENT_BYTES_MAX

FRAME_BYTES_MAX = EVENT_BYTES_MAX + 1024 * 1024  #: a frame beyond it closes the socket with 1009
PING_EVERY_S = 20.0
KEY_PROTOCOL = "openai-insecure-api-key."


class Refusal(Exception):
    """An HTTP answer that says no."""

    def __init__(self, status: int, code: str, message: str, *, kind: str = "", param: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "code": self.code, "param": self.param or None}
        return {"error": error}

    def answer(self) -> web.Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        return web.json_response(self.body(), status=self.status, headers=headers)


def bearer(request: web.Request) -> str:
    """The key of a request; browsers, which cannot set headers of a WebSocket, offer it as a subprotocol."""
    header = request.headers.get("Authorization", "")
    if header:
        return header.removeprefix("Bearer ").strip()
    offered = [one.strip() for one in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    found = next((one for one in offered if one.startswith(KEY_PROTOCOL)), "")
    return found.removeprefix(KEY_PROTOCOL)


async def json_body(request: web.Request) -> Any:
    """The body as JSON; None when it is empty. Raises Refusal."""
    data = await request.read()
    if not data.strip():
        return None
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Refusal(400, "invalid_json", f"The body is not JSON: {error}.") from error


class Socket(web.WebSocketResponse):
    """A WebSocket that ends for its reader when its client has gone.

    A ping that came just before is answered by the library while it reads, and raises where nobody is left.
    """

    async def receive(self, timeout: float | None = None) -> aiohttp.WSMessage:
        try:
            return await super().receive(timeout)
        except ConnectionError:
            return aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None)


async def upgrade(request: web.Request) -> web.WebSocketResponse:
    offered = request.headers.get("Sec-WebSocket-Protocol", "")
    socket = Socket(
        protocols=("realtime",) if offered else (),
        max_msg_size=FRAME_BYTES_MAX,
        heartbeat=PING_EVERY_S,
        compress=False,
    )
    if not socket.can_prepare(request):
        raise Refusal(426, "upgrade_required", "This is a WebSocket; connect with one.")
    await socket.prepare(request)
    return socket
