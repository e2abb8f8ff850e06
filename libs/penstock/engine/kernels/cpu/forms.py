"""Which form of bfloat16 weights this processor multiplies faster: as they are, or in 12 bits (see lossless.py).

The results are the same bit for bit. 12 bits are less to read from memory and more to compute.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.build import file_name, library
from penstock.engine.kernels.cpu.layout import LinearArgs
from penstock.engine.kernels.cpu.lossless import compressed
from penstock.engine.kernels.cpu.machine import Machine, linear_args
from penstock.engine.kernels.cpu.pack import pack
from penstock.engine.kernels.cpu.packed import Packed
from penstock.runtime.caches import cache_directory
from penstock.runtime.notes import read_note, write_note
from penstock.runtime.private import locked

FORMS = ("bfloat16", "lossless")
_SIDE = 2048
"""Inputs and columns of a matrix of the sample, which has 8 MiB of bfloat16."""
_MATRICES = 12
"""So many of them are more than the caches of most processors hold, as the weights of a model are."""
_ROWS, _ROUNDS = (1, 8), 5
"""The steps of one and of several streams that are timed, and how often."""
_CLEARLY = 0.95
"""12 bits are chosen when both take at most this share of the time, so that noise does not decide."""
_log = logging.getLogger(__name__)


def quicker_form(machine: Machine, directory: Path | None = None) -> str:
    """One of FORMS, as measured here the first time that anybody asked.

    It is noted in `directory`, by default the user's cache. Of several processes that ask at once one measures, so that
    all of them share one copy of the weights.
    """
    with suppress(OSError):
        note = (directory or cache_directory("forms")) / _subject(machine)
        with locked(note.parent):
            chosen = read_note(note)
            if chosen not in FORMS:
                chosen = _measured(machine)
                write_note(note, chosen)
            return chosen
    return _measured(machine)


def _subject(machine: Machine) -> str:
    """Names all that the times depend on: the processor, the kernels and the number of threads."""
    return hashlib.sha256(repr((processor(), file_name(machine.isa), machine.threads)).encode()).hexdigest()


def processor() -> list[str]:
    """What /proc/cpuinfo says of this kind of processor."""
    found = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return [line for line in found if not line.startswith(("cpu MHz", "bogomips", "processor", "apicid"))]


def _measured(machine: Machine) -> str:
    generator = torch.Generator().manual_seed(0)
    one = pack(torch.randn(_SIDE, _SIDE, generator=generator), "bfloat16")
    plain, lossless = [_copies(form) for form in (one, compressed(library(machine.isa), one))]
    times = {}
    for rows in _ROWS:
        x = torch.ones(rows, _SIDE)
        best = [math.inf, math.inf]
        for _ in range(_ROUNDS):  # in turns, because other processes may be computing too
            for at, matrices in enumerate((plain, lossless)):
                best[at] = min(best[at], _seconds(machine, x, matrices))
        times[rows] = best
    chosen = "lossless" if all(packed <= _CLEARLY * whole for whole, packed in times.values()) else "bfloat16"
    said = ", ".join(f"{packed / whole:.2f} with {rows} rows" for rows, (whole, packed) in times.items())
    _log.info("weights of 12 bits take %s of the time of those of 16: %s", said, chosen)
    return chosen


def _copies(packed: Packed) -> list[Packed]:
    return [replace(packed, data=packed.data.clone()) for _ in range(_MATRICES)]


def _seconds(machine: Machine, x: Tensor, matrices: Sequence[Packed]) -> float:
    arguments: list[LinearArgs] = [linear_args(matrix, None) for matrix in matrices]
    begin = time.perf_counter()
    for one in arguments:
        machine.linear(x, one)
    return time.perf_counter() - begin
