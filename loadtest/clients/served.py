"""The mesh that clients ask: one of this run's own, or one that runs already."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MODEL = "penstock-mini"
"""What `penstock up` serves."""
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Doors:
    """Where a mesh is asked."""

    url: str
    """Of its HTTP APIs, without /v1."""
    grpc: str
    """The address of its gRPC API; empty: not known."""


@contextmanager
def served(url: str = "", grpc: str = "") -> Iterator[Doors]:
    """A mesh of processes with the embedded model, which ends with the block; or the mesh at the addresses given."""
    if url:
        yield Doors(url.rstrip("/"), grpc)
        return
    grpc = f"127.0.0.1:{_free_port()}"
    command = (sys.executable, "-m", "penstock.cli", "up", "--port", "0", "--grpc-port", grpc.rpartition(":")[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mesh:
        try:
            yield Doors(_ready(mesh), grpc)
        finally:
            mesh.terminate()
            try:
                mesh.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                mesh.kill()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def _ready(mesh: subprocess.Popen[str]) -> str:
    assert mesh.stdout is not None
    for line in mesh.stdout:
        word, _, rest = line.partition(" ")
        if word == "ready":
            return rest.split()[0]
    raise SystemExit(f"penstock up ended with {mesh.wait()} before it was ready")
