"""The mesh behind the bench's gateways, in a process of its own: `python -m penstock.bench.gateway.mesh DIRECTORY`."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import grpc
from tokenizers import Tokenizer

from penstock.rpc.server import serve
from penstock.runtime.lifecycle import Lifecycle, run
from penstock.testing.emitter import Emitter
from penstock.v1 import decode_pb2_grpc, router_pb2_grpc

MODEL = "emitted"
_MOST_CALLS = 4096
_SAYS = " The quick brown fox jumps over the lazy dog, and then it goes home to sleep."


async def main(lifecycle: Lifecycle) -> None:
    """Serves until told to stop."""
    file = Path(sys.argv[1]) / "tokenizer.json"
    says = Tokenizer.from_file(str(file)).encode(_SAYS, add_special_tokens=False).ids
    emitter = Emitter(model=MODEL, tokenizer=hashlib.sha256(file.read_bytes()).hexdigest(), says=says)

    def register(server: grpc.aio.Server) -> None:
        router_pb2_grpc.add_RouterServicer_to_server(emitter, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(emitter, server)

    async with serve("127.0.0.1:0", register, [], max_calls=_MOST_CALLS, grace=0.1) as server:
        emitter.address = f"127.0.0.1:{server.port}"
        lifecycle.ready(address=emitter.address)
        await lifecycle.stopped()


if __name__ == "__main__":
    run(main)
