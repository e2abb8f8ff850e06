"""Tests of the checkout that a bench runs, and what pytest reports of them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.runtime.config import ConfigError

_ROOT = Path(__file__).parents[3]
_RAN = (0, 1)
"""Exit codes of pytest after tests that have run: all passed, or some failed."""


async def reported(part: str, words: Sequence[str]) -> str:
    """Runs pytest with `words` for the part of a bench; what it shows goes to standard error. Its report in JUnit's
    form. Raises ConfigError where there is no checkout, and RuntimeError when no tests ran."""
    if not (_ROOT / "tests").is_dir():
        raise ConfigError("part", part, "runs tests, so it needs a checkout")
    with TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = (sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *words)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=_ROOT, env={**os.environ}, stdout=sys.stderr, stderr=sys.stderr
        )
        if await process.wait() not in _RAN:
            raise RuntimeError(f"pytest ended with {process.returncode}")
        return report.read_text()
