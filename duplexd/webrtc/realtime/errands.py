"""Requests that a session of their own answers: speech, transcription, chat. HTTP in, HTTP out.

POST /v1/audio/speech            words in, their sound out, streamed as it is made (pcm, wav, opus; or SSE)
POST /v1/audio/transcriptions    a recording in, its words out
POST /v1/chat/completions        messages in, text (and sound) out, whole or streamed

1. Each is a client of the Realtime protocol inside the daemon: the same admission, the same limits, the same engine.
2. Nobody listens while it is made, so sound counts as heard when it has been sent: it is made as fast as it can be.
3. Whoever hangs up ends the session behind the request.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import io
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import av
import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from duplexd import clock
from duplexd.errors import InputRefused
from duplexd.webrtc.realtime import check as c
from duplexd.webrtc.realtime.container import OggOpus, wav_header
from duplexd.webrtc.realtime.faults import Fault, invalid, missing
from duplexd.webrtc.realtime.formats import PCM, RATES, base64_of
from duplexd.webrtc.realtime.idempotency import ANSWER_BYTES_MAX, HEADER, WRITTEN
from duplexd.webrtc.realtime.items import check_image
from duplexd.webrtc.realtime.requests import ANSWERING, BODY_BYTES_MAX, Refusal, json_body, read_form, too_large
from duplexd.webrtc.realtime.routes import RealtimeRoutes
from duplexd.webrtc.realtime.secrets import Key
from duplexd.webrtc.realtime.session import SCRIPT_MAX, RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import METADATA, TOOL_CHOICE, Settings
from duplexd.webrtc.realtime.unpack import LARGE, undone
from duplexd.webrtc.realtime.visit import RealtimeVisit

ANSWER_WITHIN_S = 120.0  #: between two events of a session that is asked for something
RECORDING_BYTES_MAX = 25 * 1024 * 1024
FORM_BYTES_MAX = BODY_BYTES_MAX  #: a recording, and what is said about it
RECORDING_S_MAX = 600.0
APPEND_SAMPLES = 24_000
EVENTS_MAX = 8192
PCM_RATE = RATES["audio/pcm"]
SOUNDS = {"pcm": "audio/pcm", "wav": "audio/wav", "opus": "audio/ogg"}
_encoder = msgspec.json.Encoder()


class Collector:
    """A sink that hands events to whoever waits for them, each with what its response had taken by then (`usage`)."""

    def __init__(self, core: RealtimeSession) -> None:
        self._core = core
        self.queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(EVENTS_MAX)
        self.has_lost = False  #: an event found no room: what is told from here on would not be the whole

    def tell(self, text: str) -> None:
        if self.queue.full():
            self.has_lost = True
        if not self.has_lost:
            event = msgspec.json.decode(text)
            event["usage"] = self._core.usage_of(event["response_id"]) if "response_id" in event else None
            self.queue.put_nowait(event)

    @property
    def backlog_bytes(self) -> int:
        """Sound that the client has not taken yet: beyond a bound, no more is made."""
        return self.queue.qsize() * 16_384

    async def close(self, code: int, reason: str) -> None:
        if not self.queue.full():
            self.queue.put_nowait(None)


class Errand:
    """One session, asked for one thing."""

    def __init__(self, visit: RealtimeVisit, collector: Collector) -> None:
        self._visit = visit
        self._collector = collector
        self.done: dict[str, Any] = {"status": "failed"}  #: the response, as it ended

    def send(self, kind: str, **fields: Any) -> None:
        self._visit.on_text(_encoder.encode({"type": kind, **fields}))

    def say(self, pcm: NDArray[np.int16]) -> None:
        """The person's sound, int16 at 24 kHz."""
        for start in range(0, len(pcm), APPEND_SAMPLES):
            piece = pcm[start : start + APPEND_SAMPLES]
            self.send("input_audio_buffer.append", audio=base64_of(piece.astype("<i2").tobytes()))
        self.send("input_audio_buffer.commit")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Events as they come. Raises Refusal for an error, a session that ends, and a silence that lasts too long."""
        sent_ms = 0.0
        while True:
            if self._collector.has_lost and self._collector.queue.empty():
                said = f"More than {EVENTS_MAX} events waited for a client that reads too slowly."
                raise Refusal(500, "events_lost", said)
            try:
                event = await asyncio.wait_for(self._collector.queue.get(), ANSWER_WITHIN_S)
            except TimeoutError as error:
                raise Refusal(504, "no_answer", f"Nothing came for {ANSWER_WITHIN_S:g} s.") from error
            if event is None:
                raise Refusal(503, "session_ended", "The session behind this request ended; try again.")
            if event["type"] == "error":
                fault = event["error"]
                raise Refusal(400, fault.get("code", ""), fault["message"], param=fault.get("param", ""))
            if event["type"] == "response.output_audio.delta":
                sent_ms += len(event["delta"]) * 3 / 4 / 48
                self.send("playback.ack", played_ms=sent_ms, response_id=event["response_id"])
            yield event

    async def wait(self, kind: str) -> dict[str, Any]:
        async for event in self.events():
            if event["type"] == kind:
                return event
        raise AssertionError("events() ends by raising")


def check_done(response: dict[str, Any]) -> None:
    """Raises Refusal when a response has not come to its end, or to the bound it was asked for."""
    status = response["status"]
    if status in ("completed", "incomplete"):
        return
    error = (response.get("status_details") or {}).get("error", {})
    http = 503 if error.get("code") == "busy" else 500
    raise Refusal(http, error.get("code", f"response_{status}"), error.get("message", f"The response is {status}."))


class Stream:
    """An answer that is written as it is made. `begin` promises it; what fails afterwards must not look whole."""

    def __init__(self, request: web.Request, **headers: str) -> None:
        self._request = request
        self._answer = web.StreamResponse(headers={name.replace("_", "-"): one for name, one in headers.items()})
        self._written: bytearray | None = bytearray() if HEADER in request.headers else None  #: for a retry
        self.has_begun = False

    async def write(self, data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._request[ANSWERING] = True
            await self._answer.prepare(self._request)
        if data:
            await self._answer.write(data)
            self._remember(data)

    def _remember(self, data: bytes) -> None:
        if self._written is not None:
            self._written += data
            if len(self._written) > ANSWER_BYTES_MAX:
                self._written = None

    async def end(self, *, is_whole: bool = True) -> web.StreamResponse:
        """`is_whole`: False when it ends with an error."""
        await self._answer.write_eof()
        if is_whole and self._written is not None:
            self._request[WRITTEN] = bytes(self._written)
        return self._answer

    def cut(self) -> web.StreamResponse:
        """The connection breaks in the middle of the body: no client takes it for whole (RFC 9112 §8)."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._answer


class Whole:
    """The final object of an answer that is streamed: what its pieces are together."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._bytes = 0

    def add(self, data: bytes) -> None:
        self._digest.update(data)
        self._bytes += len(data)

    def wire(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


class Errands:
    def __init__(self, realtime: RealtimeRoutes) -> None:
        self._realtime = realtime
        self._frontend = realtime.frontend
        self._door = realtime.door

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/audio/speech", self.speech),
            web.post("/v1/audio/transcriptions", self.transcribe),
            web.post("/v1/chat/completions", self.chat),
        ]

    @asynccontextmanager
    async def _errand(self, key: Key, *, asked: dict[str, Any] | None = None) -> AsyncIterator[Errand]:
        """A session for one request. `asked`: what of the session its client wants; its key may lock that."""
        settings = key.settings.change(asked or {}, locked=key.locked)
        own: dict[str, Any] = {"input": {"turn_detection": None, "transcription": {}, "format": {"type": PCM}}}
        settings = settings.change({"audio": {**own, "output": {"format": {"type": PCM}}}})
        visit = await self._frontend.admit(
            lambda number, line: self._realtime.core(number, line, settings, key.locked, Transport.WEBSOCKET)
        )
        collector = Collector(visit.bridge.session)
        visit.sinks.append(collector)
        visit.open()
        try:
            yield Errand(visit, collector)
        finally:
            visit.bridge.session.close()
            self._frontend.leave(visit, "the request is answered")

    def _enter(self, request: web.Request) -> Key:
        self._door.check(request)
        return self._door.settings(request, model=self._realtime.served(request))

    async def _once(
        self, request: web.Request, make: Callable[[], Awaitable[web.StreamResponse]], *content: bytes
    ) -> web.StreamResponse:
        return await self._realtime.answers.once(request, make, content=content, now=clock.now())

    # Speech -----------------------------------------------------------------------------------------------------------

    async def speech(self, request: web.Request) -> web.StreamResponse:
        key = self._enter(request)
        wanted = _SPEECH(await json_body(request) or {}, "")
        return await self._once(request, lambda: self._speech(request, key, wanted), _encoder.encode(wanted))

    async def _speech(self, request: web.Request, key: Key, wanted: dict[str, Any]) -> web.StreamResponse:
        sound = wanted.get("response_format", "wav")
        by_events = wanted.get("stream_format") == "sse"
        kind = "text/event-stream" if by_events else SOUNDS[sound]
        stream = Stream(request, Content_Type=kind, X_Sample_Rate=str(PCM_RATE))
        async with self._errand(key) as errand:
            spoken = {} if key.settings.speaks else {"output_modalities": ["audio"]}
            errand.send("response.create", response={"duplexd": {"script": wanted["input"]}, **spoken})
            whole = Whole()
            try:
                async for data in _sound_of(errand, _SoundWriter(sound)):
                    whole.add(data)
                    shown = _sse({"type": "speech.audio.delta", "audio": base64_of(data)}) if by_events else data
                    await stream.write(shown)
                usage = _speech_usage(errand.done)
            except Refusal as refusal:
                if not stream.has_begun:
                    raise
                if not by_events:
                    return stream.cut()
                await stream.write(_sse({"type": "error", **refusal.body()}))
                return await stream.end(is_whole=False)
            if by_events:
                done = {"type": "speech.audio.done", "usage": usage, "duplexd": {"output": whole.wire()}}
                await stream.write(_sse(done))
            return await stream.end()

    # Transcription ----------------------------------------------------------------------------------------------------

    async def transcribe(self, request: web.Request) -> web.StreamResponse:
        key = self._enter(request)
        fields, recording = await _form(request)
        make = functools.partial(self._transcribe, request, key, fields, recording)
        return await self._once(request, make, _encoder.encode(fields), recording)

    async def _transcribe(
        self, request: web.Request, key: Key, fields: dict[str, str], recording: bytes
    ) -> web.StreamResponse:
        kind = fields.get("response_format", "json")
        if kind not in ("json", "text", "verbose_json"):
            raise invalid("response_format", kind, "json, text, verbose_json")
        pcm = await asyncio.get_running_loop().run_in_executor(_decoders(), decode_recording, recording)
        async with self._errand(key) as errand:
            errand.say(pcm)
            done = await errand.wait("conversation.item.input_audio_transcription.completed")
        text, seconds = done["transcript"], round(len(pcm) / PCM_RATE, 3)
        if kind == "text":
            return web.Response(text=text + "\n", content_type="text/plain")
        usage = {"type": "duration", "seconds": seconds}
        body: dict[str, Any] = {"text": text, "usage": usage}
        if kind == "verbose_json":
            body |= {"task": "transcribe", "language": "english", "duration": seconds}
        if fields.get("stream") == "true":
            stream = Stream(request, Content_Type="text/event-stream")
            await stream.write(_sse({"type": "transcript.text.delta", "delta": text}))
            await stream.write(_sse({"type": "transcript.text.done", "text": text, "usage": usage}))
            return await stream.end()
        return web.json_response(body)

    # Chat -------------------------------------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        key = self._enter(request)
        wanted = _chat_request(await json_body(request))
        return await self._once(request, lambda: self._chat(request, key, wanted), _encoder.encode(wanted))

    async def _chat(self, request: web.Request, key: Key, wanted: dict[str, Any]) -> web.StreamResponse:
        await _unpack_recordings(wanted["messages"])
        chat = Chat(wanted, model=self._realtime.served(request))
        steps = chat.steps()
        async with self._errand(key, asked=chat.session(key.settings)) as errand:
            for step in steps:
                await step(errand)
            errand.send("response.create", response=chat.response())
            if wanted.get("stream"):
                return await self._stream(request, chat, errand)
            async for event in errand.events():
                chat.take(event)
                if event["type"] == "response.done":
                    break
        check_done(chat.done)
        return web.json_response(chat.whole())

    async def _stream(self, request: web.Request, chat: Chat, errand: Errand) -> web.StreamResponse:
        stream = Stream(request, Content_Type="text/event-stream", Cache_Control="no-cache")
        try:
            async for event in errand.events():
                for chunk in chat.take(event):
                    await stream.write(_sse(chunk))
                if event["type"] == "response.done":
                    break
            check_done(chat.done)
        except Refusal as refusal:
            if not stream.has_begun:
                raise
            # No finish_reason and no [DONE]: what SDKs take for an answer that broke off.
            await stream.write(_sse(refusal.body()))
            return await stream.end(is_whole=False)
        for chunk in chat.ends():
            await stream.write(_sse(chunk))
        await stream.write(b"data: [DONE]\n\n")
        return await stream.end()


async def _sound_of(errand: Errand, writer: _SoundWriter) -> AsyncIterator[bytes]:
    """The sound of a response in its container; nothing before there is some. Raises Refusal for one that fails."""
    begun = False
    async for event in errand.events():
        if event["type"] == "response.output_audio.delta":
            data = writer.push(base64.b64decode(event["delta"]))
            if not begun:
                begun, data = True, writer.begin() + data
            if data:
                yield data
        elif event["type"] == "response.done":
            errand.done = event["response"]
            break
    check_done(errand.done)
    if not begun:
        raise Refusal(400, "nothing_to_say", "These words make no sound.", param="input")
    if data := writer.finish():
        yield data


class _SoundWriter:
    """PCM of 24 kHz in pieces to one container."""

    def __init__(self, sound: str) -> None:
        self._sound = sound
        self._ogg = OggOpus() if sound == "opus" else None

    def begin(self) -> bytes:
        if self._ogg is not None:
            return self._ogg.begin()
        return wav_header(rate=PCM_RATE) if self._sound == "wav" else b""

    def push(self, data: bytes) -> bytes:
        return data if self._ogg is None else self._ogg.push(np.frombuffer(data, "<i2").astype(np.int16))

    def finish(self) -> bytes:
        return b"" if self._ogg is None else self._ogg.finish()


@functools.cache
def _decoders() -> ThreadPoolExecutor:
    """Threads of their own: whoever sends pictures or asks for names must not wait for somebody's recording."""
    return ThreadPoolExecutor(2, thread_name_prefix="duplexd-decode")


def decode_recording(data: bytes) -> NDArray[np.int16]:
    """A recording in any container the `av` wheel reads, as int16 (n,) at 24 kHz mono. In a thread: it may take long.

    Raises InputRefused for what is none, and for one that is too long; decoding stops there.
    """
    pieces: list[NDArray[np.int16]] = []
    count = 0
    try:
        with av.open(io.BytesIO(data)) as container:
            stream = next((one for one in container.streams if one.type == "audio"), None)
            if stream is None:
                raise InputRefused("The recording holds no sound.")
            resampler = av.AudioResampler(format="s16", layout="mono", rate=PCM_RATE)
            for frame in container.decode(stream):
                for made in resampler.resample(frame):
                    pieces.append(made.to_ndarray().reshape(-1))
                    count += len(pieces[-1])
                if count > RECORDING_S_MAX * PCM_RATE:
                    raise InputRefused(f"The recording is longer than {RECORDING_S_MAX:g} s.")
            pieces += [made.to_ndarray().reshape(-1) for made in resampler.resample(None)]
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        raise InputRefused(f"The recording cannot be read: {error}.") from error
    return np.concatenate(pieces).astype(np.int16) if pieces else np.zeros(0, np.int16)


async def _form(request: web.Request) -> tuple[dict[str, str], bytes]:
    if request.content_type != "multipart/form-data":
        raise Refusal(415, "unsupported_media_type", "Send multipart/form-data with the parts 'file' and 'model'.")
    parts = await read_form(request, bytes_max=FORM_BYTES_MAX)
    recording = parts.pop("file", b"")
    if not recording:
        raise missing("file")
    if len(recording) > RECORDING_BYTES_MAX:
        raise too_large("The part 'file'", RECORDING_BYTES_MAX, param="file")
    return {name.removesuffix("[]"): data.decode(errors="replace") for name, data in parts.items()}, recording


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


def _speech_usage(response: dict[str, Any]) -> dict[str, int]:
    usage = response["usage"]
    return {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}


_SPEECH = c.fields(
    {
        "model": c.anything,
        "input": c.text(longest=SCRIPT_MAX, shortest=1),
        "voice": c.anything,
        "instructions": c.nullable(c.text(longest=4096)),
        "response_format": c.one_of(*SOUNDS),
        "speed": c.one_of(1, 1.0),
        "stream_format": c.one_of("audio", "sse"),
        "stream": c.flag,
    },
    required=("input",),
)

# Chat ----------------------------------------------------------------------------------------------------------------

_MESSAGES_MAX = 512


def _stream_options(value: Any, param: str) -> Any:
    if not isinstance(value, dict):
        raise invalid(param, value, "an object")
    known = {name: one for name, one in value.items() if name in _STREAM_OPTIONS}
    return {name: c.nullable(c.flag)(one, f"{param}.{name}") for name, one in known.items()}


_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
_CHAT = c.fields(
    {
        "model": c.anything,
        "messages": c.many(c.anything, most=_MESSAGES_MAX),
        "modalities": c.nullable(c.many(c.one_of("text", "audio"), most=2)),
        "audio": c.nullable(c.fields({"voice": c.anything, "format": c.one_of("wav", "pcm16", "opus")})),
        "stream": c.nullable(c.flag),
        "stream_options": c.nullable(_stream_options),
        "max_tokens": c.nullable(c.whole(1, 1_000_000)),
        "max_completion_tokens": c.nullable(c.whole(1, 1_000_000)),
        "tools": c.nullable(c.many(c.anything, most=128)),
        "tool_choice": c.nullable(c.anything),
        "n": c.nullable(c.one_of(1)),
        "metadata": METADATA,
    },
    required=("messages",),
)
#: What other servers sample with. The thinker here decodes in one way, so they change nothing (docs/realtime.md).
_IGNORED = frozenset(
    {
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "user", "store", "logit_bias"),
        *("parallel_tool_calls", "service_tier", "reasoning_effort", "top_k", "repetition_penalty", "ignore_eos"),
        *(
            "safety_identifier",
            "prompt_cache_key",
            "verbosity",
            "logprobs",
            "stop",
            "extra_body",
            "sampling_params_list",
        ),
    }
)


def _chat_request(body: Any) -> dict[str, Any]:
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in _IGNORED}
    checked: dict[str, Any] = _CHAT(body if body is not None else {}, "")
    if not checked["messages"]:
        raise invalid("messages", [], "at least one message")
    return checked


class Chat:
    """One chat request: what a session must be told for it, and how its events look to a chat client."""

    def __init__(self, wanted: dict[str, Any], *, model: str) -> None:
        self._wanted = wanted
        self._model = model
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = round(clock.wall_seconds())
        self._speaks = "audio" in (wanted.get("modalities") or ["text"])
        self._format = (wanted.get("audio") or {}).get("format", "wav")
        self._text = ""
        self._sound = bytearray()
        self._calls: list[dict[str, Any]] = []
        self.done: dict[str, Any] = {"status": "failed"}

    # In ---------------------------------------------------------------------------------------------------------------

    def session(self, before: Settings) -> dict[str, Any]:
        """What of the session it asks for; what it does not name stays as its key has it (`before`)."""
        wanted: dict[str, Any] = {"type": "realtime"}
        modalities = ["audio"] if self._speaks else ["text"]
        if modalities != before.values["output_modalities"]:
            wanted["output_modalities"] = modalities
        instructions = "\n".join(_text_of(m) for m in self._wanted["messages"] if _is_system(m))
        if instructions:
            wanted["instructions"] = instructions
        if self._wanted.get("tools"):
            wanted["tools"] = [_tool_of(tool, index) for index, tool in enumerate(self._wanted["tools"])]
        choice = self._wanted.get("tool_choice")
        if isinstance(choice, dict):
            function = choice.get("function")
            choice = {"type": "function", "name": function.get("name", "") if isinstance(function, dict) else ""}
        if choice is not None:
            wanted["tool_choice"] = TOOL_CHOICE(choice, "tool_choice")
        return wanted

    def response(self) -> dict[str, Any]:
        limit = self._wanted.get("max_completion_tokens") or self._wanted.get("max_tokens")
        return {} if limit is None else {"max_output_tokens": min(4096, limit)}

    def steps(self) -> list[Any]:
        """What to do for each message, in order."""
        steps = []
        for index, message in enumerate(self._wanted["messages"]):
            if not isinstance(message, dict):
                raise invalid(f"messages[{index}]", message, "an object")
            if not _is_system(message):
                steps += _steps_of(message, f"messages[{index}]")
        return steps

    # Out --------------------------------------------------------------------------------------------------------------

    def take(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Chunks for a client that streams; each with the usage so far, if it wants that."""
        chunks = self._chunks_of(event)
        if self._option("continuous_usage_stats") and event.get("usage") is not None:
            usage = _usage_of(event["usage"])
            chunks = [{**chunk, "usage": usage} for chunk in chunks]
        return chunks

    def _option(self, name: str) -> bool:
        return bool((self._wanted.get("stream_options") or {}).get(name))

    def _chunks_of(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        match event["type"]:
            case "response.output_text.delta" | "response.output_audio_transcript.delta":
                self._text += event["delta"]
                if self._speaks:
                    return [self._chunk({"content": event["delta"], "audio": {"transcript": event["delta"]}}, "text")]
                return [self._chunk({"content": event["delta"]}, "text")]
            case "response.output_audio.delta":
                data = base64.b64decode(event["delta"])
                self._sound += data
                audio = {"id": f"audio_{self._id}", "data": base64_of(self._piece(data))}
                return [self._chunk({"audio": audio}, "audio")]
            case "response.function_call_arguments.done":
                function = {"name": event["name"], "arguments": event["arguments"]}
                call = {"id": event["call_id"], "type": "function", "function": function}
                self._calls.append(call)
                return [self._chunk({"tool_calls": [{"index": len(self._calls) - 1, **call}]}, "text")]
            case "response.done":
                self.done = event["response"]
        return []

    def _piece(self, data: bytes) -> bytes:
        return wav_header(rate=PCM_RATE, data_bytes=len(data)) + data if self._format == "wav" else data

    def _chunk(self, delta: dict[str, Any], modality: str, *, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish}
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model}
        return {**head, "choices": [choice], "modality": modality}

    def ends(self) -> list[dict[str, Any]]:
        last = self._chunk({}, "text", finish=self._finish())
        if self._option("continuous_usage_stats"):
            last["usage"] = self._usage()
        if not self._option("include_usage"):
            return [last]
        return [last, {**last, "choices": [], "usage": self._usage()}]

    def _finish(self) -> str:
        if self._calls:
            return "tool_calls"
        return "length" if self.done["status"] == "incomplete" else "stop"

    def _usage(self) -> dict[str, Any]:
        return _usage_of(self.done["usage"])

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None if self._speaks else self._text.strip()}
        if self._speaks:
            message["audio"] = {
                "id": f"audio_{self._id}",
                "data": base64_of(self._container()),
                "transcript": self._text.strip(),
                "expires_at": self._created,
            }
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {"index": 0, "message": message, "finish_reason": self._finish()}
        head = {"id": self._id, "object": "chat.completion", "created": self._created, "model": self._model}
        return {**head, "choices": [choice], "usage": self._usage()}

    def _container(self) -> bytes:
        data = bytes(self._sound)
        if self._format == "opus":
            ogg = OggOpus()
            return ogg.begin() + ogg.push(np.frombuffer(data, "<i2").astype(np.int16)) + ogg.finish()
        return self._piece(data)


def _usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """The protocol's figures as chat names them."""
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": usage["input_token_details"]["cached_tokens"]},
    }


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _tool_of(tool: Any, index: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise invalid(f"tools[{index}]", tool, '{"type": "function", "function": {...}}')
    kept = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", **kept}


def _steps_of(message: dict[str, Any], param: str) -> list[Any]:
    role = message.get("role")
    if role == "tool":
        item = {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": _text_of(message)}
        return [_create(item)]
    if role == "assistant":
        given = message.get("tool_calls")
        calls = given if isinstance(given, list) else []
        steps = [_create(_call_item(call)) for call in calls if isinstance(call, dict)]
        text = _text_of(message)
        if not text:
            return steps
        parts = [{"type": "output_text", "text": text}]
        return [_create({"type": "message", "role": "assistant", "content": parts}), *steps]
    if role != "user":
        raise invalid(f"{param}.role", role, "system, developer, user, assistant, tool")
    content = message.get("content")
    if isinstance(content, str):
        return [_create(_user_item([{"type": "input_text", "text": content}]))]
    if not isinstance(content, list):
        raise invalid(f"{param}.content", content, "a text or a list of parts")
    return [_part_step(part, f"{param}.content[{index}]") for index, part in enumerate(content)]


def _user_item(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": parts}


def _call_item(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "{}")
    return {"type": "function_call", "call_id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def _recording_of(data: Any, param: str) -> bytes:
    try:
        return base64.b64decode(c.text(longest=BODY_BYTES_MAX)(data, f"{param}.input_audio.data"), validate=True)
    except ValueError as error:
        raise Fault("invalid_value", f"The sound is not base64: {error}.", param=param) from error


def _create(item: dict[str, Any]) -> Any:
    async def step(errand: Errand) -> None:
        errand.send("conversation.item.create", item=item)

    return step


def _part_step(part: Any, param: str) -> Any:
    if not isinstance(part, dict):
        raise invalid(param, part, "an object")
    match part.get("type"):
        case "text":
            return _create(_user_item([{"type": "input_text", "text": str(part.get("text", ""))}]))
        case "image_url":
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, dict) else url
            check_image(str(url), f"{param}.image_url.url")
            return _create(_user_item([{"type": "input_image", "image_url": url}]))
        case "input_audio" | "audio_url":
            return _listen(part, param)
    raise invalid(f"{param}.type", part.get("type"), "text, image_url, input_audio")


async def _unpack_recordings(messages: list[Any]) -> None:
    """Large recordings become bytes: at once they would hold up everybody's voice."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))
    for part in parts:
        given = part.get("input_audio") or part.get("audio_url")
        if not isinstance(given, dict):
            continue
        data = _data_of(given)
        if isinstance(data, str) and len(data) >= LARGE:
            given["data"] = await undone(data)


def _data_of(given: dict[str, Any]) -> Any:
    return given.get("data") or str(given.get("url", "")).partition(";base64,")[2]


def _listen(part: dict[str, Any], param: str) -> Any:
    given = part.get("input_audio") or part.get("audio_url")
    if not isinstance(given, dict):
        raise invalid(f"{param}.input_audio", given, "an object")
    data = _data_of(given)
    recording = data if isinstance(data, bytes) else _recording_of(data, param)
    if not recording:
        raise missing(f"{param}.input_audio.data")

    async def step(errand: Errand) -> None:
        """What follows must stand behind these words: they are waited for."""
        pcm = await asyncio.get_running_loop().run_in_executor(_decoders(), decode_recording, recording)
        errand.say(pcm)
        await errand.wait("conversation.item.input_audio_transcription.completed")

    return step
