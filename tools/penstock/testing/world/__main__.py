"""Plays schedules: `python -m penstock.testing.world --seconds 60`, or `--seed 17 --count 1 --trace` for one again."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count

from penstock.testing.world.world import Played, played

_BATCH = 25
"""Seeds that a process plays before it says what it found."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays what the arguments say; 1 when something was found."""
    options = _options(arguments)
    began, plays, bad = time.monotonic(), 0, 0
    for number, found in _found(options):
        plays += number
        bad += 0 if options.trace else len(found)
        print(*found, sep="\n", flush=True, end="\n" if found else "")
        if plays >= options.count or time.monotonic() - began > options.seconds or bad >= options.most:
            break
    took = time.monotonic() - began
    pace = f"{60 * plays / took:.0f} a minute"
    print(f"{plays} schedules from seed {options.seed} in {took:.1f} s, {pace}; {bad} went wrong")
    return 1 if bad else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m penstock.testing.world", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="most schedules")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, about")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--most", type=int, default=5, help="ends after so many that went wrong")
    parser.add_argument("--trace", action="store_true", help="prints all that was sent")
    return parser.parse_args(arguments)


def _found(options: argparse.Namespace) -> Iterator[tuple[int, list[str]]]:
    """How many were played, and what is to be said of them."""
    if options.count <= _BATCH or options.jobs == 1:
        quiet()
        for seed in range(options.seed, options.seed + options.count):
            outcome = played(seed)
            yield 1, [_told(outcome, trace=options.trace)] if outcome.wrong or options.trace else []
        return
    with ProcessPoolExecutor(options.jobs, initializer=quiet) as pool:
        firsts = count(options.seed, _BATCH)
        try:
            while True:
                for found in pool.map(_batch, [next(firsts) for _ in range(4 * options.jobs)]):
                    yield _BATCH, found
        finally:
            pool.shutdown(cancel_futures=True)


def _batch(first: int) -> list[str]:
    outcomes = map(played, range(first, first + _BATCH))
    return [_told(outcome) for outcome in outcomes if outcome.wrong]


def quiet() -> None:
    """What was imported need not be looked at by the garbage collector again."""
    played(0)
    gc.collect()
    gc.freeze()


def _told(outcome: Played, *, trace: bool = False) -> str:
    sent = [f"{at - 1000.0:9.4f}  {source} -> {to}: {what} {more}" for at, source, to, what, more in outcome.trace]
    return "\n".join([*(sent if trace else ()), str(outcome), *([f"  digest {outcome.digest}"] if trace else ())])


if __name__ == "__main__":
    sys.exit(main())
