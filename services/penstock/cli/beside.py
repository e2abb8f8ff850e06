"""Measures how two workers on cores of their own would compute beside each other.

Cores may be two threads of one, or a hypervisor's, which other guests use too, and a worker may have to leave some of
its time to services that have no core. Two processes do what the workers would: one multiplies many rows at a time, as
prefill does, and one reads many weights for one row, as decode does.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.caches import cache_directory
from penstock.runtime.cores import format_cores
from penstock.runtime.notes import read_note, write_note

_ROUNDS, _SPAN_S = 3, 0.15
"""How often each pace is measured, and for how long. The best one counts: other processes only take time."""
_BUSY = 1.0
"""Load of a machine, in processes that compute, with which a pace says little."""


def pace_beside(cores: Sequence[tuple[int, ...]], directory: Path | None = None) -> float:
    """The share of its pace alone, at most 1, that the slower of two workers keeps beside the other, as measured here
    the first time that anybody asked. The two stay on the first two of `cores`.

    It is noted in `directory`, by default the user's cache, unless the machine was busy with something else. OSError: a
    process can't be started.
    """
    prefill, decode = cores[:2]
    note = _note(directory, prefill, decode)
    known = read_note(note) if note else None
    if known is not None:
        return float(known)
    busy = os.getloadavg()[0]
    pace = _measured(prefill, decode)
    if note and busy < _BUSY:
        write_note(note, f"{pace:.3f}")
    return pace


def _note(directory: Path | None, *cores: tuple[int, ...]) -> Path | None:
    """The file for what is measured; its name covers what that depends on: the processor and the cores. None: there is
    no place for it."""
    models = sorted({line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")})
    name = hashlib.sha256(repr((models, os.cpu_count(), cores)).encode()).hexdigest()
    with suppress(OSError):
        return (directory or cache_directory("beside")) / name
    return None


def _measured(prefill: tuple[int, ...], decode: tuple[int, ...]) -> float:
    with ExitStack() as stack:
        pair = [stack.enter_context(_busy(kind, cores)) for kind, cores in (("prefill", prefill), ("decode", decode))]
        alone, beside = [0.0, 0.0], [0.0, 0.0]
        for _ in range(_ROUNDS):
            for at, one in enumerate(pair):
                one.begin()
                alone[at] = max(alone[at], one.pace())
            for one in pair:
                one.begin()
            for at, one in enumerate(pair):
                beside[at] = max(beside[at], one.pace())
    return min(1.0, *(both / single for both, single in zip(beside, alone, strict=True)))


@dataclass(frozen=True, slots=True)
class _Busy:
    """A process that computes when it is told to."""

    process: subprocess.Popen[str]

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{_SPAN_S}\n")
        self.process.stdin.flush()

    def pace(self) -> float:
        """Of what was begun last, in steps per second; waits for its end. OSError: the process has ended."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            raise OSError(f"a process that measures cores ended with {self.process.wait()}")
        return float(said)


@contextmanager
def _busy(kind: str, cores: tuple[int, ...]) -> Iterator[_Busy]:
    threads = {f"{library}_NUM_THREADS": str(len(cores)) for library in ("OMP", "OPENBLAS", "MKL")}
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.busy", kind, format_cores(cores)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | threads,
    ) as process:
        try:
            yield _Busy(process)
        finally:
            process.kill()
