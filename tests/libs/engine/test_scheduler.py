"""The policy on its own: budgets and pages respected, order kept, everything ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.errors import EngineError
from penstock.engine.hooks import LoadResult
from penstock.engine.pages import PagePool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sampling.choice import Chosen
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


def test_none_overtakes_a_head_that_does_not_fit():
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


def test_sits_out_when_none_younger_can_help():
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


class Play:
    """A simulated engine over a scheduler: prompts, drafts accepted or not, loaded pages, sinks that hold pages, steps
    that fail for one sequence, readers that leave between steps and during them."""

    def __init__(self, requests, limits, spare, seed):
        self.luck = Random(seed)
        largest = max(limits.pages_for(prompt + output - 1) for prompt, output, _ in requests)
        self.pool = PagePool(largest + spare)
        self.scheduler = Scheduler(limits, self.pool)
        self.limits = limits
        self.lives, self.ended, self.lent = [], set(), []
        self.arrivals = [self._live(ticket, *request) for ticket, request in enumerate(requests)]
        self.repeated = 0

    def _live(self, ticket, prompt, output, loaded):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(str(ticket), tuple(range(prompt)), sampling)
        return new_live(request, ticket, frozenset()), min(loaded, self.limits.pages_for(prompt))

    def arrive(self):
        live, blocks = self.arrivals.pop(0)
        self.lives.append(live)
        if not blocks:
            assert self.scheduler.add(live) is None
            return
        self.scheduler.load(live)
        written = self.scheduler.room_for(live, 0, blocks)
        tokens = written * self.limits.block_size
        assert self.scheduler.loaded(live, written, LoadResult(tokens, (), tokens)) is None

    def drafts(self, drafted):
        lives = self.scheduler.decoding() if drafted else []
        found = {live.ticket: (0,) * self.luck.randint(0, 3) for live in lives}
        return {ticket: tokens for ticket, tokens in found.items() if tokens} if self.luck.random() < 0.8 else {}

    def step(self, drafts, chunk):
        """One turn; whether something moved."""
        expected = plan_of(self.scheduler.situation(drafts, chunk=chunk))
        again = self.scheduler._once_more
        if drafts:
            step = self.scheduler.next_step(drafts, chunk=chunk)
        else:
            step = again()
            self.repeated += step is not None
            step = self.scheduler.next_step(drafts, chunk=chunk) if step is None else step
        assert [(live.ticket, live.run.known, len(live.run.choice.drafts)) for live in step] == [
            (portion.ticket, portion.known, portion.drafts) for portion in expected.portions
        ], "also when it is the last again"
        self._check_pages()
        answers = [self._answer(live) for live in step]
        for live in step:
            if self.luck.random() < 0.01:
                self._end(live)
        ended = self.scheduler.commit(step, answers)
        for live, answer in zip(step, answers, strict=True):
            assert not live.busy
            if isinstance(answer, EngineError):
                self._end(live)
            elif live.gone:
                assert answer == []
            if live.pages and self.luck.random() < 0.2:
                self.lent.append(live.pages[0])
                self.scheduler.hold("sink", self.lent[-1:])
        for one in ended:
            assert one.finish == "length" and one.live.generated == one.live.request.sampling.max_tokens
            self._end(one.live)
        return bool(step)

    def _answer(self, live):
        if self.luck.random() < 0.01:
            return EngineError("this one alone")
        samples = live.run.samples
        return [Chosen(0)] * (1 + self.luck.randint(0, samples - 1) if samples else 0)

    def _end(self, live):
        self.ended.add(live.ticket)
        self.scheduler.drop(live)
        self.scheduler.drop(live)

    def _check_pages(self):
        pages = [page for live in self.lives for page in live.pages]
        assert len(set(pages)) == len(pages), "no page has two owners"
        assert len({*pages, *self.lent}) + self.pool.free == self.pool.total
        for live in self.lives:
            assert not live.gone or live.busy or not live.pages

    def give_back(self):
        if self.lent and self.luck.random() < 0.5:
            self.scheduler.release("sink", [self.lent.pop(self.luck.randrange(len(self.lent)))])

    def over(self):
        self.scheduler.release("sink", self.lent)
        assert self.pool.free == self.pool.total and not self.pool.owners()
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.loading, stats.queued_tokens) == (0, 0, 0, 0)


@settings(max_examples=150)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12),
    limits=st.builds(StepLimits, st.integers(4, 60), st.integers(1, 4), st.sampled_from([1, 4, 16])),
    spare=st.integers(0, 12),
    drafted=st.booleans(),
    chunk=st.none() | st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_everything_ends_whatever_happens(requests, limits, spare, drafted, chunk, seed):
    play = Play(requests, limits, spare, seed)
    for _ in range(20_000):
        play.give_back()
        stats = play.scheduler.stats()
        idle = not stats.running + stats.waiting
        if play.arrivals and (idle or play.luck.random() < 0.3):
            play.arrive()
            idle = False
        moved = play.step(play.drafts(drafted), chunk)
        assert moved or idle or play.lent, "something always moves"
        if len(play.ended) == len(requests):
            break
    assert play.ended == set(range(len(requests)))
    play.over()


@settings(max_examples=100)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(5, 40), st.just(0)), min_size=1, max_size=6),
    size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 40),
    chunk=st.none() | st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_a_step_once_more_is_what_the_policy_would_plan(requests, size, spare, chunk, seed):
    """The short way through decode steps gives the policy's own answer wherever it gives one, pages included, and it
    gives one for every step in which nothing but decoding goes on."""
    play = Play(requests, StepLimits(200, 6, size), spare, seed)
    while play.arrivals:
        play.arrive()
    decoding = 0
    while len(play.ended) < len(requests):
        situation = play.scheduler.situation({}, chunk=chunk)
        expected = plan_of(situation)
        before = {live.ticket: len(live.pages) for live in play.lives}
        step = play.scheduler._once_more()
        if step is None:
            step = play.scheduler.next_step({}, chunk=chunk)
        else:
            assert (expected.preempt, expected.strip, expected.admit) == ([], [], [])
            decoding += 1
        found = [(live.ticket, live.run.known, len(live.pages) - before[live.ticket], 0) for live in step]
        if not expected.preempt:
            assert found == [
                (portion.ticket, portion.known, portion.new_pages, portion.drafts) for portion in expected.portions
            ]
        assert all(live.run.start == live.computed and live.busy for live in step)
        for one in play.scheduler.commit(step, [[Chosen(0)] * live.run.samples for live in step]):
            play._end(one.live)
    if len(requests) == 1 and requests[0][0] > 1:
        assert decoding == requests[0][1] - 2, "the first decode step is planned, the others follow it"
    play.over()
