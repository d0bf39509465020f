"""Checks of JSON values: each takes (value, param) and returns what is kept, or raises a Fault that names the param."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from duplexd.webrtc.realtime.faults import Fault, invalid, unknown

Check: TypeAlias = Callable[[Any, str], Any]
PLAIN_VALUES_MAX = 4096
PLAIN_DEPTH_MAX = 32


def text(*, longest: int, shortest: int = 0) -> Check:
    def check(value: Any, param: str) -> Any:
        if not isinstance(value, str) or not shortest <= len(value) <= longest:
            raise invalid(param, value, f"a text of {shortest} to {longest} characters")
        return value

    return check


def one_of(*allowed: Any) -> Check:
    def check(value: Any, param: str) -> Any:
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise invalid(param, value, ", ".join(repr(one) for one in allowed))
        return value

    return check


def whole(low: int, high: int) -> Check:
    def check(value: Any, param: str) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(param, value, f"a whole number from {low} to {high}")
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any, param: str) -> Any:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fine or not low <= value <= high:
            raise invalid(param, value, f"a number from {low:g} to {high:g}")
        return value

    return check


def flag(value: Any, param: str) -> Any:
    if not isinstance(value, bool):
        raise invalid(param, value, "true, false")
    return value


def anything(value: Any, param: str) -> Any:
    return value


def plain(value: Any, param: str) -> Any:
    """Any JSON of a size that can be copied and shown: 4096 values, 32 levels."""
    waiting = [(value, 0)]
    count = 0
    while waiting:
        one, depth = waiting.pop()
        count += 1
        if count > PLAIN_VALUES_MAX or depth > PLAIN_DEPTH_MAX:
            said = f"'{param}' may hold {PLAIN_VALUES_MAX} values, {PLAIN_DEPTH_MAX} levels deep."
            raise Fault("invalid_value", said, param=param)
        if isinstance(one, dict):
            waiting += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list):
            waiting += [(inner, depth + 1) for inner in one]
    return value


def nullable(check: Check) -> Check:
    return lambda value, param: None if value is None else check(value, param)


def either(*checks: Check) -> Check:
    def check(value: Any, param: str) -> Any:
        fault: Fault | None = None
        for one in checks:
            try:
                return one(value, param)
            except Fault as error:
                fault = fault or error
        assert fault is not None
        raise fault

    return check


def many(check: Check, *, most: int) -> Check:
    def check_all(value: Any, param: str) -> Any:
        if not isinstance(value, list) or len(value) > most:
            raise invalid(param, value, f"a list of at most {most}")
        return [check(one, f"{param}[{index}]") for index, one in enumerate(value)]

    return check_all


def fields(checks: Mapping[str, Check], *, required: tuple[str, ...] = ()) -> Check:
    """An object with these fields; absent ones stay absent."""

    def check(value: Any, param: str) -> Any:
        if not isinstance(value, dict):
            raise invalid(param, value, "an object")
        for name in required:
            if name not in value:
                raise Fault(
                    "missing_required_parameter",
                    f"Missing required parameter: '{_under(param, name)}'.",
                    param=_under(param, name),
                )
        for name in value:
            if name not in checks:
                raise unknown(_under(param, str(name)[:80]), ", ".join(checks))
        return {name: checks[name](value[name], _under(param, name)) for name in value}

    return check


def loose(checks: Mapping[str, Check]) -> Check:
    """An object; of it only these fields are looked at and kept."""
    strict = fields(checks)

    def check(value: Any, param: str) -> Any:
        if not isinstance(value, dict):
            raise invalid(param, value, "an object")
        return strict({name: one for name, one in value.items() if name in checks}, param)

    return check


def _under(param: str, name: str) -> str:
    return f"{param}.{name}" if param else name
