"""The session as its client configured it: the whole effective object, and changes to it.

1. Only present fields change. `null` and empty values mean what the protocol says: `turn_detection: null` hands turns
   to the client, `instructions: ""` and `tools: []` clear.
2. A change is checked whole before any of it is applied: one bad field, one error, no effect.
3. What is accepted and has no effect here is listed in `docs/realtime.md`; nothing is accepted silently that is not.
"""

from __future__ import annotations

import copy
from typing import Any

from duplexd.webrtc.realtime import check as c
from duplexd.webrtc.realtime.faults import Fault, invalid
from duplexd.webrtc.realtime.formats import ALAW, PCM, RATES, ULAW, format_object

INSTRUCTIONS_MAX = 32_768
TOOLS_MAX = 128
RETENTION_S_MAX = 86_400
SEMANTIC_PATIENCE_MS = {"low": 8000, "medium": 4000, "auto": 4000, "high": 2000}  #: longest wait for a finished thought
VOICES = ("duplexd", "alloy", "ash", "ballad", "cedar", "coral", "echo", "marin", "sage", "shimmer", "verse")
LOCKABLE = ("instructions", "tools", "audio", "output_modalities", "model", "max_output_tokens", "tool_choice")

_ID = c.text(longest=256, shortest=1)
_FORMAT_FIELDS = {"type": c.one_of(PCM, ULAW, ALAW), "rate": c.whole(8000, 48_000)}


def _format(value: Any, param: str) -> Any:
    made = c.fields(_FORMAT_FIELDS, required=("type",))(value, param)
    rate = made.get("rate", RATES[made["type"]])
    if rate != RATES[made["type"]]:
        raise invalid(f"{param}.rate", rate, str(RATES[made["type"]]))
    return format_object(made["type"])


_VAD_COMMON = {"create_response": c.flag, "interrupt_response": c.flag}
_VAD = {
    "server_vad": c.fields(
        {
            "type": c.anything,
            "threshold": c.number(0.0, 1.0),
            "prefix_padding_ms": c.whole(0, 5000),
            "silence_duration_ms": c.whole(100, 10_000),
            "idle_timeout_ms": c.nullable(c.whole(1000, 60_000)),
            **_VAD_COMMON,
        }
    ),
    "semantic_vad": c.fields({"type": c.anything, "eagerness": c.one_of(*SEMANTIC_PATIENCE_MS), **_VAD_COMMON}),
}
_VAD_DEFAULTS: dict[str, dict[str, Any]] = {
    "server_vad": {
        "threshold": 0.5,
        "prefix_padding_ms": 300,
        "silence_duration_ms": 500,
        "idle_timeout_ms": None,
        "create_response": True,
        "interrupt_response": True,
    },
    "semantic_vad": {"eagerness": "auto", "create_response": True, "interrupt_response": True},
}


def _turn_detection(value: Any, param: str) -> Any:
    if not isinstance(value, dict):
        raise invalid(param, value, "an object or null")
    kind = value.get("type", "server_vad")
    if not isinstance(kind, str) or kind not in _VAD:
        raise invalid(f"{param}.type", kind, ", ".join(_VAD))
    given = {name: one for name, one in value.items() if one is not None or name == "idle_timeout_ms"}
    return {"type": kind, **_VAD_DEFAULTS[kind], **_VAD[kind](given, param)}


_TRANSCRIPTION = c.fields(
    {
        "model": c.nullable(c.text(longest=128)),
        "language": c.nullable(c.text(longest=32)),
        "languages": c.nullable(c.many(c.text(longest=32), most=32)),
        "prompt": c.nullable(c.text(longest=8192)),
        "delay": c.nullable(c.one_of("minimal", "low", "medium", "high", "xhigh")),
        "keywords": c.nullable(c.many(c.text(longest=128), most=256)),
    }
)


def _schema(value: Any, param: str) -> Any:
    if not isinstance(value, dict):
        raise invalid(param, value, "a JSON schema (an object)")
    return c.plain(value, param)


_TOOL = c.fields(
    {
        "type": c.one_of("function"),
        "name": c.text(longest=64, shortest=1),
        "description": c.nullable(c.text(longest=8192)),
        "parameters": c.nullable(_schema),
        "strict": c.nullable(c.flag),
    },
    required=("type", "name"),
)


def _tool(value: Any, param: str) -> Any:
    if isinstance(value, dict) and value.get("type") == "mcp":
        said = "Servers of tools (mcp) are not called from here; give their tools as functions and answer the calls."
        raise Fault("unsupported_tool", said, param=param)
    return _TOOL(value, param)


TOOLS = c.many(_tool, most=TOOLS_MAX)
TOOL_CHOICE = c.either(
    c.one_of("auto", "none", "required"),
    c.fields({"type": c.one_of("function"), "name": c.text(longest=64, shortest=1)}, required=("type", "name")),
)
OUTPUT_TOKENS = c.either(c.one_of("inf"), c.whole(1, 4096))


def _voice(value: Any, param: str) -> Any:
    name = value.get("id") if isinstance(value, dict) else value
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise invalid(param, value, "the name of a voice, or an object with its id")
    return {"id": name} if isinstance(value, dict) else name


def modalities(value: Any, param: str) -> Any:
    if value not in (["audio"], ["text"]):
        raise invalid(param, value, '["audio"], ["text"]')
    return list(value)


_INPUT = c.fields(
    {
        "format": _format,
        "noise_reduction": c.nullable(
            c.fields({"type": c.one_of("near_field", "far_field"), "strength": c.nullable(c.number(0, 1))})
        ),
        "transcription": c.nullable(_TRANSCRIPTION),
        "turn_detection": c.nullable(_turn_detection),
    }
)


def _speed(value: Any, param: str) -> Any:
    if c.number(0.25, 1.5)(value, param) != 1:
        raise Fault("unsupported_value", "The voice has one speed: 1.0.", param=param)
    return 1.0


OUTPUT = c.fields({"format": _format, "voice": _voice, "speed": _speed})


def _metadata(value: Any, param: str) -> Any:
    if not isinstance(value, dict) or len(value) > 16:
        raise invalid(param, value, "an object of at most 16 pairs")
    for name, one in value.items():
        if len(name) > 64 or not isinstance(one, str) or len(one) > 512:
            raise invalid(f"{param}.{name[:64]}", one, "a text of at most 512 characters, its name at most 64")
    return dict(value)


METADATA = c.nullable(_metadata)

_SESSION = c.fields(
    {
        "type": c.one_of("realtime", "transcription"),
        "object": c.anything,
        "id": c.anything,
        "expires_at": c.anything,
        "model": c.text(longest=128),
        "output_modalities": modalities,
        "instructions": c.text(longest=INSTRUCTIONS_MAX),
        "audio": c.fields({"input": _INPUT, "output": OUTPUT}),
        "tools": TOOLS,
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": c.flag,
        "max_output_tokens": OUTPUT_TOKENS,
        "tracing": c.nullable(c.plain),
        "truncation": c.plain,
        "prompt": c.plain,
        "include": c.nullable(c.many(c.text(longest=128), most=16)),
        "reasoning": c.plain,
        "duplexd": c.fields({"events": c.flag, "retention_s": c.nullable(c.whole(1, RETENTION_S_MAX))}),
    }
)
#: Null in these clears nothing and changes nothing: some SDKs send every field they know.
_NULL_IS_ABSENT = frozenset(
    {
        *("output_modalities", "instructions", "audio", "tools", "tool_choice", "max_output_tokens", "model"),
        *("parallel_tool_calls", "duplexd", "reasoning", "prompt", "truncation", "include", "tracing"),
    }
)


def locked_field(name: str, *, param: str) -> Fault:
    """A client secret that locks this field was used to change it, by whatever way."""
    said = f"'{name}' was fixed when the client secret was made, and cannot be changed by its holder."
    return Fault("locked_field", said, param=param)


class Settings:
    """The effective session. `change` gives another one; this one never changes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    @classmethod
    def default(cls, *, model: str, instructions: str = "") -> Settings:
        return cls(
            {
                "type": "realtime",
                "object": "realtime.session",
                "model": model,
                "output_modalities": ["audio"],
                "instructions": instructions,
                "audio": {
                    "input": {
                        "format": format_object(PCM),
                        "noise_reduction": None,
                        "transcription": None,
                        "turn_detection": {"type": "server_vad", **_VAD_DEFAULTS["server_vad"]},
                    },
                    "output": {"format": format_object(PCM), "voice": VOICES[0], "speed": 1.0},
                },
                "tools": [],
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "max_output_tokens": "inf",
                "tracing": None,
                "truncation": "auto",
                "prompt": None,
                "include": None,
                "duplexd": {"events": False, "retention_s": None},
            }
        )

    def change(self, wanted: Any, *, locked: frozenset[str] = frozenset()) -> Settings:
        """The session after an update. Raises Fault; then nothing has changed."""
        if isinstance(wanted, dict):
            wanted = {k: v for k, v in wanted.items() if not (v is None and k in _NULL_IS_ABSENT)}
        checked = _SESSION(_without_nulls(wanted), "session")
        for name in checked:
            if name in locked:
                raise locked_field(name, param=f"session.{name}")
        if "type" in checked and checked["type"] != self.values["type"]:
            raise invalid("session.type", checked["type"], self.values["type"])
        values = copy.deepcopy(self.values)
        for name in ("object", "id", "expires_at", "model"):
            checked.pop(name, None)  # A client may send back what it was sent; the model of a session never changes.
        audio = checked.pop("audio", {})
        values["audio"]["input"].update(audio.get("input", {}))
        values["audio"]["output"].update(audio.get("output", {}))
        values["duplexd"].update(checked.pop("duplexd", {}))
        values.update(checked)
        return Settings(values)

    def as_kind(self, kind: str) -> Settings:
        """The same as a `realtime` or a `transcription` session; only when it is opened."""
        values = copy.deepcopy(self.values)
        values["type"] = kind
        values["object"] = f"realtime.{'transcription_' if kind == 'transcription' else ''}session"
        if kind == "transcription" and values["audio"]["input"]["transcription"] is None:
            values["audio"]["input"]["transcription"] = {"model": values["model"]}
        return Settings(values)

    # What is read of it ---------------------------------------------------------------------------------------------

    @property
    def turn_detection(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.values["audio"]["input"]["turn_detection"]
        return found

    @property
    def input_format(self) -> str:
        return str(self.values["audio"]["input"]["format"]["type"])

    @property
    def output_format(self) -> str:
        return str(self.values["audio"]["output"]["format"]["type"])

    @property
    def transcribes(self) -> bool:
        return self.values["audio"]["input"]["transcription"] is not None

    @property
    def speaks(self) -> bool:
        return bool(self.values["output_modalities"] == ["audio"])

    @property
    def is_transcription(self) -> bool:
        return bool(self.values["type"] == "transcription")

    @property
    def retention_s(self) -> int | None:
        """How long what is over is kept; None: as long as the session."""
        found: int | None = self.values["duplexd"]["retention_s"]
        return found

    @property
    def extended(self) -> bool:
        """The client asked for the events of duplexd's own."""
        return bool(self.values["duplexd"]["events"])


def _without_nulls(value: Any) -> Any:
    """`audio.input.format: null` and the like mean absent; null in the three that can be switched off does not."""
    if not isinstance(value, dict) or not isinstance(value.get("audio"), dict):
        return value
    keep = ("turn_detection", "transcription", "noise_reduction")
    audio = {
        part: {k: v for k, v in one.items() if v is not None or k in keep} if isinstance(one, dict) else one
        for part, one in value["audio"].items()
        if one is not None
    }
    return {**value, "audio": audio}
