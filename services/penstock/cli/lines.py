"""Picks the log lines of the services that a person should see, and writes them as sentences."""

from __future__ import annotations

import json
import logging

_PLUMBING = frozenset({"event", "level", "timestamp", "service", "trace_id"})


def readable(line: str, least: str) -> str | None:
    """A log line as a sentence, when it is at least of level `least`; None: not to be shown.

    A line that is not one of ours, such as a traceback's, is shown only where debug lines are: when it matters, the
    child ends, and then its last lines are shown.
    """
    event = parse(line)
    if event is None:
        return line if least == "debug" else None
    if _number(str(event.get("level", "info"))) < _number(least):
        return None
    return sentence(event)


def parse(line: str) -> dict[str, object] | None:
    """The event of a structured line."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def sentence(event: dict[str, object]) -> str:
    """`connection lost: peer=router reason=...`"""
    details = " ".join(f"{key}={value}" for key, value in event.items() if key not in _PLUMBING and value != "")
    level = str(event.get("level", "info"))
    text = f"{event['event']}: {details}" if details else str(event["event"])
    return text if level == "info" else f"{level}: {text}"


def plain(line: str) -> str:
    """Any line, as a sentence when it is one of ours."""
    event = parse(line)
    return line if event is None else sentence(event)


def _number(level: str) -> int:
    return logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
