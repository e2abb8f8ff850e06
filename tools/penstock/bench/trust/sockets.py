"""Unix sockets beside ports, as a client sees them: `penstock up` with the one and with the other."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.bench.e2e.prompts import PromptSource, everything
from penstock.bench.e2e.running import Server, free_port, serving
from penstock.bench.e2e.servers import MESH, MeshForm, up
from penstock.bench.harness import Figure, Measure, figure, interleave
from penstock.checkpoint import inspect
from penstock.models import embedded

_MODEL = "penstock-mini"
_UNIX, _TCP = "unix", "tcp"
_PROMPT, _OUTPUT = 64, 32
_STREAMS = 8
_ONE_AT_A_TIME = 200
_NO_SLOWER = 1.0


@dataclass(frozen=True, slots=True)
class WaySample:
    """What one round has shown of one mesh."""

    ttft_s: float
    """Median of requests that come one after the other."""
    tokens_per_s: float
    """Of streams beside each other."""


async def socket_figures(quick: bool) -> Sequence[Figure]:
    """The embedded model; two prefill and decode workers, so that hand-offs go the way too."""
    rounds = 2 if quick else 11
    ports = {name: free_port() for name in (_UNIX, _TCP)}
    forms = {name: MeshForm(("--prefill", "1", "--sockets", name)) for name in ports}
    specs = {name: up(MESH, embedded(_MODEL), port, forms[name]) for name, port in ports.items()}
    async with serving(specs[_UNIX], ports[_UNIX]) as unix, serving(specs[_TCP], ports[_TCP]) as tcp:
        samples = await interleave({_UNIX: _measured(unix), _TCP: _measured(tcp)}, rounds)
    return way_figures(samples[_UNIX], samples[_TCP])


def _measured(server: Server) -> Measure[WaySample]:
    vocab = inspect(embedded(_MODEL)).config.vocab_size

    async def sample(round: int) -> WaySample:
        source, clock = PromptSource(vocab, f"sockets {round}"), asyncio.get_running_loop().time
        alone = [
            await server.client.ask(source.tokens(_PROMPT), _OUTPUT, f"{round}-{number}")
            for number in range(_ONE_AT_A_TIME)
        ]
        begin = clock()
        asked = [
            server.client.ask(source.tokens(_PROMPT), 4 * _OUTPUT, f"{round}-beside-{number}")
            for number in range(_STREAMS)
        ]
        answers = await everything(asked)
        took_s = clock() - begin
        tokens = sum(len(answer.ids) for answer in answers)
        return WaySample(statistics.median(one.time_to_first_token for one in alone), tokens / took_s)

    return sample


def way_figures(unix: Sequence[WaySample], tcp: Sequence[WaySample]) -> list[Figure]:
    """Unix sockets : ports, round by round."""
    pairs = list(zip(unix, tcp, strict=True))
    ttft = [one.ttft_s / other.ttft_s for one, other in pairs]
    tokens = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
    against = "the same mesh over ports of 127.0.0.1"
    return [
        figure("unix_vs_tcp_ttft", ttft, "ratio", against, _NO_SLOWER, lower_is_better=True),
        figure("unix_vs_tcp_tokens_per_s", tokens, "ratio", against, _NO_SLOWER),
        figure("unix_ttft_ms", [1e3 * one.ttft_s for one in unix], "ms", "for scale"),
        figure("tcp_ttft_ms", [1e3 * one.ttft_s for one in tcp], "ms", "for scale"),
    ]
