"""Small changes of a source: which are made, which are drawn, and that tests which notice are told from those that do
not. The changes of the tree itself are too many for the suite: `make mutants`."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.bench.harness import BenchReport
from penstock.bench.measured.document import section
from penstock.bench.trust.mutants.areas import AREAS, Area, drawn
from penstock.bench.trust.mutants.equivalent import equivalents
from penstock.bench.trust.mutants.measure import ROOT, noticed_figures
from penstock.bench.trust.mutants.mutant import Mutant
from penstock.bench.trust.mutants.mutating import mutants
from penstock.bench.trust.mutants.running import TestedMutant, mutant_tests
from penstock.errors import Internal


def made(source: str) -> list[str]:
    """The changed lines of all mutants of a source."""
    return [one.after for one in mutants("libs/penstock/some.py", textwrap.dedent(source))]


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("a < b", ["a <= b"]),
        ("(a) >= (b)", ["(a) > (b)"]),
        ("a == b", ["a != b"]),
        ("a is not None", ["a is None"]),
        ("a not in b", ["a in b"]),
        ("a < b <= c", ["a <= b <= c", "a < b < c"]),
        ("a > 3", ["a >= 3", "a > 4"]),
        ("a[1:-2]", ["a[2:-2]", "a[1:-1]"]),
        ("a[0]", ["a[1]"]),
        ("a + b - 1", ["a - b - 1", "a + b + 1", "a + b - 2"]),
        ("a // b * c", ["a * b * c", "a // b / c"]),
        ("not (a)", ["(a)"]),
        ("a and b or c", ["a or b or c", "a and b and c"]),
        ("b if a else c", ["b if (not (a)) else c"]),
        ("[b for b in a if b]", ["[b for b in a if (not (b))]"]),
        ("min(a, 2)", ["max(a, 2)", "min(a, 3)"]),
        ("f(a, sure=True)", ["f(a, sure=False)"]),
        ("f'{a + 1}'", []),
        ("'a < b'", []),
    ],
)
def test_expressions(line: str, changed: list[str]) -> None:
    assert made(f"x = {line}\n") == [f"x = {one}" for one in changed]


def test_a_statement_is_left_out() -> None:
    source = """
    async def f(self, held):
        self.pool.release(held)
        await self.pool.closed()
        del self.pages[held]
        self.count -= one
        self.table = None
        local = None
        while self.count:
            break
    """
    found = mutants("libs/penstock/some.py", textwrap.dedent(source))
    assert [(one.kind, one.after) for one in found] == [
        ("call left out", "pass"),
        ("call left out", "pass"),
        ("deletion left out", "pass"),
        ("assignment left out", "pass"),
        ("sign swapped", "self.count += one"),
        ("assignment left out", "pass"),
        ("condition negated", "while (not (self.count)):"),
        ("break turned", "continue"),
    ]
    assert [one.line for one in found[:3]] == [3, 4, 5]
    assert {one.function for one in found} == {"f"}


def test_what_is_said_and_hinted_stays() -> None:
    source = '''
    """Docs: a < b."""

    if TYPE_CHECKING:
        import some

    class Some:
        limit: Literal[1] = 2

        def __init__(self, a: list[Literal[1]] = ()) -> Literal[1]:
            """More: a < b."""
            super().__init__(a)
            self.a = a
            assert a[0] < 1
            self._log.warning("less", a=a[0] < 1)
            logger.info(a + 1)

        def __repr__(self):
            return self.a[0]

        def fails(self):
            raise ValueError(self.a[0])
    '''
    assert made(source) == []


def test_what_compiles_to_the_same_is_left_out() -> None:
    assert made("x = 1 + 1 - y\n") == ["x = 2 + 1 - y", "x = 1 - 1 - y", "x = 1 + 1 + y"], "1 + 2 is 2 + 1"


def test_every_change_of_the_tree_is_a_program_and_other_than_its_source() -> None:
    for area in AREAS:
        path = area.paths(ROOT)[-1]
        source = path.read_text()
        for one in mutants(str(path.relative_to(ROOT)), source):
            assert one.source != source and one.before != one.after
            assert ast.dump(ast.parse(one.source)) != ast.dump(ast.parse(source))
            assert one.before.splitlines()[0] in source.splitlines()[one.line - 1]


def test_every_area_has_its_tests() -> None:
    assert [test for area in AREAS for test in area.tests if not (ROOT / test).is_file()] == []


def a_mutant(number: int, path: str = "libs/penstock/some.py") -> Mutant:
    return Mutant(
        path=path,
        line=1,
        function="f",
        kind="comparison turned",
        before="a < b",
        after="a <= b",
        source="",
        number=number,
    )


def test_each_area_has_an_equal_share_of_the_draw() -> None:
    found = {name: [a_mutant(number) for number in range(has)] for name, has in (("a", 50), ("b", 2), ("c", 50))}
    some = drawn(found, 20, 0)
    assert {name: len(of) for name, of in some.items()} == {"a": 9, "b": 2, "c": 9}
    assert some == drawn(found, 20, 0) and some != drawn(found, 20, 1)
    assert {name: len(of) for name, of in drawn(found, 1000, 0).items()} == {"a": 50, "b": 2, "c": 50}


def test_an_edit_elsewhere_draws_no_other() -> None:
    before = drawn({"a": [a_mutant(number) for number in range(9)]}, 4, 0)["a"]
    after = drawn({"a": [a_mutant(9), *(a_mutant(number) for number in range(9))]}, 4, 0)["a"]
    assert len(set(before) & set(after)) >= 3


def test_equivalents_are_of_the_tree_and_say_why() -> None:
    known = equivalents()
    paths = {entry.path for entry in known}
    found = [one for path in paths for one in mutants(path, (ROOT / path).read_text())]
    assert [entry for entry in known if not any(entry.covers(one) for one in found)] == []
    assert all(len(entry.why) > 20 for entry in known)


def test_the_figure_names_what_survived() -> None:
    done = [TestedMutant(a_mutant(number), number > 0, "", 1.0) for number in range(20)]
    (one,) = noticed_figures(done)
    assert (one.id, one.value, one.met) == ("mutants_noticed", 0.95, True)
    assert one.against.endswith("survived: libs/penstock/some.py:1 f (comparison turned)")
    assert noticed_figures(done[:10])[0].met is False
    assert "small changes" in section(BenchReport("trust", [one]).json())


SOURCE = """
def most(values):
    while len(values) > 1:
        values.remove(min(values))
    return values[0] if values[0] >= 0 else 0
"""
TESTS = """
from penstock.some import most

def test_the_most():
    assert most([1, 2, 3]) == 3 and most([-1]) == 0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small tree with a module and its tests."""
    for part in ("libs/penstock", "services", "tools", "tests"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "libs/penstock/some.py").write_text(SOURCE)
    (tmp_path / "tests/test_some.py").write_text(TESTS)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests/conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('patient')\n"
    )
    return tmp_path


def area(tests: Sequence[str] = ("tests/test_some.py",)) -> Area:
    return Area(name="some", files=("libs/penstock/some.py",), tests=tests)


async def test_what_the_tests_notice_and_what_not(checkout: Path) -> None:
    """A change may also make a program run without an end."""
    async with mutant_tests(checkout, ["pytest"]) as tests:
        await tests.unchanged_s(area())
        done = [await tests.tested(one, area(), 0.0) for one in area().mutants(checkout)]
    said = {one.mutant.after: (one.noticed, one.by) for one in done}
    by, silent = (True, "tests/test_some.py::test_the_most"), (False, "status 0")
    assert said == {
        "while len(values) >= 1:": by,
        "while len(values) > 2:": by,
        "pass": (True, "no end in time"),
        "values.remove(max(values))": by,
        "return values[1] if values[0] >= 0 else 0": by,
        "return values[0] if values[1] >= 0 else 0": by,
        "return values[0] if values[0] > 0 else 0": silent,
        "return values[0] if values[0] >= 1 else 0": silent,
    }
    assert (checkout / "libs/penstock/some.py").read_text() == SOURCE, "the tree itself is never changed"


async def test_tests_that_fail_without_a_change_say_nothing_of_changes(checkout: Path) -> None:
    (checkout / "tests/test_some.py").write_text(TESTS.replace("== 3", "== 2"))
    async with mutant_tests(checkout, ["pytest"]) as tests:
        with pytest.raises(Internal, match="without a change, the tests of some fail"):
            await tests.unchanged_s(area())
