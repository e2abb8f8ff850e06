"""Cells with servers of their own: a restart, a killed worker, a rest, what sessions with a common prefix add to
memory."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory

from penstock.bench.e2e import processes
from penstock.bench.e2e.prompts import PromptSource, everything
from penstock.bench.e2e.running import Server
from penstock.bench.e2e.servers import MESH, MESHES
from penstock.bench.e2e.subjects import ServerRow, ServerSample, Sources
from penstock.bench.engine.process import Failed
from penstock.load.asking import AskFailed

RESTART, KILL, REST, SHARED = "restart", "kill", "rest", "shared_prefix"
_SYSTEM, _NEW, _OUTPUT = 1200, 150, 64
_DISK = ("--kv-nvme-bytes", "4GiB")
_WORKER = "penstock.decode"
_REST_S = 120.0


async def restarted(name: str, sources: Sources, turns: int = 3) -> ServerSample:
    """Turns of a session, a regular end and a new start of the whole server, then the next turn.

    `time_to_first_token_after_restart` (ms) begins when the server is ready again; `ready_again` (ms) comes before. The
    mesh has a tier on the disk, for which its user has to name a directory; peers have nothing like it.
    """
    source = PromptSource(sources.shape.vocab, f"{RESTART}/{name}")
    prompt = source.tokens(_SYSTEM)
    with TemporaryDirectory(dir=sources.model.parent) as directory:
        more = ("--kv-nvme-dir", directory, *_DISK) if name in MESHES else ()
        try:
            async with sources.open(name, *more) as server:
                for _ in range(turns):
                    prompt += source.tokens(_NEW)
                    before = await server.client.ask(prompt, _OUTPUT, source.name)
                    prompt += before.ids
            async with sources.open(name, *more) as server:
                after = await server.client.ask(prompt + source.tokens(_NEW), _OUTPUT, source.name)
                ready_s = server.ready_s
        except (Failed, AskFailed) as error:
            return ServerSample(reason=str(error))
    return ServerSample(
        {
            "time_to_first_token_last_before": before.time_to_first_token * 1e3,
            "time_to_first_token_after_restart": after.time_to_first_token * 1e3,
            "ready_again": ready_s * 1e3,
            "cached_share": after.cached_tokens / max(1, after.prompt_tokens),
        }
    )


async def killed(name: str, sources: Sources) -> ServerSample:
    """A session's stream whose worker is killed (SIGKILL) at its first token, then the session's next turn.

    `pause` (ms) is the longest wait for a token. A peer's only worker is the server itself: its client waits until it
    is ready again, and then for the first token of what it asks for anew. `time_to_first_token_after_kill` (ms) is that
    of the next turn.
    """
    source = PromptSource(sources.shape.vocab, f"{KILL}/{name}")
    prompt, new = source.tokens(_SYSTEM + _NEW), source.tokens(_NEW)
    try:
        if name in MESHES:
            async with sources.open(name) as server:
                answer = await server.client.ask(prompt, _OUTPUT, source.name, lambda: _kill(server, _WORKER))
                pause = max(answer.gaps)
                after = await server.client.ask(prompt + answer.ids + new, _OUTPUT, source.name)
        else:
            async with sources.open(name) as server:
                with suppress(AskFailed):
                    await server.client.ask(prompt, _OUTPUT, source.name, lambda: _kill(server))
            async with sources.open(name) as server:
                answer = await server.client.ask(prompt, _OUTPUT, source.name)
                pause = server.ready_s + answer.time_to_first_token
                after = await server.client.ask(prompt + answer.ids + new, _OUTPUT, source.name)
    except (Failed, AskFailed) as error:
        return ServerSample(reason=str(error))
    return ServerSample({"pause": pause * 1e3, "time_to_first_token_after_kill": after.time_to_first_token * 1e3})


async def rested(name: str, sources: Sources) -> ServerSample:
    """First turns of two sessions that have nothing in common, one at once and one after nobody asked for two minutes.

    `time_to_first_token_before_rest` and `time_to_first_token_after_rest` (ms).
    """
    source = PromptSource(sources.shape.vocab, f"{REST}/{name}")
    found = []
    try:
        async with sources.open(name) as server:
            for pause_s in (0.0, _REST_S):
                await asyncio.sleep(pause_s)
                answer = await server.client.ask(source.tokens(_SYSTEM + _NEW), _OUTPUT, f"{source.name}-{pause_s:g}")
                found.append(answer.time_to_first_token * 1e3)
    except (Failed, AskFailed) as error:
        return ServerSample(reason=str(error))
    before, after = found
    return ServerSample({"time_to_first_token_before_rest": before, "time_to_first_token_after_rest": after})


def _kill(server: Server, module: str = "") -> None:
    """Kills the processes of a module, or all of them."""
    pids = server.pids
    processes.send(processes.named(pids, module) if module else pids, signal.SIGKILL)


async def shared_prefix(name: str, sources: Sources, sessions: int = 16) -> ServerSample:
    """What further sessions with the same system prompt add to the memory of all processes.

    `memory_vs_own_part` is that per session, beside the bytes of the keys and values of what only it has. One session
    has been there before, so that what all share is no part of it.
    """
    own = (_NEW + _OUTPUT) * sources.shape.kv_bytes
    system = PromptSource(sources.shape.vocab, f"{SHARED}/{name}").tokens(_SYSTEM)

    async def run(server: Server, count: int) -> int:
        source = PromptSource(sources.shape.vocab, f"{SHARED}/{name}/{count}")
        asked = [
            server.client.ask(system + source.tokens(_NEW), _OUTPUT, f"{source.name}-{number}")
            for number in range(count)
        ]
        await everything(asked)
        return processes.memory_bytes(server.pids)

    try:
        async with sources.open(name) as server:
            before = await run(server, 1)
            grown = await run(server, sessions) - before
    except (Failed, AskFailed) as error:
        return ServerSample(reason=str(error))
    return ServerSample({"memory_vs_own_part": grown / sessions / own, "memory_grown_mb": grown / 1e6})


INCIDENTS: Mapping[str, Callable[[str, Sources], Awaitable[ServerSample]]] = {
    RESTART: restarted,
    KILL: killed,
    REST: rested,
    SHARED: shared_prefix,
}
"""By the cell's name. Each takes a server's name."""


async def measure(cell: str, names: Sequence[str], sources: Sources) -> list[ServerRow]:
    """One of INCIDENTS, once for each server, one after the other."""
    found: dict[str, list[ServerSample]] = {}
    for name in names:
        sample = await INCIDENTS[cell](name, sources)
        found[name] = [sample]
        print(f"{cell} {name}: {sample.reason or dict(sample.values)}", file=sys.stderr, flush=True)
    return [ServerRow(cell, name, samples, found.get(MESH, ())) for name, samples in found.items()]
