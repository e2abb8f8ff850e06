"""How large the images of deploy/ are."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence

from penstock.bench.harness import Figure, figure, missing

_LIMITS: Mapping[str, float] = {"image_mb_light": 250.0, "image_mb_worker": 1600.0}
"""MB of 10^6 bytes, before compression."""


async def image_figures(quick: bool) -> Sequence[Figure]:
    """Builds them, which takes minutes; needs what `make images` needs."""
    command = (sys.executable, "-m", "loadtest.containers.sizes")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    said, why = await process.communicate()
    if process.returncode:
        reason = (why.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return [missing(id, "MB", reason, limit) for id, limit in _LIMITS.items()]
    return sizes_figures(json.loads(said.decode().splitlines()[-1]))


def sizes_figures(sizes: Mapping[str, float]) -> list[Figure]:
    """Of what was printed."""
    return [
        figure(id, [sizes[id]], "MB", "before compression", limit, lower_is_better=True)
        for id, limit in _LIMITS.items()
    ]
