"""What holds for the tree as a whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = ("libs", "services", "tools")
SOURCES = sorted(path for part in (*ROOTS, "loadtest") for path in (ROOT / part).rglob("*.py"))
FORBIDDEN_CALLS = {"eval", "exec", "pickle.load", "pickle.loads", "torch.load", "yaml.load", "os.system", "os.popen"}
FORBIDDEN_CALLS |= {"yaml.unsafe_load", "yaml.full_load", "joblib.load", "numpy.load", "np.load"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def test_penstock_is_a_namespace_over_three_roots() -> None:
    assert not [part for part in ROOTS if (ROOT / part / "penstock" / "__init__.py").exists()]


@pytest.mark.parametrize(
    "module",
    [
        "penstock.gateway",
        "penstock.router",
        "penstock.kvstore",
        "penstock.picker",
        "penstock.cli",
        "penstock.checkpoint",
        "penstock.sizing",
        "penstock.models",
    ],
)
def test_light_parts_never_import_torch(module: str) -> None:
    """With torch made impossible to import, the part still starts far enough to print its help."""
    run = module if (ROOT / "services" / Path(*module.split("."))).is_dir() else ""
    program = (
        "import sys, runpy, importlib\n"
        "sys.modules['torch'] = None\n"
        f"importlib.import_module({module!r})\n"
        f"if {run!r}:\n"
        f"    importlib.import_module({module!r} + ('.up' if {run!r}.endswith('cli') else '.service'))\n"
        f"    sys.argv = [{run!r}, '--help']\n"
        f"    runpy.run_module({run!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_imports_point_downward() -> None:
    """The contracts of .importlinter, which `make check` runs as well."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_no_pickle_no_eval_no_shell() -> None:
    assert len(SOURCES) > 50
    found = {
        f"{path.relative_to(ROOT)}: {what}" for path in SOURCES for node in nodes_of(path) for what in forbidden(node)
    }
    assert not found


def forbidden(node: ast.AST) -> list[str]:
    """What the node does that nobody here may do."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if (node.module or "").split(".")[0] in FORBIDDEN_IMPORTS else []
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        shell = any(word.arg == "shell" and not is_false(word.value) for word in node.keywords)
        return [name] if name in FORBIDDEN_CALLS or shell else []
    return []


def is_false(node: ast.expr) -> bool:
    """Whether the expression is the constant False."""
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("import pickle", True),
        ("from pickle import loads", True),
        ("eval('1')", True),
        ("torch.load(path)", True),
        ("run('ls', shell=True)", True),
        ("run('ls', shell=shell)", True),
        ("run('ls', shell=False)", False),
        ("model.eval()", False),
        ("import torch", False),
    ],
)
def test_the_scan_sees_what_it_should(line: str, bad: bool) -> None:
    assert bool([what for node in ast.walk(ast.parse(line)) for what in forbidden(node)]) is bad


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a source, the module first."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def sources(*roots: str) -> dict[str, tuple[ast.AST, ...]]:
    """The nodes of hand-written sources, by path."""
    return {
        str(path.relative_to(ROOT)): nodes_of(path)
        for root in roots
        for path in sorted((ROOT / root).rglob("*.py"))
        if "v1" not in path.parts
    }


def bare_tasks(nodes: Collection[ast.AST]) -> list[int]:
    """Lines that start a task without an owner: not in a group opened by `async with asyncio.TaskGroup() as NAME`, nor
    in one that was handed on under that name, as an argument that says so or an attribute."""
    groups = {
        node.arg
        for node in nodes
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "asyncio.TaskGroup"
    }
    groups |= {
        item.optional_vars.id
        for node in nodes
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if ast.unparse(item.context_expr) == "asyncio.TaskGroup()" and isinstance(item.optional_vars, ast.Name)
    }
    return [
        call.lineno
        for call in nodes
        if isinstance(call, ast.Call) and _last_name(call.func) in ("ensure_future", "create_task")
        for receiver, _, name in [ast.unparse(call.func).rpartition(".")]
        if name == "ensure_future" or (name == "create_task" and receiver.rpartition(".")[2].strip("_") not in groups)
    ]


def _last_name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def test_every_task_has_an_owner() -> None:
    """See `penstock.runtime.tasks`, the only file that may start tasks of its own."""
    found = {path: lines for path, found in sources(*ROOTS).items() if (lines := bare_tasks(found))}
    assert set(found) == {"libs/penstock/runtime/tasks.py"}


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("asyncio.create_task(job())", [1]),
        ("asyncio.get_running_loop().create_task(job())", [1]),
        ("asyncio.ensure_future(job())", [1]),
        ("async def f():\n async with asyncio.TaskGroup() as tasks:\n  tasks.create_task(job())", []),
        ("async def f():\n async with asyncio.TaskGroup() as tasks:\n  asyncio.create_task(job())", [3]),
        ("async def f():\n async with asyncio.TaskGroup() as tasks:\n  self._tasks.create_task(job())", []),
        ("async def f():\n async with other() as tasks:\n  tasks.create_task(job())", [3]),
        ("def f(self, tasks: asyncio.TaskGroup):\n self._tasks.create_task(job())", []),
        ("def f(self, tasks):\n self._tasks.create_task(job())", [2]),
    ],
)
def test_the_scan_sees_tasks_without_an_owner(program: str, lines: list[int]) -> None:
    assert bare_tasks([*ast.walk(ast.parse(program))]) == lines


def test_a_public_class_name_exists_once() -> None:
    """One word for one thing; the embedded models, which know nothing of the mesh, have words of their own."""
    homes: dict[str, list[str]] = {}
    for path, (module, *_) in sources(*ROOTS).items():
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "penstock/models/" not in path:
                homes.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
