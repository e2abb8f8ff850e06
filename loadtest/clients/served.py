"""The mesh that clients ask: one of this run's own, or one that runs already."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MODEL = "penstock-mini"
"""What `penstock up` serves."""
_STOP_S = 30.0


@contextmanager
def served(url: str = "") -> Iterator[str]:
    """The URL of a mesh of processes with the embedded model, which ends with the block; or the URL that is given."""
    if url:
        yield url.rstrip("/")
        return
    command = (sys.executable, "-m", "penstock.cli", "up", "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mesh:
        try:
            yield _ready(mesh)
        finally:
            mesh.terminate()
            try:
                mesh.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                mesh.kill()


def _ready(mesh: subprocess.Popen[str]) -> str:
    assert mesh.stdout is not None
    for line in mesh.stdout:
        word, _, rest = line.partition(" ")
        if word == "ready":
            return rest.split()[0]
    raise SystemExit(f"penstock up ended with {mesh.wait()} before it was ready")
