"""The policy on its own: budgets and pages respected, order kept, everything ends."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engine.errors import EngineError, NotFinite
from penstock.engine.hooks import LoadResult
from penstock.engine.pages import PagePool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sampling.choice import Chosen
from penstock.engine.scheduling.leftover import ANY_LEFTOVER, Leftover
from penstock.engine.scheduling.live import new_live
from penstock.engine.scheduling.plan import plan as plan_of
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.situation import PromptRoom, Situation, StepLimits
from penstock.kv.identity import Chain, packed


@dataclass
class One:
    ticket: int
    length: int
    remaining: int
    pages: list[int] = field(default_factory=list)
    next_key: bytes | None = None
    busy: bool = False
    blind_from: int | None = None

    @property
    def place(self):
        return self.ticket

    def visible(self, start):
        return self.length if self.blind_from is None else max(start, self.blind_from)


LIMITS = StepLimits(max_batch_tokens=32, max_running=4, block_size=8)


def running(ticket, length, remaining=1):
    """Holds pages for all it knows, but for the last token of a decode step when that opens a page."""
    held = LIMITS.pages_for(length - 1 if remaining == 1 else length)
    return One(ticket, length, remaining, own(ticket, held))


def own(ticket, count, first=0):
    """Page numbers that no other ticket has."""
    return [100 * ticket + at for at in range(first, count)]


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


def test_steps_that_are_computed_at_a_time_share_the_streams():
    """What is in one stays as it is, also when there are too few pages; a block that it computes is not computed
    again."""
    limits = replace(LIMITS, flights=2)
    streams = [running(ticket, 9) for ticket in range(1, 6)]
    assert [row[0] for row in rows_of(plan(limits, 100, streams, [], {}))] == [1, 2, 3]
    flying = [replace(one, busy=True) for one in streams[:3]]
    assert [row[0] for row in rows_of(plan(limits, 100, [*flying, *streams[3:]], [], {}))] == [4, 5]
    made = plan(limits, 0, [replace(one, busy=True) for one in streams[1:]] + streams[:1], [], {})
    assert (made.portions, made.preempt) == ([], [])
    room = PromptRoom(beside=5)
    assert rows_of(plan(limits, 100, [flying[0], running(7, 40, 40)], [], {}, room=room)) == [(7, 5, 0, 0)]
    prompt = replace(running(1, 40, 40), next_key=b"same", busy=True)
    same, other = One(2, 40, 40, next_key=b"same"), One(3, 40, 40, next_key=b"other")
    assert plan(limits, 100, [prompt], [same], {}).portions == []
    assert plan(limits, 100, [prompt], [other], {}).admit == [3]


def test_what_is_resumed_comes_before_prompts_that_are_begun():
    active = [running(-7, 40, 8), running(1, 20, 10), running(2, 9)]
    made = plan(LIMITS, 100, active, [One(-6, 9, 9), One(3, 30, 30)], {})
    assert rows_of(made) == [(2, 1, 0, 1), (-7, 8, 0, 0), (-6, 9, 0, 2), (1, 10, 0, 0)]
    made = plan(LIMITS, 100, active, [One(3, 30, 30)], {})
    assert rows_of(made) == [(2, 1, 0, 1), (-7, 8, 0, 0), (1, 10, 0, 0), (3, 13, 0, 4)]


def test_who_runs_takes_pages_of_what_is_resumed_and_does_not_run_yet():
    waiting = One(-6, 60, 30, own(2000, 4))
    made = plan(LIMITS, 0, [running(1, 9)], [waiting], {})
    assert (rows_of(made), made.strip) == ([(1, 1, 0, 1)], [-6])


def test_none_begins_before_what_is_resumed_and_does_not_fit():
    made = plan(LIMITS, 5, [running(1, 20, 10)], [One(-6, 60, 60), One(3, 8, 8)], {})
    assert (rows_of(made), made.admit) == ([(1, 10, 0, 0)], [])


def test_prompts_have_less_room_beside_streams_of_this_worker_and_of_others():
    prompts = [running(1, 20, 10)], [One(2, 15, 15)]
    room = PromptRoom(beside=3, alone=12)
    assert rows_of(plan(LIMITS, 100, *prompts, {}, room=room)) == [(1, 10, 0, 0), (2, 2, 0, 2)]
    prompts[0].append(running(3, 12))
    assert rows_of(plan(LIMITS, 100, *prompts, {}, room=room)) == [(3, 1, 0, 0), (1, 3, 0, 0)]


def test_a_short_prompt_that_begins_beside_streams_is_computed_whole():
    room, short, long = PromptRoom(beside=3, whole=10), One(2, 10, 10), One(3, 11, 11)
    stream, begun = running(1, 12), running(4, 20, 8)
    assert rows_of(plan(LIMITS, 100, [stream], [short, long], {}, room=room)) == [(1, 1, 0, 0), (2, 10, 0, 2)]
    assert rows_of(plan(LIMITS, 100, [stream], [long, short], {}, room=room)) == [(1, 1, 0, 0), (3, 3, 0, 2)]
    made = plan(LIMITS, 100, [stream, begun], [short], {}, room=room)
    assert rows_of(made) == [(1, 1, 0, 0), (4, 3, 0, 0)], "one that has begun goes on as it began"
    made = plan(LIMITS, 100, [stream], [One(2, 2, 2), One(3, 10, 10)], {}, room=room)
    assert rows_of(made) == [(1, 1, 0, 0), (2, 2, 0, 1), (3, 1, 0, 2)], "a second one finds what the target leaves"
    room = PromptRoom(beside=0, whole=10)
    assert rows_of(plan(LIMITS, 100, [stream], [short], {}, room=room)) == [(1, 1, 0, 0)], "streams are measured alone"
    made = plan(StepLimits(8, 4, 8), 100, [stream], [short], {}, room=PromptRoom(beside=3, whole=10))
    assert rows_of(made) == [(1, 1, 0, 0), (2, 3, 0, 2)], "it doesn't fit into a step"


def test_prompts_that_came_together_end_one_after_the_other():
    line = [One(1, 10, 10), One(2, 10, 10), One(3, 5, 5), One(4, 5, 5), One(5, 5, 5)]
    room = PromptRoom(enough=8)
    assert rows_of(plan(StepLimits(32, 8, 8), 100, [], line, {}, room=room)) == [(1, 10, 0, 2)]
    assert rows_of(plan(StepLimits(32, 8, 8), 100, [], line[2:], {}, room=room)) == [(3, 5, 0, 1), (4, 5, 0, 1)]
    begun = [running(1, 20, 10), running(2, 20, 10)]
    assert rows_of(plan(StepLimits(32, 8, 8), 100, begun, line[2:], {}, room=room)) == [(1, 10, 0, 0)]
    long = [One(1, 40, 40), One(2, 5, 5)]
    assert rows_of(plan(StepLimits(32, 8, 8), 100, [], long, {}, room=room)) == [(1, 32, 0, 5)], "a full step is one"


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
    lent = {*own(3, 20), *own(2, 20, 1)}
    made = plan(
        LIMITS,
        0,
        [running(1, 9), running(2, 20, 5), running(3, 30, 20)],
        [],
        {},
        holds=lambda page: 1 + (page in lent),
    )
    assert made.preempt == [2] and rows_of(made) == [(1, 1, 0, 1), (3, 20, 0, 0)]


def test_pages_that_several_hold_help_when_all_can_give_them_back():
    line = [One(4, 20, 12, [1, 2]), One(5, 20, 12, [1, 2])]
    made = plan(LIMITS, 0, [running(1, 9)], line, {}, holds=lambda page: 2)
    assert made.strip == [5, 4] and rows_of(made)[0] == (1, 1, 0, 1)
    made = plan(LIMITS, 0, [running(1, 9)], line, {}, holds=lambda page: 3)
    assert made.strip == [] and rows_of(made) == [], "somebody else has them too"
    younger = One(2, 17, 1, [1, 2])
    made = plan(LIMITS, 0, [running(1, 9), younger], line[:1], {}, holds=lambda page: 1 + (page < 3))
    assert (made.preempt, made.strip) == ([2], [4]) and rows_of(made)[0] == (1, 1, 0, 1)


def test_loads_give_way_to_the_line_only_when_nothing_moves():
    line, loading = [One(2, 40, 40)], [One(1, 40, 40, [1, 2]), One(3, 40, 40, [3])]
    assert rows_of(plan(LIMITS, 3, [], line, {}, loading=loading)) == []
    made = plan(LIMITS, 3, [], line, {}, loading=loading, stalled=True)
    assert made.strip == [3, 1] and made.admit == [2] and rows_of(made) == [(2, 32, 0, 5)]


def test_drafts_shrink_to_free_pages():
    made = plan(LIMITS, 0, [running(1, 14)], [], {1: 9})
    assert rows_of(made) == [(1, 1, 2, 0)]


def test_a_prompt_is_computed_up_to_a_picture_that_is_not_ready():
    """And those behind it, in the line too, need not wait for that."""
    begun, head = running(1, 40, 30), One(2, 24, 24, blind_from=0)
    begun.blind_from = 15
    made = plan(LIMITS, 99, [begun], [head, One(3, 9, 9)], {})
    assert rows_of(made) == [(1, 5, 0, 0), (3, 9, 0, 2)]
    begun.blind_from = 10
    made = plan(LIMITS, 99, [begun], [One(2, 24, 24, blind_from=5), One(3, 24, 24, blind_from=24)], {})
    assert rows_of(made) == [(3, 24, 0, 3)], "one at a time may begin that will have to wait"
    assert rows_of(plan(LIMITS, 99, [], [One(2, 24, 24, blind_from=5)], {})) == [(2, 5, 0, 3)]
    assert rows_of(plan(LIMITS, 99, [begun], [], {})) == []
    begun.blind_from = 9
    assert rows_of(plan(LIMITS, 99, [begun], [], {}, copyable=lambda live: 4)) == []
    begun.blind_from = None
    assert rows_of(plan(LIMITS, 99, [begun], [], {})) == [(1, 30, 0, 0)]


def test_a_block_is_computed_once():
    """Whoever comes first computes it; those that run and those in the line wait for it, and none overtakes."""
    first, second = running(1, 50, 40), running(2, 60, 50)
    first.next_key = second.next_key = b"k"
    head, behind = One(4, 30, 30, next_key=b"k"), One(5, 9, 9)
    made = plan(StepLimits(100, 8, 8), 100, [first, second, running(3, 20, 20)], [head, behind], {})
    assert rows_of(made) == [(1, 40, 0, 0), (3, 20, 0, 0)] and made.admit == []
    made = plan(StepLimits(100, 8, 8), 100, [second], [head, behind], {})
    assert rows_of(made) == [(2, 50, 0, 0)], "the next one takes over"
    made = plan(StepLimits(100, 8, 8), 100, [], [head, behind], {})
    assert made.admit == [4, 5], "in the line as well"


def test_none_waits_for_a_block_of_which_it_has_to_compute_the_last_token():
    lives = [One(ticket, 16, 16 - done, next_key=key) for ticket, done, key in [(1, 8, b"k"), (2, 8, b"k")]]
    assert rows_of(plan(LIMITS, 100, [], lives, {})) == [(1, 8, 0, 2), (2, 8, 0, 2)]


def test_what_can_be_copied_takes_no_room():
    line = [One(1, 20, 20), One(2, 20, 20), One(3, 20, 12), One(4, 30, 30)]
    copyable = {1: 3, 2: 7, 3: 7, 4: 7}
    made = plan(LIMITS, 100, [], line, {}, copyable=lambda live: copyable[live.ticket])
    assert rows_of(made) == [(1, 17, 0, 3), (2, 13, 0, 3), (3, 2, 0, 3)]
    assert [portion.copied for portion in made.portions] == [3, 7, 7]


def begun(scheduler, *names, tokens, chained=True):
    """Sequences with the same tokens, in the line."""
    lives = []
    for name in names:
        chain = Chain(b"root", LIMITS.block_size, tokens) if chained else None
        request = Request(str(name), tuple(tokens), SamplingParams(max_tokens=3, ignore_eos=True))
        lives.append(new_live(request, name, frozenset(), chain=chain, now=float(name)))
        scheduler.add(lives[-1])
    return lives


def stepped(scheduler):
    """A step of them all: (ticket, first position, known tokens) of each."""
    step = scheduler.next_step({})
    made = [(live.ticket, live.run.start, live.run.known) for live in step]
    answers = [[Chosen(0)] * live.run.samples for live in step]
    for live, answer in zip(step, answers, strict=True):
        live.run.tail_sound = live.run.concludes(answer)
    for one in scheduler.commit(step, answers):
        scheduler.drop(one.live)
    return made


def test_nobody_waits_for_a_tail():
    """Those that begin together compute it, those that come later copy it."""
    scheduler = Scheduler(LIMITS, PagePool(16))
    begun(scheduler, 1, 2, 3, tokens=range(6))
    assert stepped(scheduler) == [(1, 0, 6), (2, 0, 6), (3, 0, 6)]
    begun(scheduler, 4, tokens=range(7))
    assert stepped(scheduler)[3:] == [(4, 6, 1)]


def test_those_who_waited_for_a_block_copy_the_tail_behind_it():
    scheduler = Scheduler(LIMITS, PagePool(32))
    begun(scheduler, 1, 2, 3, 4, tokens=range(21))
    assert stepped(scheduler) == [(1, 0, 21)]
    assert stepped(scheduler) == [(1, 21, 1), (2, 20, 1), (3, 20, 1), (4, 20, 1)]
    assert scheduler.stats().copied_tokens == 12


def test_the_page_to_copy_from_is_kept_during_the_step():
    """However much room others take meanwhile."""
    scheduler = Scheduler(LIMITS, pool := PagePool(8))
    [first] = begun(scheduler, 1, tokens=range(14))
    stepped(scheduler)
    scheduler.drop(first)
    assert pool.free == 8
    begun(scheduler, 2, tokens=range(14))
    step = scheduler.next_step({})
    source = first_page(pool)
    assert [live.run.source for live in step] == [source] and pool.holds(source) == 1
    [loading] = begun(scheduler, 3, tokens=range(100, 200), chained=False)
    scheduler.load_again(loading)
    assert scheduler.room_for(loading, 0, 8) == 4, "one stays free for the sequence that runs"
    assert source not in loading.pages
    scheduler.commit(step, [[Chosen(0)]])
    assert pool.holds(source) == 0 and pool.free == 2


def test_a_step_that_fails_gives_the_page_back():
    scheduler = Scheduler(LIMITS, pool := PagePool(8))
    [first] = begun(scheduler, 1, tokens=range(14))
    stepped(scheduler)
    scheduler.drop(first)
    [second] = begun(scheduler, 2, tokens=range(14))
    for _ in range(2):
        step = scheduler.next_step({})
        assert (second.run.start, second.run.known, second.run.source) == (13, 1, first_page(pool))
        scheduler.commit(step, [EngineError("this time")])
        assert second.computed == 8 and pool.owners() == {second.owner}
    scheduler.distrust(second)
    assert pool.longest(second.chain.keys[0], packed(range(8, 13))) == (0, 0), "it may be what is damaged"


def test_pages_of_a_sequence_that_has_left_are_distrusted_too():
    """Its client leaves while the step is computed that finds numbers which are not finite."""
    scheduler = Scheduler(StepLimits(8, 2, 8), pool := PagePool(8))
    [live] = begun(scheduler, 1, tokens=range(30))
    keys = list(live.chain.keys)
    stepped(scheduler)
    assert pool.find(keys[0]) is not None
    step = scheduler.next_step({})
    scheduler.drop(live)
    scheduler.commit(step, [NotFinite()])
    assert pool.find(keys[0]) is None and pool.free == 8


def test_what_stands_on_kv_that_may_be_damaged_is_named_by_none():
    """Neither the block that is not finite, nor those behind it, whatever they hold."""
    scheduler = Scheduler(StepLimits(8, 2, 8), pool := PagePool(8))
    [live] = begun(scheduler, 1, tokens=range(30))
    keys = list(live.chain.keys)
    stepped(scheduler)
    [second] = scheduler.next_step({})
    second.run.sound = False
    scheduler.commit([second], [[]])
    assert [stepped(scheduler), stepped(scheduler)] == [[(1, 16, 8)], [(1, 24, 6)]]
    assert [pool.find(key) is not None for key in keys] == [True, False, False]


def first_page(pool):
    """The page that holds the tail of the first."""
    return pool.longest(Chain(b"root", LIMITS.block_size, range(8)).keys[0], packed(range(8, 13)))[0]


def test_a_chunk_may_end_inside_a_block_that_is_copied():
    """Less room than is left behind the copy, and a page to copy from that is gone when the pages are there."""
    scheduler = Scheduler(StepLimits(5, 2, 8), PagePool(4))
    begun(scheduler, 1, tokens=range(15))
    while scheduler.stats().running + scheduler.stats().waiting:
        stepped(scheduler)
    begun(scheduler, 2, tokens=[*range(12), *range(50, 58)])
    assert stepped(scheduler) == [(2, 12, 5)]
    assert stepped(scheduler) == [(2, 17, 3)]


def test_a_page_to_copy_from_that_is_needed_itself():
    """Its rows are computed after all, as far as there is room for them in the step."""
    scheduler = Scheduler(StepLimits(32, 2, 8), pool := PagePool(3))
    begun(scheduler, 1, tokens=range(6))
    while scheduler.stats().running + scheduler.stats().waiting:
        stepped(scheduler)
    [live] = begun(scheduler, 2, tokens=[*range(6), *range(50, 65)])
    assert scheduler.situation({}).copyable(live) == 6
    assert stepped(scheduler) == [(2, 0, 15)]
    assert stepped(scheduler) == [(2, 15, 6)] and pool.free == 0


rooms = st.builds(
    PromptRoom,
    beside=st.none() | st.integers(0, 40),
    alone=st.none() | st.integers(1, 40),
    whole=st.integers(0, 40),
    enough=st.none() | st.integers(1, 40),
)

leftovers = st.builds(
    Leftover,
    beside_s=st.sampled_from([0.0, 1.0, 20.0]),
    alone_s=st.sampled_from([0.5, 20.0, inf]),
    row_s=st.sampled_from([0.0, 1.0]),
    token_s=st.sampled_from([0.0, 0.5]),
)


@st.composite
def situations(draw):
    limits = StepLimits(draw(st.integers(4, 40)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 4, 16])))
    tickets = draw(st.lists(st.integers(-4, 50), unique=True, max_size=10))
    split = draw(st.integers(0, min(len(tickets), limits.max_running)))
    lines: list[list[One]] = [[], []]
    for line, part in enumerate((sorted(tickets[:split]), sorted(tickets[split:]))):
        for ticket in part:
            length = draw(st.integers(1, 60))
            computed = draw(st.integers(0, length - 1))
            held = limits.pages_for(computed) if length - computed == 1 or line else limits.pages_for(length)
            key = draw(st.sampled_from([None, None, b"k", b"l"]))
            pages = own(ticket, held)
            if draw(st.booleans()):
                common = draw(st.integers(0, min(held, 3)))
                pages[:common] = own(1000, common)
            lines[line].append(One(ticket, length, length - computed, pages, key))
    drafts = draw(st.dictionaries(st.sampled_from(tickets), st.integers(0, 9))) if tickets else {}
    return limits, draw(st.integers(0, 20)), *lines, drafts, draw(rooms)


def _shares(one, limits):
    done = one.length - one.remaining
    whole = done // limits.block_size < (one.length - 1) // limits.block_size
    return one.next_key is not None and one.remaining > 1 and whole


def _check_room(room, prompts, admitted, known, beside_streams):
    """The portions of prompts stay within what they may have."""
    computed = sum(portion.known for portion in prompts)
    most = room.beside if beside_streams else room.alone
    if most is not None and computed > most:
        [only] = prompts
        assert beside_streams and only.ticket in admitted and only.known <= room.whole
        assert only.known == known[only.ticket].remaining or only.known == known[only.ticket].length
    for count in range(1, len(prompts)):
        last, enough = prompts[count - 1], room.enough
        if known[last.ticket].remaining == last.known and enough is not None:
            assert sum(portion.known for portion in prompts[:count]) < enough


@given(situations())
def test_plans_are_sound(situation):
    limits, free, active, line, drafts, room = situation
    users = Counter(page for one in [*active, *line] for page in one.pages)
    before = repr((active, line))
    made = plan(limits, free, active, line, drafts, room=room, holds=users.__getitem__)
    assert repr((active, line)) == before, "the policy touches nothing"
    known = {one.ticket: one for one in [*active, *line]}
    assert sum(portion.known + portion.drafts for portion in made.portions) <= limits.max_batch_tokens
    tickets = [portion.ticket for portion in made.portions]
    assert len(set(tickets)) == len(tickets) and not set(tickets) & set(made.preempt)
    assert len(active) - len(made.preempt) + len(made.admit) <= limits.max_running
    assert made.admit == [one.ticket for one in line][: len(made.admit)]
    given = Counter(page for ticket in [*made.preempt, *made.strip] for page in known[ticket].pages)
    freed = sum(given[page] == users[page] for page in given)
    stays = [one for one in active if one.ticket not in made.preempt]
    for one in stays if made.preempt else []:
        if one.ticket > min(made.preempt):
            others = {page for older in stays for page in older.pages if older.ticket < one.ticket}
            assert set(one.pages) <= others, "the youngest go, unless that frees no page"
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
    prompts = [portion for portion in made.portions if portion.ticket not in going]
    _check_room(room, prompts, made.admit, {one.ticket: one for one in [*active, *line]}, bool(going & set(tickets)))
    whole = [one.next_key for one in map(known.get, tickets) if _shares(one, limits) and one.ticket not in made.strip]
    assert len(set(whole)) == len(whole), "no block is computed twice"
    apart = [replace(one, next_key=None) for one in active], [replace(one, next_key=None) for one in line]
    assert bool(made.portions) == bool(
        plan(limits, free, *apart, drafts, room=room, holds=users.__getitem__).portions
    ), "somebody computes"
    unbounded = plan(limits, free, active, line, drafts, holds=users.__getitem__)
    assert bool(made.portions) == bool(unbounded.portions)
    for ours, theirs in zip(made.portions, unbounded.portions, strict=False):
        assert ours.ticket == theirs.ticket and ours.known <= theirs.known, "chunks are smaller, the order is the same"


class Play:
    """A simulated engine over a scheduler: prompts, drafts accepted or not, loaded pages, sinks that hold pages, steps
    that fail for one sequence, readers that leave between steps and during them, pages that sequences share.

    `memory` says what is in the pages, which stays when their owners go."""

    def __init__(self, requests, limits, spare, seed, yielding=0.0, leftover=ANY_LEFTOVER):
        """`yielding` is the chance that a request yields."""
        self.luck = Random(seed)
        self.yielding, self.leftover = yielding, leftover
        largest = max(limits.pages_for(prompt + output - 1) for prompt, output, _ in requests)
        self.pool = PagePool(largest + spare, itertools.count().__next__)
        self.memory, self.kv = defaultdict(dict), {}
        self.scheduler = Scheduler(limits, self.pool)
        self.limits = limits
        self.lives, self.ended, self.lent = [], set(), []
        self.arrivals = [self._live(ticket, *request) for ticket, request in enumerate(requests)]
        self.repeated = self.copied = 0
        self.flights = []

    def _live(self, ticket, prompt, output, loaded):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        family = self.luck.choice([0, 0, 100, 200])
        tokens = tuple(at + (family if at > 9 else 0) for at in range(prompt))
        chain = Chain(b"", self.limits.block_size, tokens) if self.luck.random() < 0.7 else None
        owner, priority = self.luck.choice([b"a", b"b"]), self.luck.choice([0, 0, 5, -5])
        yields = self.yielding > 0 and self.luck.random() < self.yielding
        more = {"yields": yields, "resumed": not yields and self.luck.random() < 0.2}
        request = Request(str(ticket), tokens, sampling, owner=owner, priority=priority, **more)
        live = new_live(request, ticket, frozenset(), chain=chain, now=ticket)
        return live, min(loaded, self.limits.pages_for(prompt))

    def arrive(self):
        live, blocks = self.arrivals.pop(0)
        self.lives.append(live)
        if not blocks:
            assert self.scheduler.add(live) is None
            return
        self.scheduler.load(live)
        taken = self.scheduler.take(live, 0, self.luck.choice([0, blocks]))
        written = taken + self.scheduler.room_for(live, taken, blocks - taken) if taken < blocks else taken
        tokens = written * self.limits.block_size
        self._write(live, taken * self.limits.block_size, min(tokens, live.length))
        if self.luck.random() < 0.5:
            self.scheduler.settled(live, written)
        assert self.scheduler.loaded(live, written, LoadResult(tokens, (), tokens)) is None

    def queued(self):
        """The tokens that steps have still to compute, block by block."""
        size, own, common = self.limits.block_size, 0, {}
        for live in [*self.scheduler._waiting, *self.scheduler._running]:
            if live.request.yields or (live.remaining == 1 and live in self.scheduler._running):
                continue
            for block in range(live.computed // size, self.limits.pages_for(live.length)):
                tokens = min(live.length, (block + 1) * size) - max(live.computed, block * size)
                if live.chain is None or block >= min(len(live.chain.keys), (live.length - 1) // size):
                    own += tokens
                elif self.pool.find(key := live.chain.keys[block]) is None:
                    common[key] = min(tokens, common.get(key, size))
        return own + sum(common.values())

    def drafts(self, drafted):
        lives = self.scheduler.decoding() if drafted else []
        found = {live.ticket: (0,) * self.luck.randint(0, 3) for live in lives}
        return {ticket: tokens for ticket, tokens in found.items() if tokens} if self.luck.random() < 0.8 else {}

    def step(self, drafts, room):
        """One turn, in which a step begins, and the first is over if there are no more at a time; whether something
        moved."""
        assert self.scheduler.stats().queued_tokens == self.queued()
        self.scheduler._share()
        assert self.scheduler.stats().queued_tokens == self.queued()
        expected = plan_of(self.scheduler.situation(drafts, room=room, leftover=self.leftover))
        again = partial(self.scheduler._once_more, self.leftover)
        if drafts:
            step = self.scheduler.next_step(drafts, room=room, leftover=self.leftover)
        else:
            step = again()
            self.repeated += step is not None
            step = self.scheduler.next_step(drafts, room=room, leftover=self.leftover) if step is None else step
        assert [(live.ticket, live.run.known, len(live.run.choice.drafts)) for live in step] == [
            (portion.ticket, portion.known, portion.drafts) for portion in expected.portions
        ], "also when it is the last again"
        self._check_pages()
        assert self.scheduler.stats().queued_tokens == self.queued()
        answers = [self._answer(live) for live in step]
        parts = list(zip(step, answers, strict=True))
        for live, answer in Random(len(step)).sample(parts, len(parts)):  # halves may be computed one after the other
            self._check_run(live, len(answer) - 1 if isinstance(answer, list) else 0)
            live.run.tail_sound = live.run.concludes(answer)
        for live in step:
            if self.luck.random() < 0.01:
                self._end(live)
        if step:
            self.flights.append((step, answers))
        if step and len(self.flights) < self.limits.flights:
            return True
        return self.land()

    def land(self):
        """The step that began first is over; whether there was one."""
        if not self.flights:
            return False
        step, answers = self.flights.pop(0)
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
        return True

    def _answer(self, live):
        if self.luck.random() < 0.01:
            return EngineError("this one alone")
        samples = live.run.samples
        return [Chosen(0)] * (1 + self.luck.randint(0, samples - 1) if samples else 0)

    def _end(self, live):
        self.ended.add(live.ticket)
        self.scheduler.drop(live)
        self.scheduler.drop(live)

    def _kv(self, live, drafts=()):
        """The KV of each token: a hash of all tokens up to it."""
        known = self.kv.setdefault(live.ticket, [0])
        for token in live.tokens[len(known) - 1 :]:
            known.append(hash((known[-1], token)))
        found = known[1:]
        for token in drafts:
            found.append(hash((found[-1], token)))
        return found

    def _write(self, live, start, end, drafts=()):
        size, kv = self.limits.block_size, self._kv(live, drafts)
        for at in range(start, end):
            self.memory[live.pages[at // size]][at % size] = kv[at]

    def _check_pages(self):
        users = defaultdict(set)
        for live in self.lives:
            assert not live.gone or live.busy or not live.pages
            assert len(set(live.pages)) == len(live.pages)
            for block, page in enumerate(live.pages):
                shared = live.chain is not None and block < live.named
                users[page].add(live.chain.keys[block] if shared else live.owner)
                assert not shared or self.pool.find(live.chain.keys[block]) == page, "equal keys are one page"
        assert all(len(keys) == 1 for keys in users.values()), "who shares a page agrees on what is in it"
        borrowed = {live.run.source for live in self.lives if live.busy and live.run.source}
        assert len({*users, *self.lent, *borrowed}) + self.pool.free == self.pool.total

    def _check_run(self, live, accepted):
        """What a run reads is there once it has copied its tail, and it writes to pages that are its own. Then it
        writes, also what belongs to drafts that are not accepted."""
        run, size = live.run, self.limits.block_size
        kv = self._kv(live)
        assert run.start - live.computed == (run.start % size if run.source else 0)
        if run.source:
            copied = {at: self.memory[run.source][at] for at in range(run.start % size)}
            self.memory[live.pages[run.start // size]] = copied
            self.copied += len(copied)
            assert run.source != live.pages[run.start // size]
        for at in range(run.start):
            assert self.memory[live.pages[at // size]][at % size] == kv[at]
        written = live.pages[run.start // size : self.limits.pages_for(run.end)]
        assert not any(self.pool.named(page) for page in written), "no page is written while it has a key"
        drafts = run.choice.drafts
        self._write(live, run.start, run.end, (*drafts[: max(0, accepted)], *[9] * len(drafts[max(0, accepted) :])))

    def give_back(self):
        if self.lent and self.luck.random() < 0.5:
            self.scheduler.release("sink", [self.lent.pop(self.luck.randrange(len(self.lent)))])

    def over(self):
        while self.land():
            pass
        self.scheduler.release("sink", self.lent)
        assert self.pool.free == self.pool.total and not self.pool.owners()
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.loading, stats.queued_tokens, stats.yielding) == (0, 0, 0, 0, 0)
        assert stats.copied_tokens == self.copied


@example(
    requests=[(1, 1, 0), (29, 9, 0), (29, 1, 0), (28, 1, 0), (1, 1, 0)],
    limits=StepLimits(4, 2, 4),
    spare=0,
    drafted=False,
    room=PromptRoom(),
    seed=270,
    yielding=0.0,
    leftover=ANY_LEFTOVER,
)  # a running sequence takes the pages of all that it has still to compute but its last token
@example(
    requests=[(1, 3, 0), (1, 1, 0), (7, 14, 0), *[(1, 1, 0)] * 4, (1, 5, 0), (1, 25, 0), (1, 1, 0)],
    limits=StepLimits(6, 2, 1, 2),
    spare=0,
    drafted=False,
    room=PromptRoom(),
    seed=122,
    yielding=1.0,
    leftover=Leftover(beside_s=0.0, alone_s=0.5, row_s=0.0, token_s=0.0),
)  # none goes back to the line in place of a younger one, which a step has
@settings(max_examples=150)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12),
    limits=st.builds(
        StepLimits, st.integers(4, 60), st.integers(1, 4), st.sampled_from([1, 4, 16]), st.sampled_from([1, 1, 2, 3])
    ),
    spare=st.integers(0, 12),
    drafted=st.booleans(),
    room=rooms,
    seed=st.integers(0, 10**6),
    yielding=st.sampled_from([0.0, 0.0, 0.4, 1.0]),
    leftover=leftovers,
)
def test_everything_ends_whatever_happens(requests, limits, spare, drafted, room, seed, yielding, leftover):
    play = Play(requests, limits, spare, seed, yielding, leftover)
    for _ in range(20_000):
        play.give_back()
        stats = play.scheduler.stats()
        idle = not stats.running + stats.waiting + stats.yielding
        if play.arrivals and (idle or play.luck.random() < 0.3):
            play.arrive()
            idle = False
        moved = play.step(play.drafts(drafted), room)
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
    room=rooms,
    seed=st.integers(0, 10**6),
)
def test_a_step_once_more_is_what_the_policy_would_plan(requests, size, spare, room, seed):
    """The short way through decode steps gives the policy's own answer wherever it gives one, pages included, and it
    gives one for every step in which nothing but decoding goes on."""
    play = Play(requests, StepLimits(200, 6, size), spare, seed)
    while play.arrivals:
        play.arrive()
    decoding = 0
    while len(play.ended) < len(requests):
        play.scheduler._share()
        situation = play.scheduler.situation({}, room=room)
        expected = plan_of(situation)
        before = {live.ticket: len(live.pages) for live in play.lives}
        step = play.scheduler._once_more()
        if step is None:
            step = play.scheduler.next_step({}, room=room)
        else:
            assert (expected.preempt, expected.strip, expected.admit) == ([], [], [])
            decoding += 1
        found = [(live.ticket, live.run.known, len(live.pages) - before[live.ticket], 0) for live in step]
        if not expected.preempt:
            assert found == [
                (portion.ticket, portion.known, portion.new_pages, portion.drafts) for portion in expected.portions
            ]
        for live in step:
            assert live.run.start - live.computed == (live.run.start % size if live.run.source else 0) and live.busy
            play.copied += live.run.start - live.computed
        for one in play.scheduler.commit(step, [[Chosen(0)] * live.run.samples for live in step]):
            play._end(one.live)
    if len(requests) == 1 and requests[0][0] > 1 and room.alone is None:
        assert decoding == requests[0][1] - 2, "the first decode step is planned, the others follow it"
    play.over()


def lined_up(*asked):
    """A scheduler in whose line requests wait: (owner, priority) each, one second after the other; their numbers in the
    order of the line."""
    scheduler = Scheduler(LIMITS, PagePool(16))
    for number, (owner, priority) in enumerate(asked):
        request = Request(str(number), (0,) * 4, SamplingParams(max_tokens=2), owner=owner, priority=priority)
        scheduler.add(new_live(request, number, frozenset(), now=float(number)))
    return scheduler, [live.ticket for live in scheduler.situation({}).waiting]


def test_a_priority_exchanges_places_with_those_of_its_owner_only():
    assert lined_up((b"a", 0), (b"b", 0), (b"a", 9), (b"b", 0), (b"a", -9))[1] == [4, 1, 0, 3, 2]
    assert lined_up((b"a", 0), (b"a", 0), (b"b", -1000), (b"a", 0))[1] == [0, 1, 2, 3], "others are not passed"


def test_what_is_resumed_passes_all_owners_and_lends_its_place_to_none():
    scheduler, order = lined_up((b"a", 0), (b"b", 0), (b"a", 0))
    for ticket, owner, priority, resumed in ((7, b"b", -60, True), (8, b"b", 0, True), (9, b"b", -1000, False)):
        request = Request(
            str(ticket), (0,) * 4, SamplingParams(max_tokens=2), (1,), owner, priority=priority, resumed=resumed
        )
        scheduler.add(new_live(request, ticket, frozenset(), now=5.0))
    assert order == [0, 1, 2]
    assert [live.ticket for live in scheduler.situation({}).waiting] == [7, 8, 0, 9, 2, 1]


def test_a_priority_is_so_many_seconds_so_nobody_waits_for_ever():
    asked = [(b"a", 5), *[(b"a", 0)] * 10]
    order = lined_up(*asked)[1]
    assert order.index(0) == 4, "those that came 5 s later are later"
    assert [number for number in order if number] == list(range(1, 11))


def test_who_runs_keeps_its_place():
    scheduler, order = lined_up((b"a", 0), (b"a", 0), (b"a", 0), (b"a", 0), (b"a", 0))
    assert [live.ticket for live in scheduler.next_step({})] == order[:4]
    late = new_live(
        Request("late", (0,) * 4, SamplingParams(max_tokens=2), owner=b"a", priority=-100), 9, frozenset(), now=9.0
    )
    scheduler.add(late)
    assert [live.ticket for live in scheduler.situation({}).waiting] == [9, 4]
    assert [live.ticket for live in scheduler.situation({}).running] == [0, 1, 2, 3]
