"""Requests of the API: bodies in, refusals out, and the upgrade to a WebSocket."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec
from aiohttp import BodyPartReader, MultipartReader, web

from duplexd.webrtc.frontend import RETRY_AFTER_S
from duplexd.webrtc.realtime.limits import EVENT_BYTES_MAX

FRAME_BYTES_MAX = EVENT_BYTES_MAX + 1024 * 1024  #: a frame beyond it closes the socket with 1009
PING_EVERY_S = 20.0
BODY_BYTES_MAX = 26_000_000  #: a recording to transcribe; offers and settings have bounds of their own
FORM_PARTS_MAX = 16
#: Set on a request whose answer has begun (a stream, a WebSocket): no refusal can follow it.
ANSWERING = web.RequestKey("answering", bool)
KEY_PROTOCOL = "openai-insecure-api-key."


class Refusal(Exception):
    """An HTTP answer that says no."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str = "",
        param: str = "",
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self._more = more  # fields of the error beside the usual ones
        self.status, self.code, self.param = status, code, param
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "code": self.code, "param": self.param or None}
        return {"error": {**error, **self._more}}

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


async def read_body(request: web.Request, *, bytes_max: int) -> bytes:
    """The body. Raises Refusal (413) as soon as it is known to be larger; no more of it is kept then."""
    if (request.content_length or 0) > bytes_max:
        raise too_large("The body", bytes_max)
    data = bytearray()
    async for chunk in request.content.iter_chunked(65_536):
        data += chunk
        if len(data) > bytes_max:
            raise too_large("The body", bytes_max)
    return bytes(data)


async def read_form(request: web.Request, *, bytes_max: int) -> dict[str, bytes]:
    """The parts of a form by their names, `bytes_max` in all. Raises Refusal: 413, or 400 for what is no such form."""
    try:
        return await _parts_of(await request.multipart(), bytes_max)
    except (ValueError, RuntimeError) as error:  # Of aiohttp's reader, for boundaries and headers that are none.
        raise Refusal(400, "invalid_form", f"The form cannot be read: {error}.") from error


async def _parts_of(reader: MultipartReader, bytes_max: int) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    left, count = bytes_max, 0
    while (part := await reader.next()) is not None:
        count += 1
        if not isinstance(part, BodyPartReader) or not part.name or count > FORM_PARTS_MAX:
            raise Refusal(400, "invalid_form", f"The form has parts without names, or more than {FORM_PARTS_MAX}.")
        data = bytearray()
        while chunk := await part.read_chunk(65_536):
            left -= len(chunk)
            if left < 0:
                raise too_large("The form", bytes_max, param=part.name)
            data += chunk
        parts[part.name] = bytes(data)
    return parts


def too_large(what: str, bytes_max: int, *, param: str = "") -> Refusal:
    return Refusal(413, "file_too_large", f"{what} has more than {bytes_max} bytes.", param=param)


async def json_body(request: web.Request, *, bytes_max: int = BODY_BYTES_MAX) -> Any:
    """The body as JSON; None when it is empty. Raises Refusal."""
    data = await read_body(request, bytes_max=bytes_max)
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
    request[ANSWERING] = True
    await socket.prepare(request)
    return socket
