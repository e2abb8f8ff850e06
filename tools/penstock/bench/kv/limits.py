"""What the machine can do, measured with a process that does nothing else."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from penstock.bench.kv.memory import Region, copy_all
from penstock.bench.kv.peer import MESSAGE_BYTES, SERVICE, asked
from penstock.bench.kv.processes import started
from penstock.rpc.channels import open_channels


class MachineLimits:
    """Rates in bytes/s. Made by `open_limits`."""

    def __init__(self, size: int, memory: str, tcp: int, channel: grpc.aio.Channel) -> None:
        self._size = size
        fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._shared, self._own = Region(size, fd), Region(size)
        finally:
            os.close(fd)
        self._own.touch(3)
        self._tcp = tcp
        self._fill: Any = channel.unary_unary(f"/{SERVICE}/Fill")
        self._stream: Any = channel.unary_stream(f"/{SERVICE}/Stream")

    async def copy_in(self, round: int) -> float:
        """The other process writes the shared mapping."""
        seconds: float = struct.unpack("<d", await self._fill(b""))[0]
        return self._size / seconds

    async def copy_out(self, round: int) -> float:
        """This process copies out the bytes that the other has just written."""
        await self._fill(b"")
        return self._size / copy_all(self._own, self._shared)

    async def tcp(self, round: int) -> float:
        """One connection, plain blocking reads."""
        target = memoryview(bytearray(MESSAGE_BYTES))
        with socket.create_connection(("127.0.0.1", self._tcp)) as connection:
            begin, left = time.perf_counter(), self._size
            connection.sendall(asked(left))
            while left:
                left -= connection.recv_into(target)
            return self._size / (time.perf_counter() - begin)

    async def stream(self, round: int) -> float:
        """One grpc.aio stream of messages of 1 MiB; the bytes are dropped as they come."""
        begin, received = time.perf_counter(), 0
        async for message in self._stream(asked(self._size // MESSAGE_BYTES)):
            received += len(message)
        assert received == self._size
        return received / (time.perf_counter() - begin)


@asynccontextmanager
async def open_limits(size: int) -> AsyncIterator[tuple[MachineLimits, str]]:
    """The limits for `size` bytes, and the address of the process behind them."""
    async with started("penstock.bench.kv.peer", str(size)) as (_, said), open_channels() as channels:
        address, memory, tcp = str(said["address"]), str(said["memory"]), int(str(said["tcp"]))
        yield MachineLimits(size, memory, tcp, channels.to(address, "store")), address
