"""Which stores a worker gets the KV from that the store of its host lacks."""

from __future__ import annotations

from itertools import islice

from penstock.router.costs import worth_pulling
from penstock.router.facts import Holdings
from penstock.router.ledger import Ledger
from penstock.router.options import Decision
from penstock.router.registry import Member, Registry

_MOST = 3
"""Stores named to one worker."""


class KvSources:
    """Names stores by their addresses."""

    def __init__(self, registry: Registry, ledger: Ledger) -> None:
        self._registry = registry
        self._ledger = ledger

    def computing(self, decision: Decision, host: str, holdings: Holdings) -> list[str]:
        """For whoever computes the prompt, on `host`: stores that hold more of it, and those that are going to."""
        more = self._deeper(host, holdings) if decision.prompt.remote else []
        soon = self._soon(decision, host, holdings) if holdings.computing else []
        return list(dict.fromkeys([*more, *soon]))[:_MOST]

    def decoding(self, prefill: Member, decode: Member, holdings: Holdings) -> list[str]:
        """Where the decode worker's store gets the prompt's KV: what the prefill worker computes lies with its own."""
        if prefill.host_id == decode.host_id or not holdings.has_store(decode.host_id):
            return []
        beside = [store.address for store in self._registry.stores_of(prefill.host_id)]
        return list(dict.fromkeys([*beside, *self._deeper(decode.host_id, holdings)]))[:_MOST]

    def _soon(self, decision: Decision, host: str, holdings: Holdings) -> list[str]:
        """Stores of other hosts that are going to have more of the prompt than there is on this one, because workers
        there compute it for others, as far as it is quicker to fetch than to compute."""
        computes, size = decision.computes, holdings.block_size
        if not holdings.has_store(host):
            return []
        here, worth = decision.prompt.tokens // size, dict[str, None]()
        for depth, member in holdings.computing:
            there = self._host(member)
            if there != host and holdings.has_store(there) and holdings.here(there) == depth:
                more = depth + self._ledger.of(member).computing.run(holdings.keys, depth) - here
                if worth_pulling(computes.state, here * size, more * size):
                    worth[there] = None
        return [store.address for there in worth for store in self._registry.stores_of(there)]

    def _deeper(self, host: str, holdings: Holdings) -> list[str]:
        """Stores that hold more than the one of `host`, which has one."""
        if not holdings.has_store(host):
            return []
        return [store.address for store in islice(holdings.stores(holdings.here(host)), _MOST)]

    def _host(self, member_id: str) -> str:
        seat = self._registry.get(member_id)
        assert seat is not None, "only joined members are candidates"
        return seat.member.host_id
