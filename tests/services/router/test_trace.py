"""A replay of a real hour: Mooncake's conversation trace on eight prefill workers, each with a cache of its own.

Every request of that trace begins with the same block, which is what a common system prompt looks like: the policy that
follows the longest prefix sends everything to one worker. The floors are for the router's own planner with a simulated
clock; the naive policies run in the same simulation.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from penstock.kv.spec import KvSpec
from penstock.router.config import RouterConfig
from penstock.router.planner import PlanAsk, Planner
from penstock.router.policy import Role
from penstock.router.registry import Member

TRACE = Path(__file__).parents[4] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
BLOCK = 512
REPLICAS = 8
BLOCKS_EACH = 50_000 // REPLICAS
RATE = 5117.0
"""Tokens per second of each worker: together just enough for the trace without any cache."""
SPEC = KvSpec(model="m", tokenizer="t", layout="v1", dtype="bfloat16", block_size=BLOCK, block_bytes=6 << 20)

pytestmark = pytest.mark.skipif(not TRACE.exists(), reason="the traces are not part of the repository")


class Request(msgspec.Struct):
    """One line of the trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass
class Replica:
    """One worker's queue and its LRU cache of blocks."""

    free_at: float = 0.0
    computed: int = 0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def depth(self, ids: list[int]) -> int:
        return next((number for number, block in enumerate(ids) if block not in self.blocks), len(ids))

    def store(self, ids: list[int]) -> list[int]:
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


def replay(place: Place, done: Callable[[int, int, list[int], list[int]], None]) -> Outcome:
    """`place(request, replicas, now)` chooses a replica, `done(ticket, replica, stored, evicted)` hears of each end."""
    lines = gzip.decompress(TRACE.read_bytes()).splitlines()
    requests = [msgspec.json.decode(line, type=Request) for line in lines]
    replicas = [Replica() for _ in range(REPLICAS)]
    running: list[tuple[float, int, int, list[int]]] = []
    waits, reused, total = [], 0, 0
    for ticket, request in enumerate(requests):
        now = request.timestamp / 1000
        while running and running[0][0] <= now:
            _, number, which, ids = heapq.heappop(running)
            done(number, which, ids, replicas[which].store(ids))
        which = place(request, replicas, now)
        replica = replicas[which]
        cached = min(BLOCK * replica.depth(request.hash_ids), request.input_length - 1)
        uncached = request.input_length - cached
        begin = max(now, replica.free_at)
        replica.free_at = begin + uncached / RATE
        replica.computed += uncached
        heapq.heappush(running, (replica.free_at, ticket, which, request.hash_ids))
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
            member = Member(f"{number}", Role.PREFILL, "x:1", f"host-{number}", "m", SPEC, 1 << 20, 64, 1 << 30)
            planner.registry.join(member, 0.0).measure(RATE, 0, 1e11, 0.0, remote_rate=1)  # no way between hosts
            planner.registry.join(Member(f"store-{number}", None, "x:2", f"host-{number}"), 0.0)
        planner.registry.join(Member("d", Role.DECODE, "x:3", "", "m", SPEC, 1 << 20, 4096, 1 << 40), 0.0)

    def place(self, request: Request, replicas: list[Replica], now: float) -> int:
        self.now = now
        keys = [key(block) for block in request.hash_ids]
        planned = self.planner.plan(PlanAsk("m", request.input_length, request.output_length, block_keys=keys))
        self.plans.append(planned.number)
        assert planned.prefill is not None
        return int(planned.prefill.id)

    def done(self, ticket: int, which: int, stored: list[int], evicted: list[int]) -> None:
        self.planner.release(self.plans[ticket])
        self.planner.index.stored(f"store-{which}", map(key, stored))
        self.planner.index.removed(f"store-{which}", map(key, evicted))


def nothing(ticket: int, which: int, stored: list[int], evicted: list[int]) -> None:
    """A naive policy learns nothing."""


def test_the_planner_keeps_the_cache_and_the_balance() -> None:
    turns = itertools.count()
    round_robin = replay(lambda request, replicas, now: next(turns) % REPLICAS, nothing)
    longest_prefix = replay(
        lambda request, replicas, now: max(range(REPLICAS), key=lambda n: replicas[n].depth(request.hash_ids)), nothing
    )
    planned = Planned()
    outcome = replay(planned.place, planned.done)
    assert outcome.hit > 0.26
    assert outcome.busiest < 1.1
    assert outcome.wait_p99_s < 10
    assert outcome.hit > 2 * round_robin.hit
    assert outcome.wait_p99_s < round_robin.wait_p99_s / 3
    assert longest_prefix.busiest > 5
    assert outcome.hit > longest_prefix.hit
