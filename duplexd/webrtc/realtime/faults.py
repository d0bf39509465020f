"""What is wrong with something a client sent; it becomes one `error` event, and the session goes on."""

from __future__ import annotations


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


def invalid(param: str, got: object, allowed: str) -> Fault:
    shown = repr(got) if len(repr(got)) <= 80 else f"{repr(got)[:77]}..."
    return Fault("invalid_value", f"Invalid value for '{param}': {shown}. Allowed: {allowed}.", param=param)
