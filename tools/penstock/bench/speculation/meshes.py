"""Drafts as clients meet them: through meshes that are the same but for their proposers, one under load at a time."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.engine.subjects import Places
from penstock.bench.harness import Figure, Measure, figure, interleave
from penstock.bench.speculation import asks
from penstock.bench.speculation.asks import Asks
from penstock.bench.speculation.bound import bound
from penstock.bench.speculation.running import (
    PLAIN,
    WITHOUT_DRAFTS,
    WITHOUT_LOOKUP,
    BenchMesh,
    DraftedAnswer,
    Form,
    running,
)
from penstock.models import embedded

AGAIN = "again"
"""Like the one without drafts: how far it is from that is what the run can't tell."""
FORMS: Mapping[str, tuple[bool, Mapping[str, str]]] = {
    PLAIN: (False, WITHOUT_DRAFTS),
    AGAIN: (False, WITHOUT_DRAFTS),
    "grammar": (False, WITHOUT_LOOKUP),
    "lookup": (False, {}),
    "all": (True, {}),
}
"""Whether there is a draft service, and settings of the workers."""
PAIRS: Mapping[str, tuple[int, int]] = {"embedded": (0, 0), "bound": (135_000_000, 15_000_000)}
"""Parameters of target and draft; 0: as they are."""
_CELLS: Sequence[tuple[str, Callable[[int, int], Asks], int]] = (
    ("tool_calls", asks.tool_calls, 1),
    ("tool_calls", asks.tool_calls, 4),
    ("json", asks.schema_json, 1),
    ("quote", asks.quotes, 1),
    ("text", asks.free_text, 1),
    ("hostile", asks.hostile, 1),
    *(("text", asks.free_text, streams) for streams in (2, 4, 8, 16)),
    ("hostile", asks.hostile, 16),
)
"""Name, requests, and how many at a time."""
_GOALS = {
    "speedup_tool_calls_bound": 2.0,
    "speedup_tool_calls_embedded": 1.3,
    "speedup_json_bound": 2.0,
    "speedup_json_embedded": 1.3,
    "speedup_forced": 1.2,
    "speedup_quote": 2.0,
    "speedup_text": 1.2,
    "worst_ratio": 0.97,
}


@dataclass(frozen=True, slots=True)
class MeshRate:
    """What a mesh gave in one round."""

    tokens_per_s: float
    """Between the first token of a request and its last, of all streams together."""
    accepted: float
    """Drafts that were accepted, for each token."""


async def rate(mesh: BenchMesh, wanted: Asks, streams: int) -> MeshRate:
    """Sends the requests, `streams` at a time."""
    line = asyncio.Queue[Mapping[str, Any]]()
    for body in wanted.bodies:
        line.put_nowait(body)
    found: list[DraftedAnswer] = []

    async def stream() -> None:
        while not line.empty():
            found.append(await mesh.chat(line.get_nowait()))

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    wall = time.perf_counter() - began
    tokens = sum(answer.later for answer in found)
    seconds = wall if streams > 1 else sum(answer.seconds for answer in found)
    return MeshRate(tokens / seconds, sum(answer.accepted for answer in found) / tokens)


async def mesh_figures(quick: bool) -> list[Figure]:
    """Of both pairs, in every form."""
    found: list[Figure] = []
    for pair in PAIRS:
        found += await _pair_figures(pair, quick)
    lead = [
        _lead("speedup_tool_calls_bound", found, "ratio_all_tool_calls_bound"),
        _lead("speedup_tool_calls_embedded", found, "ratio_all_tool_calls_embedded"),
        _lead("speedup_json_bound", found, "ratio_all_json_bound"),
        _lead("speedup_json_embedded", found, "ratio_all_json_embedded"),
        _lead("speedup_forced", found, "ratio_grammar_tool_calls_bound"),
        _lead("speedup_quote", found, "ratio_lookup_quote_bound"),
        _lead("speedup_text", found, "ratio_all_text_bound"),
        figure("worst_ratio", [_worst(found, "all")], "ratio", "no drafts", _GOALS["worst_ratio"]),
        figure("worst_ratio_again", [_worst(found, AGAIN)], "ratio", "no drafts either"),
    ]
    return [*lead, *found]


def _worst(found: Sequence[Figure], form: str) -> float:
    """The lowest ratio of a form in any cell."""
    return min(one.value for one in found if one.id.startswith(f"ratio_{form}_") and one.value is not None)


def _lead(id: str, found: Sequence[Figure], of: str) -> Figure:
    one = next(figure for figure in found if figure.id == of)
    assert one.value is not None and one.min is not None and one.max is not None
    return figure(id, [one.min, one.value, one.max], "ratio", "no drafts", _GOALS[id])


async def _pair_figures(pair: str, quick: bool) -> list[Figure]:
    rounds, count = (1, 4) if quick else (2, 6)
    found: list[Figure] = []
    async with open_meshes(pair, tuple(FORMS)) as meshes:
        for name, make, streams in _CELLS:
            subjects = {form: subject(mesh, make, max(count, 2 * streams), streams) for form, mesh in meshes.items()}
            rates = await interleave(subjects, rounds)
            cell = f"{name}_{pair}" if streams == 1 else f"{name}_{streams}_{pair}"
            for form, samples in rates.items():
                rate = statistics.median(sample.tokens_per_s for sample in samples)
                accepted = statistics.median(sample.accepted for sample in samples)
                print(f"{cell} {form}: {rate:.4g} tokens/s, {accepted:.2f} accepted", file=sys.stderr, flush=True)
                found.append(figure(f"rate_{form}_{cell}", [one.tokens_per_s for one in samples], "tokens/s", "scale"))
                if form == PLAIN:
                    continue
                found.append(figure(f"accepted_{form}_{cell}", [one.accepted for one in samples], "per token", "scale"))
                ratios = [
                    one.tokens_per_s / other.tokens_per_s for one, other in zip(samples, rates[PLAIN], strict=True)
                ]
                found.append(figure(f"ratio_{form}_{cell}", ratios, "ratio", "no drafts"))
    return found


def subject(mesh: BenchMesh, make: Callable[[int, int], Asks], count: int, streams: int) -> Measure[MeshRate]:
    """Sends requests to a mesh, others in each round."""

    async def sample(round: int) -> MeshRate:
        return await rate(mesh, make(count, round), streams)

    return sample


@asynccontextmanager
async def open_meshes(pair: str, forms: Collection[str] = FORMS) -> AsyncIterator[Mapping[str, BenchMesh]]:
    """One for each of these forms."""
    target, draft = checkpoints(pair)
    wanted = {name: Form(str(draft) if drafts else "none", settings) for name, (drafts, settings) in FORMS.items()}
    async with running(target, {name: wanted[name] for name in forms}) as meshes:
        yield meshes


def checkpoints(pair: str) -> tuple[Path, Path]:
    """Target and draft, made when they are missing."""
    models = Path(embedded("penstock-mini")), Path(embedded("penstock-mini-draft"))
    place = Places.default().models
    target, draft = (
        bound(model, size, place) if size else model for model, size in zip(models, PAIRS[pair], strict=True)
    )
    return target, draft
