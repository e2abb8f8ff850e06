"""A package drawn as floors: what stands on what.

The rooms of a package are its files and subfolders. An arrow is one room that imports another, however often. Where
rooms import each other in a ring, the fewest arrows without which there is none are said to run up; a package's floors
are the longest chain of the arrows that remain. A circle is a ring of files, which is worse: they
can't be read one after the other. Imports for type checkers alone count like all others.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

_MOST_TRIED = 3

Arrow = tuple[str, str]
"""Who imports, what is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storeys:
    """One package."""

    package: str
    rooms: int
    floors: int
    arrows: int
    up: Sequence[str]
    """Arrows that run up, as `room -> room`."""
    circles: Sequence[Sequence[str]]
    """Rings of files."""


def modules(roots: Iterable[Path]) -> dict[str, Path]:
    """All modules of source roots that share a namespace, by dotted name."""
    found = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(known: Mapping[str, Path]) -> Counter[Arrow]:
    """How often each module imports each other one."""
    found: Counter[Arrow] = Counter()
    for name, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found.update((name, other) for other in _imported(tree, package, known) if other != name)
    return found


def storeys(package: str, known: Mapping[str, Path], arrows: Mapping[Arrow, int]) -> Storeys:
    """The package as floors."""
    inside = {name for name in known if name.startswith(f"{package}.")}
    rooms = {_room(name, package) for name in inside}
    between: Counter[Arrow] = Counter()
    for (importer, imported), count in arrows.items():
        if importer in inside and imported in inside:
            arrow = _room(importer, package), _room(imported, package)
            if arrow[0] != arrow[1]:
                between[arrow] += count
    down, up = _without_rings(between)
    return Storeys(
        package=package,
        rooms=len(rooms),
        floors=_longest(rooms, down),
        arrows=len(between),
        up=[f"{importer} -> {imported}" for importer, imported in up],
        circles=rings([arrow for arrow in arrows if arrow[0] in inside and arrow[1] in inside]),
    )


def rings(arrows: Iterable[Arrow]) -> list[list[str]]:
    """Groups of two or more nodes that all reach each other (Tarjan's strongly connected components)."""
    onward: dict[str, list[str]] = {}
    for importer, imported in arrows:
        onward.setdefault(importer, []).append(imported)
        onward.setdefault(imported, [])
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in onward[node]:
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in onward:
        if node not in order:
            visit(node)
    return sorted(found)


def _imported(tree: ast.Module, package: str, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            for alias in node.names:
                if f"{base}.{alias.name}" in known:
                    yield f"{base}.{alias.name}"
                elif base in known:
                    yield base


def _base(node: ast.ImportFrom, package: str) -> str:
    """The module that is imported from, in full."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    above = ".".join(parts[: len(parts) - node.level + 1])
    return f"{above}.{node.module}" if node.module else above


def _room(name: str, package: str) -> str:
    return name.removeprefix(f"{package}.").split(".")[0]


def _without_rings(arrows: Mapping[Arrow, int]) -> tuple[list[Arrow], list[Arrow]]:
    """Arrows that run down, and those that have to be called upward so that the rest has no ring: as few as possible,
    and of as few imports as possible."""
    down, up = dict(arrows), []
    while found := rings(down):
        ring = {arrow: count for arrow, count in down.items() if set(arrow) <= set(found[0])}
        for arrow in _breaking(ring):
            del down[arrow]
            up.append(arrow)
    return list(down), up


def _breaking(ring: Mapping[Arrow, int]) -> Sequence[Arrow]:
    """The arrows without which the ring is none. Of a ring that needs more than a few, the weakest arrow of all."""
    for size in range(1, _MOST_TRIED + 1):
        cuts = [cut for cut in combinations(sorted(ring), size) if not rings(ring.keys() - set(cut))]
        if cuts:
            return min(cuts, key=lambda cut: sum(ring[arrow] for arrow in cut))
    return [min(ring, key=lambda arrow: (ring[arrow], arrow))]


def _longest(rooms: Iterable[str], arrows: Sequence[Arrow]) -> int:
    """Rooms on the longest chain."""

    @cache
    def height(room: str) -> int:
        return 1 + max((height(below) for above, below in arrows if above == room), default=0)

    return max((height(room) for room in rooms), default=0)
