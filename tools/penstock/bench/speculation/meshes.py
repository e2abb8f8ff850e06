"""Drafts as clients meet them: each request twice in a mesh, with drafts and without, in turns.

Two meshes that are the same differ by several per cent for as long as they run, so only one mesh can tell what drafts
cost. A request without drafts takes no part in them: nobody's are guessed from its text.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
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

FORMS: Mapping[str, tuple[bool, Mapping[str, str]]] = {
    PLAIN: (False, WITHOUT_DRAFTS),
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
_GUIDED = ("tool_calls", "json")
"""Workloads in which a grammar can force tokens."""
_ROUNDS = {"hostile": 8}
"""More where what drafts cost has to be known to a hundredth."""
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


@dataclass(slots=True)
class MeshRate:
    """What a mesh gave in one round, with drafts or without."""

    tokens: int = 0
    """But the first of each answer."""
    seconds: float = 0.0
    """Between the first token of a request and its last; of several at a time, between the first and last of any."""
    accepted: int = 0
    """Drafts that were accepted."""

    @property
    def per_s(self) -> float:
        """Tokens per second, of all streams together."""
        return self.tokens / self.seconds

    @property
    def accepted_share(self) -> float:
        """Accepted drafts for each token."""
        return self.accepted / self.tokens

    def add(self, answers: Sequence[DraftedAnswer]) -> None:
        """Answers to requests that were sent at a time."""
        self.tokens += sum(answer.later for answer in answers)
        self.seconds += max(answer.last for answer in answers) - min(answer.first for answer in answers)
        self.accepted += sum(answer.accepted for answer in answers)


@dataclass(frozen=True, slots=True)
class PairedRates:
    """A round's requests with drafts, and the same without."""

    drafted: MeshRate
    plain: MeshRate

    @property
    def ratio(self) -> float:
        """With : without."""
        return self.drafted.per_s / self.plain.per_s


async def paired(mesh: BenchMesh, wanted: Asks, streams: int, turn: int) -> PairedRates:
    """Sends the requests, `streams` at a time, these with drafts and without by turns; before, their prompts alone, so
    that neither computes them."""
    rates = PairedRates(MeshRate(), MeshRate())
    for number, first in enumerate(range(0, len(wanted.bodies), streams)):
        bodies = wanted.bodies[first : first + streams]
        await _all(mesh, [{**body, "max_tokens": 1} for body in bodies], False)
        order = (rates.drafted, rates.plain) if (number + turn) % 2 else (rates.plain, rates.drafted)
        for rate in order:
            rate.add(await _all(mesh, bodies, rate is rates.drafted))
    return rates


async def _all(mesh: BenchMesh, bodies: Sequence[Mapping[str, Any]], drafts: bool) -> list[DraftedAnswer]:
    return await asyncio.gather(*(mesh.chat(body, drafts) for body in bodies))


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
        _worst("worst_ratio", found, "all", _GOALS["worst_ratio"]),
        _worst("worst_ratio_again", found, PLAIN),
    ]
    return [*lead, *found]


def _worst(id: str, found: Sequence[Figure], form: str, goal: float | None = None) -> Figure:
    """The lowest ratio of a form in any cell, with its rounds."""
    cells = [one for one in found if one.id.startswith(f"ratio_{form}_") and one.value is not None]
    worst = min(cells, key=lambda one: one.value or 0.0)
    assert worst.value is not None and worst.min is not None and worst.max is not None
    return figure(id, [worst.min, worst.value, worst.max], "ratio", worst.id.removeprefix(f"ratio_{form}_"), goal)


def _lead(id: str, found: Sequence[Figure], of: str) -> Figure:
    one = next(figure for figure in found if figure.id == of)
    assert one.value is not None and one.min is not None and one.max is not None
    return figure(id, [one.min, one.value, one.max], "ratio", "no drafts", _GOALS[id])


async def _pair_figures(pair: str, quick: bool) -> list[Figure]:
    found: list[Figure] = []
    async with open_meshes(pair, tuple(FORMS)) as meshes:
        for name, make, streams in _CELLS:
            wanted = {form: mesh for form, mesh in meshes.items() if form != "grammar" or name in _GUIDED}
            count = max(4 if quick else 6, 2 * streams)
            subjects = {form: subject(mesh, make, count, streams) for form, mesh in wanted.items()}
            rates = await interleave(subjects, 1 if quick else _ROUNDS.get(name, 2))
            cell = f"{name}_{pair}" if streams == 1 else f"{name}_{streams}_{pair}"
            for form, samples in rates.items():
                found += compared("", form, cell, samples)
    return found


def compared(kind: str, form: str, cell: str, samples: Sequence[PairedRates]) -> list[Figure]:
    """A form's figures of one cell; their ids begin with `kind`."""
    plain = figure(f"{kind}plain_{form}_{cell}", [one.plain.per_s for one in samples], "tokens/s", "scale")
    ratio = figure(f"{kind}ratio_{form}_{cell}", [one.ratio for one in samples], "ratio", "no drafts")
    accepted = [one.drafted.accepted_share for one in samples]
    print(
        f"{cell} {form}: {plain.value:.4g} tokens/s without, {ratio.value:.3f} times as many with,"
        f" {statistics.median(accepted):.2f} accepted",
        file=sys.stderr,
        flush=True,
    )
    return [plain, ratio, figure(f"{kind}accepted_{form}_{cell}", accepted, "per token", "scale")]


def subject(mesh: BenchMesh, make: Callable[[int, int], Asks], count: int, streams: int) -> Measure[PairedRates]:
    """Sends requests to a mesh, others in each round."""

    async def sample(round: int) -> PairedRates:
        return await paired(mesh, make(count, round), streams, round)

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
