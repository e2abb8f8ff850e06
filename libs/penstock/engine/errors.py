"""Errors of the engine, one class for each reaction that is open to the caller."""

from __future__ import annotations


class EngineError(Exception):
    """The request failed inside the engine, which keeps running. Another worker may succeed."""


class NotFinite(EngineError):
    """The model computed logits that are not finite for this request; other requests may be fine."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite numbers: its weights, or stored KV, are damaged")


class RequestRefused(EngineError, ValueError):
    """The request can never run here: do not retry it unchanged."""

    def __init__(self, field: str, reason: str) -> None:
        """`field` names the field of Request or SamplingParams that is wrong."""
        super().__init__(reason)
        self.field = field


class GrammarFailed(RequestRefused):
    """The request's grammar is none, or can't be followed from where its text is."""

    def __init__(self, reason: object) -> None:
        super().__init__("grammar", f"grammar: {reason}")


class RequestTooLong(RequestRefused):
    """The request needs more context or more pages than this engine has."""


class EngineBusy(EngineError):
    """The waiting line is full: retry later or elsewhere."""


class EngineClosed(EngineError):
    """The engine is shutting down: retry elsewhere."""


class RankLost(EngineClosed):
    """A process that computes a part of the model has ended, or does not answer: the engine can't go on."""
