"""A process of beside.py: computes as a worker would, for as long as it is told to, and says how many steps a second.

    python -m penstock.cli.busy prefill|decode CORES

reads a line with a number of seconds from its input, answers with a line, and ends with its input.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from penstock.runtime.cores import parse_cores, stay_on

_SIDE, _ROWS, _MATRICES = 1024, 128, 16
"""A matrix has 4 MiB. All of them are more than the caches of most processors hold, as the weights of a model are."""


def step_of(kind: str) -> Callable[[], object]:
    """A step as `kind` takes them: of many rows in one matrix, or of one row in many."""
    one = np.ones((_SIDE, _SIDE), dtype=np.float32)
    if kind == "prefill":
        rows = np.ones((_ROWS, _SIDE), dtype=np.float32)
        return lambda: rows @ one
    matrices, row = [one.copy() for _ in range(_MATRICES)], np.ones(_SIDE, dtype=np.float32)
    return lambda: [matrix @ row for matrix in matrices]


def pace(step: Callable[[], object], seconds: float) -> float:
    """Steps per second, of one step at least."""
    begin, steps = time.perf_counter(), 0
    while (taken := time.perf_counter() - begin) < seconds or not steps:
        step()
        steps += 1
    return steps / taken


def main(kind: str, cores: str) -> None:
    """Answers the lines of its input."""
    stay_on(parse_cores(cores))
    step = step_of(kind)
    step()
    for line in sys.stdin:
        print(pace(step, float(line)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
