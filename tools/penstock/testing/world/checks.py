"""What holds when all requests have ended and everything has settled: nobody has kept anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.kvstore.service import KvStore
from penstock.kvstore.table.blocks import TierKind
from penstock.router.service import Router
from penstock.testing.world import model
from penstock.testing.world.gateway import PretendGateway
from penstock.testing.world.network import Network
from penstock.testing.world.parts import PretendPart
from penstock.testing.world.serving import PretendServer
from penstock.testing.world.worker import PretendWorker


class Settling(Protocol):
    """A world, as far as it is looked at."""

    network: Network
    routers: Sequence[PretendPart[Router]]
    store: PretendPart[KvStore] | None
    workers: Sequence[PretendPart[PretendWorker]]
    gateway: PretendPart[PretendGateway]


def joined(router: Router) -> int:
    """How many members it has."""
    return len(router.planner.registry)


def settled(world: Settling, gateway_tasks: int) -> Iterator[str]:
    """What is not as it has to be; the gateway had so many tasks when it had no request."""
    for router in world.routers:
        if router.served is not None:
            yield from _of_router(world, router.name, router.served)
    if world.store is not None and world.store.served is not None:
        yield from _of_store(world, world.store.served)
    yield from _of_workers(world)
    yield from _of_gateway(world, gateway_tasks)
    yield from _of_calls(world)


def _of_router(world: Settling, name: str, router: Router) -> Iterator[str]:
    planner = router.planner
    if not planner.ledger.empty or len(planner.ledger):
        yield f"{name} has charges left: {len(planner.ledger)}"
    if planner._running:
        yield f"{name} still watches {len(planner._running)} plans"
    if len(router.line) or len(router.yielding):
        yield f"{name} still holds {len(router.line)} requests"
    if router.plans._live._live:
        yield f"{name} takes sessions for active: {len(router.plans._live._live)}"
    members = len(world.workers) + (world.store is not None)
    if joined(router) != members:
        yield f"{name} has {joined(router)} members, not {members}"
    if silent := planner.registry.view(router._clock()).silent:
        yield f"{name} does not hear from {', '.join(silent)}"
    if world.store is not None and world.store.served is not None:
        known, there = indexed(router), set(world.store.served.partitions.keys())
        if known != there:
            yield f"the index of {name} has {len(known - there)} blocks too many and {len(there - known)} too few"


def indexed(router: Router) -> set[bytes]:
    """The blocks that a router knows to be somewhere."""
    index = router.planner.index
    return {key for key, mask in index._masks.items() if mask & ~index._dead}


def _of_store(world: Settling, store: KvStore) -> Iterator[str]:
    stats, table, host = store.stats(), store.host.table, store.host
    none = {"leases": stats.leases, "reserved": stats.reserved, "detached": stats.detached, "cooling": stats.cooling}
    for name, count in none.items():
        if count:
            yield f"the store has {count} {name} left"
    if stats.attachments != len(world.workers):
        yield f"the store has {stats.attachments} attachments of {len(world.workers)} workers"
    for part in store.partitions:
        part.store.claims.expire(part.store.now())
    if claims := sum(len(part.store.claims) for part in store.partitions):
        yield f"the store has {claims} claims left"
    if table.slots.held != stats.blocks:
        yield f"{table.slots.held} slots of the store are held, and {stats.blocks} have blocks"
    epochs: Counter[int] = Counter()
    stored = [*table.keys()]
    for key in stored:
        block = table.find(key)
        assert block is not None
        epochs[block.slot] += 1
        if host.arena._epochs[block.slot] != block.epoch:
            yield f"slot {block.slot} has another epoch than its block"
        if bytes(host.arena.block(block.slot, model.BLOCK_BYTES)) != model.content(key):
            yield f"slot {block.slot} does not hold the block that it says"
    if any(count > 1 for count in epochs.values()):
        yield "two blocks are in one slot"
    held = sum(1 for epoch in host.arena._epochs if epoch)
    if held != stats.blocks:
        yield f"{held} slots have an epoch, and {stats.blocks} have blocks"
    if set(stored) != set(store.partitions.keys()):
        yield "the store's tiers know other blocks than its table"
    assert TierKind.HOST in {tier.kind for tier in store.store.tiers.kept}


def _of_workers(world: Settling) -> Iterator[str]:
    for part in world.workers:
        worker = part.served
        if worker is None:
            yield f"{part.name} does not run"
            continue
        left = {"running": worker.running, "publishing": len(worker.publishing), "handoffs": len(worker.handoffs)}
        left["listeners"] = len(worker._listeners._open)
        for name, count in left.items():
            if count:
                yield f"{part.name} has {name} left: {count}"


def _of_gateway(world: Settling, tasks: int) -> Iterator[str]:
    gateway = world.gateway.served
    if gateway is None:
        yield "the gateway does not run"
        return
    found = world.network.loop.tasks_of(world.gateway.process)
    if len(found) != tasks:
        names = Counter(task.get_name().rstrip("0123456789-") for task in found)
        yield f"the gateway has {len(found)} tasks, and had {tasks}: {dict(names)}"
    if gateway.view._calls:
        yield "the gateway's view still knows calls"
    if gateway.workers._uses or gateway.workers._listening or gateway.workers._leaving:
        yield "the gateway still uses channels"


def _of_calls(world: Settling) -> Iterator[str]:
    """Only streams that stay are open."""
    stay = {"/penstock.v1.Router/Join", "/penstock.v1.Router/Watch", "/penstock.v1.KvStore/Attach"}
    for server in world.network.servers.values():
        assert isinstance(server, PretendServer)
        left = [task.get_name() for task in server.calls.values() if task.get_name() not in stay]
        if left:
            yield f"{server.process.name} still serves {left}"
