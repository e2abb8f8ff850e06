"""Tool calls beside other servers that speculate, on the same weights: the same tokens of all, greedily, one stream."""

from __future__ import annotations

import statistics
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2

from penstock.bench.e2e.running import Server, free_port, serving
from penstock.bench.e2e.servers import ServerSpec, peer
from penstock.bench.engine.process import Failed
from penstock.bench.engine.subjects import Places
from penstock.bench.harness import Figure, Measure, figure, interleave, missing
from penstock.bench.speculation import asks
from penstock.bench.speculation.running import WITHOUT_DRAFTS, mesh_command
from penstock.load.asking import AskFailed

_OURS, _PLAIN = "mesh", "mesh_plain"
_SIZES = {"streams": 1, "tokens": 2048, "room": 8192}
"""What the peers are told; see loadtest/peers/servers/options.py."""
_WITH_DRAFT, _WITH_LOOKUP = "draft", "lookup"
_PEERS: Mapping[str, Sequence[str]] = {
    "llamaserver": (_WITH_DRAFT, _WITH_LOOKUP),
    "transformers": (_WITH_DRAFT, _WITH_LOOKUP),
    "vllm": (_WITH_LOOKUP,),
}
"""And how each can speculate; vLLM's build for processors has no draft models."""
_GOAL = 1.2
_Start = Callable[[int], ServerSpec]
"""A server at a port."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    ids: Sequence[int]
    tokens: int
    """Length of the tool call."""


async def peer_figures(target: Path, draft: Path, quick: bool) -> list[Figure]:
    """Tokens per second between first and last token of a call, ours : theirs, of the peers that are installed."""
    rounds, count = (1, 3) if quick else (3, 6)
    absent: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, start in _servers(target, draft).items():
            try:
                servers[name] = await stack.enter_async_context(_paused(start))
            except Failed as error:
                absent[name] = str(error)
        asked = servers[_PLAIN].port  # not of the mesh that remembers its answers
        prompts = [await _prompts(asked, target.name, count, round) for round in range(rounds + 1)]
        rates = await interleave({name: _subject(server, prompts) for name, server in servers.items()}, rounds)
    found = [missing(f"tool_calls_vs_{name}", "ratio", why) for name, why in absent.items()]
    ratios: dict[str, list[float]] = {}
    for name, samples in rates.items():
        print(f"{name}: {statistics.median(samples):.4g} tokens/s", file=sys.stderr, flush=True)
        found.append(figure(f"rate_tool_calls_{name}", samples, "tokens/s", "scale"))
        if name != _OURS:
            ratios[name] = [one / other for one, other in zip(rates[_OURS], samples, strict=True)]
            found.append(figure(f"tool_calls_vs_{name}", ratios[name], "ratio", name))
    peers = [name for name in ratios if not name.startswith(_OURS)]
    if not peers:
        return [missing("tool_calls_vs_best_peer", "ratio", "no peer is installed", _GOAL), *found]
    best = min(peers, key=lambda name: statistics.median(ratios[name]))
    return [figure("tool_calls_vs_best_peer", ratios[best], "ratio", best, _GOAL), *found]


def _servers(target: Path, draft: Path) -> dict[str, _Start]:
    """All by name."""
    found: dict[str, _Start] = {
        _OURS: partial(_mesh, target, str(draft), {}),
        _PLAIN: partial(_mesh, target, "none", WITHOUT_DRAFTS),
    }
    places = Places.default()
    for name, ways in _PEERS.items():
        for way in ways:
            more = ("--draft", str(draft)) if way == _WITH_DRAFT else ("--lookup",)
            found[f"{name}_{way}"] = partial(_peer, name, target, places, more)
    return found


def _mesh(target: Path, draft: str, settings: Mapping[str, str], port: int) -> ServerSpec:
    return ServerSpec(
        name=_OURS,
        command=mesh_command(target, draft, port),
        model=target.name,
        ready_path="/readyz",
        paused=False,
        environment=settings,
    )


def _peer(name: str, target: Path, places: Places, more: Sequence[str], port: int) -> ServerSpec:
    return peer(name, target, port, places, *more, **_SIZES)


@asynccontextmanager
async def _paused(start: _Start) -> AsyncIterator[Server]:
    """It runs when it is asked. Raises Failed."""
    port = free_port()
    async with serving(start(port), port) as server:
        server.pause()
        yield server


async def _prompts(port: int, model: str, count: int, round: int) -> list[_Prompt]:
    """Of a round: tool calls as the demo's clients ask for them, and how long the answers are."""
    found = []
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
        for body in asks.tool_calls(count, round).bodies:
            chat = {"model": model, **body}
            answer = (await http.post("/v1/chat/completions", json=chat)).raise_for_status().json()
            asked = {name: chat[name] for name in ("model", "messages", "tools")}
            ids = (await http.post("/tokenize", json=asked)).raise_for_status().json()["tokens"]
            found.append(_Prompt(ids, answer["usage"]["completion_tokens"]))
    return found


def _subject(server: Server, prompts: Sequence[Sequence[_Prompt]]) -> Measure[float]:
    async def sample(round: int) -> float:
        server.go_on()
        try:
            tokens, seconds = 0, 0.0
            for number, prompt in enumerate(prompts[round]):
                answer = await server.client.ask(prompt.ids, prompt.tokens, f"{number} in round {round}")
                tokens += prompt.tokens - 1
                seconds += answer.times[-1] - answer.times[0]
            return tokens / seconds
        except AskFailed as error:
            raise Failed(f"{server.spec.name}: {error}") from error
        finally:
            server.pause()

    return sample
