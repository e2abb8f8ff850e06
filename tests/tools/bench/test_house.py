"""The figures of the source, on sources of a few lines whose figures can be counted by eye."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from penstock.bench.house.measure import ROOTS, group, measure
from penstock.bench.house.rooms import imports, modules, rings, storeys
from penstock.bench.house.source import read_text

ROOT = Path(__file__).parents[3]
TEXT = '''\
from typing import Any


class Open:
    """A docstring."""

    def method(self, a: int, b, *rest: str, c: Any = 0) -> None:
        def inner(x):
            return x

        inner(1)

    @property
    def seen(self) -> int:
        """Of it."""
        return 1

    def _hidden(self): ...

    @staticmethod
    def made(size: int) -> "Open": ...


class _Closed:
    def method(self) -> None: ...


@decorated(
    1,
)
async def public(
    one: int,
    two: int,
) -> None:
    call(1, 2, 3, 4, 5, 6)
    call(*(1, 2, 3), *rest, 5, 6)  # type: ignore[thing]
    call(1, 2, 3, 4, 5, six=6)
    "# type: ignore"
'''


def test_functions_are_counted_without_self_and_without_decorators():
    found = {function.name: function for function in reversed(read_text(TEXT, "a.py").functions)}
    assert (found["public"].lines, found["public"].parameters, found["public"].annotated) == (8, 2, 2)
    method = found["method"]  # b has no annotation
    assert (method.lines, method.parameters, method.annotated, method.returns) == (5, 4, 3, True)
    assert found["made"].parameters == 1
    assert found["inner"].lines == 2


def test_what_is_public():
    facts = read_text(TEXT, "a.py")
    assert [each.name for each in facts.functions if each.public] == ["method", "seen", "made", "public"]
    assert [(each.name, each.public, each.documented) for each in facts.classes] == [
        ("Open", True, True),
        ("_Closed", False, False),
    ]
    assert [each.name for each in facts.functions if each.documented] == ["seen"]


def test_methods_of_a_class():
    shown, _ = read_text(TEXT, "a.py").classes
    assert (shown.methods, shown.public_methods) == (4, 3)


def test_calls_any_and_ignores():
    facts = read_text(TEXT, "a.py")
    assert (facts.calls, facts.long_calls) == (5, [35, 36])
    assert (facts.any, facts.ignores, facts.lines) == (1, 1, 38)


def test_sizes_of_a_group():
    files = [read_text("x = 1\n" * lines, f"{lines}.py") for lines in range(1, 11)]
    found = group("some", [*files, read_text(TEXT, "a.py")])
    assert found.lines == 93
    assert (found.files.count, found.files.median, found.files.p90, found.files.max) == (11, 6, 10, 38)
    assert (found.public, found.documented) == (5, 2)
    assert (found.arguments, found.annotated) == (8, 6)


def test_a_group_without_files():
    found = group("none", [])
    assert (found.files.count, found.functions.max, found.lines) == (0, 0, 0)


def put(root, **files: str) -> None:
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def tree(tmp_path):
    """`top` stands on `middle` and `low`, `middle` on `low`; `low` has two rooms; `services` shares the namespace."""
    put(
        tmp_path / "libs",
        pkg__low__init="",
        pkg__low__a="from pkg.low import b\n",
        pkg__low__b="",
        pkg__middle="from .low.a import thing\nimport pkg.low.b\n",
    )
    put(tmp_path / "services", pkg__top="from pkg import middle\nfrom pkg.low.b import thing\nimport os\n")
    (tmp_path / "libs/pkg/low/init.py").rename(tmp_path / "libs/pkg/low/__init__.py")
    return tmp_path


def drawn(tree, package: str):
    known = modules([tree / "libs", tree / "services", tree / "missing"])
    return storeys(package, known, imports(known))


def test_modules_of_two_roots_share_a_namespace(tree):
    assert set(modules([tree / "libs", tree / "services"])) == {
        "pkg.low",
        "pkg.low.a",
        "pkg.low.b",
        "pkg.middle",
        "pkg.top",
    }


def test_imports_are_seen_in_every_form(tree):
    known = modules([tree / "libs", tree / "services"])
    assert imports(known) == Counter(
        {
            ("pkg.low.a", "pkg.low.b"): 1,
            ("pkg.middle", "pkg.low.a"): 1,
            ("pkg.middle", "pkg.low.b"): 1,
            ("pkg.top", "pkg.middle"): 1,
            ("pkg.top", "pkg.low.b"): 1,
        }
    )


def test_floors_are_the_longest_chain_of_rooms(tree):
    found = drawn(tree, "pkg")
    assert (found.rooms, found.floors, found.arrows, found.up, found.circles) == (3, 3, 3, [], [])
    inside = drawn(tree, "pkg.low")
    assert (inside.rooms, inside.floors, inside.arrows) == (2, 2, 1)


def test_of_rooms_that_import_each_other_the_fewer_imports_run_up(tree):
    put(tree / "libs", pkg__low__c="from pkg import middle\n")
    found = drawn(tree, "pkg")
    assert (found.floors, found.arrows, found.up) == (3, 4, ["low -> middle"])
    assert found.circles == []  # no file imports itself on any way


def test_a_circle_of_files_is_named(tree):
    put(tree / "libs", pkg__low__b="def late():\n    from pkg.middle import thing\n")
    assert drawn(tree, "pkg").circles == [["pkg.low.a", "pkg.low.b", "pkg.middle"]]


def test_rings_are_groups_that_reach_each_other():
    assert rings([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "d"), ("d", "e"), ("f", "a")]) == [
        ["a", "b", "c"],
        ["d", "e"],
    ]
    assert rings([("a", "b"), ("b", "c"), ("a", "c")]) == []


def test_a_whole_checkout(tmp_path):
    put(
        tmp_path,
        libs__penstock__kv__blocks=TEXT,
        libs__penstock__models__net="class Net: ...\n",
        libs__penstock__v1__made="class Open: ...\n",
        services__penstock__cli__up="x = 1\n" * 301,
        tools__penstock__bench__it="class Open: ...\n",
        tests__test_it="def test(): ...\n",
        loadtest__agents="class Net: ...\n",
    )
    found = measure(tmp_path)
    figures = {each.name: each for each in found.groups}
    assert figures["core: all but the embedded models"].files.count == 3
    assert figures["- cli and tools"].lines == 302
    assert figures["tests"].functions.count == 1
    assert found.long_files == [("services/penstock/cli/up.py", 301)]
    assert found.long_functions == []
    assert found.long_calls == 2
    # generated classes are not named by us
    assert found.repeated_names == {
        "Net": ["libs/penstock/models/net.py", "loadtest/agents.py"],
        "Open": ["libs/penstock/kv/blocks.py", "tools/penstock/bench/it.py"],
    }
    assert json.loads(found.json())["any_per_1000"] == pytest.approx(1000 / 340, abs=0.1)
    assert found.shown() is not None


def test_no_files_of_this_tree_stand_in_a_circle():
    known = modules(ROOT / part for part in ROOTS)
    assert rings(imports(known)) == []
