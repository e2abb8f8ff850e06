"""`python -m penstock.bench.kv.peer`: the other process of every limit, with nothing on top of the kernel and grpc.

It shares a mapping that it fills on request, sends bytes over TCP, and serves plain grpc.aio methods: an empty call,
and a stream of the same megabyte again and again.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.bench.kv.memory import Region, copy_all
from penstock.runtime.lifecycle import Lifecycle, run

SERVICE = "penstock.bench.Peer"
MESSAGE_BYTES = 1 << 20
_NUMBER = struct.Struct("<Q")


class LimitPeer:
    """State that the methods share."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("penstock-bench", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.size = size
        self._shared, self._own = Region(size, self.fd), Region(size)
        self._shared.touch(1)
        self._own.touch(2)
        self._message = bytes(MESSAGE_BYTES)

    async def empty(self, request: bytes, context: Any) -> bytes:
        """An empty request and an empty answer."""
        return b""

    async def fill(self, request: bytes, context: Any) -> bytes:
        """Copies into the shared mapping; answers with the seconds."""
        return struct.pack("<d", copy_all(self._shared, self._own))

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Streams as many messages as were asked for."""
        for _ in range(_NUMBER.unpack(request)[0]):
            yield self._message

    def handlers(self) -> Any:
        """The method handlers for a server; messages are plain bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Empty": grpc.unary_unary_rpc_method_handler(self.empty),
                "Fill": grpc.unary_unary_rpc_method_handler(self.fill),
                "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
            },
        )


def send_forever(listener: socket.socket) -> None:
    """Sends each caller as many bytes as it asks for."""
    message = bytes(MESSAGE_BYTES)
    while True:
        connection, _ = listener.accept()
        with connection:
            left = _NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))[0]
            while left > 0:
                left -= connection.send(message[: min(left, MESSAGE_BYTES)])


def asked(count: int) -> bytes:
    """A request for `count` messages or bytes."""
    return _NUMBER.pack(count)


async def serve(lifecycle: Lifecycle) -> None:
    """Serves until told to stop."""
    peer = LimitPeer(int(sys.argv[1]))
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((peer.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=send_forever, args=(listener,), daemon=True).start()
        lifecycle.ready(
            address=f"127.0.0.1:{port}", tcp=listener.getsockname()[1], memory=f"/proc/{os.getpid()}/fd/{peer.fd}"
        )
        await lifecycle.stopped()
    await server.stop(0)


if __name__ == "__main__":
    run(serve)
