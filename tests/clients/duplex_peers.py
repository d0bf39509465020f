"""The peers' duplex client, unmodified: three spoken turns, the first reply interrupted. Prints one JSON.

Its package is imported from where it was unpacked (argument 3): it needs nothing of the engine it belongs to.
"""

import asyncio
import base64
import json
import math
import sys
import time
import types

URL, SECONDS, ROOT = sys.argv[1], float(sys.argv[2]), sys.argv[3]
package = types.ModuleType("vllm_omni")
package.__path__ = [ROOT]
sys.modules["vllm_omni"] = package
from vllm_omni.clients.duplex import DuplexClient, SessionConfig  # noqa: E402

out = {"audio": [], "events": [], "errors": [], "interrupted": [], "history": [], "truncated": []}
started = time.monotonic()


def tone(ms, level=8000):
    return b"".join(
        int(level * math.sin(2 * math.pi * 700 * i / 16000)).to_bytes(2, "little", signed=True) for i in range(16 * ms)
    )


def now():
    return (time.monotonic() - started) * 1000


async def main():
    config = SessionConfig(instructions="Be brief.")
    async with DuplexClient(URL, model="clock", config=config) as client:
        replies = client.responses()
        committed = {}

        async def note():
            async for event in client.events():
                if event.type == "playback.committed":
                    committed[event.response_id] = event.text

        watch = asyncio.create_task(note())
        for turn, stop_ms in enumerate((1500, None, None)):
            await client.append_audio(tone(500))
            await client.append_audio(tone(300, 0))
            await client.commit()
            response = await anext(replies)
            out["events"].append([now(), f"turn {turn}: {response.decision}"])
            begun = time.monotonic()
            async for chunk in response.audio():
                out["audio"].append([now(), response.response_id, base64.b64encode(chunk).decode()])
                played = min(response.played_ms, (time.monotonic() - begun) * 1000)
                await client.ack_playback(played, response_id=response.response_id)
                if stop_ms is not None and played >= stop_ms:
                    await client.send({"type": "response.cancel", "response_id": response.response_id})
                    out["truncated"].append([response.response_id, played])
                    out["interrupted"].append([now(), played])
                    stop_ms = None
            out["history"].append({"id": response.response_id, "role": "assistant", "text": response.transcript})
            await asyncio.sleep(0.3)
        watch.cancel()
    for entry in out["history"]:  # What the server committed, where it says so.
        entry["text"] = committed.get(entry["id"], entry["text"])


asyncio.run(asyncio.wait_for(main(), SECONDS))
print(json.dumps(out))
