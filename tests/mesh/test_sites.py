"""Two sites as far as the network is concerned: each in a namespace of its own, one behind a link that takes its time.
A gateway beside the first serves requests at either, and loses no token when one goes."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.services.kvstore.netns import Network, impossible, network

from penstock.engine.request import SamplingParams
from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, open_gateway
from penstock.testing.slow_link import SlowLink

from .support import body_of, prompt

ROUTER, WORKER = 7401, 7402
WAY_S = 0.04
"""To the far site and back: some 4,000 km of glass."""
LONG = SamplingParams(
    max_tokens=900, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(256, 260), -100.0)
)
WHY_NOT = impossible()

pytestmark = [pytest.mark.mesh, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible")]


@dataclass
class Sites:
    """A gateway beside site `near`; `far` is behind the link."""

    network: Network
    workers: dict[str, subprocess.Popen[bytes]]
    gateway: Gateway
    http: httpx2.AsyncClient

    @asynccontextmanager
    async def streamed(self, tokens: list[int], sampling: SamplingParams) -> AsyncIterator[Answering]:
        """A running completion."""
        body = body_of(tokens, sampling) | {"stream": True, "stream_options": {"include_usage": True}}
        request = self.http.stream(
            "POST", f"http://{self.gateway.address}/v1/completions", json=body, headers={"x-penstock-explain": "plan"}
        )
        async with request as answer:
            assert answer.status_code == 200, await answer.aread()
            [plan] = json.loads(answer.headers["x-penstock-plan"])
            yield Answering(plan["site"], answer.aiter_lines())


class Answering:
    """What has come of an answer."""

    def __init__(self, site: str, lines: AsyncIterator[str]) -> None:
        self.site = site
        """Of its first plan."""
        self.ids: list[int] = []
        self.usage: dict[str, Any] = {}
        self._lines = lines

    async def read(self, most: int | None = None) -> list[int]:
        """All of its tokens; only some of them, once there are `most`."""
        async for line in self._lines:
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                self.usage = chunk["usage"] or self.usage
                self.ids += [id for choice in chunk["choices"] for id in choice.get("token_ids", ())]
            if most is not None and len(self.ids) >= most:
                break
        return self.ids


@asynccontextmanager
async def opened(tiny: Path, *routing: str) -> AsyncIterator[Sites]:
    async with AsyncExitStack() as stack:
        net = stack.enter_context(network())
        far = net.from_here("b").partition(":")[0]
        links = [SlowLink(port, far, delay_s=WAY_S) for port in (ROUTER, WORKER)]
        relays = [await stack.enter_async_context(link.serving()) for link in links]
        advertised = {"a": net.from_here("a", WORKER), "b": relays[1]}
        workers = {}
        for host, name in (("a", "near"), ("b", "far")):
            net.start(host, "router", *routing, port=ROUTER)
            options = ["--router", f"127.0.0.1:{ROUTER}", "--model", str(tiny), "--advertise", advertised[host]]
            options += ["--role", "both", "--host-id", name, "--threads", "1"]
            workers[name] = net.start(host, "decode", *options, port=WORKER)
        config = GatewayConfig(
            router=net.from_here("a", ROUTER),
            site="near",
            far=(f"far={relays[0]}",),
            model_dir=tiny,
            http_address="127.0.0.1:0",
        )
        gateway = await stack.enter_async_context(open_gateway(config))
        async with asyncio.timeout(30), gateway.view.changed:
            await gateway.view.changed.wait_for(
                lambda: all(gateway.view.serves_at(site, "tiny") for site in ("near", "far"))
            )
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=60))
        yield Sites(net, workers, gateway, http)


async def test_two_sites_serve_as_one_and_either_may_go(tiny, oracle) -> None:
    texts = [prompt(f"sites/{number}", 40) for number in range(3)]
    expected = [(await oracle(tokens, LONG)).ids for tokens in texts]
    async with opened(tiny, "--max-live-plans", "1") as sites:
        async with sites.streamed(texts[0], LONG) as first:
            await first.read(10)
            async with sites.streamed(texts[1], LONG) as second:
                assert (first.site, second.site) == ("near", "far"), "the near one is full"
                assert await first.read() == expected[0]
                await second.read(20)
                sites.network.cut_off("b")
                assert await second.read() == expected[1], "it goes on at home"
                assert second.usage["completion_tokens"] == LONG.max_tokens
                assert second.usage["penstock"]["computed_tokens"] == len(texts[1])


async def test_what_runs_at_home_goes_on_elsewhere(tiny, oracle) -> None:
    tokens = prompt("sites/home", 40)
    expected = (await oracle(tokens, LONG)).ids
    async with opened(tiny) as sites, sites.streamed(tokens, LONG) as answer:
        assert answer.site == "near"
        await answer.read(20)
        sites.workers["near"].kill()
        assert await answer.read() == expected
        sample = sites.gateway.metrics.registry.get_sample_value
        reasons = ("away", "sooner")  # as its router had heard of the end of the worker already, or only of its failure
        assert sum(sample("penstock_spilled_total", {"site": "far", "reason": why}) or 0 for why in reasons) == 1
