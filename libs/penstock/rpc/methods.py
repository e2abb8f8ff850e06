"""Which role may call which method: the only place that says so. What is not here is refused.

The gateway's own API is not here: its callers are clients, who show keys. Health is open to all that show a
certificate of the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.rpc.identity import MemberRole

_WORKS: frozenset[MemberRole] = frozenset({"worker", "draft"})
"""Computes, and keeps what it has computed in a store."""
_READS: frozenset[MemberRole] = _WORKS | {"store"}
"""Stores read from each other."""
_LOOKS: frozenset[MemberRole] = frozenset({"gateway", "operator"})
"""Shows people what the mesh does; a gateway to those with an operator's key."""


def _only(*roles: MemberRole) -> frozenset[MemberRole]:
    return frozenset(roles)


METHODS: Mapping[str, frozenset[MemberRole]] = {
    "/penstock.v1.Router/Join": _only("worker", "store", "draft"),
    "/penstock.v1.Router/Plan": _only("gateway"),
    "/penstock.v1.Router/Watch": _only("gateway"),
    "/penstock.v1.Router/Hint": _only("gateway"),
    "/penstock.v1.Router/Evict": _only("gateway"),
    "/penstock.v1.Router/Members": _LOOKS | {"picker"},
    "/penstock.v1.Router/Sessions": _LOOKS,
    "/penstock.v1.Router/Plans": _LOOKS,
    "/penstock.v1.Router/Command": _only("operator"),
    "/penstock.v1.Router/ChangeAdapter": _only("operator"),
    "/penstock.v1.Prefill/Prefill": _only("gateway"),
    "/penstock.v1.Prefill/Handoff": _only("worker"),
    "/penstock.v1.Pictures/Hold": _only("gateway"),
    "/penstock.v1.Decode/Generate": _only("gateway"),
    "/penstock.v1.Decode/Listen": _only("gateway"),
    "/penstock.v1.Draft/Propose": _only("worker"),
    "/penstock.v1.Draft/Describe": _only("worker"),
    "/penstock.v1.Draft/Vocabulary": _only("worker"),
    "/penstock.v1.Stage/Compute": _only("worker"),
    "/penstock.v1.KvStore/Attach": _READS,
    "/penstock.v1.KvStore/Lease": _READS,
    "/penstock.v1.KvStore/Release": _READS,
    "/penstock.v1.KvStore/Read": _READS,
    "/penstock.v1.KvStore/Quarantine": _READS,
    "/penstock.v1.KvStore/Claim": _READS,
    "/penstock.v1.KvStore/Lookup": _READS | {"operator"},
    "/penstock.v1.KvStore/Reserve": _WORKS,
    "/penstock.v1.KvStore/Commit": _WORKS,
    "/penstock.v1.KvStore/Write": _WORKS,
    "/penstock.v1.KvStore/Lend": _WORKS,
    "/penstock.v1.KvStore/Save": _WORKS,
    "/penstock.v1.KvStore/Retain": _WORKS,
    "/penstock.v1.KvStore/Withdraw": _WORKS,
    "/penstock.v1.KvStore/Touch": _WORKS,
    "/penstock.v1.KvStore/Announce": _only("store"),
    "/penstock.v1.KvStore/WhoHas": _only("store"),
    "/penstock.v1.KvStore/Hint": _only("gateway", "router"),
    "/penstock.v1.KvStore/Events": _only("router", "operator"),
    "/penstock.v1.KvStore/Stats": _only("operator"),
    "/penstock.v1.Checkup/Examine": _only("operator"),
}


def allowed(method: str) -> frozenset[MemberRole]:
    """The roles that may call `method`, given as /package.Service/Method."""
    return METHODS.get(method, frozenset())
