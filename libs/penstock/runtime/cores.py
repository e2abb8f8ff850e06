"""The cores that this process may use, and how the workers of a host share them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.config import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_CORES = Path("/sys/devices/system/cpu")
_SMALL_BYTES = 32 << 20
"""A step over smaller weights ends before a second thread has begun."""
_OTHERS = 2
"""Cores for the services without a model, where workers have cores of their own."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one worker."""

    threads: int
    """Threads of a model step."""
    cores: tuple[int, ...] = ()
    """The cores that the worker stays on; empty: the system places it."""


def available_cores() -> int:
    """Cores that this process may run on, as far as its control group lets it use them."""
    return cores_of(len(os.sched_getaffinity(0)), _quota(_CGROUP))


def cores_of(affinity: int, quota: float | None) -> int:
    """`quota` is processor time per time, None where there is no limit. A part of a core counts as one: a thread
    less would leave it idle, a thread more would be stopped in the middle of a step."""
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def have_own_cores(workers: int) -> bool | None:
    """Whether this host has two cores for each of so many workers, and some for the services without a model. None: the
    number does not tell, because it is enough for the workers alone, or only with two threads of a core as two."""
    affinity, cores = os.sched_getaffinity(0), available_cores()
    if cores < len(affinity):  # a quota: nobody has a core of its own, whatever they are
        return (cores - _OTHERS) // workers >= 2
    if cores // workers < 2:
        return False
    return True if (whole_cores(affinity, _CORES) - _OTHERS) // workers >= 2 else None


def whole_cores(affinity: Iterable[int], root: Path) -> int:
    """How many cores these are where two threads of one core count as one, as far as the system's topology below `root`
    says that they are."""
    return len({_siblings(root / f"cpu{core}" / "topology" / "core_cpus_list", core) for core in affinity})


def _siblings(file: Path, core: int) -> str:
    try:
        return file.read_text()
    except OSError:
        return str(core)


def own_cores(workers: int) -> list[tuple[int, ...]]:
    """The neighbouring cores of each of so many workers: those of `shares`, or as many as there are for each."""
    affinity = sorted(os.sched_getaffinity(0))
    return _neighbours(affinity, workers, max((len(affinity) - _OTHERS) // workers, 2))


def _neighbours(affinity: Sequence[int], workers: int, each: int) -> list[tuple[int, ...]]:
    return [tuple(affinity[number * each : (number + 1) * each]) for number in range(workers)]


def host_shares(workers: int, weights_bytes: int) -> list[Share]:
    """`shares` of this host."""
    affinity = sorted(os.sched_getaffinity(0))
    return shares(affinity, available_cores(), workers, weights_bytes)


def shares(affinity: Sequence[int], cores: int, workers: int, weights_bytes: int) -> list[Share]:
    """How `workers` engines share `cores` cores of those in `affinity`.

    Where two cores for each worker and some for the other services are there, each worker stays on neighbouring ones of
    its own, and its threads' caches with them. Where a quota is the limit, or cores are few, staying would only keep
    idle ones from being used; and there a worker of a model that is not small has two threads, even if that makes more
    than cores: workers pause between their steps, and a thread of the kernels that gets no core does not hold up the
    others (see team.cpp).

    Draft models and the services without a model get by on what the steps leave: they are small, and sleep.
    """
    threads = max(cores // workers, 1 if weights_bytes < _SMALL_BYTES else min(cores, 2))
    own = (len(affinity) - _OTHERS) // workers
    if cores < len(affinity) or own < 2:
        return [Share(threads)] * workers
    return [Share(own, cores) for cores in _neighbours(affinity, workers, own)]


def parse_cores(text: str) -> frozenset[int]:
    """`"0-3,8"` -> {0, 1, 2, 3, 8}. Raises ValueError that says what would be right."""
    found: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or not (last if dash else first).strip().isdecimal():
            raise ValueError(f"{part!r} is not a core; write for example 0-3 or 0,2")
        cores = range(int(first), int(last or first) + 1)
        if not cores or cores.stop > 4096:
            raise ValueError(f"{part!r} is not a range of cores; write for example 0-3")
        found.update(cores)
    return frozenset(found)


def format_cores(cores: Iterable[int]) -> str:
    """The form that `parse_cores` reads: `"0-3,8"` is written as `"0,1,2,3,8"`."""
    return ",".join(map(str, sorted(cores)))


def stay_on(cores: Iterable[int]) -> None:
    """This thread, and all that it starts from now on, run on these cores only. Raises OSError: there is none."""
    os.sched_setaffinity(0, cores)


def _quota(root: Path) -> float | None:
    """Processor time per time that control groups, v2 or v1, grant this process; None: no limit."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def check_cores(cores: str) -> None:
    """Checks a setting `cores`; empty: any. Raises ConfigError."""
    try:
        parse_cores(cores)
    except ValueError as error:
        raise ConfigError("cores", cores, str(error)) from error


def keep_to(cores: str) -> None:
    """Keeps this process on the cores of a setting; empty: anywhere. Call it before the first thread that computes.
    Raises ConfigError."""
    if cores:
        try:
            stay_on(parse_cores(cores))
        except OSError as error:
            raise ConfigError("cores", cores, f"{error.strerror}; use cores of this host") from error
