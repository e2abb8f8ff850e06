"""The joined members: one seat per worker or store, from the first message of its stream to the stream's end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from penstock.errors import Overloaded, Refused
from penstock.kv.spec import KvSpec
from penstock.router.bias import Bias
from penstock.router.workers import Role, StepCost

_SUSPECT_S = 3.0
"""A fault makes a member less wanted for this long, ever less so."""
_SUSPECT_COST_S = 2.0
_HALF_LIFE_S = 60.0
"""After this long without a change, a measured rate counts half, the mean of the others half."""


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
    routers: int = 1
    """That it joins."""
    version: str = ""
    """Of its code and its wire; empty: it does not say."""


class HeldAdapter(NamedTuple):
    """An adapter that a worker has."""

    fingerprint: str
    directory: str


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """A model with an adapter: those of its workers that have it."""

    base: str
    name: str
    """The adapter's."""
    adapter: HeldAdapter
    seats: Sequence[Seat]


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's load, as it pushed it."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_kv_tokens: int = 0
    overdue: bool = False
    """Its step has taken longer than it may, by what was predicted."""
    store_away: bool = False
    """It is connected to no store."""
    yielding: int = 0
    """Sequences that yield, of which the other fields know nothing."""


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


@dataclass(slots=True)
class RecentWork:
    """Seconds of work that count half after `_HALF_LIFE_S`."""

    seconds: float = 0.0
    changed_at: float = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Some more."""
        self.seconds, self.changed_at = self.left(now) + seconds, now

    def left(self, now: float) -> float:
        """What it all counts now."""
        left: float = self.seconds * 0.5 ** ((now - self.changed_at) / _HALF_LIFE_S)
        return left


class Measured(NamedTuple):
    """Rates of a worker, or assumed of one that has not measured its own. 0: not measured."""

    prefill_rate: float = 0.0
    """Tokens per second, whatever context they have."""
    fetch_rate: float = 0.0
    """Bytes per second, from the store of its host."""
    remote_rate: float = 0.0
    """Likewise by way of another host's store."""
    base_s: float = 0.0
    """Seconds of one decoding step, however little there is to do."""
    sequence_s: float = 0.0
    """What each sequence adds."""
    token_s: float = 0.0
    """What each token of their context adds."""
    fetch_overhead_s: float = 0.0
    """Seconds of each fetch from the store of its host, apart from moving the bytes."""
    remote_overhead_s: float = 0.0
    """Likewise of one by way of another host's."""
    handoff_overhead_s: float = 0.0
    """Seconds of each hand-off from another worker by way of the store of its host, apart from moving the bytes."""
    handoff_rate: float = 0.0
    """Bytes per second of the rest; as long as it is 0 of all workers, they move as those of a fetch."""
    far_handoff_overhead_s: float = 0.0
    """Likewise by way of another host's."""
    far_handoff_rate: float = 0.0
    prompt_s: float = 0.0
    """Seconds of a prompt's token with no context before it; as long as it is 0 of all workers, that of the rate."""
    prompt_context_s: float = 0.0
    """What each token of the context before it adds."""

    @property
    def step(self) -> StepCost:
        """Of one decoding step."""
        return StepCost(self.base_s, self.sequence_s, self.token_s)


_NOTHING = Measured()
_DEFAULT = Measured(2_000.0, 1e9, 2e8, 0.02, 0.02 / 32, 0.02 / 100_000)
"""A first guess of each."""


class Rates:
    """The measured rates of the workers of one model, as far as they have any: sums that grow and shrink with them."""

    def __init__(self, guess: Measured) -> None:
        """`guess`: what holds as long as nobody has measured it."""
        self._sums = [0.0] * len(_NOTHING)
        self._counts = [0] * len(_NOTHING)
        self._guess = self.means = guess
        """What is assumed of a worker that has measured nothing."""

    def change(self, before: Measured, after: Measured) -> None:
        """One worker's rates were `before` and are `after` now."""
        if before == after:
            return
        for at, (old, new) in enumerate(zip(before, after, strict=True)):
            self._counts[at] += (new > 0) - (old > 0)
            self._sums[at] = self._sums[at] + new - old if self._counts[at] else 0.0
        known = zip(self._sums, self._counts, self._guess, strict=True)
        self.means = Measured(*(total / count if count else assumed for total, count, assumed in known))


@dataclass(slots=True, eq=False)
class Seat:
    """One joined member."""

    member: Member
    joined_at: float
    changed: set[str]
    """Takes its id whenever something here changes."""
    rates: Rates
    """Of all workers of its model."""
    plan_key: bytes = b""
    """With which plans are proved to it; empty: it asks for no proof."""
    adapters: Mapping[str, HeldAdapter] = field(default_factory=dict)
    """Those of a worker, by name."""
    draining: bool = False
    report: Report = field(default_factory=Report)
    reported_at: float = -inf
    heard_at: float = 0.0
    """The newest report or, before the first, the joining."""
    suspect_until: float = 0.0
    prompts: Bias = field(default_factory=Bias)
    """Of its prompts, from plan to first token."""
    prompts_given: RecentWork = field(default_factory=RecentWork)
    """Prompts that were planned for it, as predicted."""
    answers: Bias = field(default_factory=Bias)
    """Of the tokens after it."""
    _rates: list[Rate] = field(default_factory=lambda: [Rate() for _ in _NOTHING])
    """As in `Measured`."""

    def hear(self, report: Report, now: float) -> None:
        """The newest load."""
        self.report = report
        self.heard_at = self.reported_at = now
        self.changed.add(self.member.id)

    @property
    def well_at(self) -> float:
        """When it was last known to get on with its work: `heard_at`, unless it says there that it does not."""
        return -inf if self.report.overdue else self.heard_at

    @property
    def decodes(self) -> bool:
        """Whether it is a worker that decodes."""
        return self.member.role not in (None, Role.PREFILL)

    def drain(self, draining: bool = True) -> None:
        """It wants nothing new, or something again."""
        self.draining = draining
        self.changed.add(self.member.id)

    @property
    def measured(self) -> Measured:
        """The newest rates."""
        return Measured(*(rate.value for rate in self._rates))

    def believed(self, now: float) -> Measured:
        """Its rates, as far as they are new; else more and more those of the others."""
        pairs = zip(self._rates, self.rates.means, strict=True)
        return Measured(*(rate.believed(mean, now) for rate, mean in pairs))

    def measure(self, measured: Measured, now: float) -> None:
        """The newest rates; 0: none."""
        before = self.measured
        for rate, value in zip(self._rates, measured, strict=True):
            rate.measure(value, now)
        self.rates.change(before, self.measured)
        self.changed.add(self.member.id)

    def step_of(self, seconds: float) -> StepCost:
        """What steps cost when one took `seconds` under the load of the last report: a guess, that a full batch takes
        twice, and full memory once more, what an empty worker takes."""
        member, report = self.member, self.report
        crowd = report.running / member.max_running
        full = 1 - min(1.0, report.free_kv_tokens / member.kv_capacity_tokens)
        base = seconds / (1 + crowd + full)
        return StepCost(base, base / member.max_running, base / member.kv_capacity_tokens)

    def left(self) -> None:
        """The member has gone, and its rates count for nobody any more."""
        self.rates.change(self.measured, _NOTHING)

    def suspect(self, now: float) -> None:
        """It failed a request, by a fault of its own or of the way there."""
        self.suspect_until = now + _SUSPECT_S

    def penalty_s(self, now: float) -> float:
        """Seconds that the last fault still adds to its cost; falls to 0 by itself."""
        return _SUSPECT_COST_S * max(0.0, self.suspect_until - now) / _SUSPECT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model as the gateways see it."""

    model: str
    spec: KvSpec
    max_model_len: int
    prefill_workers: int
    decode_workers: int
    adapter: str = ""
    """The fingerprint of that which is added to the model `base`; empty: none."""
    base: str = ""

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
    """Workers that have joined but have not been heard of, or have not got on, for too long; by id."""


class Registry:
    """Owner of the seats."""

    def __init__(self, max_members: int, silent_s: float, *, pull_s: float, handoff_s: float) -> None:
        """`pull_s` and `handoff_s` are first guesses: of each pull from another host, and of each hand-off."""
        self._max = max_members
        self._silent_s = silent_s
        self._guess = _DEFAULT._replace(
            remote_overhead_s=pull_s, handoff_overhead_s=handoff_s, far_handoff_overhead_s=handoff_s + pull_s
        )
        self._seats: dict[str, Seat] = {}
        self._rates: dict[str, Rates] = {}
        """By model, as long as it has workers."""
        self.version = 0
        """Changes when somebody joins, leaves or takes another role."""
        self.changed: set[str] = set()
        """Members of whom something has changed; whoever keeps track of them clears it."""
        self.charged: set[str] = set()
        """Likewise those of whom nothing has changed but what plans charge them with."""
        self._stores: dict[str, list[Member]] = {}
        """By host."""
        self._adapted: tuple[int, Mapping[str, AdaptedModel]] = (-1, {})
        """For a version."""

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
        if old is not None:
            self.leave(old)
        rates = self._rates.setdefault(member.model, Rates(self._guess))
        seat = Seat(member, joined_at=now, changed=self.changed, rates=rates, heard_at=now)
        seat.report = Report(free_kv_tokens=member.kv_capacity_tokens)
        self._seats[member.id] = seat
        if member.role is None:
            self._stores.setdefault(member.host_id, []).append(member)
        self.version += 1
        return seat

    def leave(self, seat: Seat) -> bool:
        """Ends a seat; False when a newer stream of the same member holds it now."""
        if self._seats.get(seat.member.id) is not seat:
            return False
        del self._seats[seat.member.id]
        if seat.member.role is None:
            beside = self._stores[seat.member.host_id]
            beside.remove(seat.member)
            if not beside:
                del self._stores[seat.member.host_id]
        seat.left()
        self.version += 1
        if not any(other.member.model == seat.member.model for other in self):
            del self._rates[seat.member.model]
        return True

    def assign(self, seat: Seat, role: Role) -> None:
        """A worker has another role from now on: what it does already it goes on with."""
        if seat.member.role is not role:
            seat.member = replace(seat.member, role=role)
            self.changed.add(seat.member.id)
            self.version += 1

    def adapt(self, seat: Seat, adapters: Mapping[str, HeldAdapter]) -> None:
        """A worker has these adapters from now on, and no others."""
        if seat.adapters != adapters:
            seat.adapters = adapters
            self.version += 1

    def adapted(self) -> Mapping[str, AdaptedModel]:
        """The models with adapters, by the names by which clients ask for them. Where workers mean different adapters
        by one name, it is that of most of them, and the others do not count."""
        if self._adapted[0] != self.version:
            self._adapted = self.version, dict(self._find_adapted())
        return self._adapted[1]

    def _find_adapted(self) -> Iterator[tuple[str, AdaptedModel]]:
        models = {seat.member.model for seat in self}
        holders: dict[tuple[str, str], dict[str, list[Seat]]] = {}
        for seat in self:
            for name, held in seat.adapters.items():
                holders.setdefault((seat.member.model, name), {}).setdefault(held.fingerprint, []).append(seat)
        for (base, name), by_fingerprint in sorted(holders.items()):
            seats = by_fingerprint[max(by_fingerprint, key=lambda one: (len(by_fingerprint[one]), one))]
            if (full := f"{base}:{name}") not in models:
                yield full, AdaptedModel(base, name, seats[0].adapters[name], seats)

    def find(self, name: str) -> Seat | None:
        """The seat of a member by its id or its address; of several at one address that of the newest."""
        there = [seat for seat in self if seat.member.address == name]
        return self._seats.get(name) or (max(there, key=lambda seat: seat.joined_at) if there else None)

    def workers(self, model: str, now: float) -> list[Seat]:
        """Those of `model`, which may name an adapter, that may get work."""
        adapted = self.adapted().get(model)
        seats = adapted.seats if adapted is not None else [seat for seat in self if seat.member.model == model]
        return [seat for seat in seats if seat.member.role is not None and self.available(seat, now)]

    def base(self, model: str) -> str:
        """The model whose workers serve `model`, which may name an adapter."""
        adapted = self.adapted().get(model)
        return model if adapted is None else adapted.base

    def decoders(self, model: str, now: float) -> list[Seat]:
        """Those of them that decode."""
        return [seat for seat in self.workers(model, now) if seat.decodes]

    def stores(self) -> list[Member]:
        """The joined stores."""
        return [store for beside in self._stores.values() for store in beside]

    def stores_of(self, host_id: str) -> Sequence[Member]:
        """Those of one host."""
        return self._stores.get(host_id, ())

    def view(self, now: float) -> RegistryView:
        """The registry as gateways see it."""
        workers = [seat for seat in self._seats.values() if seat.member.role is not None]
        models: dict[str, list[Seat]] = {}
        for seat in workers:
            models.setdefault(seat.member.model, []).append(seat)
        adapted = (
            replace(
                self._serve(name, own.seats, now),
                adapter=own.adapter.fingerprint,
                base=own.base,
            )
            for name, own in self.adapted().items()
        )
        return RegistryView(
            (*(self._serve(model, seats, now) for model, seats in sorted(models.items())), *adapted),
            tuple(sorted(seat.member.id for seat in workers if self.silent(seat, now))),
        )

    def count(self) -> dict[str, int]:
        """Members by role."""
        counts = dict.fromkeys(["kvstore", *(role.value for role in Role)], 0)
        for seat in self._seats.values():
            counts[seat.member.role.value if seat.member.role else "kvstore"] += 1
        return counts

    def available(self, seat: Seat, now: float) -> bool:
        """Whether a worker may get work."""
        return not seat.draining and not self.silent(seat, now)

    def silent(self, seat: Seat, now: float) -> bool:
        """Whether a worker is taken for dead: it has not been heard of, or has not got on, for too long."""
        return now - seat.well_at > self._silent_s

    def forgive(self, seconds: float, now: float) -> None:
        """For so long nobody could be heard: the router itself was away."""
        for seat in self:
            seat.heard_at = min(now, seat.heard_at + seconds)
            self.changed.add(seat.member.id)

    def _serve(self, model: str, seats: Sequence[Seat], now: float) -> ServedModel:
        spec = seats[0].member.spec
        assert spec is not None, "a worker's spec is checked when it joins"
        roles = [seat.member.role for seat in seats if self.available(seat, now)]
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
