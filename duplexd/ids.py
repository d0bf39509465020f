"""Identifiers. One noun, one type; every id comes from a counter, never from a clock or a random source."""

from __future__ import annotations

from typing import NewType

SessionId = NewType("SessionId", int)  #: one person and one character, from connect to close; never reused
Epoch = NewType("Epoch", int)  #: counts interruptions of one session; output of an older epoch is never heard
ChunkId = NewType(
    "ChunkId", int
)  #: one stretch of output of one session; never repeats, even if its span is made again
ResponseId = NewType("ResponseId", int)  #: one reply of the character within a session
TurnId = NewType("TurnId", int)  #: one turn of the person within a session
ConditionVersion = NewType(
    "ConditionVersion", int
)  #: version of text, emotion, image or setting; taken at chunk boundaries
WorkId = NewType("WorkId", int)  #: one launch of a stage on a lane
FenceId = NewType("FenceId", int)  #: a point on a lane that has or has not passed
SlotId = NewType("SlotId", int)  #: one slot of an arena partition or of a shared-memory pool
ContextId = NewType("ContextId", int)  #: one growing autoregressive context: a block table over arena pages

UNCONDITIONED = ConditionVersion(0)  #: before anybody has set a condition
