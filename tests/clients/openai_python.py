"""openai-python over a WebSocket: three spoken turns, the first reply interrupted; a secret. Prints one JSON.

It plays what it is given in real time; at `speech_started` it truncates at what it has played. The library keeps no
history: what its application knows of an item is what it was told last, so it asks for an item that was cut.
"""

import asyncio
import base64
import sys

from openai import AsyncOpenAI
from person import Person

URL, SECONDS = sys.argv[1], float(sys.argv[2])
person = Person()
found = person.found


def spoken(item):
    return {"id": item.id, "role": item.role, "text": " ".join(part.transcript or "" for part in item.content)}


async def main():
    client = AsyncOpenAI(api_key="x", base_url=f"{URL}/v1", max_retries=0)
    found["models"] = [model.id for model in (await client.models.list()).data]
    found["secret"] = (await client.realtime.client_secrets.create(session={"type": "realtime"})).value
    async with client.realtime.connect(model="clock") as connection:
        session = {"type": "realtime", "audio": {"input": {"transcription": {"model": "x"}}}}
        await connection.session.update(session=session)

        async def say(pcm):
            await connection.input_audio_buffer.append(audio=base64.b64encode(pcm).decode())

        view, playing = {}, {}

        async def ask_for_all():
            await person.speak(SECONDS, say)
            for one in view:
                await connection.conversation.item.retrieve(item_id=one)

        asking = asyncio.create_task(ask_for_all())
        async for event in connection:
            if event.type == "response.output_audio.delta":
                if event.item_id != playing.get("item"):
                    playing = {"item": event.item_id, "begin": person.now(), "made": 0.0}
                data = base64.b64decode(event.delta)
                person.play(event.item_id, data)
                playing["made"] += len(data) / 48_000
                continue
            person.note(event.type)
            if event.type == "error":
                found["errors"].append(event.error.message)
            elif event.type == "response.output_audio_transcript.delta":
                person.tell(event.item_id, event.delta)
            elif event.type == "input_audio_buffer.speech_started":
                if playing and person.now() - playing["begin"] < playing["made"]:
                    heard = int((person.now() - playing["begin"]) * 1000)
                    where = {"item_id": playing["item"], "content_index": 0}
                    await connection.conversation.item.truncate(**where, audio_end_ms=heard)
                    person.cut(playing["item"], heard)
                playing = {}
            elif event.type in ("conversation.item.added", "conversation.item.done"):
                view[event.item.id] = spoken(event.item)
            elif event.type == "conversation.item.retrieved":
                found["remembered"].append(spoken(event.item))
                view[event.item.id] = spoken(event.item)
                if len(found["remembered"]) == len(view):
                    break
        found["history"] = list(view.values())
        await asking


asyncio.run(asyncio.wait_for(main(), SECONDS + 20))
person.print()
