"""Runs the tests of an area against a mutant: the side that asks; `warm` answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.trust.mutants.areas import Area
from penstock.bench.trust.mutants.mutant import Mutant
from penstock.errors import Internal

_SCRIPT = Path(__file__).with_name("warm.py")
_ROOTS = ("", "libs", "services", "tools")
_LONGEST_S, _TEST_S = 600.0, 60
_CPU_FACTOR, _CPU_SLACK_S = 2.0, 5.0
_WALL_FACTOR, _WALL_SLACK_S = 5.0, 60.0
"""A run of a mutant may take so many times what the tests take without a change, and so much more: of the processor's
time, and by the clock of a machine that others use too."""
_TEST_FAILED = 1
"""What pytest returns then."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
_LONGEST_LINE = 1 << 20
_IMPORTS = (
    "pytest",
    "pytest_asyncio.plugin",
    "pytest_timeout",
    "xdist.plugin",
    "hypothesis.stateful",
    "hypothesis.extra.numpy",
    "_hypothesis_pytestplugin",
    "grpc.aio",
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "google.protobuf.json_format",
    "numpy",
    "torch",
    "safetensors.torch",
    "tokenizers",
    "llguidance",
    "jinja2.sandbox",
    "msgspec",
    "structlog",
    "uvicorn",
    "starlette.applications",
    "openai",
    "opentelemetry.sdk.trace",
    "prometheus_client",
    "redis.asyncio",
    "rich.console",
)
"""What tests of all areas import."""


@dataclass(frozen=True, slots=True)
class TestedMutant:
    """What the tests have said of a mutant."""

    __test__ = False

    mutant: Mutant
    noticed: bool
    by: str
    """The test that failed; or why there is none."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Said:
    """Answer of the warm process."""

    status: int | None
    seconds: float
    said: str


class MutantTests:
    """Tests of a checkout, one run at a time. A test that fails and then, alone, does not has failed for reasons of the
    machine: the others go on without it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._fickle: list[str] = []
        """Tests that have failed so without a change."""

    async def unchanged_s(self, area: Area) -> float:
        """Seconds that the tests of an area take without a change. Raises Internal when one fails: then nothing can be
        said of changes."""
        said = await self._run(None, area, self._fickle, _LONGEST_S, _LONGEST_S)
        if said.status != 0:
            raise Internal(f"without a change, the tests of {area.name} fail:\n{said.said}")
        return said.seconds

    async def tested(self, mutant: Mutant, area: Area, unchanged_s: float) -> TestedMutant:
        """Runs the tests of an area against a mutant, until one fails."""
        cpu_s, wall_s = _CPU_FACTOR * unchanged_s + _CPU_SLACK_S, _WALL_FACTOR * unchanged_s + _WALL_SLACK_S
        said = await self._run(mutant, area, [*self._fickle], cpu_s, wall_s)
        return TestedMutant(mutant, said.status != 0, _noticed_by(said), said.seconds)

    async def _run(self, mutant: Mutant | None, area: Area, fickle: list[str], cpu_s: float, wall_s: float) -> _Said:
        """Adds to the `fickle` tests, which it leaves out."""
        while True:
            said = await self._ask(mutant, [*(f"--deselect={test}" for test in fickle), *area.tests], cpu_s, wall_s)
            failed = _FAILED.findall(said.said)
            if said.status != _TEST_FAILED or not failed:
                return said
            if (await self._ask(mutant, failed[:1], cpu_s, wall_s)).status != 0:
                return said
            fickle.append(failed[0])

    async def _ask(self, mutant: Mutant | None, tests: Sequence[str], cpu_s: float, wall_s: float) -> _Said:
        changed = {"module": "", "path": "", "source": ""}
        if mutant is not None:
            changed = {"module": mutant.module, "path": mutant.path, "source": mutant.source}
        ask = {**changed, "tests": list(tests), "cpu_s": cpu_s, "wall_s": wall_s, "test_s": _TEST_S}
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._process.stdin.write(json.dumps(ask).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise Internal("the process that runs the tests has ended")
        return _Said(**json.loads(line))


def _noticed_by(said: _Said) -> str:
    if said.status is None:
        return "no end in time"
    failed = _FAILED.findall(said.said)
    return failed[0] if failed else f"status {said.status}"


@asynccontextmanager
async def mutant_tests(root: Path, imports: Sequence[str] = _IMPORTS) -> AsyncIterator[MutantTests]:
    """Those of the checkout at `root`. What `imports` names is imported once, and not in each run."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = {"PYTHONPATH": os.pathsep.join(str(root / part) for part in _ROOTS)}
        env = {**os.environ, **one_thread, **paths, "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(_SCRIPT),
            *imports,
            cwd=root,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
        )
        try:
            yield MutantTests(process)
        finally:
            process.terminate()
            await process.wait()
