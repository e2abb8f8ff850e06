"""What is changed, and the tests that should notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.trust.mutants.mutant import Mutant
from penstock.bench.trust.mutants.mutating import mutants


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Files that decide one thing."""

    name: str
    files: Sequence[str]
    """Patterns, from the root of the checkout."""
    tests: Sequence[str]
    """Files of tests that use them, the likeliest to notice and the quickest first. None starts a mesh."""

    def paths(self, root: Path) -> list[Path]:
        """Of its files."""
        paths = sorted(path for pattern in self.files for path in root.glob(pattern))
        assert paths, f"{self.name}: no such files in {root}"
        return paths

    def mutants(self, root: Path) -> list[Mutant]:
        """Of all its files."""
        return [
            one for path in self.paths(root) for one in mutants(str(path.relative_to(root)), path.read_text("utf-8"))
        ]


def _in(folder: str, names: str) -> list[str]:
    return [f"{folder}/test_{name}.py" for name in names.split()]


AREAS: Sequence[Area] = (
    Area(
        name="scheduler",
        files=("libs/penstock/engine/scheduling/*.py",),
        tests=_in("tests/libs/engine", "yielding chunking scheduler pace sharing engine storm pages tails speculation"),
    ),
    Area(
        name="policy",
        files=tuple(f"services/penstock/router/{name}.py" for name in ("policy", "planner", "ledger", "options")),
        tests=_in(
            "tests/services/router",
            "policy planner ledger baselines bias chains index yielding directing showing others line fair hints"
            " service sessions shortlist trace",
        ),
    ),
    Area(
        name="block table",
        files=("services/penstock/kvstore/table/*.py",),
        tests=_in(
            "tests/services/kvstore",
            "table store_machine service hints origin wire_events dropping prefetch events pulling suppliers movement"
            " touch circles homes announcing claims lending retention sessions partitions client",
        ),
    ),
    Area(
        name="flow",
        files=tuple(f"services/penstock/gateway/completing/{name}.py" for name in ("flow", "attempt")),
        tests=_in("tests/services/gateway", "flow gone retention faults"),
    ),
    Area(
        name="identity",
        files=("libs/penstock/kv/identity.py",),
        tests=[
            *_in("tests/libs/kv", "identity"),
            *_in("tests/services/router", "chains"),
            *_in("tests/libs/engine", "pages sharing"),
        ],
    ),
    Area(
        name="sampler",
        files=(
            *(f"libs/penstock/engine/sampling/{name}.py" for name in ("bans", "choice", "noise", "occurrences")),
            "libs/penstock/engine/sampling/sampler.py",
            "libs/penstock/engine/forward/accepting.py",
        ),
        tests=[
            *_in("tests/libs/engine", "bans masking sampler"),
            *_in("tests/libs/engine/cuda", "pretend"),
            *_in("tests/libs/engine", "speculation engine"),
        ],
    ),
)


def drawn(found: Mapping[str, Sequence[Mutant]], count: int, seed: int) -> dict[str, list[Mutant]]:
    """`count` of the mutants of all areas, by area: of each as many, or all where one has too few. Which ones, the
    `seed` says."""
    shares = _shares({name: len(some) for name, some in found.items()}, count)
    return {name: sorted(found[name], key=lambda one: one.rank(seed))[:share] for name, share in shares.items()}


def _shares(most: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of each, equal but for what there is of it; the last get one fewer when they can't be equal."""
    shares, left = dict.fromkeys(most, 0), count
    for place, (name, has) in enumerate(sorted(most.items(), key=lambda item: item[1])):
        share = min(has, -(-left // (len(most) - place)))
        shares[name], left = share, left - share
    return shares
