"""What can go wrong, named for the caller's next move."""

from __future__ import annotations


class EngineError(Exception):
    """The request failed inside the engine; the engine goes on. Another worker may try."""


class RequestRefused(EngineError, ValueError):
    """The request can never run here: do not retry it unchanged."""


class RequestTooLong(RequestRefused):
    """The request needs more context or more pages than this engine has."""


class EngineBusy(EngineError):
    """The waiting line is full: retry later or elsewhere."""


class EngineClosed(EngineError):
    """The engine is shutting down: retry elsewhere."""
