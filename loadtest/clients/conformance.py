"""schemathesis on the OpenAPI document that the gateway serves: no failure of the server's own, answers are what the
document says, and what it forbids is refused."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.clients.install import installed, place
from loadtest.clients.served import MODEL

ENVIRONMENT = "conformance"
HOOKS = Path(__file__).parent / "cases" / "openapi_hooks.py"
_EXAMPLES = 15
"""Of each operation, beside those that cover each part of its schema."""
_LIMIT_S = 900.0
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conforms:
    """What schemathesis found."""

    requests: int = 0
    operations: int = 0
    problems: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """One sentence for people."""
        asked = f"schemathesis asked {self.requests} requests of {self.operations} operations"
        return f"{asked} and found {'; '.join(self.problems) or 'nothing wrong'}."


def run(url: str) -> Conforms:
    """Asks the gateway what its document allows and forbids."""
    if not installed(ENVIRONMENT):
        return Conforms(problems=(f"not installed: python -m loadtest.clients.install {ENVIRONMENT}",))
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        command = (
            place() / ENVIRONMENT / "bin" / "schemathesis",
            *("run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "--checks", ",".join(_CHECKS)),
            *("--max-examples", str(_EXAMPLES), "--seed", "1", "--continue-on-failure", "--request-timeout", "60"),
            *("--generation-database", "none", "--report", "json", "--report-json-path", f"{directory}/report.json"),
        )
        environment = {
            **os.environ,
            "PENSTOCK_MODEL": MODEL,
            "SCHEMATHESIS_HOOKS": HOOKS.stem,
            "PYTHONPATH": str(HOOKS.parent),
        }
        try:
            done = subprocess.run(
                command, env=environment, cwd=directory, capture_output=True, text=True, timeout=_LIMIT_S
            )
            report = json.loads(Path(directory, "report.json").read_text())
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            return Conforms(problems=(f"schemathesis gave no report: {error}",))
    problems = tuple(_problems(report))
    if done.returncode and not problems:
        problems = (f"schemathesis ended with {done.returncode}",)
    return Conforms(
        requests=report["test_cases"]["generated"], operations=report["operations"]["tested"], problems=problems
    )


def _problems(report: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("failures", "errors"):
        for found in report[kind]:
            where = found.get("operation") or found.get("label") or ""
            yield f"{found['title']} ({found.get('count', 1)}) {where}".strip()
