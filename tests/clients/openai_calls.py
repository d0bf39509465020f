"""openai-python makes a call, aiortc carries its sound: three spoken turns, the first reply interrupted. One JSON.

Argument 3 is `realtime` (`client.realtime.calls`, joined by `client.realtime.connect(call_id=...)`) or `live`
(`client.live.create`, joined by `client.live.sideband.connect`). What is recorded is what comes out of the track.
"""

import asyncio
import base64
import fractions
import json
import sys

import aioice.ice
import av
import numpy as np
from aiortc import MediaStreamTrack, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from openai import AsyncOpenAI
from person import Person

URL, SECONDS, KIND = sys.argv[1], float(sys.argv[2]), sys.argv[3]
RATE = 48_000
person = Person(RATE)
found = person.found
found["rate"] = RATE
# This machine's loopback is where the daemon's media is, and aiortc leaves it out.
aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: ["127.0.0.1"]


class Microphone(MediaStreamTrack):
    """A track of what the person says, in real time."""

    kind = "audio"

    def __init__(self):
        super().__init__()
        self.index = 0

    async def recv(self):
        await asyncio.sleep(max(0.0, self.index * 0.02 - person.now()))
        pcm = np.frombuffer(person.frame(self.index), "<i2").reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, self.index * 960, fractions.Fraction(1, RATE)
        self.index += 1
        return frame


async def listen(track):
    try:
        while True:
            frame = await track.recv()
            sound = frame.to_ndarray().reshape(-1, len(frame.layout.channels))[:, 0]
            person.play("", sound.astype("<i2").tobytes())
    except MediaStreamError:
        return


class Call:
    """The media side, and the events on its channel."""

    def __init__(self):
        self.connection = RTCPeerConnection()
        self.channel = self.connection.createDataChannel("oai-events")
        self.events = asyncio.Queue()
        self.channel.on("message", lambda text: self.events.put_nowait(json.loads(text)))
        self.connection.addTrack(Microphone())
        self.listening = []
        self.connection.on("track", lambda track: self.listening.append(asyncio.ensure_future(listen(track))))

    async def offer(self):
        await self.connection.setLocalDescription(await self.connection.createOffer())
        return self.connection.localDescription.sdp

    async def answer(self, sdp):
        await self.connection.setRemoteDescription(RTCSessionDescription(sdp=sdp, type="answer"))

    async def until(self, kind):
        while (await self.events.get())["type"] != kind:
            pass


def spoken(item):
    return {"id": item.id, "role": item.role, "text": " ".join(part.transcript or "" for part in item.content)}


async def realtime(client, call):
    detection = {"type": "semantic_vad"}
    session = {"type": "realtime", "model": "clock", "audio": {"input": {"turn_detection": detection}}}
    answer = await client.realtime.calls.create(sdp=await call.offer(), session=session)
    await call.answer(answer.text)
    call_id = answer.response.headers["Location"].rsplit("/", 1)[1]
    await call.until("session.created")
    view = {}
    async with client.realtime.connect(call_id=call_id) as side:

        async def ask_for_all():
            await asyncio.sleep(SECONDS - person.now())
            for one in view:
                await side.conversation.item.retrieve(item_id=one)

        asking = asyncio.create_task(ask_for_all())
        async for event in side:
            person.note(event.type)
            if event.type == "error":
                found["errors"].append(event.error.message)
            elif event.type in ("conversation.item.added", "conversation.item.done"):
                view[event.item.id] = spoken(event.item)
            elif event.type == "conversation.item.truncated":
                person.cut(event.item_id, event.audio_end_ms)  # The daemon's: it knows what was sent.
            elif event.type == "response.output_audio_transcript.delta":
                person.tell(event.item_id, event.delta)
            elif event.type == "conversation.item.retrieved":
                found["remembered"].append(spoken(event.item))
                view[event.item.id] = spoken(event.item)
                if len(found["remembered"]) == len(view):
                    break
        await asking
    found["history"] = list(view.values())
    await client.realtime.calls.hangup(call_id)


async def live(client, call):
    session = {"model": "clock", "instructions": "Be brief."}
    made = await client.live.create(session=session, transport={"type": "webrtc", "sdp": await call.offer()})
    await call.answer(made.transport.sdp)
    await call.until("session.started")
    sides = {"session.input_transcript.delta": "user", "session.output_transcript.delta": "assistant"}
    beside = b""
    async with client.live.sideband.connect(session_id=made.session.id) as side:

        async def end():
            await asyncio.sleep(SECONDS - person.now())
            await side.session.close()

        ending = asyncio.create_task(end())
        async for event in side:
            if event.type == "session.output_audio.delta":
                beside += base64.b64decode(event.delta)
                continue
            if event.type in sides:
                found["history"].append({"role": sides[event.type], "text": event.delta})
            elif event.type == "error":
                found["errors"].append(event.error.message)
            elif event.type == "session.closed":
                found["closed"] = event.reason
                break
            if event.type != "session.input_audio.append":
                person.note(event.type)
        await ending
    found["beside_audio"] = [base64.b64encode(beside).decode()]


async def main():
    client = AsyncOpenAI(api_key="x", base_url=f"{URL}/v1", max_retries=0)
    call = Call()
    await {"realtime": realtime, "live": live}[KIND](client, call)
    await call.connection.close()
    for task in call.listening:
        task.cancel()


asyncio.run(asyncio.wait_for(main(), SECONDS + 30))
person.print()
