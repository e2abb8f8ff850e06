"""What happens in a world: who is there, what is asked, and what goes wrong when. All of it follows from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from penstock.testing.world.gateway import PretendAsk
from penstock.testing.world.network import Weather
from penstock.testing.world.worker import WorkerTraits
from penstock.v1 import router_pb2

Act = Literal["kill", "stop", "restart", "cut", "hold", "hang", "slow", "leave"]
"""Of a part: kill -9, and a new process later; SIGSTOP, and SIGCONT later; an orderly end, and a new process. Of the
way between two: its connections break; nothing gets through for a while. Of a worker: its engine hangs; all takes
longer. Of a request: its client leaves."""

ROUTERS = ("10.0.0.1:7100", "10.0.0.2:7100")
_STORE = "10.0.1.1:7200"
_WORKER = "10.0.2.%d:7300"
_ROLES = {
    "both": router_pb2.ROLE_BOTH,
    "prefill": router_pb2.ROLE_PREFILL,
    "decode": router_pb2.ROLE_DECODE,
}
_TEAMS = (
    ("both",),
    ("both", "both"),
    ("both", "both", "both"),
    ("prefill", "decode"),
    ("prefill", "decode", "decode"),
    ("prefill", "prefill", "decode", "both"),
)
GATEWAY = "gateway"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something goes wrong."""

    at: float
    act: Act
    who: str
    """A part, or a request."""
    other: str = ""
    """The other end of the way."""
    seconds: float = 0.0
    """Until it is mended."""

    def __str__(self) -> str:
        to = f" - {self.other}" if self.other else ""
        return f"{self.at:7.3f} s  {self.act} {self.who}{to} for {self.seconds:.3f} s"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule."""

    seed: int
    workers: Sequence[WorkerTraits]
    routers: Sequence[str]
    store: str
    """Address; empty: there is none."""
    slots: int
    """Of the store."""
    eviction: str
    weather: Weather
    asks: Sequence[tuple[float, PretendAsk]]
    faults: Sequence[Fault] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """Names of all processes."""
        stores = ["store"] if self.store else []
        return [*(f"router-{number}" for number in range(len(self.routers))), *stores, *self.team, GATEWAY]

    @property
    def team(self) -> list[str]:
        """Names of the workers."""
        return [worker.name for worker in self.workers]


def drawn(seed: int) -> Schedule:
    """The schedule of a seed."""
    random = Random(f"script {seed}")
    team = random.choice(_TEAMS)
    routers = ROUTERS[: 2 if random.random() < 0.25 else 1]
    store = _STORE if random.random() < 0.85 else ""
    workers = [
        WorkerTraits(
            name=f"{role}-{number}",
            address=_WORKER % number,
            host_id="host" if random.random() < 0.7 else "far",
            role=_ROLES[role],
            routers=routers,
            store=store,
            token_s=random.choice((0.0005, 0.002, 0.01)),
            step_s=random.choice((0.005, 0.02, 0.08)),
            room=random.choice((1, 2, 4)),
        )
        for number, role in enumerate(team)
    ]
    weather = Weather(
        delay_s=random.choice((0.0002, 0.001, 0.01)),
        late=random.choice((0.0, 0.02, 0.1)),
        late_s=random.choice((0.02, 0.3, 1.5)),
    )
    asks = [_ask(random, number) for number in range(random.randint(1, 6))]
    schedule = Schedule(
        seed=seed,
        workers=workers,
        routers=routers,
        store=store,
        slots=random.choice((16, 24, 64)),
        eviction=random.choice(("lru", "lru", "s3-fifo", "worth")),
        weather=weather,
        asks=sorted(asks, key=lambda ask: ask[0]),
    )
    faults = [_fault(random, schedule) for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4)))]
    return Schedule(**{**vars(schedule), "faults": sorted(faults, key=lambda fault: fault.at)})


def _ask(random: Random, number: int) -> tuple[float, PretendAsk]:
    story = random.randrange(3)
    prompt = [1 + story] * random.choice((3, 8, 17, 30)) + [100 + number] * random.choice((0, 0, 5, 12))
    most = random.choice((1, 2, 7, 16, 30))
    wanted = PretendAsk(
        id=f"ask-{number}",
        prompt=prompt,
        max_tokens=most,
        seed=random.randrange(4),
        session=random.choice(("", "s" * 32, "t" * 32)),
        stops_at=random.randrange(most) if random.random() < 0.2 else None,
        patience_s=random.choice((3.0, 8.0, 12.0)),
    )
    return random.choice((0.0, 0.05, 0.5, 1.5)) * random.random(), wanted


def _fault(random: Random, schedule: Schedule) -> Fault:
    acts: tuple[Act, ...] = ("kill", "kill", "stop", "stop", "restart", "cut", "cut", "hold", "hang", "slow", "leave")
    act = random.choice(acts)
    at, seconds = 1.5 * random.random() ** 2, random.choice((0.05, 0.6, 2.5, 4.0)) * (0.5 + random.random())
    if act in ("cut", "hold"):
        one, other = random.sample(schedule.parts, 2)
        return Fault(at=at, act=act, who=one, other=other, seconds=seconds)
    if act in ("hang", "slow"):
        who = random.choice(schedule.team)
    elif act == "leave":
        who = random.choice(schedule.asks)[1].id
    else:
        who = random.choice(schedule.parts)
    return Fault(at=at, act=act, who=who, seconds=seconds)
