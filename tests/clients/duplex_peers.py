"""The peers' duplex client, unmodified: three spoken turns, the first reply interrupted by a voice. Prints one JSON.

Its package is imported from where it was unpacked (argument 3): it needs nothing of the engine it belongs to. It plays
in real time what it takes from a response and acknowledges that; a voice over it ends the response, and it stops there.
"""

import asyncio
import sys
import types

from person import Person

URL, SECONDS, ROOT = sys.argv[1], float(sys.argv[2]), sys.argv[3]
package = types.ModuleType("vllm_omni")
package.__path__ = [ROOT]
sys.modules["vllm_omni"] = package
from vllm_omni.clients.duplex import DuplexClient, SessionConfig  # noqa: E402

RATE_OUT = 24_000
person = Person(16_000)
found = person.found


async def play(client, response):
    """Take, play and acknowledge, until the response ends and what was taken is played or a voice stopped it."""
    waiting, begun, played = bytearray(), None, 0
    taking = asyncio.create_task(take(response, waiting))
    while not (taking.done() and not waiting):
        if response.finished and status_of(response) == "cancelled":
            break
        if waiting and begun is None:
            begun = person.now()
        if begun is not None:
            due = int((person.now() - begun) * RATE_OUT) * 2 - played
            part = bytes(waiting[: max(0, due)])
            del waiting[: len(part)]
            played += len(part)
            if part:
                person.play(response.response_id, part)
                await client.ack_playback(played / 2 / RATE_OUT * 1000, response_id=response.response_id)
        await asyncio.sleep(0.05)
    await taking
    if status_of(response) == "cancelled":
        person.cut(response.response_id, played / 2 / RATE_OUT * 1000)
    entry = {"id": response.response_id, "role": "assistant", "text": response.transcript}
    found["history"].append(entry)


async def take(response, waiting):
    async for chunk in response.audio():
        waiting += chunk


def status_of(response):
    done = response.done_event
    return "" if done is None else done.raw.get("response", {}).get("status", "")


async def main():
    config = SessionConfig(instructions="Be brief.", turn_detection={"type": "server_vad"})
    async with DuplexClient(URL, model="clock", config=config) as client:

        async def note():
            async for event in client.events():
                if event.type == "playback.committed":
                    entry = {"id": event.response_id, "role": "assistant", "text": event.text}
                    found["remembered"].append(entry)
                elif event.type == "error":
                    found["errors"].append(event.message)
                elif event.type == "response.output_audio_transcript.delta":
                    person.tell(event.response_id, event.text)
                if not event.type.endswith(".delta"):
                    person.note(event.type)

        async def answer():
            async for response in client.responses():
                await play(client, response)

        tasks = [asyncio.create_task(note()), asyncio.create_task(answer())]
        await person.speak(SECONDS, client.append_audio)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


asyncio.run(asyncio.wait_for(main(), SECONDS + 20))
person.print()
