"""Pipecat's OpenAI realtime service in a pipeline with its context aggregators: three spoken turns, the first reply
interrupted. Prints one JSON.

The library has the character speak first; the person lets it end.

The output transport is Pipecat's own base with a loudspeaker of ours behind it, which takes as long for a frame as the
frame lasts; so text comes to the context when the library releases it.
"""

import asyncio
import sys

from loguru import logger
from person import Person
from pipecat.frames.frames import EndFrame, ErrorFrame, InputAudioRawFrame, LLMContextFrame, TTSTextFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams

URL, SECONDS = sys.argv[1], float(sys.argv[2])
RATE = 24_000
person = Person(RATE, first_at=9.0)
found = person.found
logger.remove()
logger.add(sys.stderr, level="WARNING")


class Loudspeaker(BaseOutputTransport):
    """Plays in real time."""

    def __init__(self):
        super().__init__(TransportParams(audio_out_enabled=True, audio_out_sample_rate=RATE))
        self.free_at = 0.0

    async def start(self, frame):
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def process_frame(self, frame, direction):
        if isinstance(frame, ErrorFrame):
            found["errors"].append(frame.error)
        elif isinstance(frame, TTSTextFrame):
            person.tell("", frame.text)
        await super().process_frame(frame, direction)

    async def write_audio_frame(self, frame):
        person.play("", frame.audio)
        self.free_at = max(self.free_at, person.now()) + len(frame.audio) / 2 / RATE
        await asyncio.sleep(max(0.0, self.free_at - person.now()))
        return True


def service_of():
    detection = events.TurnDetection(type="server_vad")
    audio_input = events.AudioInput(transcription=events.InputAudioTranscription(), turn_detection=detection)
    properties = events.SessionProperties(instructions="Be brief.", audio=events.AudioConfiguration(input=audio_input))
    settings = OpenAIRealtimeLLMService.Settings(session_properties=properties)
    return OpenAIRealtimeLLMService(api_key="x", base_url=f"{URL}/v1/realtime", settings=settings)


async def main():
    service = service_of()
    send = service.send_client_event

    async def spy(event):
        if event.type != "input_audio_buffer.append":
            person.note("> " + event.type)
        if event.type == "conversation.item.truncate":
            person.cut(event.item_id, event.audio_end_ms)
        await send(event)

    service.send_client_event = spy
    items = []

    @service.event_handler("on_conversation_item_created")
    async def created(service, item_id, item):
        items.append(item_id)

    context = LLMContext([])
    pair = LLMContextAggregatorPair(context)
    task = PipelineTask(
        Pipeline([pair.user(), service, Loudspeaker(), pair.assistant()]),
        params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE),
    )

    async def say(pcm):
        await task.queue_frame(InputAudioRawFrame(audio=pcm, sample_rate=RATE, num_channels=1))

    async def talk():
        await asyncio.sleep(0.3)
        await task.queue_frame(LLMContextFrame(context))
        await person.speak(SECONDS, say)
        for item_id in items:
            item = await asyncio.wait_for(service.retrieve_conversation_item(item_id), 5)
            text = " ".join((part.transcript or part.text or "") for part in item.content or [])
            found["remembered"].append({"id": item.id, "role": item.role, "text": text})
        for message in context.messages:
            if isinstance(message.get("content"), str):
                found["history"].append({"id": "", "role": message["role"], "text": message["content"]})
        await task.queue_frame(EndFrame())

    talking = asyncio.create_task(talk())
    await PipelineRunner(handle_sigint=False).run(task)
    await talking


asyncio.run(main())
person.print()
