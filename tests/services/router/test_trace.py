"""A replay of an hour of conversations on eight prefill workers, each with a cache of its own.

The hour is drawn at random, in the shape of what Mooncake published of its chat service (Qin et al., "Mooncake", FAST
2025): about 12,000 requests, prompts of 12,000 tokens in the mean with a long tail, turns that resend all that came
before. Every request begins with the same block, as with a common system prompt: the policy that follows the longest
prefix sends everything to one worker. The floors are for the router's own planner with a simulated clock; the naive
policies run in the same simulation.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.kv.spec import KvSpec
from penstock.router.config import RouterConfig
from penstock.router.planner import Planner
from penstock.router.plans import PlanAsk
from penstock.router.registry import Measured, Member
from penstock.router.workers import Role

HOUR_S = 3600.0
SESSIONS = 7_000
BLOCK = 512
REPLICAS = 8
BLOCKS_EACH = 50_000 // REPLICAS
SPEC = KvSpec(model="m", tokenizer="t", layout="v1", dtype="bfloat16", block_size=BLOCK, block_bytes=6 << 20)


@dataclass(frozen=True, order=True)
class Request:
    """One turn of a session."""

    at_s: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...]


def an_hour() -> list[Request]:
    """Sessions that begin at any time; each turn adds to the one before, after a pause for reading and writing."""
    draw = random.Random(7)
    numbers = itertools.count(1)
    requests = []
    for _ in range(SESSIONS):
        at_s, length, blocks = draw.uniform(-HOUR_S / 2, HOUR_S), BLOCK, [0]
        while at_s < HOUR_S:
            length = min(length + int(draw.lognormvariate(7.8, 1.2)), 120_000)
            blocks += [next(numbers) for _ in range(length // BLOCK - len(blocks))]
            answer = int(draw.lognormvariate(5.3, 0.8)) + 1
            if at_s >= 0:
                requests.append(Request(at_s, length, answer, tuple(blocks)))
            if draw.random() < 0.4:
                break
            length += answer
            at_s += draw.expovariate(1 / 120)
    return sorted(requests)


HOUR = an_hour()
RATE = sum(request.input_length for request in HOUR) / HOUR_S / REPLICAS
"""Tokens per second of each worker: together just enough for the hour without any cache."""


@dataclass
class Replica:
    """One worker's queue and its LRU cache of blocks."""

    free_at: float = 0.0
    computed: int = 0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def depth(self, ids: Sequence[int]) -> int:
        return next((number for number, block in enumerate(ids) if block not in self.blocks), len(ids))

    def store(self, ids: Sequence[int]) -> list[int]:
        """Stores `ids`; returns what had to go."""
        for block in reversed(ids):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        return [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - BLOCKS_EACH)]


@dataclass(frozen=True)
class Outcome:
    """What a policy made of the hour."""

    hit: float
    """Part of the prompt tokens that was reused."""
    busiest: float
    """Most computed tokens of one worker, as a multiple of the mean."""
    wait_p99_s: float


Place = Callable[[Request, list[Replica], float], int]


def replay(place: Place, done: Callable[[int, int, Sequence[int], list[int]], None]) -> Outcome:
    """`place(request, replicas, now)` chooses a replica, `done(ticket, replica, stored, evicted)` hears of each end."""
    replicas = [Replica() for _ in range(REPLICAS)]
    running: list[tuple[float, int, int, tuple[int, ...]]] = []
    waits, reused, total = [], 0, 0
    for ticket, request in enumerate(HOUR):
        now = request.at_s
        while running and running[0][0] <= now:
            _, number, which, ids = heapq.heappop(running)
            done(number, which, ids, replicas[which].store(ids))
        which = place(request, replicas, now)
        replica = replicas[which]
        cached = min(BLOCK * replica.depth(request.blocks), request.input_length - 1)
        uncached = request.input_length - cached
        begin = max(now, replica.free_at)
        replica.free_at = begin + uncached / RATE
        replica.computed += uncached
        heapq.heappush(running, (replica.free_at, ticket, which, request.blocks))
        waits.append(begin - now)
        reused, total = reused + cached, total + request.input_length
    computed = [replica.computed for replica in replicas]
    waits.sort()
    return Outcome(reused / total, max(computed) * REPLICAS / sum(computed), waits[int(0.99 * len(waits))])


def key(block: int) -> bytes:
    return block.to_bytes(32, "big")


class Planned:
    """The router's planner, with one store beside each prefill worker."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[int] = []
        config = RouterConfig(
            seed=5, local_prefill_tokens=0, max_live_plans=100_000, max_queue_s=1e9, silent_s=1e9, handoff_s=0
        )
        self.planner = planner = Planner(config, lambda: self.now)
        for number in range(REPLICAS):
            member = Member(
                id=f"{number}",
                role=Role.PREFILL,
                address="x:1",
                host_id=f"host-{number}",
                model="m",
                spec=SPEC,
                max_model_len=1 << 20,
                max_running=64,
                kv_capacity_tokens=1 << 30,
            )
            planner.registry.join(member, 0.0).measure(Measured(RATE, 1e11, 1), 0.0)  # no way between hosts
            planner.registry.join(Member(id=f"store-{number}", role=None, address="x:2", host_id=f"host-{number}"), 0.0)
        planner.registry.join(
            Member(
                id="d",
                role=Role.DECODE,
                address="x:3",
                host_id="",
                model="m",
                spec=SPEC,
                max_model_len=1 << 20,
                max_running=4096,
                kv_capacity_tokens=1 << 40,
            ),
            0.0,
        )

    def place(self, request: Request, replicas: list[Replica], now: float) -> int:
        self.now = now
        keys = [key(block) for block in request.blocks]
        planned = self.planner.plan(
            PlanAsk(model="m", prompt_tokens=request.input_length, max_tokens=request.output_length, block_keys=keys)
        )
        self.plans.append(planned.number)
        assert planned.prefill is not None
        return int(planned.prefill.id)

    def done(self, ticket: int, which: int, stored: Sequence[int], evicted: list[int]) -> None:
        self.planner.release(self.plans[ticket])
        self.planner.index.stored(f"store-{which}", map(key, stored))
        self.planner.index.removed(f"store-{which}", map(key, evicted))


def possible() -> float:
    """The part of the prompt tokens that one cache without end would reuse."""
    cache, reused = Replica(), 0
    for request in HOUR:
        reused += min(BLOCK * cache.depth(request.blocks), request.input_length - 1)
        cache.blocks.update(dict.fromkeys(request.blocks))
    return reused / sum(request.input_length for request in HOUR)


def nothing(ticket: int, which: int, stored: Sequence[int], evicted: list[int]) -> None:
    """A naive policy learns nothing."""


def test_the_planner_keeps_the_cache_and_the_balance() -> None:
    turns = itertools.count()
    round_robin = replay(lambda request, replicas, now: next(turns) % REPLICAS, nothing)
    longest_prefix = replay(
        lambda request, replicas, now: max(range(REPLICAS), key=lambda n: replicas[n].depth(request.blocks)), nothing
    )
    planned = Planned()
    outcome = replay(planned.place, planned.done)
    assert outcome.hit > 0.8 * possible()
    assert outcome.busiest < 1.1
    assert outcome.wait_p99_s < 10
    assert outcome.hit > 2 * round_robin.hit
    assert outcome.wait_p99_s < round_robin.wait_p99_s / 3
    assert longest_prefix.busiest > 5
    assert outcome.hit > longest_prefix.hit
