"""Opening a worker that serves all that workers serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from penstock.runtime.metrics import WorkerMetrics
from penstock.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    pictures_pb2,
    pictures_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
)
from penstock.worker.config import WorkerConfig
from penstock.worker.opening import ServedWorker, open_worker
from penstock.worker.serving.decoding import DecodeService
from penstock.worker.serving.drafting import open_drafter
from penstock.worker.serving.offering import Handoffs
from penstock.worker.serving.picturing import PicturesService
from penstock.worker.serving.prefilling import PrefillService
from penstock.worker.worker import Worker

SERVICES = [
    prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name,
    decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name,
    pictures_pb2.DESCRIPTOR.services_by_name["Pictures"].full_name,
]


@asynccontextmanager
async def open_both(config: WorkerConfig, role: router_pb2.Role.ValueType) -> AsyncIterator[ServedWorker]:
    """Serves prefill and decode until the block ends; `role` says which of them the router is to ask for first."""
    metrics = WorkerMetrics(config.served_name)
    async with open_drafter(config, metrics) as drafter:

        def register(server: grpc.aio.Server, worker: Worker) -> None:
            handoffs = Handoffs(config.handoff_wait_s, config.handoff_keep_s)
            prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillService(worker, handoffs), server)
            decode_pb2_grpc.add_DecodeServicer_to_server(DecodeService(worker, drafter), server)
            pictures_pb2_grpc.add_PicturesServicer_to_server(PicturesService(worker), server)

        async with open_worker(config, role, register, SERVICES, metrics=metrics, drafter=drafter) as served:
            yield served
