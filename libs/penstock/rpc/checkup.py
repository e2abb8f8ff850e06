"""What a process says of itself to `penstock ctl doctor`: its version, its clock, and what it finds where it runs."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import grpc

from penstock.runtime.findings import Finding, open_files
from penstock.v1 import (
    checkup_pb2,
    checkup_pb2_grpc,
    common_pb2,
    decode_pb2,
    draft_pb2,
    gateway_pb2,
    kvstore_pb2,
    prefill_pb2,
    router_pb2,
    stage_pb2,
)

if TYPE_CHECKING:
    Examining = grpc.aio.ServicerContext[checkup_pb2.ExamineRequest, checkup_pb2.ExamineResponse]

CHECKUP = checkup_pb2.DESCRIPTOR.services_by_name["Checkup"].full_name
"""The service's name."""
_WIRE = (
    checkup_pb2,
    common_pb2,
    decode_pb2,
    draft_pb2,
    gateway_pb2,
    kvstore_pb2,
    prefill_pb2,
    router_pb2,
    stage_pb2,
)

WIRE = 1
"""The number of the wire between members. It changes when one of before would misunderstand what is said, or be
misunderstood; what is added, and what who does not know it can do without, leaves it as it is."""

Examine = Callable[[], Awaitable[Sequence[Finding]]]
"""Finds out what is particular to one service."""


@cache
def own_version() -> str:
    """The version of the package, and a digest of its wire, which changes from commit to commit while that does not."""
    try:
        released = version("penstock")
    except PackageNotFoundError:  # a checkout on the path, not installed
        released = "0"
    digest = hashlib.sha256(b"".join(module.DESCRIPTOR.serialized_pb for module in _WIRE))
    return f"{released}+wire.{digest.hexdigest()[:8]}"


async def nothing_more() -> Sequence[Finding]:
    """For services of which only the limits of their process are looked at."""
    return ()


class CheckupService(checkup_pb2_grpc.CheckupServicer):
    """Part of every server."""

    def __init__(self, examine: Examine = nothing_more) -> None:
        self._examine = examine

    async def Examine(self, request: checkup_pb2.ExamineRequest, context: Examining) -> checkup_pb2.ExamineResponse:
        """The findings; the clock is read last, when the answer leaves."""
        findings = [await asyncio.to_thread(open_files), *await self._examine()]
        return checkup_pb2.ExamineResponse(
            version=own_version(),
            host=socket.gethostname(),
            findings=[
                checkup_pb2.Finding(check=one.check, ok=one.ok, found=one.found, advice=one.advice) for one in findings
            ],
            clock=time.time(),
        )
