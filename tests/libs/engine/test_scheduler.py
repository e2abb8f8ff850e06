"""The policy on its own: budgets and pages respected, order kept, everything ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.pages import PagePool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.live import new_live
from penstock.engine.scheduling.plan import Situation, StepLimits
from penstock.engine.scheduling.plan import plan as plan_of
from penstock.engine.scheduling.scheduler import Scheduler


@dataclass
class One:
    ticket: int
    length: int
    remaining: int
    pages: list[int] = field(default_factory=list)


LIMITS = StepLimits(max_batch_tokens=32, max_running=4, block_size=8)


def running(ticket, length, remaining=1):
    """Holds pages for all it knows, but for the last token of a decode step when that opens a page."""
    held = LIMITS.pages_for(length - 1 if remaining == 1 else length)
    return One(ticket, length, remaining, list(range(held)))


def plan(limits, free, running, waiting, drafts, **fields):
    return plan_of(Situation(limits, free, running, waiting, drafts=drafts, **fields))


def rows_of(made):
    return [(portion.ticket, portion.known, portion.drafts, portion.new_pages) for portion in made.portions]


def test_decode_comes_first_then_drafts_then_prompts_then_new_ones():
    made = plan(LIMITS, 100, [running(1, 50, 40), running(2, 9), running(3, 12)], [One(4, 5, 5)], {2: 3, 3: 2})
    assert rows_of(made) == [(2, 1, 3, 1), (3, 1, 2, 0), (1, 25, 0, 0)]
    assert made.admit == [] and made.preempt == []


def test_chunks_fill_the_budget_in_order_of_arrival():
    made = plan(LIMITS, 100, [running(1, 20, 10)], [One(2, 15, 15), One(3, 30, 30), One(4, 9, 9)], {})
    assert rows_of(made) == [(1, 10, 0, 0), (2, 15, 0, 2), (3, 7, 0, 4)]
    assert made.admit == [2, 3]


def test_nobody_overtakes_a_head_that_does_not_fit():
    made = plan(LIMITS, 3, [running(1, 4)], [One(2, 40, 40), One(3, 2, 2)], {})
    assert made.admit == [] and rows_of(made) == [(1, 1, 0, 0)]


def test_the_youngest_gives_way():
    made = plan(LIMITS, 0, [running(1, 9), running(2, 17), running(3, 30, 20)], [One(4, 5, 5)], {1: 4})
    assert made.preempt == [3] and made.admit == []
    assert rows_of(made) == [(1, 1, 4, 1), (2, 1, 0, 1)]


def test_loaded_pages_of_the_line_go_before_running_sequences():
    made = plan(LIMITS, 0, [running(1, 9)], [One(2, 20, 4, [1, 2]), One(3, 20, 4, [3, 4])], {})
    assert made.strip == [3] and made.preempt == []
    assert rows_of(made) == [(1, 1, 0, 1)]


def test_pages_of_loads_go_before_running_sequences():
    loading = [One(5, 20, 20, [5]), One(6, 20, 20)]
    made = plan(LIMITS, 0, [running(1, 9), running(2, 9)], [], {}, loading=loading)
    assert made.strip == [5] and made.preempt == []
    assert rows_of(made) == [(1, 1, 0, 1)]


def test_sits_out_when_nobody_younger_can_help():
    assert plan(LIMITS, 0, [running(1, 9)], [], {}) == plan(LIMITS, 0, [], [], {})
    made = plan(LIMITS, 1, [running(1, 9), running(2, 17)], [], {})
    assert made.preempt == [] and rows_of(made) == [(1, 1, 0, 1)]


def test_pages_that_sinks_hold_do_not_help():
    lent = {3: 0, 2: 1}
    made = plan(
        LIMITS,
        0,
        [running(1, 9), running(2, 20, 5), running(3, 30, 20)],
        [],
        {},
        freeable=lambda pages: lent.get(len(pages) - 1, 0),
    )
    assert made.preempt == [2] and rows_of(made) == [(1, 1, 0, 1), (3, 20, 0, 0)]


def test_loads_give_way_to_the_line_only_when_nothing_moves():
    line, loading = [One(2, 40, 40)], [One(1, 40, 40, [1, 2]), One(3, 40, 40, [3])]
    assert rows_of(plan(LIMITS, 3, [], line, {}, loading=loading)) == []
    made = plan(LIMITS, 3, [], line, {}, loading=loading, stalled=True)
    assert made.strip == [3, 1] and made.admit == [2] and rows_of(made) == [(2, 32, 0, 5)]


def test_drafts_shrink_to_free_pages():
    made = plan(LIMITS, 0, [running(1, 14)], [], {1: 9})
    assert rows_of(made) == [(1, 1, 2, 0)]


@st.composite
def situations(draw):
    limits = StepLimits(draw(st.integers(4, 40)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 4, 16])))
    tickets = draw(st.lists(st.integers(0, 50), unique=True, max_size=10))
    split = draw(st.integers(0, min(len(tickets), limits.max_running)))
    lines: list[list[One]] = [[], []]
    for line, part in enumerate((sorted(tickets[:split]), sorted(tickets[split:]))):
        for ticket in part:
            length = draw(st.integers(1, 60))
            computed = draw(st.integers(0, length - 1))
            held = limits.pages_for(computed) if length - computed == 1 or line else limits.pages_for(length)
            lines[line].append(One(ticket, length, length - computed, [0] * held))
    drafts = draw(st.dictionaries(st.sampled_from(tickets), st.integers(0, 9))) if tickets else {}
    return limits, draw(st.integers(0, 20)), *lines, drafts, draw(st.none() | st.integers(1, 40))


@given(situations())
def test_plans_are_sound(situation):
    limits, free, active, line, drafts, chunk = situation
    before = repr((active, line))
    made = plan(limits, free, active, line, drafts, chunk=chunk)
    assert repr((active, line)) == before, "the policy touches nothing"
    known = {one.ticket: one for one in [*active, *line]}
    assert sum(portion.known + portion.drafts for portion in made.portions) <= limits.max_batch_tokens
    tickets = [portion.ticket for portion in made.portions]
    assert len(set(tickets)) == len(tickets) and not set(tickets) & set(made.preempt)
    assert len(active) - len(made.preempt) + len(made.admit) <= limits.max_running
    assert made.admit == [one.ticket for one in line][: len(made.admit)]
    holders = sorted(one.ticket for one in active if one.pages)
    assert sorted(made.preempt) == holders[len(holders) - len(made.preempt) :], "the youngest go"
    freed = sum(len(known[ticket].pages) for ticket in [*made.preempt, *made.strip])
    assert sum(portion.new_pages for portion in made.portions) <= free + freed
    for portion in made.portions:
        one = known[portion.ticket]
        remaining = one.length if portion.ticket in made.strip else one.remaining
        held = 0 if portion.ticket in made.strip else len(one.pages)
        assert 1 <= portion.known <= remaining and portion.drafts <= drafts.get(portion.ticket, 0)
        assert not portion.drafts or remaining == 1
        reach = one.length - remaining + portion.known + portion.drafts
        assert (held + portion.new_pages) * limits.block_size >= reach
    going = {one.ticket for one in active if one.remaining == 1}
    if chunk is not None and going & set(tickets):
        assert sum(portion.known for portion in made.portions if portion.ticket not in going) <= chunk
    unbounded = plan(limits, free, active, line, drafts)
    assert bool(made.portions) == bool(unbounded.portions)
    for ours, theirs in zip(made.portions, unbounded.portions, strict=False):
        assert ours.ticket == theirs.ticket and ours.known <= theirs.known, "chunks are smaller, the order is the same"


@settings(max_examples=150)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12),
    limits=st.builds(StepLimits, st.integers(4, 60), st.integers(1, 4), st.sampled_from([1, 4, 16])),
    spare=st.integers(0, 12),
    drafted=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_everything_ends_whatever_happens(requests, limits, spare, drafted, seed):
    """A simulated engine: prompts, drafts accepted or not, loaded pages, sinks that hold pages, readers that leave."""
    luck = Random(seed)
    largest = max(limits.pages_for(prompt + output - 1) for prompt, output, _ in requests)
    pool = PagePool(largest + spare)
    scheduler = Scheduler(limits, pool)
    arrivals = []
    for ticket, (prompt, output, loaded) in enumerate(requests):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(str(ticket), tuple(range(prompt)), sampling)
        one = new_live(request, ticket, frozenset(), None, None, 0.0)
        arrivals.append((one, min(loaded, limits.pages_for(prompt))))
    ended = set()
    lent: list[int] = []
    for _ in range(20_000):
        if lent and luck.random() < 0.5:
            pool.release("sink", [lent.pop(luck.randrange(len(lent)))])
        if arrivals and (luck.random() < 0.3 or not scheduler.running + scheduler.waiting):
            one, blocks = arrivals.pop(0)
            if pool.can_allocate(blocks + len(scheduler.running)):
                scheduler.grow(one, blocks)
                one.computed = min(blocks * limits.block_size, one.length - 1)
            scheduler.add(one)
        drafts = {one.ticket: luck.randint(0, 3) for one in scheduler.decoding() if drafted}
        lines = (scheduler.running, scheduler.waiting, scheduler.loading)
        expected = plan_of(Situation(limits, pool.free, *lines, drafts, pool.sole))
        step = scheduler.next_step(drafts)
        planned = [(portion.ticket, portion.known, portion.drafts) for portion in expected.portions]
        assert [(one.ticket, portion.known, portion.drafts) for one, portion in step] == planned, (
            "also when it is the last again"
        )
        assert step or lent or not (scheduler.running or scheduler.waiting), "somebody always moves"
        pages = [page for one in scheduler.running + scheduler.waiting for page in one.pages]
        assert len(set(pages)) == len(pages), "no page has two owners"
        assert len({*pages, *lent}) + pool.free == pool.total
        for one, portion in step:
            one.computed += portion.known
            grown = 1 + luck.randint(0, portion.drafts) if one.computed == one.length else 0
            for _ in range(grown):
                one.tokens.append(0)
                if one.verdict(10**6):
                    break
            one.computed = one.length - 1 if grown else one.computed
            if one.pages and luck.random() < 0.2:
                lent.append(one.pages[0])
                pool.hold("sink", lent[-1:])
            leaves = luck.random() < 0.01
            if one.verdict(10**6) or leaves:
                ended.add(one.ticket)
                assert leaves or one.generated == one.sampling.max_tokens
                scheduler.drop(one)
            scheduler.settle(one)
        if len(ended) == len(requests):
            break
    assert ended == set(range(len(requests)))
    pool.release("sink", lent)
    assert pool.free == pool.total and not pool.owners()
