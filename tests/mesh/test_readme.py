"""The clients in the README work as they stand there, against `penstock up`."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from .test_up import up

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)


@dataclass(frozen=True)
class Addresses:
    """Where the mesh answers, for those that the README names."""

    http: str
    grpc: str

    def put_into(self, text: str) -> str:
        """The text with these addresses."""
        return text.replace("http://127.0.0.1:8080", self.http).replace("127.0.0.1:8081", self.grpc)


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Addresses]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    async with up("--grpc-port", str(port)) as (_, _, url):
        yield Addresses(url, f"127.0.0.1:{port}")


def block(language: str, word: str) -> str:
    """The README's one block of code in that language with that word in it."""
    [found] = [text for kind, text in BLOCKS if kind == language and word in text]
    return found


async def said(*command: str) -> str:
    """What a program that ends well prints."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_official_client(served):
    answer = await said(sys.executable, "-c", served.put_into(block("python", "OpenAI")))
    assert "CompletionUsage(" in answer and "cached_tokens" in answer


async def test_grpc(served):
    assert await said(sys.executable, "-c", served.put_into(block("python", "GatewayStub")))


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
async def test_curl(served):
    answer = await said(*shlex.split(served.put_into(block("", "curl ")).replace("\\\n", " ")))
    assert answer.startswith("data: {") and answer.rstrip().endswith("data: [DONE]")


async def test_grpc_reflection_names_the_gateway(served):
    def services() -> list[str]:
        with grpc.insecure_channel(served.grpc) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert "penstock.v1.Gateway" in await asyncio.to_thread(services)
