"""What goes wrong between ranks."""

from __future__ import annotations

from penstock.engine.errors import EngineClosed


class RankLost(EngineClosed):
    """A process that computes a part of the model has ended, or does not answer: the engine can't go on."""
