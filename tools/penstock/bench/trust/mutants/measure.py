"""`penstock bench trust --part mutants`: the share of small changes that the tests notice, and a list of the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from penstock.bench.harness import Figure, figure, missing
from penstock.bench.trust.mutants.areas import AREAS, Area, drawn
from penstock.bench.trust.mutants.equivalent import equivalents
from penstock.bench.trust.mutants.mutant import Mutant
from penstock.bench.trust.mutants.running import TestedMutant, mutant_tests

_ID, _UNIT, _GOAL = "mutants_noticed", "share", 0.95
_COUNT, _QUICK_COUNT = 200, 12
ROOT = Path(__file__).parents[5]
"""Of the checkout; an installed package has no tests."""


async def mutant_figures(quick: bool) -> Sequence[Figure]:
    """Of 200 changes, or 12 when it shall be quick. What survives is printed to standard error when it is found, and
    named in the figure."""
    if not (ROOT / "tests").is_dir():
        return [missing(_ID, _UNIT, "needs a checkout with its tests", _GOAL)]
    return noticed_figures(await tested(AREAS, _QUICK_COUNT if quick else _COUNT, 0, _survived_to_stderr))


async def tested(
    areas: Collection[Area], count: int, seed: int, told: Callable[[TestedMutant], None]
) -> list[TestedMutant]:
    """What the tests say of `count` mutants of these areas. `told` is given each as soon as it is known."""
    chosen, done = draw(areas, count, seed), list[TestedMutant]()
    async with mutant_tests(ROOT) as tests:
        for area in areas:
            unchanged_s = await tests.unchanged_s(area)
            for mutant in chosen[area.name]:
                found = await tests.tested(mutant, area, unchanged_s)
                done.append(found)
                told(found)
    return done


def draw(areas: Collection[Area], count: int, seed: int) -> dict[str, list[Mutant]]:
    """By area, without those that are known to be equivalent."""
    known = equivalents()
    found = {area.name: area.mutants(ROOT) for area in areas}
    real = {
        name: [one for one in some if not any(entry.covers(one) for entry in known)] for name, some in found.items()
    }
    return drawn(real, count, seed)


def noticed_figures(done: Sequence[TestedMutant]) -> list[Figure]:
    """The share, beside the places of those that survived."""
    survived = [one.mutant for one in done if not one.noticed]
    against = f"{len(done)} small changes, all but those that change nothing"
    if survived:
        against += f"; survived: {'; '.join(f'{one.place} ({one.kind})' for one in survived)}"
    return [figure(_ID, [1 - len(survived) / len(done)], _UNIT, against, _GOAL)]


def _survived_to_stderr(one: TestedMutant) -> None:
    if not one.noticed:
        print(f"survived: {one.mutant.diff()}", file=sys.stderr, flush=True)
