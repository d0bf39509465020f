"""Requests that are sent again under one `Idempotency-Key`: the answer is the first one's, and nothing is made twice.

    key unknown -> made, and kept if it succeeded      same key, same content, being made -> 409, come again
    same key, same content, kept -> told again         same key, other content            -> 422

1. A key is known for `WINDOW`. It belongs to who sent it (by the key of the API) and to what was asked for (the path).
2. What failed is forgotten: a retry makes it anew. So is one that broke off, or is larger than `ANSWER_BYTES_MAX`.
3. At the bound the oldest gives way.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from aiohttp import web

from duplexd.units import NANOS_PER_SECOND, Nanos
from duplexd.webrtc.realtime.requests import Refusal, bearer

HEADER = "Idempotency-Key"
WINDOW = Nanos(600 * NANOS_PER_SECOND)
KEYS_MAX = 256
KEY_CHARACTERS_MAX = 255
ANSWER_BYTES_MAX = 1024 * 1024
BYTES_MAX = 32 * 1024 * 1024  #: of all answers that are kept
NOT_KEPT = ("Date", "Server", "Content-Length", "Transfer-Encoding", "Connection")
#: Where a streamed answer leaves what it has written, if that is the whole of it.
WRITTEN = web.RequestKey("written", bytes)


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def again(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.body, headers=[*self.headers, ("Idempotent-Replayed", "true")]
        )


class _Kept(msgspec.Struct):
    content: bytes  #: digest of what was asked for
    until: Nanos
    answer: Answer | None = None  #: None: it is being made


class Answers:
    """The answers of the last ten minutes. `now` is given by the caller."""

    def __init__(self, *, keys_max: int = KEYS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._kept: OrderedDict[tuple[bytes, str, str], _Kept] = OrderedDict()
        self._keys_max = keys_max
        self._bytes_max = bytes_max

    def __len__(self) -> int:
        return len(self._kept)

    async def once(
        self,
        request: web.Request,
        make: Callable[[], Awaitable[web.StreamResponse]],
        *,
        content: Iterable[bytes | str],
        now: Nanos,
    ) -> web.StreamResponse:
        """The answer to a request of this `content`. Raises Refusal (400, 409, 422) and what `make` does."""
        key = request.headers.get(HEADER)
        if key is None:
            return await make()
        if not 0 < len(key) <= KEY_CHARACTERS_MAX:
            raise Refusal(400, "invalid_value", f"{HEADER} has 1 to {KEY_CHARACTERS_MAX} characters.", param=HEADER)
        name = (_digest([bearer(request)]), request.path, key)
        wanted = _digest(content)
        self._forget(now)
        if (kept := self._kept.get(name)) is not None:
            return _answer_of(kept, wanted)
        kept = self._kept[name] = _Kept(wanted, Nanos(now + WINDOW))
        try:
            made = await make()
            kept.answer = _copy_of(made, request)
        finally:
            if kept.answer is None and self._kept.get(name) is kept:
                del self._kept[name]
            self._shrink()
        return made

    def _forget(self, now: Nanos) -> None:
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._kept.popitem(last=False)

    def _shrink(self) -> None:
        held = sum(len(kept.answer.body) for kept in self._kept.values() if kept.answer is not None)
        while self._kept and (len(self._kept) > self._keys_max or held > self._bytes_max):
            _, left = self._kept.popitem(last=False)
            held -= len(left.answer.body) if left.answer is not None else 0


def _answer_of(kept: _Kept, wanted: bytes) -> web.Response:
    if kept.content != wanted:
        said = f"This {HEADER} was used for a request with another content; take a new one for a new request."
        raise Refusal(422, "idempotency_key_reused", said, param=HEADER)
    if kept.answer is None:
        said = f"The request with this {HEADER} is still being answered; come again."
        raise Refusal(409, "request_in_progress", said, param=HEADER)
    return kept.answer.again()


def _copy_of(made: web.StreamResponse, request: web.Request) -> Answer | None:
    body = made.body if isinstance(made, web.Response) else request.get(WRITTEN)
    if not 200 <= made.status < 300 or not isinstance(body, bytes | bytearray) or len(body) > ANSWER_BYTES_MAX:
        return None
    headers = tuple((name, value) for name, value in made.headers.items() if name not in NOT_KEPT)
    return Answer(made.status, headers, bytes(body))


def _digest(parts: Iterable[bytes | str]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()
