"""The benches belong to the command line, the checkers and the wheel, and cost nothing until one is asked for."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.test_layout import ROOTS

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_of_the_command_line_imports_no_bench() -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['penstock', '--help']\n"
        "try: runpy.run_module('penstock.cli', run_name='__main__')\n"
        "finally: print([name for name in sys.modules if name == 'torch' or name.startswith('penstock.bench')])\n"
    )
    said = run("-c", program)
    assert "bench" in said and said.splitlines()[-1] == "[]"


BENCHES = [
    "all",
    "batch",
    "e2e",
    "engine",
    "evict",
    "failover",
    "gateway",
    "house",
    "kv",
    "large",
    "masked",
    "measured",
    "operate",
    "overhead",
    "cores",
    "paired",
    "router",
    "soak",
    "speculation",
    "trust",
]


def test_every_bench_has_help() -> None:
    """All in one process: each imports what the others do."""
    program = """
import io, sys
from contextlib import redirect_stdout, suppress
from penstock.cli.__main__ import make_app

for name in sys.argv[1:]:
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        make_app()(["bench", name, "--help"])
    print(f"bench {name}" in said.getvalue() and "Usage" in said.getvalue())
"""
    assert run("-c", program, *BENCHES).split() == ["True"] * len(BENCHES)


def test_every_source_root_is_installed_and_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools, packages = settings["tool"], [f"{root}/penstock" for root in ROOTS]
    assert tools["hatch"]["build"]["targets"]["wheel"]["packages"] == packages
    assert tools["hatch"]["build"]["dev-mode-dirs"] == list(ROOTS)
    assert tools["mypy"]["mypy_path"] == tools["pyright"]["extraPaths"] == tools["ruff"]["src"] == list(ROOTS)
    assert tools["pytest"]["ini_options"]["pythonpath"] == [".", *ROOTS]
    assert f"mypy {' '.join(ROOTS)} loadtest" in (ROOT / "Makefile").read_text()


def test_a_bench_that_is_told_to_end_ends_what_it_has_started() -> None:
    """As with `timeout penstock bench ...`: its servers run in sessions of their own."""
    program = """
import asyncio
from penstock.bench import commands

async def bench(quick):
    try:
        print("begun", flush=True)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("ended", flush=True)

commands._run(bench, None)
"""
    with subprocess.Popen((sys.executable, "-c", program), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        assert process.stdout.read() == "ended\n"
    assert process.returncode == 128 + signal.SIGTERM
