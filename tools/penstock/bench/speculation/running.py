"""Meshes that run side by side, the same but for what drafts: one is under load at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from openai import AsyncOpenAI

from penstock.bench.e2e.running import free_port, serving
from penstock.bench.e2e.servers import ServerSpec
from penstock.load.asking import TokenClient
from penstock.load.target import LoadTarget

PLAIN = "plain"
"""Name of the form that has no drafts."""
NO_DRAFTS = {"penstock": {"drafts": False}}
"""In the body of a request that takes no part in drafts, where others do."""
WITHOUT_DRAFTS = {"PENSTOCK_DECODE_DRAFT_TOKENS": "0"}
WITHOUT_LOOKUP = {"PENSTOCK_DECODE_LOOKUP_TOKENS": "0"}
"""Settings of the workers."""


@dataclass(frozen=True, slots=True)
class Form:
    """What is different about a mesh."""

    draft: str = "none"
    """As in `penstock up --draft`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of its workers, as environment."""
    arguments: Sequence[str] = ()
    """Further ones of `penstock up`."""


@dataclass(slots=True)
class DraftedAnswer:
    """One request as its client saw it."""

    first: float = 0.0
    last: float = 0.0
    """When its first and last tokens came, in seconds."""
    ids: Sequence[int] = ()
    """Its tokens, of a completion."""
    later: int = 0
    """Tokens behind the first."""
    accepted: int = 0
    """Drafts that were accepted."""

    @property
    def seconds(self) -> float:
        """From first to last token."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class BenchMesh:
    """A mesh that runs."""

    client: AsyncOpenAI
    target: LoadTarget

    async def chat(self, body: Mapping[str, Any], drafts: bool = True) -> DraftedAnswer:
        """The answer to a chat completion, with `drafts` or without."""
        more = body.get("extra_body", {}) | ({} if drafts else NO_DRAFTS)
        return await _read(
            await self.client.chat.completions.create(
                model=self.target.model,
                stream=True,
                stream_options={"include_usage": True},
                **{**body, "extra_body": more},
            )
        )

    async def complete(self, prompt: Sequence[int], tokens: int, drafts: bool = True) -> DraftedAnswer:
        """The next `tokens` tokens behind a prompt of token ids, greedily; with `drafts` or without. The client takes
        less of the processor than OpenAI's, which the mesh is to have."""
        target = self.target
        if not drafts:
            target = msgspec.structs.replace(target, extra=target.extra | NO_DRAFTS)
        timed = await TokenClient(target).ask(prompt, tokens, "bench")
        return DraftedAnswer(timed.times[0], timed.times[-1], timed.ids, len(timed.ids) - 1, timed.accepted_tokens)


async def _read(stream: AsyncIterator[Any]) -> DraftedAnswer:
    answer = DraftedAnswer()
    async for chunk in stream:
        if chunk.usage is not None:
            answer.later = chunk.usage.completion_tokens - 1
            answer.accepted = chunk.usage.penstock["accepted_tokens"]
        elif chunk.choices:
            answer.last = time.perf_counter()
            answer.first = answer.first or answer.last
    return answer


def mesh_command(target: Path, draft: str, port: int) -> Sequence[str]:
    """Starts a mesh with the model; `draft` as in `penstock up --draft`."""
    command = (sys.executable, "-m", "penstock.cli", "up", "--model", str(target), "--port", str(port))
    return (*command, "--draft", draft, "--kv-host-bytes", "256MiB")


@asynccontextmanager
async def running(target: Path, forms: Mapping[str, Form]) -> AsyncIterator[Mapping[str, BenchMesh]]:
    """A mesh with the model for each form, all at once: those that are not asked compute nothing."""
    async with AsyncExitStack() as stack:
        meshes = {}
        for name, form in forms.items():
            port = free_port()
            spec = ServerSpec(
                name=name,
                command=(*mesh_command(target, form.draft, port), *form.arguments),
                model=target.name,
                ready_path="/readyz",
                paused=False,
                environment=form.settings,
            )
            server = await stack.enter_async_context(serving(spec, port))
            client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
            meshes[name] = BenchMesh(await stack.enter_async_context(client), server.target)
        yield meshes
