"""What a router says of the mesh, as plain figures; docs/operating.md describes the fields of their JSON."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.v1 import common_pb2, router_pb2

SOURCES = ("computed", "worker", "gpu", "host", "nvme", "remote")
"""Where the KV of prompts came from."""
_WINDOW_S = 60.0

Json = dict[str, Any]


def role_of(member: router_pb2.JoinedMember | router_pb2.MemberEvicted | router_pb2.WorkerAdapter) -> str:
    """Its role, as people write it."""
    return router_pb2.Role.Name(member.role).removeprefix("ROLE_").lower()


def state_of(member: router_pb2.JoinedMember) -> str:
    """What it does with new work."""
    if member.silent:
        return "silent"
    if member.draining:
        return "draining" if member.running + member.waiting else "drained"
    return "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Work that was done, by all workers or one."""

    prompts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    """Tokens by source."""
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    """In which it was done; 0: since the workers' start."""

    def less(self, earlier: Done, seconds: float) -> Done:
        """What was done since `earlier`; workers that were started again meanwhile count as nothing."""
        return Done(
            prompts={source: max(0, self.prompts[source] - earlier.prompts[source]) for source in SOURCES},
            generated=max(0, self.generated - earlier.generated),
            drafted=max(0, self.drafted - earlier.drafted),
            accepted=max(0, self.accepted - earlier.accepted),
            seconds=seconds,
        )

    @property
    def hit_rates(self) -> dict[str, float] | None:
        """Parts of all prompt tokens by source, 0 to 1; None: there were none."""
        total = sum(self.prompts.values())
        return {source: round(tokens / total, 4) for source, tokens in self.prompts.items()} if total else None

    @property
    def acceptance(self) -> float | None:
        """The part of the drafts that was right; None: there were none."""
        return round(self.accepted / self.drafted, 4) if self.drafted else None

    def plain(self) -> Json:
        """Its JSON."""
        return {
            "prompt_tokens": dict(self.prompts),
            "hit_rates": self.hit_rates,
            "generated_tokens": self.generated,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "acceptance": self.acceptance,
        }


def together(parts: Iterable[Done]) -> Done:
    """The work of several as one's."""
    every = list(parts)
    return Done(
        prompts={source: sum(one.prompts[source] for one in every) for source in SOURCES},
        generated=sum(one.generated for one in every),
        drafted=sum(one.drafted for one in every),
        accepted=sum(one.accepted for one in every),
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """The mesh at one time."""

    head: Json
    workers: Sequence[tuple[Json, Done]]
    stores: Sequence[Json]
    drafts: Sequence[Json]
    gateways: Sequence[Json]

    def since_start(self) -> Done:
        """What all workers have done."""
        return together(done for _, done in self.workers)

    def plain(self) -> Json:
        """Its JSON."""
        total = {name: sum(worker[name] for worker, _ in self.workers) for name in ("running", "waiting")}
        return {
            **self.head,
            "total": {**total, **self.since_start().plain()},
            "workers": [{**worker, **done.plain()} for worker, done in self.workers],
            "stores": list(self.stores),
            "drafts": list(self.drafts),
            "gateways": list(self.gateways),
        }


class Window:
    """What was done within the last minute, from frames."""

    def __init__(self, seconds: float = _WINDOW_S) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, dict[str, Done]]] = deque()

    def add(self, frame: Frame, now: float) -> Done:
        """Takes the newest frame; what the workers that are in it have done since the oldest one that counts. Of the
        first frame, all that they have done."""
        here = {worker["id"]: done for worker, done in frame.workers}
        self._seen.append((now, here))
        while now - self._seen[0][0] > self._seconds:
            self._seen.popleft()
        at, earlier = self._seen[0]
        if at == now:
            return frame.since_start()
        span = now - at
        parts = [done.less(earlier.get(worker, Done()), span) for worker, done in here.items()]
        return replace(together(parts), seconds=span)


def frame_of(found: router_pb2.MembersResponse) -> Frame:
    """The figures of a router's answer."""
    head = {
        "router": found.router_id,
        "version": found.version,
        "requests": found.requests,
        "held": found.held,
        "sessions": found.sessions,
        "indexed_blocks": found.indexed_blocks,
    }
    workers = [member for member in found.members if member.role != router_pb2.ROLE_KVSTORE]
    stores = [member for member in found.members if member.role == router_pb2.ROLE_KVSTORE]
    gateways = [
        {"address": one.address, "http_address": one.http_address, "tls": one.tls, "version": one.version}
        for one in found.gateways
    ]
    return Frame(
        head,
        [(_worker(one), _done(one.counts)) for one in workers],
        [_store(one) for one in stores],
        [_draft(one) for one in found.drafts],
        gateways,
    )


def _member(member: router_pb2.JoinedMember) -> Json:
    return {
        "id": member.member_id,
        "role": role_of(member),
        "state": state_of(member),
        "address": member.address,
        "host": member.host_id,
        "version": member.version,
        "joined_s": round(member.joined_s, 3),
    }


def _worker(member: router_pb2.JoinedMember) -> Json:
    counts = member.counts
    return {
        **_member(member),
        "model": member.model_name,
        "running": member.running,
        "max_running": member.max_running,
        "waiting": member.waiting,
        "queued_tokens": member.queued_prefill_tokens,
        "queue_s": round(member.queue_s, 6),
        "kv_usage": round(member.kv_usage, 4),
        "kv_capacity_tokens": member.kv_capacity_tokens,
        "resident_blocks": counts.resident_blocks,
        "resident_bytes": counts.resident_blocks * counts.block_bytes,
        "prefill_tokens_per_s": round(member.prefill_tokens_per_s, 3),
        "decode_step_s": round(member.decode_step_s, 6),
        "heard_s": round(member.heard_s, 3),
    }


def _done(counts: router_pb2.WorkerCounts) -> Done:
    return Done(
        prompts={source: getattr(counts.prompts, source) for source in SOURCES},
        generated=counts.generated,
        drafted=counts.drafted,
        accepted=counts.accepted,
    )


def tier_name(tier: common_pb2.Tier.ValueType) -> str:
    """A tier as usage names it; that of a worker's own pages is `worker`."""
    return "worker" if not tier else common_pb2.Tier.Name(tier).removeprefix("TIER_").lower()


def _store(member: router_pb2.JoinedMember) -> Json:
    load = member.store
    return {
        **_member(member),
        "tiers": [
            {
                "tier": tier_name(tier.tier),
                "blocks": tier.blocks,
                "used_bytes": tier.used_bytes,
                "bytes": tier.bytes,
                "given_blocks": tier.given_blocks,
                "evictions": tier.evictions,
            }
            for tier in load.tiers
        ],
        "asked_blocks": load.asked,
        "missed_blocks": load.missed,
        "hit_rate": round(1 - load.missed / load.asked, 4) if load.asked else None,
        "leases": load.leases,
        "attachments": load.attachments,
        "lent_blocks": load.lent_blocks,
        "sessions": load.sessions,
    }


def _draft(member: router_pb2.JoinedDraft) -> Json:
    load = member.load
    told = load.computed + load.resident + load.fetched
    return {
        "id": member.member_id,
        "address": member.address,
        "host": member.host_id,
        "version": member.version,
        "joined_s": round(member.joined_s, 3),
        "heard_s": round(member.heard_s, 3),
        "model": member.model_name,
        "workers": load.workers,
        "sequences": load.sequences,
        "kv_usage": round(1 - load.free_pages / load.pages, 4) if load.pages else 0.0,
        "guessed_tokens": load.guessed,
        "dropped_tokens": load.dropped,
        "told_tokens": {"computed": load.computed, "pages": load.resident, "store": load.fetched},
        "hit_rate": round(1 - load.computed / told, 4) if told else None,
        "busy_s": round(load.busy_s, 3),
    }
