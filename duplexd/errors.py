"""Errors a user can act on: what was asked, what is allowed, which session.

DuplexdError
+-- ConfigError          an option is unknown, missing or out of its range
+-- WeightsError         a weights file is missing or damaged
+-- ModelError           a model family or checkpoint cannot be loaded
+-- ArenaError
|   +-- ArenaFull        no slot or page is free
|   +-- StaleLease       a slot was used after it had been given back
|   +-- LedgerError      the ledger contradicts itself: always a bug of duplexd
+-- ChannelError
|   +-- ChannelClosed    the other process went away
|   +-- ChannelFull      the other process does not read
+-- TraceError           a trace cannot be written, is damaged, or belongs to another version
+-- SessionRefused       admission said no; the text names what is missing
+-- InputRefused         one input was refused; the session goes on
"""

from __future__ import annotations


class DuplexdError(Exception):
    """Base of every error duplexd raises on purpose."""


class ConfigError(DuplexdError):
    """An option is unknown, missing or out of its range."""


class WeightsError(DuplexdError):
    """A weights file is missing or damaged; the text names the file, its source and the command that mends it."""


class ModelError(DuplexdError):
    """A model family or checkpoint cannot be loaded."""


class ArenaError(DuplexdError):
    """Base of memory errors."""


class ArenaFull(ArenaError):
    """No slot or page is free; the text says how many were asked for, how many are free and what to lower."""


class StaleLease(ArenaError):
    """A slot was used after it had been given back."""


class LedgerError(ArenaError):
    """The ledger contradicts itself: always a bug of duplexd, never of its user."""


class ChannelError(DuplexdError):
    """Base of errors between the front end and the engine."""


class ChannelClosed(ChannelError):
    """The other process went away."""


class ChannelFull(ChannelError):
    """The other process does not read."""


class TraceError(DuplexdError):
    """A trace cannot be written, is damaged, or belongs to another version."""


class SessionRefused(DuplexdError):
    """Admission said no; the text names what is missing."""


class InputRefused(DuplexdError):
    """One input was refused; the session goes on."""
