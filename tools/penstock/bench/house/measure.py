"""Reads a checkout and says how it is built. Nothing of it is imported or run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table

from penstock.bench.harness import describe_host
from penstock.bench.house.rooms import Storeys, imports, modules, storeys
from penstock.bench.house.source import ClassFacts, FileFacts, FunctionFacts, read_file

ROOTS = ("libs", "services", "tools")
"""Source roots that share the namespace; one that a checkout lacks counts nothing."""
GENERATED = "penstock.v1"
LONG_FUNCTION = 60
LONG_FILE = 300
MANY_PARAMETERS = 7
BIG_CLASSES = (15, 20)
"""Public methods above which a class is counted."""
_LEAST_ROOMS = 4
"""Smaller packages have no floors to speak of."""

Fact = TypeVar("Fact", FunctionFacts, ClassFacts)

_MODELS = "libs/penstock/models/"
_CLI = "services/penstock/cli/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How long things are, in lines."""

    count: int
    median: float
    p90: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """One part of the checkout."""

    name: str
    lines: int
    files: Sizes
    functions: Sizes
    arguments: int
    annotated: int
    public: int
    """Classes and functions."""
    documented: int
    """Of the public ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HouseReport:
    """One checkout. Lists hold `path:line name` and a number, longest first."""

    groups: Sequence[GroupFigures]
    long_functions: Sequence[tuple[str, int]]
    long_files: Sequence[tuple[str, int]]
    many_parameters: Sequence[tuple[str, int]]
    big_classes: Mapping[int, Sequence[tuple[str, int]]]
    """Per limit of public methods, the classes above it."""
    calls: int
    long_calls: int
    """Calls with six or more positional arguments."""
    any_per_1000: float
    type_ignores: int
    packages: Sequence[Storeys]
    repeated_names: Mapping[str, Sequence[str]]
    """Public class names that stand more than once, and the files."""

    def json(self) -> str:
        """One object, for programs; readable as a diff."""
        return json.dumps({"bench": "house", "host": describe_host(), **asdict(self)}, indent=1)

    def shown(self) -> RenderableType:
        """For people."""
        return Group(self._groups(), self._lists(), self._packages())

    def _groups(self) -> Table:
        columns = ("files", "lines", "file med/p90/max", "functions", "fn med/p90/max", "annotated", "docstrings")
        table = _table("Sizes", "group", columns)
        for group in self.groups:
            table.add_row(
                group.name,
                f"{group.files.count:,}",
                f"{group.lines:,}",
                _span(group.files),
                f"{group.functions.count:,}",
                _span(group.functions),
                _share(group.annotated, group.arguments),
                _share(group.documented, group.public),
            )
        return table

    def _lists(self) -> Table:
        table = Table(title="Core: what is counted, and the worst of it", title_justify="left")
        table.add_column("check")
        table.add_column("count", justify="right")
        table.add_column("worst", overflow="fold")
        for name, rows in (
            (f"functions over {LONG_FUNCTION} lines", self.long_functions),
            (f"files over {LONG_FILE} lines", self.long_files),
            (f"functions with more than {MANY_PARAMETERS} parameters", self.many_parameters),
            *((f"classes over {limit} public methods", rows) for limit, rows in self.big_classes.items()),
        ):
            table.add_row(name, str(len(rows)), "\n".join(f"{place} {number}" for place, number in rows[:8]))
        table.add_row("calls with 6 or more positional arguments", f"{self.long_calls} of {self.calls:,}", "")
        table.add_row("Any per 1,000 lines", f"{self.any_per_1000:.1f}", "")
        table.add_row("type: ignore", str(self.type_ignores), "")
        names = "\n".join(f"{name}: {', '.join(paths)}" for name, paths in self.repeated_names.items())
        table.add_row("public class names that stand more than once", str(len(self.repeated_names)), names)
        return table

    def _packages(self) -> Table:
        table = _table("Packages as floors", "package", ("rooms", "floors", "arrows", "circles"))
        table.add_column("arrows that run up", overflow="fold")
        for package in self.packages:
            numbers = (package.rooms, package.floors, package.arrows, len(package.circles))
            rings = [f"circle: {', '.join(circle)}" for circle in package.circles if package.package != "penstock"]
            table.add_row(package.package, *map(str, numbers), "\n".join([*package.up, *rings]))
        return table


def measure(root: Path) -> HouseReport:
    """Reads the checkout at `root`. Raises SyntaxError on a file that is not Python."""
    known = {name: path for name, path in modules(root / part for part in ROOTS).items() if not _generated(name)}
    files = [read_file(path, root) for path in known.values()]
    core = [file for file in files if not file.path.startswith(_MODELS)]
    return report(
        groups=[*_groups(files), *(group(name, _read(root, name)) for name in ("tests", "loadtest")), _cpp(root)],
        core=core,
        packages=_packages(known),
        everything=[*files, *_read(root, "loadtest")],
    )


def report(
    *,
    groups: Sequence[GroupFigures],
    core: Sequence[FileFacts],
    packages: Sequence[Storeys],
    everything: Iterable[FileFacts],
) -> HouseReport:
    """The lists are those of `core`, repeated names those of `everything`."""
    functions = [function for file in core for function in file.functions]
    classes = [each for file in core for each in file.classes]
    lines = sum(file.lines for file in core)
    return HouseReport(
        groups=groups,
        long_functions=_above(functions, LONG_FUNCTION, lambda one: one.lines),
        long_files=_sorted((file.path, file.lines) for file in core if file.lines > LONG_FILE),
        many_parameters=_above(functions, MANY_PARAMETERS, lambda one: one.parameters),
        big_classes={limit: _above(classes, limit, lambda one: one.public_methods) for limit in BIG_CLASSES},
        calls=sum(file.calls for file in core),
        long_calls=sum(len(file.long_calls) for file in core),
        any_per_1000=1000 * sum(file.any for file in core) / max(1, lines),
        type_ignores=sum(file.ignores for file in core),
        packages=packages,
        repeated_names=_repeated(everything),
    )


def group(name: str, files: Sequence[FileFacts]) -> GroupFigures:
    """The figures of some files."""
    functions = [function for file in files for function in file.functions]
    named: list[FunctionFacts | ClassFacts] = [each for file in files for each in file.functions]
    named += [each for file in files for each in file.classes]
    public = [each for each in named if each.public]
    return GroupFigures(
        name=name,
        lines=sum(file.lines for file in files),
        files=_sizes([file.lines for file in files]),
        functions=_sizes([function.lines for function in functions]),
        arguments=sum(function.parameters for function in functions),
        annotated=sum(function.annotated for function in functions),
        public=len(public),
        documented=sum(each.documented for each in public),
    )


def _groups(files: Sequence[FileFacts]) -> list[GroupFigures]:
    core = [file for file in files if not file.path.startswith(_MODELS)]
    return [
        group("core: all but the embedded models", core),
        group("- libs", [file for file in core if file.path.startswith("libs/")]),
        group(
            "- services without cli",
            [file for file in core if file.path.startswith("services/") and not file.path.startswith(_CLI)],
        ),
        group("- cli and tools", [file for file in core if file.path.startswith((_CLI, "tools/"))]),
        group("the embedded models (training)", [file for file in files if file.path.startswith(_MODELS)]),
    ]


def _read(root: Path, folder: str) -> list[FileFacts]:
    return [read_file(path, root) for path in sorted((root / folder).rglob("*.py"))]


def _cpp(root: Path) -> GroupFigures:
    """Files and lines alone: functions of C++ are not counted."""
    paths = sorted(path for kind in ("*.cpp", "*.h") for path in (root / "libs").rglob(kind))
    return group("C++", [FileFacts(path.as_posix(), path.read_text().count("\n")) for path in paths])


def _packages(known: Mapping[str, Path]) -> list[Storeys]:
    arrows = imports(known)
    names = ["penstock", *(name for name, path in known.items() if path.name == "__init__.py")]
    drawn = (storeys(name, known, arrows) for name in names)
    return [package for package in drawn if package.rooms >= _LEAST_ROOMS]


def _repeated(files: Iterable[FileFacts]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for file in files:
        for each in file.classes:
            if each.public:
                found[each.name].append(file.path)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def _above(facts: Iterable[Fact], limit: int, number: Callable[[Fact], int]) -> list[tuple[str, int]]:
    return _sorted((fact.place, number(fact)) for fact in facts if number(fact) > limit)


def _sorted(rows: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def _sizes(lines: Sequence[int]) -> Sizes:
    if not lines:
        return Sizes(count=0, median=0, p90=0, max=0)
    ranked = sorted(lines)
    p90 = ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))]
    return Sizes(count=len(ranked), median=statistics.median(ranked), p90=p90, max=ranked[-1])


def _generated(name: str) -> bool:
    return name == GENERATED or name.startswith(f"{GENERATED}.")


def _span(sizes: Sizes) -> str:
    return f"{sizes.median:g} / {sizes.p90} / {sizes.max}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
