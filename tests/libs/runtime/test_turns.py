"""Workers that share cores take turns: really excluding each other, whatever becomes of one of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.runtime.turns import baton as module
from penstock.runtime.turns.baton import Baton, own_claim
from penstock.runtime.turns.order import CoreClaim, Stage, Standing, crowded, may_begin, meet
from penstock.runtime.turns.table import Streams, TurnTable

BOTH = CoreClaim(cores=0b11, threads=2)
WORKER = """
import os, sys
from pathlib import Path
from penstock.runtime.turns.baton import Baton
from penstock.runtime.turns.order import CoreClaim

directory, kind, turns, expected = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
baton, log = Baton(directory, CoreClaim(0b11, 2)), os.open(sys.argv[5], os.O_WRONLY | os.O_APPEND)

def say(word):
    print(word, flush=True)
    assert sys.stdin.readline(), "the test has ended"

say("ready")
for _ in range(turns):
    with baton.turn(kind == "decode", expected):
        os.write(log, kind[0].encode())
        if turns == 1:
            say("holding")
        else:
            for _ in range(20):
                os.sched_yield()
        os.write(log, kind[0].upper().encode())
if turns == 1:
    say("given")
print("done", flush=True)
"""


class OtherWorker:
    """A worker in a process of its own, which goes on when it is told."""

    def __init__(self, directory: Path, kind: str, turns: int, expected_s: float = 0.01) -> None:
        log = directory / "log"
        log.touch()
        words = (str(directory / "turns"), kind, str(turns), str(expected_s), str(log))
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def hear(self, word: str) -> None:
        assert self.process.stdout.readline() == word + "\n"

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def others(tmp_path: Path) -> Iterator:
    """Starts other workers; they are ready when it returns."""
    started: list[OtherWorker] = []

    def start(kind: str, turns: int = 1, expected_s: float = 0.01) -> OtherWorker:
        started.append(OtherWorker(tmp_path, kind, turns, expected_s))
        started[-1].hear("ready")
        return started[-1]

    yield start
    for other in started:
        other.end()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Baton]:
    baton = Baton(tmp_path / "turns", BOTH)
    yield baton
    baton.close()


@contextmanager
def takes(least_s: float, most_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert least_s <= time.monotonic() - began <= most_s


# Processes


@pytest.mark.parametrize("kinds", [["decode", "prefill"], ["decode", "decode", "prefill", "prefill"]])
def test_slices_and_streams_exclude_each_other_and_both_get_on(tmp_path, others, kinds):
    """Each writes a letter when its turn begins and a capital when it ends."""
    workers = [others(kind, 300) for kind in kinds]
    for worker in workers:
        worker.go()
    for worker in workers:
        worker.hear("done")
    log = (tmp_path / "log").read_text()
    assert len(log) == 600 * len(kinds)
    computing = {"d": 0, "p": 0}
    for letter in log:
        computing[letter.lower()] += 1 if letter.islower() else -1
        assert not (computing["d"] and computing["p"])


def test_a_slice_stops_for_streams_that_wait_and_goes_on_after_them(tmp_path, mine):
    other = Baton(tmp_path / "turns", BOTH)
    order: list[str] = []

    def decode() -> None:
        with other.turn(True, 0.01):
            order.append("decode")

    waiting = Thread(target=decode)
    with mine.turn(False, 0.01):
        mine.pause(0)
        order.append("nobody waits")
        waiting.start()
        while not mine._streams_wait(time.monotonic()):
            os.sched_yield()
        mine.pause(100)
        order.append("too early")
        mine.pause(0)
        order.append("slice")
    waiting.join()
    other.close()
    assert order == ["nobody waits", "too early", "decode", "slice"]
    assert mine.counters.turns == 2


def test_kill_9_of_the_one_that_computes(others, mine):
    holder = others("prefill", expected_s=100)
    holder.go()
    holder.hear("holding")
    holder.process.kill()
    with takes(0, 4), mine.turn(True, 0.01):
        assert mine.counters.given_up == 0, "the kernel has released it"
    assert list(mine._table.rows()) == [mine._table.row], "its row is free"


def test_one_that_is_stopped_is_waited_for_once(others, mine):
    holder = others("prefill", expected_s=0.25)
    holder.go()
    holder.hear("holding")
    holder.process.send_signal(signal.SIGSTOP)
    with takes(0.2, 30), mine.turn(True, 0.01):
        assert mine.counters.given_up == 1
    with mine.turn(True, 0.01):
        assert mine.counters.given_up == 1, "not again for the same turn"
    holder.process.send_signal(signal.SIGCONT)
    holder.go()
    holder.hear("given")
    with mine.turn(True, 0.01):
        assert (mine.counters.turns, mine.counters.given_up) == (3, 1)


def test_one_that_is_stopped_with_the_table_in_its_hand(tmp_path, mine, others, monkeypatch):
    monkeypatch.setattr(module, "_REST_S", 60)
    others("prefill")
    other = TurnTable(tmp_path / "turns", BOTH)
    with other.locked():
        for _ in range(2):
            with mine.turn(True, 0.01):
                assert mine.counters.given_up == 1, "and then left alone for a while"
    other.close()


def test_a_slice_owes_streams_a_turn(tmp_path, mine):
    other = Baton(tmp_path / "turns", BOTH)
    for decodes, baton, owed in ((True, mine, False), (True, other, False), (False, other, True), (True, mine, False)):
        with baton.turn(decodes, 0.01):
            assert mine._standing().owed == owed
    other.close()


def test_alone_it_waits_for_nobody(tmp_path, mine):
    with mine.turn(True, 0.01), mine.turn(True, 0.01):
        pass
    assert mine.counters.turns == 0
    beside = Baton(tmp_path / "turns", CoreClaim(cores=0b1100, threads=2))
    with mine.turn(True, 0.01), beside.turn(True, 0.01):
        pass
    assert mine.counters.turns == beside.counters.turns == 0, "on cores of its own"
    small = Baton(tmp_path / "turns", CoreClaim(cores=0b1111_0000, threads=2))
    other = Baton(tmp_path / "turns", CoreClaim(cores=0b1111_0000, threads=2))
    with small.turn(True, 0.01), other.turn(True, 0.01):
        pass
    assert small.counters.turns == other.counters.turns == 0, "the cores suffice for both"
    for each in (beside, small, other):
        each.close()


def test_it_meets_who_comes_and_forgets_who_leaves(tmp_path, mine):
    for _ in range(100):  # more than there are rows
        other = Baton(tmp_path / "turns", BOTH)
        with mine.turn(True, 0.01):
            assert list(mine._met.values()) == [BOTH]
        other.close()
    with mine.turn(True, 0.01):
        assert not mine._met
    assert mine.counters.turns == 100


def test_a_full_table_is_an_error(tmp_path):
    tables = [TurnTable(tmp_path / "turns", BOTH) for _ in range(64)]
    with pytest.raises(OSError, match="64 workers already"):
        TurnTable(tmp_path / "turns", BOTH)
    for table in tables:
        table.close()


def test_it_hears_of_streams_beside_it_while_they_are_fresh(tmp_path, mine, monkeypatch):
    monkeypatch.setattr(module, "_FRESH_S", 30)
    other = Baton(tmp_path / "turns", BOTH)
    for baton in (mine, other):
        with baton.turn(True, 0.01):
            pass
    with mine.turn(True, 0.01):
        pass
    other.tell(3, 0.02)
    assert (mine.beside().streams, mine.beside().step_s) == (3, 0.02)
    other._table.tell(Streams(3, 0.02, time.monotonic() - 60))
    assert mine.beside().streams == 0, "it is stopped, or has nothing to do"
    other.tell(0, 0.02)
    assert mine.beside() == module.ALONE
    other.close()


def test_another_user_has_another_table(tmp_path):
    (tmp_path / "turns").mkdir(mode=0o777)
    (tmp_path / "turns").chmod(0o777)
    with pytest.raises(PermissionError):
        TurnTable(tmp_path / "turns", BOTH)


def test_the_table_is_this_users_alone(tmp_path, mine):
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "turns", *(tmp_path / "turns").iterdir())]
    assert modes == [0o700, 0o600]


def test_what_this_process_computes_with():
    claim = own_claim(0)
    assert claim.cores == sum(1 << core for core in os.sched_getaffinity(0))
    assert 1 <= claim.threads <= claim.cores.bit_count()
    assert own_claim(7).threads == 7


# The order


def test_more_threads_than_cores_are_too_many():
    assert not crowded([CoreClaim(0b1111, 2), CoreClaim(0b1111, 2)])
    assert crowded([CoreClaim(0b1111, 2), CoreClaim(0b1111, 3)])
    assert not crowded([CoreClaim(0b0011, 2), CoreClaim(0b1110, 2)])
    assert crowded([CoreClaim(0b1111, 2, group=5, quota=2), CoreClaim(0b1111, 2, group=5, quota=2)]), (
        "one limit for both"
    )
    assert not crowded([CoreClaim(0b1111, 2, group=5, quota=2), CoreClaim(0b1111, 2, group=6, quota=2)])
    assert crowded([CoreClaim(0b0010, 2), CoreClaim(0b1010, 1), CoreClaim(0b1101, 1)]), "two of them, on two cores"
    assert meet(CoreClaim(0b01, 1), CoreClaim(0b11, 1))
    assert not meet(CoreClaim(0b01, 1), CoreClaim(0b10, 1))
    assert meet(CoreClaim(0b01, 1, group=5), CoreClaim(0b10, 1, group=5))


claims = st.builds(CoreClaim, st.integers(1, 15), st.integers(1, 4))


@given(st.lists(claims, min_size=1, max_size=6))
def test_workers_are_crowded_where_no_threads_fit_their_cores(claims):
    """Naively: each thread gets a core of its own, or there is no way to do that."""

    def fits(threads: list[int], free: int) -> bool:
        if not threads:
            return True
        return any(fits(threads[1:], free & ~(1 << core)) for core in range(4) if threads[0] & free & (1 << core))

    threads = [claim.cores for claim in claims for _ in range(claim.threads)]
    assert crowded(claims) is not (len(threads) <= 4 and fits(threads, 0b1111))


standings = st.builds(
    Standing,
    claims,
    st.just(Stage.WAITING),
    st.booleans(),
    st.booleans(),
    due=st.just(1.0),
)


def waiting(cores: int, threads: int, *, decodes: bool = False) -> Standing:
    return Standing(CoreClaim(cores, threads), Stage.WAITING, decodes, owed=False, due=1.0)


@given(st.lists(standings, min_size=1, max_size=6))
@example([waiting(0b0010, 2), waiting(0b1010, 1, decodes=True), waiting(0b1101, 1)])
def test_one_of_those_who_wait_may_begin_and_the_choice_is_sound(rows):
    begun: list[int] = []
    for at, row in enumerate(rows):
        met = [key for key, other in enumerate(rows) if key != at and meet(other.claim, row.claim)]
        others = [replace(rows[key], stage=Stage.COMPUTING) if key in begun else rows[key] for key in met]
        if may_begin(row, others, now=0.0):
            before = [rows[key] for key in met if key in begun and rows[key].decodes != row.decodes]
            assert not before or not crowded([row.claim, *(one.claim for one in before)])
            begun.append(at)
    assert begun
    assert may_begin(rows[0], rows[1:], now=1.0), "none counts whose time is over"


def naive(rows: dict[str, Standing]) -> set[str]:
    """Those of workers on the same cores that may begin, when all wait: streams that are owed a step, or else slices,
    or else what there is."""
    owed = {name for name, row in rows.items() if name[0] == "d" and row.owed}
    slices = {name for name in rows if name[0] == "p"}
    rest = {name for name, row in rows.items() if name[0] == "d" and not row.owed}
    return owed | (set() if slices else rest) or slices


def able(rows: dict[str, Standing]) -> set[str]:
    return {name for name in rows if may_begin(rows[name], [rows[key] for key in rows if key != name], now=0.0)}


def test_the_order_is_that_of_the_naive_line():
    source = random.Random(5)
    for _ in range(300):
        names = [f"{source.choice('dp')}{number}" for number in range(source.randrange(1, 6))]
        rows = {name: Standing(BOTH, Stage.WAITING, name[0] == "d", source.random() < 0.5, 1.0) for name in names}
        assert able(rows) == naive(rows)


@pytest.mark.parametrize("names", [["d", "p"], ["d", "p1", "p2"], ["d1", "d2", "p"], ["d1", "d2", "p1", "p2"]])
def test_streams_go_first_and_prompts_get_every_other_turn(names):
    """All want to compute all the time, on the same cores."""
    rows = {name: Standing(BOTH, Stage.WAITING, name[0] == "d", due=1.0) for name in names}
    for turn in range(10):
        kind = "dp"[turn % 2]
        assert able(rows) == {name for name in names if name[0] == kind}
        rows = {name: replace(row, owed=kind == "p") if row.decodes else row for name, row in rows.items()}
