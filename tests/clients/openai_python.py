"""openai-python over a WebSocket: three spoken turns, the first reply interrupted; a secret; a call. Prints one JSON.

It plays what it is given in real time; at `speech_started` it truncates at what it has played.
"""

import asyncio
import base64
import json
import math
import sys
import time
from pathlib import Path

from openai import AsyncOpenAI

URL, SECONDS, OFFER = sys.argv[1], float(sys.argv[2]), sys.argv[3]
TURNS = [(1.0, 1.6), (4.5, 5.4), (13.5, 14.1)]
out = {"audio": [], "events": [], "errors": [], "interrupted": [], "history": [], "truncated": []}
started = time.monotonic()


def now():
    return time.monotonic() - started


async def speak(connection):
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
            await connection.input_audio_buffer.append(audio=base64.b64encode(pcm).decode())
            sent += 1
        await asyncio.sleep(0.01)


async def main():
    client = AsyncOpenAI(api_key="x", base_url=f"{URL}/v1", max_retries=0)
    out["models"] = [model.id for model in (await client.models.list()).data]
    out["secret"] = (await client.realtime.client_secrets.create(session={"type": "realtime"})).value
    call = await client.realtime.calls.create(
        sdp=Path(OFFER).read_text(), session={"type": "realtime", "model": "clock"}
    )
    out["answer"] = (await call.aread()).decode() if hasattr(call, "aread") else call.text
    out["call_id"] = call.response.headers["Location"].rsplit("/", 1)[1]
    await client.realtime.calls.hangup(out["call_id"])
    async with client.realtime.connect(model="clock") as connection:
        await connection.session.update(
            session={"type": "realtime", "audio": {"input": {"transcription": {"model": "x"}}}}
        )
        speaker = asyncio.create_task(speak(connection))
        begin, made, item, items = None, 0.0, None, []

        async def ask_for_all():
            await speaker
            for one in items:
                await connection.conversation.item.retrieve(item_id=one)

        asking = asyncio.create_task(ask_for_all())
        async for event in connection:
            if event.type == "response.output_audio.delta":
                if event.item_id != item:
                    begin, made, item = now(), 0.0, event.item_id
                data = base64.b64decode(event.delta)
                out["audio"].append([now() * 1000, item, event.delta])
                made += len(data) / 48000
                continue
            out["events"].append([now() * 1000, event.type])
            if event.type == "error":
                out["errors"].append(event.error.message)
            elif event.type == "input_audio_buffer.speech_started" and item and now() - begin < made:
                heard = int((now() - begin) * 1000)
                await connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=heard)
                out["interrupted"].append([now() * 1000, heard])
                out["truncated"].append([item, heard])
                item = None
            elif event.type == "conversation.item.added":
                items.append(event.item.id)
            elif event.type == "conversation.item.retrieved":
                part = event.item.content[0]
                out["history"].append({"id": event.item.id, "role": event.item.role, "text": part.transcript or ""})
                if len(out["history"]) == len(items):
                    break
        await asking


asyncio.run(asyncio.wait_for(main(), SECONDS + 20))
print(json.dumps(out))
