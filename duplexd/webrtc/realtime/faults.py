"""What is wrong with something a client sent; it becomes one `error` event, and the session goes on."""

from __future__ import annotations

import reprlib

SHOWN_MAX = 80  #: characters of a value that is told back
_repr = reprlib.Repr()  #: bounded: what a stranger sent may be long and deep
_repr.maxlevel, _repr.maxstring, _repr.maxother = 4, SHOWN_MAX, SHOWN_MAX


class Fault(Exception):
    """`code` and `param` as the protocol has them; the message is a sentence a person can act on."""

    def __init__(self, code: str, message: str, *, param: str = "", kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.kind = kind


def missing(param: str) -> Fault:
    return Fault("missing_required_parameter", f"Missing required parameter: '{param}'.", param=param)


def unknown(param: str, allowed: object) -> Fault:
    return Fault("unknown_parameter", f"Unknown parameter: '{param}'. Allowed here: {allowed}.", param=param)


def shown(value: object) -> str:
    """A value that a stranger sent, for a sentence."""
    text = _repr.repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."


def invalid(param: str, got: object, allowed: str) -> Fault:
    return Fault("invalid_value", f"Invalid value for '{param}': {shown(got)}. Allowed: {allowed}.", param=param)
