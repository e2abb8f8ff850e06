"""A router in the middle of its work, without sockets: many members that report their load, live plans, a full index,
sessions that come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from penstock.kv.spec import KvSpec
from penstock.router.config import RouterConfig
from penstock.router.line import WaitingLine
from penstock.router.planner import Planner
from penstock.router.plans import PlanAsk, Planned
from penstock.router.registry import Measured, Member, Report, Seat
from penstock.router.workers import Role

BLOCK = 16
_SPEC = KvSpec(model="m", tokenizer="t", layout="v1", dtype="bfloat16", block_size=BLOCK, block_bytes=360 << 10)
_COMMON = 60
"""Blocks of the system prompt that all prompts begin with, and that every worker has in its pages."""
_PER_HOST = 8
_CHAIN = 500
"""Blocks of each of the conversations that fill the index."""
_LIVE, _LIVE_TOKENS = 4, 2_000
"""Plans for each worker that run all the time, and the tokens of their prompts."""
_REQUESTS_PER_S, _REPORTS_PER_S = 3.0, 2.0
"""Of each worker: it tells its load and rates as often as a real one does."""
TURN_TOKENS = 720
"""What a turn adds to its prompt: the median of the coding agents' turns in penstock's traces."""


def key(number: int) -> bytes:
    """A block's key: different numbers, different blocks."""
    return number.to_bytes(32, "big")


@dataclass(frozen=True, slots=True)
class CrowdSetup:
    """The size of a mesh and of what its router knows."""

    workers: int
    disaggregated: bool = False
    blocks: int = 1_000_000


class Crowd:
    """A router with `setup.workers` workers that have room, a store on every host, and as many blocks in its index."""

    def __init__(self, setup: CrowdSetup, seed: int = 1) -> None:
        self._draw = draw = Random(seed)
        self._hosts = max(1, setup.workers // _PER_HOST)
        self._numbers = iter(range(1 << 40, 1 << 62))
        config = RouterConfig(
            seed=1, max_members=4096, max_live_plans=1 << 20, max_indexed_blocks=setup.blocks * 5 // 4
        )
        self._now = 0.0
        self.planner = Planner(config, lambda: self._now)
        self.line = WaitingLine(self.planner, config, lambda: self._now)
        self._seats: deque[Seat] = deque()
        """Of the workers; the next one to report first."""
        self._due = 0.0
        """Reports."""
        for number in range(setup.workers):
            roles = (Role.PREFILL, Role.DECODE) if setup.disaggregated else (Role.BOTH,)
            self._join(number, roles[number % len(roles)])
        for host in range(self._hosts):
            self.planner.registry.join(Member(id=f"s{host}", role=None, address=f"s{host}:1", host_id=f"h{host}"), 0.0)
        self._common = self._new(_COMMON)
        for number in range(setup.workers):
            self.planner.index.stored(f"w{number}", self._common)
        for _ in range(setup.blocks // _CHAIN):
            self.planner.index.stored(f"s{draw.randrange(self._hosts)}", self._new(_CHAIN))
        for number in range(_LIVE * setup.workers):
            self.planner.prefilled(self.plan(next(self.session(f"live/{number}", _LIVE_TOKENS))))
            self.tick()

    def _join(self, number: int, role: Role) -> None:
        draw = self._draw
        seat = self.planner.registry.join(
            Member(
                id=f"w{number}",
                role=role,
                address=f"w{number}:1",
                host_id=f"h{number % self._hosts}",
                model="m",
                spec=_SPEC,
                max_model_len=1 << 20,
                max_running=64,
                kv_capacity_tokens=4_000_000,
            ),
            0.0,
        )
        step_s = draw.uniform(0.015, 0.025)
        seat.measure(Measured(draw.uniform(4e3, 6e3), 1e9, 2e8, step_s, step_s / 64, step_s / 4e6), 0.0)
        self._report(seat)
        self._seats.append(seat)

    def tick(self) -> None:
        """Time passes until the next request comes; the workers whose turn it is report."""
        workers = len(self._seats)
        self._now += 1 / (_REQUESTS_PER_S * workers)
        self._due += _REPORTS_PER_S / _REQUESTS_PER_S
        while self._due >= 1:
            self._due -= 1
            self._report(self._seats[0])
            self.planner.refresh()
            self._seats.rotate(-1)

    def _report(self, seat: Seat) -> None:
        """Its load, which is never so high that requests would be held back, and rates a little off the last ones."""
        draw, measured = self._draw, seat.measured
        seat.hear(Report(draw.randrange(20), 0, draw.randrange(4_000), draw.randrange(1_000_000, 4_000_000)), self._now)
        rate = measured.prefill_rate * draw.uniform(0.99, 1.01)
        seat.measure(measured._replace(prefill_rate=min(6e3, max(4e3, rate))), self._now)

    def _new(self, count: int) -> list[bytes]:
        return [key(next(self._numbers)) for _ in range(count)]

    def session(self, name: str, tokens: int) -> Iterator[PlanAsk]:
        """The asks of a session, for ever: the first of `tokens` tokens with all of its keys, the next ones with those
        of their new blocks."""
        own = self._new(max(0, tokens // BLOCK - _COMMON))
        keys: Sequence[bytes] = [*self._common, *own][: tokens // BLOCK]
        after = b""
        while True:
            ask = PlanAsk(
                model="m",
                prompt_tokens=tokens,
                max_tokens=200,
                tenant="t",
                session=name,
                block_keys=keys,
                after=after,
            )
            yield ask
            after, keys = keys[-1], self._new(TURN_TOKENS // BLOCK)
            tokens += TURN_TOKENS

    def serve(self, ask: PlanAsk) -> None:
        """Plans a request, and lets it end."""
        number = self.plan(ask)
        members = self.planner.ledger.members(number)
        self.end(number)
        self.store(ask, members)
        self.tick()

    def plan(self, ask: PlanAsk) -> int:
        """What the router does for one request: from its ask to its plan."""
        whole = self.planner.recall(ask)
        assert whole is not None, "the session's last keys are known"
        planned = self.line.enter(whole)
        assert isinstance(planned, Planned), "there is room"
        return planned.number

    def end(self, number: int) -> None:
        """What the router does after that: the prompt is computed, and then the answer has ended."""
        self.planner.prefilled(number)
        self.planner.generated(number, 1)
        self.planner.release(number)

    def store(self, ask: PlanAsk, members: tuple[str, str]) -> None:
        """Who computed a request and who decoded it have its blocks, and so has the store of the first."""
        for member in {*members, f"s{int(members[0][1:]) % self._hosts}"}:
            self.planner.index.stored(member, ask.block_keys)
