"""LiveKit's OpenAI realtime plugin, without a room: three spoken turns, the first reply interrupted. Prints one JSON.

It plays what it is given in real time; at `input_speech_started` it interrupts and truncates at what it has played, as
an AgentSession does.
"""

import asyncio
import base64
import json
import math
import sys
import time

from livekit import rtc
from livekit.plugins import openai
from openai.types.realtime.realtime_audio_input_turn_detection import ServerVad

URL, SECONDS = sys.argv[1], float(sys.argv[2])
TURNS = [(1.0, 1.6), (4.5, 5.4), (13.5, 14.1)]
out = {"audio": [], "events": [], "errors": [], "interrupted": [], "history": [], "truncated": []}
started = time.monotonic()
playing = {}


def now():
    return time.monotonic() - started


async def play(message):
    texts = asyncio.create_task(read(message))
    begin, played = None, 0.0
    async for frame in message.audio_stream:
        if begin is None:
            begin = now()
            playing["id"], playing["begin"] = message.message_id, begin
        out["audio"].append([now() * 1000, message.message_id, base64.b64encode(bytes(frame.data)).decode()])
        played += frame.duration
        playing["made"] = played
    await texts


async def read(message):
    async for _ in message.text_stream:
        pass


async def generation(event):
    async for message in event.message_stream:
        await play(message)


async def main():
    model = openai.realtime.RealtimeModel(
        base_url=f"{URL}/v1",
        api_key="x",
        model="clock",
        turn_detection=ServerVad(type="server_vad", create_response=True, interrupt_response=True),
    )
    session = model.session()
    tasks = []
    session.on("error", lambda e: out["errors"].append(str(e.error)))
    items = {}

    def note(event):
        out["events"].append([now() * 1000, event["type"]])
        if event["type"] == "conversation.item.retrieved":
            items[event["item"]["id"]] = event["item"]

    session.on("openai_server_event_received", note)
    session.on("generation_created", lambda e: tasks.append(asyncio.create_task(generation(e))))

    def stop(_):
        if "begin" in playing:
            heard = min(now() - playing["begin"], playing["made"])
            if heard < playing["made"] or now() - playing["begin"] <= playing["made"]:
                session.interrupt()
                session.truncate(message_id=playing["id"], modalities=["audio"], audio_end_ms=int(heard * 1000))
                out["interrupted"].append([now() * 1000, heard * 1000])
                out["truncated"].append([playing["id"], int(heard * 1000)])
            playing.clear()

    session.on("input_speech_started", stop)
    session.update_options()
    await session.update_instructions("Be brief.")
    sent = 0
    while now() < SECONDS:
        while sent * 0.02 < now():
            at = sent * 0.02
            loud = any(a <= at < b for a, b in TURNS)
            pcm = b"".join(
                int(8000 * math.sin(2 * math.pi * 700 * (at + i / 24000)) if loud else 20 * (i % 2)).to_bytes(
                    2, "little", signed=True
                )
                for i in range(480)
            )
            session.push_audio(rtc.AudioFrame(pcm, 24000, 1, 480))
            sent += 1
        await asyncio.sleep(0.01)
    # The plugin's own copy keeps whole texts (its AgentSession cuts them): ask for what the server remembers.
    ids = [item.id for item in session.chat_ctx.items if item.type == "message"]
    for item_id in ids:
        session.send_event({"type": "conversation.item.retrieve", "item_id": item_id})
    await asyncio.sleep(0.5)
    for item_id in ids:
        parts = items[item_id].get("content", [])
        text = " ".join((part.get("transcript") or part.get("text") or "") for part in parts)
        out["history"].append({"id": item_id, "role": items[item_id]["role"], "text": text})
    for task in tasks:
        task.cancel()
    await session.aclose()
    await model.aclose()


asyncio.run(main())
print(json.dumps(out))
