"""The joined members: one seat per worker or store, from the first message of its stream to the stream's end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from penstock.errors import Overloaded, Refused
from penstock.kv.spec import KvSpec
from penstock.router.policy import Role

_SUSPECT_S = 3.0
"""A fault makes a member less wanted for this long, ever less so."""
_SUSPECT_COST_S = 2.0
_HALF_LIFE_S = 60.0
"""After this long without a change, a measured rate counts half, the mean of the others half."""
_DEFAULT_PREFILL_RATE = 2_000.0
_DEFAULT_STEP_S = 0.02
_DEFAULT_FETCH_RATE = 1e9
_DEFAULT_REMOTE_RATE = 2e8


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker or store, as it described itself when it joined."""

    id: str
    role: Role | None
    """None: a store."""
    address: str
    host_id: str
    model: str = ""
    spec: KvSpec | None = None
    max_model_len: int = 0
    max_running: int = 0
    kv_capacity_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's load, as it pushed it."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_kv_tokens: int = 0


@dataclass(slots=True)
class Rate:
    """A measured value that counts less the older the measurement is: no worker is shunned for ever for one slow
    start."""

    value: float = 0.0
    """0: never measured."""
    changed_at: float = 0.0

    def measure(self, value: float, now: float) -> None:
        """Takes the newest measurement; 0 and a repeated value are none."""
        if value > 0 and value != self.value:
            self.value, self.changed_at = value, now

    def believed(self, mean: float, now: float) -> float:
        """Between the measurement and the `mean` of all."""
        if not self.value:
            return mean
        weight: float = 0.5 ** ((now - self.changed_at) / _HALF_LIFE_S)
        return weight * self.value + (1 - weight) * mean


@dataclass(slots=True, eq=False)
class Seat:
    """One joined member."""

    member: Member
    joined_at: float
    draining: bool = False
    report: Report = field(default_factory=Report)
    reported_at: float = -inf
    heard_at: float = 0.0
    """The newest report or, before the first, the joining."""
    suspect_until: float = 0.0
    prefill: Rate = field(default_factory=Rate)
    step: Rate = field(default_factory=Rate)
    fetch: Rate = field(default_factory=Rate)
    remote: Rate = field(default_factory=Rate)

    def hear(self, report: Report, now: float) -> None:
        """The newest load."""
        self.report = report
        self.heard_at = self.reported_at = now

    def measure(
        self, prefill_rate: float, step_s: float, fetch_rate: float, now: float, remote_rate: float = 0.0
    ) -> None:
        """The newest rates; the step is brought down to that of an empty worker."""
        member, report = self.member, self.report
        crowd = report.running / member.max_running
        full = 1 - min(1.0, report.free_kv_tokens / member.kv_capacity_tokens)
        self.prefill.measure(prefill_rate, now)
        self.step.measure(step_s / (1 + crowd + full), now)
        self.fetch.measure(fetch_rate, now)
        self.remote.measure(remote_rate, now)

    def suspect(self, now: float) -> None:
        """It failed a request, by a fault of its own or of the way there."""
        self.suspect_until = now + _SUSPECT_S

    def penalty_s(self, now: float) -> float:
        """Seconds that the last fault still adds to its cost; falls to 0 by itself."""
        return _SUSPECT_COST_S * max(0.0, self.suspect_until - now) / _SUSPECT_S


@dataclass(frozen=True, slots=True)
class Means:
    """Rates that are assumed of a worker that has not measured its own."""

    prefill_rate: float
    step_s: float
    fetch_rate: float
    remote_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model as the gateways see it."""

    model: str
    spec: KvSpec
    max_model_len: int
    prefill_workers: int
    decode_workers: int

    @property
    def ready(self) -> bool:
        """Whether a request would find workers."""
        return self.decode_workers > 0


@dataclass(frozen=True, slots=True)
class RegistryView:
    """The registry as gateways see it."""

    models: tuple[ServedModel, ...] = ()
    """All with a worker joined, by name."""
    silent: tuple[str, ...] = ()
    """Workers that have joined but not been heard of for too long, by id."""


class Registry:
    """Owner of the seats."""

    def __init__(self, max_members: int, silent_s: float) -> None:
        self._max = max_members
        self._silent_s = silent_s
        self._seats: dict[str, Seat] = {}

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    def get(self, member_id: str) -> Seat | None:
        """The seat of a joined member."""
        return self._seats.get(member_id)

    def join(self, member: Member, now: float) -> Seat:
        """Seats `member`; an older stream of the same member loses its seat. Raises Refused or Overloaded."""
        old = self._seats.get(member.id)
        if old is None and len(self._seats) >= self._max:
            raise Overloaded(f"{self._max} members are joined already", retry_after=5.0)
        self._check_spec(member)
        seat = self._seats[member.id] = Seat(member, joined_at=now, heard_at=now)
        seat.report = Report(free_kv_tokens=member.kv_capacity_tokens)
        return seat

    def leave(self, seat: Seat) -> bool:
        """Ends a seat; False when a newer stream of the same member holds it now."""
        if self._seats.get(seat.member.id) is not seat:
            return False
        del self._seats[seat.member.id]
        return True

    def candidates(self, model: str, now: float) -> list[Seat]:
        """Workers of `model` that may get work."""
        return [
            seat
            for seat in self._seats.values()
            if seat.member.model == model and seat.member.role is not None and self._available(seat, now)
        ]

    def stores(self) -> list[Member]:
        """The joined stores."""
        return [seat.member for seat in self._seats.values() if seat.member.role is None]

    def view(self, now: float) -> RegistryView:
        """The registry as gateways see it."""
        workers = [seat for seat in self._seats.values() if seat.member.role is not None]
        models: dict[str, list[Seat]] = {}
        for seat in workers:
            models.setdefault(seat.member.model, []).append(seat)
        return RegistryView(
            tuple(self._serve(model, seats, now) for model, seats in sorted(models.items())),
            tuple(sorted(seat.member.id for seat in workers if self._silent(seat, now))),
        )

    def count(self) -> dict[str, int]:
        """Members by role."""
        counts = dict.fromkeys(["kvstore", *(role.value for role in Role)], 0)
        for seat in self._seats.values():
            counts[seat.member.role.value if seat.member.role else "kvstore"] += 1
        return counts

    def _available(self, seat: Seat, now: float) -> bool:
        return not seat.draining and not self._silent(seat, now)

    def _silent(self, seat: Seat, now: float) -> bool:
        return now - seat.heard_at > self._silent_s

    def _serve(self, model: str, seats: list[Seat], now: float) -> ServedModel:
        spec = seats[0].member.spec
        assert spec is not None, "a worker's spec is checked when it joins"
        roles = [seat.member.role for seat in seats if self._available(seat, now)]
        prefill = roles.count(Role.PREFILL)
        return ServedModel(
            model=model,
            spec=spec,
            max_model_len=min(seat.member.max_model_len for seat in seats),
            prefill_workers=prefill,
            decode_workers=len(roles) - prefill,
        )

    def _check_spec(self, member: Member) -> None:
        if member.spec is None:
            return
        for seat in self._seats.values():
            other = seat.member
            if other.spec is None or other.model != member.model or other.id == member.id:
                continue
            difference = member.spec.difference(other.spec)
            if difference is not None:
                raise Refused(
                    f"worker {member.id} does not fit the others that serve {member.model!r}: {difference}"
                    f" (there: {other.role.value if other.role else 'store'} {other.id})",
                    code="spec_mismatch",
                )


def means(seats: list[Seat]) -> Means:
    """Over all measured rates of `seats`."""
    return Means(
        _mean([seat.prefill.value for seat in seats], _DEFAULT_PREFILL_RATE),
        _mean([seat.step.value for seat in seats], _DEFAULT_STEP_S),
        _mean([seat.fetch.value for seat in seats], _DEFAULT_FETCH_RATE),
        _mean([seat.remote.value for seat in seats], _DEFAULT_REMOTE_RATE),
    )


def _mean(values: list[float], default: float) -> float:
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else default
