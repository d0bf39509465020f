"""Pipecat's OpenAI realtime service in a pipeline: three spoken turns, the first reply interrupted. Prints one JSON."""

import asyncio
import base64
import json
import math
import sys
import time

from loguru import logger
from pipecat.frames.frames import EndFrame, ErrorFrame, InputAudioRawFrame, LLMContextFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService

URL, SECONDS = sys.argv[1], float(sys.argv[2])
TURNS = [(1.0, 1.6), (4.5, 5.4), (13.5, 14.1)]
out = {"audio": [], "events": [], "errors": [], "interrupted": [], "history": [], "truncated": []}
started = time.monotonic()
logger.remove()
logger.add(sys.stderr, level="WARNING")


def now():
    return time.monotonic() - started


class Ears(FrameProcessor):
    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            out["audio"].append([now() * 1000, "", base64.b64encode(frame.audio).decode()])
        elif isinstance(frame, ErrorFrame):
            out["errors"].append(frame.error)
        await self.push_frame(frame, direction)


async def main():
    detection = events.TurnDetection(type="server_vad")
    properties = events.SessionProperties(
        instructions="Be brief.",
        audio=events.AudioConfiguration(
            input=events.AudioInput(transcription=events.InputAudioTranscription(), turn_detection=detection)
        ),
    )
    service = OpenAIRealtimeLLMService(
        api_key="x",
        base_url=f"{URL}/v1/realtime",
        settings=OpenAIRealtimeLLMService.Settings(session_properties=properties),
    )
    send = service.send_client_event

    async def spy(event):
        if event.type != "input_audio_buffer.append":
            out["events"].append([now() * 1000, "> " + event.type])
        if event.type == "conversation.item.truncate":
            out["interrupted"].append([now() * 1000, event.audio_end_ms])
            out["truncated"].append([event.item_id, event.audio_end_ms])
        await send(event)

    service.send_client_event = spy
    items = []

    @service.event_handler("on_conversation_item_created")
    async def created(service, item_id, item):
        items.append(item_id)

    task = PipelineTask(
        Pipeline([service, Ears()]), params=PipelineParams(audio_in_sample_rate=24000, audio_out_sample_rate=24000)
    )

    async def speak():
        await asyncio.sleep(0.3)
        await task.queue_frame(LLMContextFrame(LLMContext([])))
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
                await task.queue_frame(InputAudioRawFrame(audio=pcm, sample_rate=24000, num_channels=1))
                sent += 1
            await asyncio.sleep(0.01)
        for item_id in items:
            item = await asyncio.wait_for(service.retrieve_conversation_item(item_id), 5)
            text = " ".join((part.transcript or part.text or "") for part in item.content or [])
            out["history"].append({"id": item.id, "role": item.role, "text": text, "status": item.status})
        await task.queue_frame(EndFrame())

    speaker = asyncio.create_task(speak())
    await PipelineRunner(handle_sigint=False).run(task)
    await speaker


asyncio.run(main())
print(json.dumps(out))
