"""A store's part in what people see of the mesh and do to it: its figures, and what it drops."""

from __future__ import annotations

import structlog

from penstock.kv.bounds import check_namespace
from penstock.kvstore.config import KvStoreConfig
from penstock.kvstore.messages import Reports, stats_message
from penstock.kvstore.partitions import Partitions
from penstock.kvstore.reporting import evicted_message, load_message
from penstock.kvstore.sessions import SessionTable
from penstock.v1 import router_pb2


class MeshPart:
    """All partitions of a store, for its membership."""

    def __init__(self, partitions: Partitions, reports: Reports, sessions: SessionTable, config: KvStoreConfig) -> None:
        self._partitions = partitions
        self._reports = reports
        self._sessions = sessions
        self._config = config
        self._log = structlog.get_logger("penstock.kvstore")

    def load(self) -> router_pb2.StoreLoad:
        """The figures, as they are now."""
        known, host_id = len(self._sessions), self._config.host_id
        stats = stats_message(self._partitions, self._reports, host_id=host_id, sessions=known)
        return load_message(stats, self._config.nvme_bytes)

    async def evict(self, order: router_pb2.EvictOrder) -> router_pb2.Evicted:
        """Drops a tenant's blocks. Raises InvalidRequest."""
        check_namespace("evict.namespace", order.namespace)
        if not order.namespace:  # blocks of unknown tenants are nobody's to drop
            return router_pb2.Evicted(number=order.number)
        dropped = await self._partitions.drop_tenant(order.namespace)
        tiers = {one.kind.name.lower(): one.blocks for one in dropped}
        self._log.info("blocks of a tenant are dropped", **tiers, in_use=sum(one.in_use for one in dropped))
        return evicted_message(order.number, dropped)
