"""Sequences that yield: they get what the others leave of each step, and give way at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from penstock.engine.engine import Engine
from penstock.engine.pages import PagePool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sampling.choice import Chosen
from penstock.engine.scheduling.leftover import YIELDS_FROM, Leftover, leftover
from penstock.engine.scheduling.live import new_live
from penstock.engine.scheduling.plan import plan
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.situation import Situation, StepLimits

LIMITS = StepLimits(max_batch_tokens=64, max_running=4, block_size=8)


@dataclass
class One:
    """A sequence; one that yields has a ticket from 100 on."""

    ticket: int
    length: int
    remaining: int = 1
    pages: list[int] = field(default_factory=list)
    next_key: bytes | None = None
    busy: bool = False

    @property
    def place(self):
        return self.ticket + (YIELDS_FROM if self.ticket >= 100 else 0)

    def visible(self, start):
        return self.length


def running(ticket, length=8, remaining=1):
    held = LIMITS.pages_for(length - 1 if remaining == 1 else length)
    return One(ticket, length, remaining, [1000 * ticket + at for at in range(held)])


def made(running=(), waiting=(), free=100, **fields):
    return plan(Situation(LIMITS, free, list(running), list(waiting), **fields))


def rows(found):
    return [(portion.ticket, portion.known) for portion in found.portions]


def test_alone_they_have_the_step():
    found = made([running(100), running(101)], [One(102, 30, 30)])
    assert rows(found) == [(100, 1), (101, 1), (102, 30)] and found.admit == [102]


def test_beside_others_they_have_what_is_left_and_no_more():
    line = [running(1), running(2), running(100), running(101)]
    assert rows(made(line, [One(102, 30, 30)])) == [(1, 1), (2, 1)], "nothing is left"
    some = Leftover(beside_s=0.375, row_s=0.25, token_s=0.125)
    assert rows(made(line, [One(102, 30, 30)], leftover=some)) == [(1, 1), (2, 1), (100, 1)]
    more = Leftover(beside_s=3.0, row_s=0.25, token_s=0.125)
    assert rows(made(line[1:], [One(102, 30, 30)], leftover=more)) == [(2, 1), (100, 1), (101, 1), (102, 20)]
    assert rows(made([running(1, 40, 30)], [One(102, 30, 30)])) == [(1, 30)], "nor beside a prompt"
    assert rows(made([running(100)], [One(1, 5, 5), One(102, 30, 30)])) == [(1, 5)], "nor one that begins"


def test_a_step_of_their_own_is_short():
    line, prompt = [running(100), running(101), running(102)], One(103, 60, 60)
    bound = Leftover(alone_s=1.0, row_s=0.4, token_s=0.01)
    assert rows(made(line, leftover=bound)) == [(100, 1), (101, 1)]
    assert rows(made(line, [prompt], leftover=bound)) == [(100, 1), (103, 60)], "half of it is for prompts"
    slow = Leftover(alone_s=1.0, row_s=5.0, token_s=1.0)
    assert rows(made(line, [prompt], leftover=slow)) == [(100, 1), (103, 16)], "somebody always gets on"
    assert rows(made(line, [prompt], leftover=Leftover(alone_s=0.0))) == [], "the cores are others'"


def test_one_that_comes_gets_their_place():
    found = made([running(1), running(100), running(101), running(102)], [One(2, 9, 9)])
    assert found.preempt == [102] and found.admit == [2] and rows(found) == [(1, 1), (2, 9)]
    found = made([running(ticket) for ticket in (1, 2, 3, 4)], [One(5, 9, 9)])
    assert found.preempt == [] and found.admit == [], "nobody gives way to its equals"


def test_one_that_comes_gets_their_pages():
    found = made([running(1), running(100, 30), running(101, 30)], [One(2, 40, 40)], free=2)
    assert found.preempt == [101] and found.admit == [2] and rows(found) == [(1, 1), (2, 40)]
    found = made([running(1)], [One(2, 40, 40), running(101, 60, 20)], free=2)
    assert found.strip == [101] and found.admit == [2]
    found = made([running(1, 9), running(2, 9), running(100, 30)], free=0)
    assert found.preempt == [100] and rows(found) == [(1, 1), (2, 1)], "also one that grows"


def test_they_take_no_page_of_others():
    waiting = running(1, 40, 20)
    found = made([running(100, 9), running(101, 9)], [waiting], free=0, leftover=Leftover(beside_s=inf))
    assert 1 not in found.strip and rows(found)[0] == (1, 20)
    found = made([running(100, 9), running(101, 9)], [], loading=[running(2, 40, 20)], free=0)
    assert found.strip == [] and found.preempt == [101] and rows(found) == [(100, 1)]
    found = made([], [One(100, 40, 40)], loading=[running(2, 40, 20)], free=0, stalled=True)
    assert found.strip == found.admit == [], "whatever time they wait"


def test_they_leave_pages_free_for_those_that_come():
    assert made([running(100)], [One(101, 40, 40)], free=12, reserve=6).admit == [101]
    assert made([running(100)], [One(101, 40, 40)], free=11, reserve=6).admit == []
    assert made([], [One(101, 40, 40)], free=5, reserve=6).admit == [101], "nobody else is there to give any back"
    found = made([running(100), running(101)], free=2, reserve=6)
    assert found.preempt == [101] and rows(found) == [(100, 1)]


def test_an_older_one_in_the_line_gives_its_pages_to_the_one_that_runs():
    """Where nothing could be computed else: it has gone back, and found its blocks in pages again."""
    older, younger = One(100, 24, 1, [1, 2, 3]), replace(running(101, 9), pages=[4])
    found = made([younger], [older], free=0)
    assert ([portion.ticket for portion in found.portions], found.strip) == ([101], [100])
    first, second = One(100, 24, 1, [1, 2, 3]), One(101, 24, 1, [1, 2, 3])
    held = made([replace(running(102, 9), pages=[4])], [first, second], free=0, holds=lambda page: 2 if page < 4 else 1)
    assert ([portion.ticket for portion in held.portions], sorted(held.strip)) == ([102], [100, 101])
    waits = made([replace(younger, busy=True)], [older], free=0)
    assert (waits.portions, waits.strip) == ([], []), "a step that is being computed may free some"


def test_what_is_left_follows_what_steps_take():
    measured = leftover(0.010, (0.002, 0.0005, 0.0), 1000.0, 6, alone=True)
    assert measured.beside_s == 0.05 * (0.002 + 6 * 0.0005) and measured.alone_s == 0.008
    assert leftover(0.010, (0.040, 0.001, 0.0), 1000.0, 6, alone=True).alone_s == 0.040, "a base as long again"
    assert leftover(0.010, (0.002, 0.0005, 0.0), 1000.0, 0, alone=False).alone_s == 0.0
    first = leftover(0.010, (0.0, 0.0, 0.0), 0.0, 0, alone=True)
    assert (int(first.alone_s / first.row_s), first.tokens(first.alone_s)) == (8, 64), "before anything was measured"


async def test_tokens_of_one_are_told_many_at_a_time(config, kit):
    """Of which the first comes at once, and the last with the end."""
    async with Engine.open(config) as engine:
        request = kit.request("a", 30, kit.seeded(1, 200, logprobs=2))
        live, line = await kit.read(engine, request), await kit.read(engine, replace(request, yields=True))
        kit.assert_same(live, line)
        counts = [len(update.tokens) for update in line.updates]
        assert counts[0] == 1 and counts[-1] == (200 - 1) % 64 and set(counts[1:-1]) == {64}, counts
        given = replace(request, yields=True, output=tuple(token.token for token in live.tokens[:100]))
        rest = await kit.read(engine, given)
        assert [len(update.tokens) for update in rest.updates] == [1, 64, 35]


def begin(scheduler, ticket, tokens=9, *, yields=False, output=40):
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    request = Request(str(ticket), tuple(range(tokens)), sampling, yields=yields, owner=b"o")
    live = new_live(request, ticket, frozenset(), now=float(ticket))
    scheduler.add(live)
    return live


def step(scheduler):
    lives = scheduler.next_step({})
    ended = scheduler.commit(lives, [[Chosen(0)] * live.run.samples for live in lives])
    for one in ended:
        scheduler.drop(one.live)
    return [live.ticket for live in lives]


def test_a_batch_rests_while_others_are_served_and_goes_on_where_it_was():
    scheduler = Scheduler(LIMITS, PagePool(64))
    batch = [begin(scheduler, ticket, yields=True) for ticket in (1, 2)]
    assert step(scheduler) == [1, 2] and step(scheduler) == [1, 2]
    length = [live.length for live in batch]
    begin(scheduler, 3, output=3)
    assert [step(scheduler) for _ in range(3)] == [[3], [3], [3]]
    assert [live.length for live in batch] == length and step(scheduler) == [1, 2]


def test_a_batch_gives_way_to_the_streams_of_other_workers():
    """Also in the middle of steps that repeat each other."""
    scheduler = Scheduler(LIMITS, PagePool(64))
    for ticket in (1, 2):
        begin(scheduler, ticket, yields=True)
    assert step(scheduler) == step(scheduler) == step(scheduler) == [1, 2]
    assert scheduler.next_step({}, leftover=Leftover(alone_s=0.0)) == []
    assert step(scheduler) == [1, 2]
    short = scheduler.next_step({}, leftover=Leftover(alone_s=0.003, row_s=0.002))
    assert [live.ticket for live in short] == [1], "a row takes longer than was thought"


def test_others_do_not_see_them():
    scheduler = Scheduler(LIMITS, pool := PagePool(64))
    for ticket in (1, 2, 3, 4, 5):
        begin(scheduler, ticket, 60, yields=True)
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.queued_tokens, stats.yielding) == (0, 0, 0, 5)
    assert scheduler.crowd() == (0, 0) and stats.roomy_pages == 64 > pool.free
    begin(scheduler, 6, 20)
    assert scheduler.queued(False) == 1 and scheduler.stats().queued_tokens == 20
    assert scheduler.next_in_line()[0].ticket == 6, "though all places are taken"
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.running, stats.yielding, stats.roomy_pages) == (1, 5, 61)


def test_kv_that_is_fetched_for_others_finds_room():
    scheduler = Scheduler(LIMITS, pool := PagePool(16))
    batch = [begin(scheduler, ticket, 60, yields=True) for ticket in (1, 2)]
    assert step(scheduler) == [1] and pool.free == 8, "a quarter is left free"
    request = Request("3", tuple(range(100)), SamplingParams(max_tokens=3))
    fetching = new_live(request, 3, frozenset())
    scheduler.load(fetching)
    assert scheduler.room_for(fetching, 0, 12) == 12 and not batch[0].pages
    assert (scheduler.queued(True), scheduler.stats().preemptions) == (2, 1), "back in the line"
    busy = Scheduler(LIMITS, pool := PagePool(16))
    [live] = [begin(busy, 1, 60, yields=True)]
    busy.next_step({})
    busy.load(fetching := new_live(request, 3, frozenset()))
    assert busy.room_for(fetching, 0, 12) == 7 and live.pages, "not from one whose step is computed"


def test_a_priority_exchanges_no_places_between_the_two():
    scheduler = Scheduler(StepLimits(64, 1, 8), PagePool(64))
    first = begin(scheduler, 1)
    urgent = Request("2", (1,), SamplingParams(max_tokens=1), owner=b"o", priority=-1000, yields=True)
    scheduler.add(late := new_live(urgent, 2, frozenset(), now=2.0))
    assert first.place < YIELDS_FROM <= late.place
