"""A draft head in the decode worker and in the draft service: what it brings, and what its states cost on their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.bench.harness import Figure, figure, interleave, missing
from penstock.bench.speculation import asks
from penstock.bench.speculation.asks import Asks
from penstock.bench.speculation.meshes import compared, subject
from penstock.bench.speculation.running import WITHOUT_LOOKUP, Form, running
from penstock.checkpoint import CheckpointError, HeadCheckpoint, inspect, inspect_head
from penstock.models import embedded
from penstock.runtime.config import ConfigError

_CELLS: tuple[tuple[str, Callable[[int, int], Asks], int], ...] = (
    ("tool_calls", asks.tool_calls, 1),
    ("text", asks.free_text, 1),
    ("hostile", asks.hostile, 1),
    ("text", asks.free_text, 8),
)
"""Name, requests, and how many at a time."""
_PLACES = ("worker", "service")


async def head_figures(directory: Path | None, quick: bool) -> list[Figure]:
    """Of a head for the embedded model; without one, why there are none. Raises ConfigError for another directory."""
    lead = [f"head_ratio_{place}_tool_calls" for place in _PLACES]
    if directory is None:
        return [missing(id, "ratio", "no head: --head names one, `penstock models head` trains one") for id in lead]
    head = _head(directory)
    found = [figure("head_state_bytes_per_token", [state_bytes(head)], "bytes", "scale")]
    forms = {}
    for place in _PLACES:
        arguments = ("--draft-head", str(directory), "--draft-head-in", place)
        forms[place] = Form(settings=WITHOUT_LOOKUP, arguments=arguments)
    rounds, count = (1, 4) if quick else (3, 6)
    async with running(Path(embedded("penstock-mini")), forms) as meshes:
        for name, make, streams in _CELLS:
            subjects = {form: subject(mesh, make, max(count, 2 * streams), streams) for form, mesh in meshes.items()}
            for form, samples in (await interleave(subjects, rounds)).items():
                found += compared("head_", form, name if streams == 1 else f"{name}_{streams}", samples)
    return found


def state_bytes(head: HeadCheckpoint) -> int:
    """Of a token's states as they are told to the service: bfloat16."""
    return 2 * len(head.layers) * head.hidden_size


def _head(directory: Path) -> HeadCheckpoint:
    try:
        return inspect_head(directory, inspect(embedded("penstock-mini")))
    except CheckpointError as error:
        raise ConfigError("head", str(directory), str(error)) from error
