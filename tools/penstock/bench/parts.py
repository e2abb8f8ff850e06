"""Benches of several parts, of which a run may have some."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.bench.harness import Figure
from penstock.runtime.config import ConfigError

Parts = Mapping[str, Callable[[bool], Coroutine[Any, Any, Sequence[Figure]]]]
"""By name. Each takes whether it shall be quick."""


async def measured(parts: Parts, quick: bool, wanted: Sequence[str]) -> list[Figure]:
    """The figures of the parts that are wanted, in the parts' order; of all without names. Raises ConfigError for one
    that there is not."""
    for name in wanted:
        if name not in parts:
            raise ConfigError("part", name, f"must be one of {', '.join(parts)}")
    found = [await part(quick) for name, part in parts.items() if not wanted or name in wanted]
    return [figure for figures in found for figure in figures]
