"""What README and docs promise is held by tests that exist."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LONGEST = 160
"""Lines of the README: one page."""


@dataclass(frozen=True)
class Promise:
    """One row of docs/promises.md."""

    where: Path
    sentence: str
    tests: tuple[str, ...]


def promises() -> list[Promise]:
    rows = []
    for line in (DOCS / "promises.md").read_text().splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and "::" in cells[2]:
            where = ROOT / cells[0] if cells[0] in ("README.md", "SECURITY.md") else DOCS / cells[0]
            rows.append(Promise(where, cells[1], tuple(re.findall(r"`([^`]+)`", cells[2]))))
    return rows


def plain(markdown: str) -> str:
    """Without links and emphasis, in lower case, white space as one space."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("**", "")
    return " ".join(text.split()).lower()


@cache
def names(path: Path) -> frozenset[str]:
    """Tests that a file has: functions, and the classes that Hypothesis makes of machines."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(found)


def section(title: str) -> str:
    text = (ROOT / "README.md").read_text()
    return re.split(r"\n## ", text.split(f"\n## {title}\n", 1)[1])[0]


_AGAIN = ".venv/bin/pytest --last-failed --last-failed-no-failures none"
_TEST = f"pytest -n 2 --dist loadfile --no-loadscope-reorder --cache-clear || {{ test $? = 1 && {_AGAIN}; }}"


@pytest.mark.parametrize(("verb", "ends"), [("demo", "penstock demo"), ("test", _TEST)], ids=["demo", "test"])
def test_the_two_commands_prepare_what_they_need(tmp_path: Path, verb: str, ends: str) -> None:
    """On a clone without an environment, make would create one, install into it and then run the command."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "locked.txt"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # of a make around us
    command = ["make", "-n", verb]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert any("python3 -m venv" in line for line in lines) and any("pip install" in line for line in lines)
    assert lines[-1].endswith(ends)


def test_there_are_promises() -> None:
    assert len(promises()) > 50


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise.sentence[:50])
def test_a_promise_is_written_and_held(promise: Promise) -> None:
    assert plain(promise.sentence) in plain(promise.where.read_text()), f"{promise.where.name} does not say it"
    for test in promise.tests:
        path, name = test.split("::")
        assert (ROOT / path).is_file(), f"there is no {path}"
        assert name in names(ROOT / path), f"there is no {name} in {path}"
        assert name.lower().startswith("test")


@pytest.mark.parametrize("title", ["A request's life", "Why it is so"])
def test_every_step_and_every_reason_is_held(title: str) -> None:
    items = re.split(r"\n(?=(?:\d+\.|-) )", section(title).split("\n\nEach sentence")[0].strip())
    assert len(items) >= 6
    held = [plain(promise.sentence) for promise in promises() if promise.where.name == "README.md"]
    assert [item for item in items if not any(sentence in plain(item) for sentence in held)] == []


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_every_document_is_linked() -> None:
    text = "".join(path.read_text() for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    assert [path.name for path in DOCS.rglob("*.md") if f"{path.name})" not in text] == []


def test_the_files_of_the_readme_are_there() -> None:
    """Every folder and file that the tree names, below the source root that stands before it."""
    tree = re.search(r"```\n(.*?)```", section("The files"), re.DOTALL)
    assert tree is not None
    missing, root = [], ROOT
    for line in tree[1].splitlines():
        indent, parts = len(line) - len(line.lstrip()), line.split("  ")
        entry = next(part for part in parts if part.strip()).split()
        if indent == 0:
            root = ROOT / entry[0]
            missing += [name for name in entry if not (ROOT / name).exists()]
        elif indent == 2:
            missing += [name for name in entry if not (root / name).exists()]
    assert missing == []


def test_the_glossary_is_short_and_at_the_head() -> None:
    head, rest = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Verbs\n")
    assert len(head.splitlines()) <= 40
    words = [row.split("|")[1].strip() for row in head.splitlines() if row.startswith("| ")][1:]
    assert len(words) == len(set(words)) >= 20
    assert rest


def statement(package: Path) -> str:
    begin = package / "__init__.py"
    return (ast.get_docstring(ast.parse(begin.read_text())) or "") if begin.exists() else ""


def test_every_package_says_what_it_is() -> None:
    """In its `__init__.py`; folders that are no packages have a README."""
    roots = [ROOT / part for part in ("libs", "services", "tools", "loadtest")]
    packages = {path.parent for root in roots for path in root.rglob("*.py")}
    silent = [path for path in packages if path.name not in ("penstock", "v1") and not statement(path)]
    assert silent == []
    assert [part for part in ("tests", "proto", "docs") if not any((ROOT / part).glob("*.md"))] == []
