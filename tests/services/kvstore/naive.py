"""What a block store should do, written without regard to speed: lists, and a search for everything.

It does not choose victims by itself: of several equally old blocks any may go. It is shown which one went and says
whether that was right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.kvstore.table.blocks import ReserveState, Wanted
from penstock.kvstore.table.promises import Grant


@dataclass(eq=False)
class Holding:
    key: bytes
    parent: bytes
    attachment: str
    epoch: int
    deadline: float
    used: int
    state: str = "reserved"  # then "stored", perhaps "detached"; gone ones are dropped


@dataclass(eq=False)
class NaiveLease:
    attachment: str
    holdings: list[Holding]
    deadline: float


@dataclass
class NaiveRetention:
    """A list of promises, read from the start for each question."""

    most: int
    tenant_most: int
    longest: float
    promises: list[tuple[bytes, bytes, float, float]] = field(default_factory=list)
    """Key, tenant, seconds, end."""

    def live(self, now: float) -> list[tuple[bytes, bytes, float, float]]:
        self.promises = [one for one in self.promises if one[3] > now]
        return self.promises

    def grant(self, tenant: bytes, wanted: list[bytes], seconds: float, now: float) -> Grant:
        seconds = min(seconds, self.longest)
        granted = 0
        for key in wanted if seconds > 0 else []:
            live = self.live(now)
            old = next((one for one in live if one[0] == key), None)
            if old is not None and old[1] != tenant:
                break
            of_tenant = sum(one[1] == tenant for one in live)
            if old is None and (of_tenant == self.tenant_most or of_tenant >= self.most - len(live)):
                break
            self.promises = [one for one in live if one is not old]
            longest = max(seconds, old[2]) if old else seconds
            self.promises.append((key, tenant, longest, max(now + seconds, old[3] if old else 0.0)))
            granted += 1
        return Grant(seconds, granted) if granted else Grant()

    def refresh(self, used: list[bytes], now: float) -> None:
        self.promises = [
            (key, tenant, seconds, max(end, now + seconds) if key in used else end)
            for key, tenant, seconds, end in self.live(now)
        ]

    def until(self, key: bytes, now: float) -> float:
        return next((end for one, _, _, end in self.live(now) if one == key), 0.0)


@dataclass
class NaiveStore:
    slots: int
    reserve_s: float
    cooling_s: float
    lru: bool = True
    """Whether the longest unused block has to go first; otherwise any may that may go at all."""
    promises: NaiveRetention = field(default_factory=lambda: NaiveRetention(0, 0, 0.0))
    holdings: list[Holding] = field(default_factory=list)
    leases: dict[int, NaiveLease] = field(default_factory=dict)
    cooling: list[float] = field(default_factory=list)
    attachments: set[str] = field(default_factory=set)
    tick: int = 0

    def find(self, key: bytes, *states: str) -> Holding | None:
        return next((one for one in self.holdings if one.key == key and one.state in states), None)

    def pinned(self, holding: Holding) -> bool:
        return any(holding in lease.holdings for lease in self.leases.values())

    def evictable(self, spare: bytes) -> list[Holding]:
        """The stored blocks that may go, `spare` being the parent of a block that comes."""
        parents = {one.parent for one in self.holdings if one.state != "detached"} | {spare}
        return [
            one for one in self.holdings if one.state == "stored" and one.key not in parents and not self.pinned(one)
        ]

    def full(self) -> bool:
        return len(self.holdings) + len(self.cooling) == self.slots

    def drop(self, holding: Holding, now: float, *, cool: bool) -> None:
        self.holdings.remove(holding)
        if cool:
            self.cooling.append(now + self.cooling_s)

    def reserve(
        self, attachment: str, want: Wanted, now: float, epoch: int, evicted: list[bytes], *, without_room: set[bytes]
    ) -> ReserveState:
        """`epoch` is what the store gave, `evicted` the keys that it removed and that are not accounted for yet,
        `without_room` those that the same call has left out, to which this adds."""
        stored = self.find(want.key, "stored")
        if stored is not None:
            stored.used = self.tick
            self.promises.refresh([want.key], now)
            return ReserveState.EXISTS
        if self.find(want.key, "reserved") is not None:
            return ReserveState.EXISTS
        if want.parent in without_room:
            without_room.add(want.key)
            return ReserveState.FULL
        if self.full():
            candidates = self.evictable(want.parent)
            if not candidates:
                without_room.add(want.key)
                return ReserveState.FULL
            victim = next(one for one in candidates if one.key == evicted[0])
            free = [one for one in candidates if not self.promises.until(one.key, now)]
            if not free:
                ends = [self.promises.until(one.key, now) for one in candidates]
                assert self.promises.until(victim.key, now) == min(ends), "evicted what was promised for longer"
            elif self.lru:
                assert victim.used == min(one.used for one in free), "evicted something that was used later"
            assert victim in free or not free, "evicted what was promised, without need"
            evicted.pop(0)
            self.drop(victim, now, cool=False)
        self.holdings.append(Holding(want.key, want.parent, attachment, epoch, now + self.reserve_s, self.tick))
        return ReserveState.WRITE

    def commit(self, attachment: str, key: bytes, epoch: int, good: bool, now: float) -> bool:
        found = self.find(key, "reserved")
        if found is None or found.attachment != attachment or found.epoch != epoch:
            return False
        if good:
            found.state, found.used = "stored", self.tick
        else:
            self.drop(found, now, cool=False)
        return True

    def prefix(self, keys: list[bytes]) -> list[Holding]:
        found = []
        for key in keys:
            holding = self.find(key, "stored")
            if holding is None:
                break
            found.append(holding)
        return found

    def lease(self, attachment: str, lease_id: int, keys: list[bytes], end: float) -> None:
        found = self.prefix(keys)
        for one in found:
            one.used = self.tick
        self.leases[lease_id] = NaiveLease(attachment, found, end)

    def release(self, lease_id: int, now: float) -> None:
        lease = self.leases.pop(lease_id)
        for one in lease.holdings:
            if one.state == "detached" and one in self.holdings and not self.pinned(one):
                self.drop(one, now, cool=True)

    def quarantine(self, key: bytes, epoch: int, now: float) -> bool:
        found = self.find(key, "stored")
        if found is None or found.epoch != epoch:
            return False
        found.state = "detached"
        if not self.pinned(found):
            self.drop(found, now, cool=True)
        return True

    def detach(self, attachment: str, now: float) -> None:
        self.attachments.remove(attachment)
        for lease_id in [key for key, lease in self.leases.items() if lease.attachment == attachment]:
            self.release(lease_id, now)
        for one in [one for one in self.holdings if one.state == "reserved" and one.attachment == attachment]:
            self.drop(one, now, cool=True)

    def expire(self, now: float) -> None:
        self.cooling = [end for end in self.cooling if end > now]
        for lease_id in [key for key, lease in self.leases.items() if lease.deadline <= now]:
            self.release(lease_id, now)
        for one in [one for one in self.holdings if one.state == "reserved" and one.deadline <= now]:
            self.drop(one, now, cool=True)
