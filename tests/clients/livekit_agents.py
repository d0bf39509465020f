"""LiveKit's AgentSession over its OpenAI realtime plugin, without a room: three spoken turns, the first reply
interrupted. Prints one JSON.

The loudspeaker is an output of ours that plays in real time and says how far it came, as the library asks of one; when
to interrupt, where to truncate and what to remember is the library's.
"""

import asyncio
import sys

from livekit import rtc
from livekit.agents import Agent, AgentSession
from livekit.agents.voice import io
from livekit.plugins import openai
from openai.types.realtime.realtime_audio_input_turn_detection import ServerVad
from person import Person

URL, SECONDS = sys.argv[1], float(sys.argv[2])
RATE = 24_000
person = Person(RATE)
found = person.found


class Microphone(io.AudioInput):
    """Frames as the person speaks them."""

    def __init__(self):
        super().__init__(label="microphone")
        self.index = 0

    async def __anext__(self):
        if person.now() >= SECONDS:
            await asyncio.sleep(3600)
        await asyncio.sleep(max(0.0, self.index * 0.02 - person.now()))
        pcm = person.frame(self.index)
        self.index += 1
        return rtc.AudioFrame(pcm, RATE, 1, len(pcm) // 2)


class Loudspeaker(io.AudioOutput):
    """Plays one segment after the other, in real time; what was played is what the person heard."""

    def __init__(self):
        super().__init__(label="loudspeaker", capabilities=io.AudioOutputCapabilities(pause=False), sample_rate=RATE)
        self.waiting = bytearray()
        self.playing = None
        self.ended = False

    async def capture_frame(self, frame):
        await super().capture_frame(frame)
        self.waiting += bytes(frame.data)
        if self.playing is None:
            self.ended = False
            self.playing = asyncio.create_task(self.play())
            self.on_playback_started(created_at=person.started + person.now())

    def flush(self):
        super().flush()
        self.ended = True

    def clear_buffer(self):
        self.waiting.clear()
        if self.playing is not None:
            self.playing.cancel()
            self.finish(interrupted=True)

    async def play(self):
        self.begun, self.played = person.now(), 0
        while self.waiting or not self.ended:
            due = int((person.now() - self.begun) * RATE) * 2 - self.played
            part = bytes(self.waiting[: max(0, due)])
            del self.waiting[: len(part)]
            self.played += len(part)
            if part:
                person.play("", part)
            await asyncio.sleep(0.01)
        self.finish(interrupted=False)

    def finish(self, *, interrupted):
        self.playing = None
        self.on_playback_finished(playback_position=self.played / 2 / RATE, interrupted=interrupted)


async def main():
    detection = ServerVad(type="server_vad", create_response=True, interrupt_response=True)
    model = openai.realtime.RealtimeModel(base_url=f"{URL}/v1", api_key="x", model="clock", turn_detection=detection)
    session = AgentSession(llm=model, aec_warmup_duration=None)  # There is no echo to be cancelled.
    session.input.audio, session.output.audio = Microphone(), Loudspeaker()
    session.on("error", lambda e: found["errors"].append(str(e.error)))
    await session.start(Agent(instructions="Be brief."))
    realtime = session.current_agent.realtime_llm_session
    items = {}

    def note(event):
        person.note(event["type"])
        if event["type"] == "conversation.item.retrieved":
            items[event["item"]["id"]] = event["item"]
        elif event["type"] == "response.output_audio_transcript.delta":
            person.tell(event["item_id"], event["delta"])

    def note_own(event):
        kind = event["type"] if isinstance(event, dict) else event.type
        if kind == "conversation.item.truncate":
            own = event if isinstance(event, dict) else event.model_dump()
            person.cut(own["item_id"], own["audio_end_ms"])

    realtime.on("openai_server_event_received", note)
    realtime.on("openai_client_event_queued", note_own)
    await asyncio.sleep(SECONDS - person.now())
    for item in session.history.items:
        if item.type == "message":
            entry = {"id": item.id, "role": item.role, "text": item.text_content or ""}
            found["history"].append(entry | {"interrupted": item.interrupted})
    ids = [item.id for item in realtime.chat_ctx.items if item.type == "message"]
    for item_id in ids:
        realtime.send_event({"type": "conversation.item.retrieve", "item_id": item_id})
    await asyncio.sleep(0.5)
    for item_id in ids:
        parts = items[item_id].get("content", [])
        text = " ".join((part.get("transcript") or part.get("text") or "") for part in parts)
        found["remembered"].append({"id": item_id, "role": items[item_id]["role"], "text": text})
    await session.aclose()
    await model.aclose()


asyncio.run(main())
person.print()
