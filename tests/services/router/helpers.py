"""The messages that callers of a router send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import grpc

from penstock.router.service import Router
from penstock.rpc.channels import Channels
from penstock.v1 import common_pb2, router_pb2, router_pb2_grpc

BLOCK = 16


def spec(**other: object) -> common_pb2.KvSpec:
    fields: dict[str, Any] = {
        "model": "ab" * 32,
        "tokenizer": "cd" * 32,
        "layout": "v1",
        "dtype": "float32",
        "block_size": BLOCK,
        "block_bytes": 4096,
    }
    return common_pb2.KvSpec(**(fields | other))


def hello(member: str, role: str = "both", **other: Any) -> router_pb2.Hello:
    fields: dict[str, Any] = {
        "member_id": member,
        "role": router_pb2.Role.Value(f"ROLE_{role.upper()}"),
        "address": f"127.0.0.1:{1 + crc32(member.encode()) % 60000}",
        "host_id": "h",
    }
    if role == "draft":
        fields["model_name"] = "guesser"
    elif role != "kvstore":
        fields |= {
            "model_name": "m",
            "spec": spec(),
            "max_model_len": 8192,
            "max_running": 16,
            "kv_capacity_tokens": 100_000,
        }
    return router_pb2.Hello(**(fields | other))


def ask(tokens: int = 100, block_keys: Sequence[bytes] = (), **other: Any) -> router_pb2.PlanAsk:
    packed = b"".join(block_keys)
    fields: dict[str, Any] = {"model_name": "m", "prompt_tokens": tokens, "max_tokens": 50, "block_keys": packed}
    return router_pb2.PlanAsk(**(fields | other))


def keys(count: int, chain: int = 0) -> list[bytes]:
    return [bytes([chain]) + number.to_bytes(31, "big") for number in range(count)]


async def eventually(condition: Callable[[], object]) -> None:
    """Lets everybody else run until `condition` holds; the time is bounded, not guessed."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@dataclass
class Harness:
    """One router, and calls that end with the test."""

    router: Router
    channels: Channels
    calls: list[Any] = field(default_factory=list)

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.channels.to(self.router.address, "router")

    @property
    def stub(self) -> router_pb2_grpc.RouterAsyncStub:
        return router_pb2_grpc.RouterStub(self.channel)

    async def join(self, member: str, role: str = "both", **other: Any) -> Any:
        call = self.stub.Join()
        self.calls.append(call)
        await call.write(router_pb2.JoinRequest(hello=hello(member, role, **other)))
        assert (await call.read()).HasField("welcome")
        return call

    async def store(self, call: Any, **events: Any) -> None:
        """Sends block events and returns when the router has taken them."""
        await call.write(router_pb2.JoinRequest(blocks=common_pb2.BlockEvents(**events)))

    async def plan(self, **fields: Any) -> tuple[Any, router_pb2.PlanResponse]:
        call = self.stub.Plan()
        self.calls.append(call)
        return call, await self.again(call, **fields)

    async def again(self, call: Any, **fields: Any) -> router_pb2.PlanResponse:
        await call.write(router_pb2.PlanRequest(ask=ask(**fields)))
        answer: router_pb2.PlanResponse = await call.read()
        return answer

    async def gone(self, call: Any) -> None:
        call.cancel()
        self.calls.remove(call)
