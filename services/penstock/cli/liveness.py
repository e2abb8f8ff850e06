"""Whether a child still answers. A process that hangs does not end, so waiting for its end is not enough."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2

from penstock.rpc.channels import open_channels

_CHECKS = 3
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def silence(address: str, bound_s: float) -> None:
    """Returns when gRPC's health check at `address` has had no answer three times in a row, for `bound_s` seconds in
    all. Any answer counts, also that the service is not serving."""
    loop = asyncio.get_running_loop()
    missed, period_s = 0, bound_s / _CHECKS
    async with open_channels() as channels:
        while missed < _CHECKS:
            began = loop.time()
            missed = 0 if await _answers(channels.to(address), period_s) else missed + 1
            await asyncio.sleep(period_s - (loop.time() - began))


async def _answers(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        await check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        return error.code() not in _SILENCE
    return True
