"""The person's camera: RTP to "somebody is there", with the least work and nothing kept.

    RTP -> aiortc's assembly -> door (size, rate, key frames) -> one thread: decode, find a face -> rule -> fact

1. At most five frames a second are decoded, whatever is sent, none larger than 640 x 480, and one at a time: what comes
   faster is dropped undecoded. After a dropped or lost frame only a key frame can be decoded; one is asked for at most
   once in two seconds, so a page that floods us is looked at every two seconds.
2. Nothing is looked at before the page has said that its camera is on, nor after it has said that it is off.
3. A picture lives from its decoding to the end of the search for a face, on one thread, and in the decoder as what the
   next one is a difference to. With the camera off the decoder goes. Nothing is stored or sent on.
4. Nothing from the network raises: what is wrong is counted and waits for the next key frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import av
import msgspec
from aiortc.jitterbuffer import JitterBuffer

from duplexd import clock
from duplexd.errors import ConfigError
from duplexd.media.person import PersonFinder, PersonRule, Place, Sighting
from duplexd.units import NANOS_PER_SECOND, Nanos
from duplexd.webrtc.receive import DECODER_QUEUE, JITTER_BUFFER, NoDecoderQueue

FRAMES_PER_SECOND = 5
BURST = 3.0  #: frames that may come at once: jitter of the line
WIDTH_MAX, HEIGHT_MAX = 640, 480
FRAME_BYTES_MAX = 65_536
ASKED_EVERY = Nanos(2 * NANOS_PER_SECOND)
PACKETS_MAX = 128  #: of one frame that is being assembled; a power of two (aiortc)
_START_CODE = b"\x9d\x01\x2a"  # RFC 6386 §9.1


class CameraCounts(msgspec.Struct):
    frames: int = 0  #: that arrived whole
    decoded: int = 0
    dropped: int = 0  #: too fast, while one was being looked at, or of a chain that had been broken
    refused: int = 0  #: too large
    damaged: int = 0


class Size(msgspec.Struct, frozen=True):
    width: int
    height: int


def key_frame_size(frame: bytes) -> Size | None:
    """Of a VP8 key frame; None for any other frame, or none (RFC 6386 §9.1)."""
    if len(frame) < 10 or frame[0] & 1 or frame[3:6] != _START_CODE:
        return None
    width, height = struct.unpack_from("<HH", frame, 6)
    return Size(width & 0x3FFF, height & 0x3FFF)


class CameraDoor:
    """Which frames are decoded (module rule 1). Pure: frames and `now` in, yes or no out."""

    def __init__(self, counts: CameraCounts) -> None:
        self.counts = counts
        self._broken = True  # until the first key frame
        self._tokens = BURST
        self._filled_at: Nanos | None = None
        self._asked_at: Nanos | None = None

    def takes(self, frame: bytes, now: Nanos, *, busy: bool) -> bool:
        """Whether to decode this frame; `busy` while the one before it is being looked at."""
        self._fill(now)
        self.counts.frames += 1
        size = key_frame_size(frame)
        if len(frame) > FRAME_BYTES_MAX or (size and (size.width > WIDTH_MAX or size.height > HEIGHT_MAX)):
            self.counts.refused += 1
            self._broken = True
            return False
        if busy or self._tokens < 1 or (self._broken and size is None):
            self.counts.dropped += 1
            self._broken = True
            return False
        self._tokens -= 1
        self._broken = False
        return True

    def damage(self) -> None:
        """What was taken could not be decoded."""
        self.counts.damaged += 1
        self._broken = True

    def lose(self) -> None:
        """What the next frame is a difference to is not there."""
        self._broken = True

    def asks_for_key_frame(self, now: Nanos) -> bool:
        """Whether to ask for one now (PLI)."""
        if not self._broken or (self._asked_at is not None and now - self._asked_at < ASKED_EVERY):
            return False
        self._asked_at = now
        return True

    def _fill(self, now: Nanos) -> None:
        passed = 0 if self._filled_at is None else now - self._filled_at
        self._tokens = min(BURST, self._tokens + passed * FRAMES_PER_SECOND / NANOS_PER_SECOND)
        self._filled_at = now


class CameraReceiver:
    """One peer's camera.

    Args:    on_person: takes each fact, on the loop. pool: where frames are decoded and looked at.
    """

    def __init__(self, on_person: Callable[[Sighting], None], *, finder: PersonFinder, pool: Executor) -> None:
        self.counts = CameraCounts()
        self._door = CameraDoor(self.counts)
        self._rule = PersonRule()
        self._on_person = on_person
        self._finder = finder
        self._pool = pool
        self._decoder: Any = None
        self._looking: asyncio.Task[None] | None = None
        self._on = False

    @property
    def sees_somebody(self) -> bool:
        return self._rule.present

    def take(self, frame: bytes, now: Nanos) -> None:
        """A whole VP8 frame."""
        if self._on and self._door.takes(frame, now, busy=self._looking is not None):
            self._looking = asyncio.ensure_future(self._look(frame))

    def asks_for_key_frame(self, now: Nanos) -> bool:
        return self._on and self._door.asks_for_key_frame(now)

    def tick(self, now: Nanos) -> None:
        """A camera that has stopped sending shows nobody."""
        self._tell(self._rule.wait(now))

    def lose(self) -> None:
        """A frame was lost on the way."""
        self._door.lose()

    def switch(self, *, on: bool, now: Nanos) -> None:
        """The page says whether its camera is on."""
        if not on:
            self.close()
            self._tell(self._rule.leave(now))
        self._on = on

    def close(self) -> None:
        self._on = False
        self._door.lose()
        with contextlib.suppress(RuntimeError):  # The daemon is stopping: its threads take no more.
            self._pool.submit(self._forget)  # Behind the frame that is being looked at.

    def _forget(self) -> None:
        self._decoder = None

    async def _look(self, frame: bytes) -> None:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._pool, self._find, frame)
        except (av.FFmpegError, ValueError):
            self._door.damage()
            return
        except RuntimeError:
            return  # The daemon is stopping: its threads take no more.
        finally:
            self._looking = None
        self.counts.decoded += 1
        if self._on:
            self._tell(self._rule.look(found, clock.now()))

    def _find(self, frame: bytes) -> Place | None:
        """On the pool's thread. The picture dies here."""
        if self._decoder is None or key_frame_size(frame) is not None:
            self._decoder = av.CodecContext.create("vp8", "r")
        pictures = self._decoder.decode(av.Packet(frame))
        if not pictures:
            raise ValueError("a frame without a picture")
        grey = pictures[-1].to_ndarray()[: pictures[-1].height]
        return self._finder.find(grey)

    def _tell(self, sighting: Sighting | None) -> None:
        if sighting is not None:
            self._on_person(sighting)


# Under aiortc -------------------------------------------------------------------------------------------------------


class _Assembly:
    """Stands where aiortc keeps its jitter buffer: frames go to the camera, none to aiortc's decoder thread."""

    def __init__(self, camera: CameraReceiver) -> None:
        self._camera = camera
        self._buffer = JitterBuffer(capacity=PACKETS_MAX, is_video=True)

    def add(self, packet: Any) -> tuple[bool, None]:
        now = clock.now()
        lost, frame = self._buffer.add(packet)
        if lost:
            self._camera.lose()
        if frame is not None:
            self._camera.take(frame.data, now)
        return self._camera.asks_for_key_frame(now), None


def install(receiver: Any, camera: CameraReceiver) -> None:
    """Replace the receive path of an aiortc video receiver; call it before the receiver starts.

    Raises ConfigError if this aiortc keeps its jitter buffer or its decoder elsewhere: it is pinned to 1.16.
    """
    missing = [name for name in (JITTER_BUFFER, DECODER_QUEUE) if not hasattr(receiver, name)]
    if missing:
        raise ConfigError(f"This aiortc has no {', '.join(missing)}; duplexd's camera path knows aiortc 1.16.")
    setattr(receiver, JITTER_BUFFER, _Assembly(camera))
    setattr(receiver, DECODER_QUEUE, NoDecoderQueue())
