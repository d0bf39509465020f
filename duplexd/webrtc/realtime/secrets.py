"""Who may connect: the daemon's token, or a short-lived secret that somebody with the token had made.

1. A secret opens any number of sessions until it expires; sessions outlive it.
2. It carries the session it was made for; fields named in `locked_fields` cannot be changed by its holder.
3. What is compared is compared in constant time; nothing of it is ever logged.
4. At the bound the secret that expires first gives way.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any, NamedTuple

import msgspec

from duplexd.webrtc.realtime import check as c
from duplexd.webrtc.realtime.faults import Fault, invalid
from duplexd.webrtc.realtime.settings import LOCKABLE, Settings

LIFE_S_MIN, LIFE_S_MAX, LIFE_S = 10, 7200, 600
SECRETS_MAX = 4096

_REQUEST = c.fields(
    {
        "expires_after": c.nullable(
            c.fields({"anchor": c.one_of("created_at"), "seconds": c.whole(LIFE_S_MIN, LIFE_S_MAX)})
        ),
        "session": c.nullable(c.anything),
        "locked_fields": c.many(c.one_of(*LOCKABLE), most=len(LOCKABLE)),
    }
)


class Key(NamedTuple):
    """What the key of a client stands for."""

    settings: Settings
    locked: frozenset[str]  #: what its holder may not change, by whatever way it comes


class Secret(msgspec.Struct, frozen=True):
    value: str
    expires_at: float  #: seconds of the wall clock
    settings: Settings
    locked: frozenset[str]


class Doorkeeper:
    """Knows the token and the secrets made with it. `wall` is seconds of the wall clock, given by the caller."""

    def __init__(self, token: str, *, secrets_max: int = SECRETS_MAX) -> None:
        self._token = token
        self._secrets: dict[str, Secret] = {}
        self._secrets_max = secrets_max

    def make(self, request: Any, *, model: str, wall: float) -> Secret:
        """A new secret, as the body of `POST /v1/realtime/client_secrets` asks for it. Raises Fault."""
        wanted = _REQUEST(request if request is not None else {}, "")
        session = wanted.get("session") or {}
        if not isinstance(session, dict):
            raise invalid("session", session, "an object")
        kind = session.get("type", "realtime")
        if kind not in ("realtime", "transcription"):
            raise Fault("invalid_value", "session.type is realtime or transcription.", param="session.type")
        settings = Settings.default(model=model).as_kind(kind).change({**session, "type": kind})
        life = (wanted.get("expires_after") or {}).get("seconds", LIFE_S)
        secret = Secret(
            f"ek_{secrets.token_urlsafe(24)}", wall + life, settings, frozenset(wanted.get("locked_fields", ()))
        )
        self._drop_expired(wall)
        if len(self._secrets) >= self._secrets_max:
            del self._secrets[min(self._secrets, key=lambda value: self._secrets[value].expires_at)]
        self._secrets[secret.value] = secret
        return secret

    def _drop_expired(self, wall: float) -> None:
        self._secrets = {value: one for value, one in self._secrets.items() if one.expires_at > wall}

    def secret(self, given: str, *, wall: float) -> Secret | None:
        """The living secret that was given, if it is one."""
        wanted = given.encode()
        found = next((s for s in self._secrets.values() if hmac.compare_digest(s.value.encode(), wanted)), None)
        return found if found is not None and found.expires_at > wall else None

    def is_master(self, given: str) -> bool:
        """The daemon's own token; without one everybody holds it."""
        return not self._token or hmac.compare_digest(given.encode(), self._token.encode())
