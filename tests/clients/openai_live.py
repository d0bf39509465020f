"""openai-python's Live over a WebSocket: three spoken turns, the first reply spoken over. Prints one JSON.

It plays all that it is given, in order, and throws nothing away; its history is the pieces of both transcripts, as they
come. A second connection of the same library joins beside it and is told the same.
"""

import asyncio
import base64
import sys

from openai import AsyncOpenAI
from person import Person

URL, SECONDS = sys.argv[1], float(sys.argv[2])
person = Person()
found = person.found
SIDES = {"session.input_transcript.delta": "user", "session.output_transcript.delta": "assistant"}


async def watch(client, session_id):
    """The sideband: what it is told of both sides."""
    found["beside"], found["beside_audio"] = [], []
    async with client.live.sideband.connect(session_id=session_id) as side:
        async for event in side:
            if event.type in SIDES:
                found["beside"].append([SIDES[event.type], event.delta])
            elif event.type == "session.output_audio.delta":
                found["beside_audio"].append(event.delta)
            elif event.type == "session.closed":
                return


async def main():
    client = AsyncOpenAI(api_key="x", base_url=f"{URL}/v1", max_retries=0)
    async with client.live.connect() as connection:
        await connection.session.start(session={"model": "clock", "instructions": "Be brief."})

        async def say(pcm):
            await connection.session.input_audio.append(audio=base64.b64encode(pcm).decode())

        async def talk():
            await person.speak(SECONDS, say)
            await connection.session.close()

        talking = watching = None
        async for event in connection:
            if event.type == "session.output_audio.delta":
                person.play("", base64.b64decode(event.delta))
                continue
            person.note(event.type)
            if event.type == "session.started":
                found["session"] = event.session.id
                watching = asyncio.create_task(watch(client, event.session.id))
                talking = asyncio.create_task(talk())
            elif event.type in SIDES:
                entry = {"role": SIDES[event.type], "text": event.delta}
                found["history"].append(entry | {"start_ms": event.start_ms, "end_ms": event.end_ms})
            elif event.type == "error":
                found["errors"].append(event.error.message)
            elif event.type == "session.closed":
                found["closed"] = event.reason
                break
        await talking
        await watching


asyncio.run(asyncio.wait_for(main(), SECONDS + 20))
person.print()
