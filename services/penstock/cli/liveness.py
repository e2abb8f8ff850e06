"""Whether a child still works. A process that hangs does not end, so waiting for its end is not enough."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.rpc.channels import open_channels
from penstock.rpc.server import LIVE

_CHECKS = 3
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_STUCK = health_pb2.HealthCheckResponse.NOT_SERVING


class Pulse(Enum):
    """What a child answers when it is asked whether it is live."""

    WELL = "well"
    STUCK = "stuck"
    """It answers that it is not live."""
    NONE = "none"


async def silence(address: str, bound_s: float) -> None:
    """Returns when gRPC's health check at `address` has had no answer three times in a row, for `bound_s` seconds in
    all. Any answer counts, also that the service is not live."""
    loop = asyncio.get_running_loop()
    missed, period_s = 0, bound_s / _CHECKS
    async with open_channels() as channels:
        while missed < _CHECKS:
            began = loop.time()
            missed = missed + 1 if await _pulse(channels.to(address, "worker"), period_s) is Pulse.NONE else 0
            await asyncio.sleep(period_s - (loop.time() - began))


async def stuck(address: str, bound_s: float) -> None:
    """Returns when the service at `address` has said for `bound_s` seconds that it is not live. A service that takes no
    requests, because it drains or waits for others, is live; silence neither begins nor ends this."""
    loop = asyncio.get_running_loop()
    period_s = bound_s / _CHECKS
    since: float | None = None
    async with open_channels() as channels:
        while True:
            began = loop.time()
            pulse = await _pulse(channels.to(address, "worker"), period_s)
            if pulse is Pulse.WELL:
                since = None
            elif pulse is Pulse.STUCK:
                since = began if since is None else since
                if began - since >= bound_s:
                    return
            await asyncio.sleep(period_s - (loop.time() - began))


async def _pulse(channel: grpc.aio.Channel, timeout_s: float) -> Pulse:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVE), timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        return Pulse.NONE if error.code() in _SILENCE else Pulse.WELL
    return Pulse.STUCK if answer.status == _STUCK else Pulse.WELL
