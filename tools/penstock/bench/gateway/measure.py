"""`penstock bench gateway`: the gateway before a mesh that emits at will, beside a bare SSE application.

Rates are per second of the processor that a process used, so that clients and mesh, which share the machine, don't
count. The gateway answers one request per stream, with one plan and one call to a worker. Last comes what a
grammar costs: to compile, `compiling`, and to follow, `masked`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from penstock.bench.gateway import compiling
from penstock.bench.gateway.client import Client
from penstock.bench.gateway.dialog import Dialog, TurnTime, next_turn
from penstock.bench.gateway.mesh import MODEL
from penstock.bench.gateway.overload import LIVE, Flood, flood
from penstock.bench.gateway.rates import Passage, Streamer, events_per_s, on_the_way, rate_at_half_load
from penstock.bench.harness import BenchReport, Figure, Measure, figure, interleave
from penstock.bench.kv.processes import started
from penstock.models import embedded

_DIRECTORY = embedded("penstock-mini")
_STREAMS = (64, 1000)
_TURNS = (1_000, 10_000, 100_000)
_BARE = "a bare SSE application of starlette under uvicorn"


async def measure(quick: bool) -> BenchReport:
    """Runs the bench."""
    rounds = 3 if quick else 7
    figures: list[Figure] = []
    async with started("penstock.bench.gateway.mesh", str(_DIRECTORY)) as (_, mesh):
        router = str(mesh["address"])
        async with gateway(router, 2048) as ours, bare() as theirs:
            figures += await _rates(ours, theirs, rounds, quick)
            figures += await _turns(ours.client, rounds)
        async with gateway(router, LIVE) as ours:
            figures += await _overload(ours, rounds, 2.0 if quick else 6.0)
    figures += await compiling.figures(_DIRECTORY / "tokenizer.json", 1 if quick else 3)
    from penstock.bench.gateway import masked  # an engine, which is loaded when the streams have been measured

    figures += await masked.figures(quick)
    return BenchReport("gateway", figures)


@asynccontextmanager
async def gateway(router: str, live: int) -> AsyncIterator[Streamer]:
    """A gateway that takes so many requests at one time."""
    settings = {
        "router": router,
        "model-dir": str(_DIRECTORY),
        "model-name": MODEL,
        "http-address": "127.0.0.1:0",
        "max-live-requests": str(live),
        "log-level": "error",
    }
    arguments = [text for name, value in settings.items() for text in (f"--{name}", value)]
    async with started("penstock.gateway", *arguments) as (pid, values):
        yield Streamer(Client(str(values["address"])), pid)


@asynccontextmanager
async def bare() -> AsyncIterator[Streamer]:
    """The application that the gateway is measured beside."""
    async with started("penstock.bench.gateway.bare") as (pid, values):
        yield Streamer(Client(str(values["address"])), pid)


async def _rates(ours: Streamer, theirs: Streamer, rounds: int, quick: bool) -> list[Figure]:
    found: list[Figure] = []
    scale: list[Figure] = []
    for streams in _STREAMS:
        tokens = (12_000 if quick else 40_000) // streams

        async def gateway_rate(_round: int, streams: int = streams, tokens: int = tokens) -> float:
            return await events_per_s(ours, streams, tokens)

        async def bare_rate(_round: int, streams: int = streams, tokens: int = tokens) -> float:
            return await events_per_s(theirs, streams, 4 * tokens)

        got = await interleave({"gateway": gateway_rate, "bare": bare_rate}, rounds)
        ratios = [one / other for one, other in zip(got["gateway"], got["bare"], strict=True)]
        found.append(figure(f"events_vs_bare_{streams}", ratios, "ratio", _BARE, 0.5))
        scale += [figure(f"{name}_events_{streams}", got[name], "1/s", "for scale, per core") for name in got]

    seconds = 2.0 if quick else 5.0
    half = await rate_at_half_load(ours, _STREAMS[0], seconds)

    async def token(_round: int) -> Passage:
        return await on_the_way(ours, _STREAMS[0], half, seconds)

    passages = (await interleave({"token": token}, rounds))["token"]
    against = f"{_STREAMS[0]} streams at {half:.0f} tokens/s, at which the gateway needs half of a core"
    found.append(_milliseconds("token_in_gateway_ms_p99", [one.p99_s for one in passages], against, 5.0))
    scale.append(figure("token_in_gateway_core", [one.core for one in passages], "cores", "for scale, in these rounds"))
    return found + scale


async def _turns(client: Client, rounds: int) -> list[Figure]:
    dialogs = {tokens: Dialog(client, _DIRECTORY, tokens) for tokens in _TURNS}

    def turns(dialog: Dialog) -> Measure[TurnTime]:
        async def measured(_round: int) -> TurnTime:
            return await next_turn(dialog, 5)

        return measured

    got = await interleave({str(tokens): turns(dialog) for tokens, dialog in dialogs.items()}, rounds)
    few, many = got[str(_TURNS[0])], got[str(_TURNS[-1])]
    ratios = [one.whole / other.whole for one, other in zip(many, few, strict=True)]
    reading = [turn.reading / turn.whole for turn in many]
    return [
        figure("next_turn_us_100k_over_1k", ratios, "ratio", "the same after 1,000 tokens"),
        figure("next_turn_reading_100k", reading, "ratio", "the whole turn; reading its body takes this part"),
        *(
            figure(
                f"next_turn_us_{tokens // 1000}k", [turn.whole * 1e6 for turn in got[str(tokens)]], "us", "for scale"
            )
            for tokens in _TURNS
        ),
    ]


async def _overload(ours: Streamer, rounds: int, seconds: float) -> list[Figure]:
    async def flooded(_round: int) -> Flood:
        return await flood(ours.client, ours.pid, seconds)

    got = (await interleave({"overload": flooded}, rounds))["overload"]
    grown = (got[-1].held_bytes - got[0].held_bytes) / 1e6  # single rounds differ by what is live when they end
    against = "the same gateway without overload"
    return [
        figure("overload_goodput", [one.goodput for one in got], "ratio", against, 0.9),
        _milliseconds("refusal_ms_p99", [one.refusal_p99_s for one in got], "open loop, 3 x its capacity", 10.0),
        figure("overload_grown_mb", [grown], "MB", "its memory after the first round", 10.0, lower_is_better=True),
    ]


def _milliseconds(id: str, seconds: Sequence[float], against: str, goal: float) -> Figure:
    return figure(id, [one * 1e3 for one in seconds], "ms", against, goal, lower_is_better=True)
