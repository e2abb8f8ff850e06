"""Which site serves a request: by the seconds that each predicts, and by who is there at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from penstock.errors import Overloaded, Unavailable
from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, open_gateway
from penstock.kv.hint import ReturnHint
from penstock.runtime.config import ConfigError
from penstock.v1 import router_pb2

from . import fakes
from .conftest import plain_script
from .test_flow import REQUEST

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = "The quick brown fox."
LONG = {"queue_s": 4.5, "first_token_s": 5.0, "answer_s": 8.0}


@dataclass
class TwoSites:
    """A gateway beside `near`, which knows `far` as osaka."""

    gateway: Gateway
    near: fakes.FakeMesh
    far: fakes.FakeMesh
    client: AsyncOpenAI

    async def ask(self, **more: Any) -> tuple[str, list[dict[str, Any]]]:
        """The text of an answer, and its plans."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model="tiny", messages=HELLO, extra_headers={"x-penstock-explain": "plan"}, **more
        )
        return raw.parse().choices[0].message.content, json.loads(raw.headers["x-penstock-plan"])

    def spilled(self, reason: str) -> float:
        sample = self.gateway.metrics.registry.get_sample_value
        return sample("penstock_spilled_total", {"site": "osaka", "reason": reason}) or 0.0

    async def until_serves(self, site: str, expected: bool) -> None:
        """Returns when the gateway has heard that a site has workers, or none."""
        view = self.gateway.view
        async with asyncio.timeout(10), view.changed:
            await view.changed.wait_for(lambda: view.serves_at(site, "tiny") is expected)


@pytest.fixture
async def sites(model_dir) -> AsyncIterator[TwoSites]:
    async with opened(model_dir) as made:
        yield made


@asynccontextmanager
async def opened(model_dir, **settings: Any) -> AsyncIterator[TwoSites]:
    file = model_dir / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    async with (
        fakes.open_mesh(plain_script(tokenizer), file) as near,
        fakes.open_mesh(plain_script(tokenizer), file) as far,
    ):
        config = GatewayConfig(
            router=near.address,
            site="tokyo",
            far=(f"osaka={far.address}",),
            model_dir=model_dir,
            http_address="127.0.0.1:0",
            drain_s=0.2,
            failover_s=5.0,
            **settings,
        )
        async with open_gateway(config) as gateway:
            client = AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0)
            async with client:
                sites = TwoSites(gateway, near, far, client)
                await sites.until_serves("tokyo", True)
                await sites.until_serves("osaka", True)
                yield sites


def works(mesh: fakes.FakeMesh) -> int:
    """Answers that a site's workers were asked for."""
    return sum(len(worker.requests) for worker in mesh.decodes)


async def test_a_request_that_is_answered_soon_stays(sites) -> None:
    text, [plan] = await sites.ask()
    assert (text, plan["site"]) == (TEXT, "tokyo")
    assert sites.far.router.asks == [], "nobody else was asked"


async def test_one_that_would_wait_goes_where_its_answer_ends_sooner(sites) -> None:
    sites.near.script.reasons = LONG
    text, [plan] = await sites.ask()
    assert (text, plan["site"], plan["answer_s"]) == (TEXT, "osaka", 2.0)
    assert (works(sites.near), works(sites.far)) == (0, 1)
    await sites.near.until(lambda: sites.near.router.live == 0)  # its charge at home is released
    assert sites.spilled("sooner") == 1


async def test_one_that_would_wait_elsewhere_too_stays(sites) -> None:
    sites.near.script.reasons = LONG
    sites.far.script.reasons = LONG
    text, [plan] = await sites.ask()
    assert (text, plan["site"]) == (TEXT, "tokyo"), "the way makes the difference"
    assert len(sites.far.router.asks) == 1
    await sites.far.until(lambda: sites.far.router.live == 0)  # what was asked for is released
    assert works(sites.far) == 0


async def test_the_way_counts(model_dir) -> None:
    async with opened(model_dir, spill_s=0.0) as sites:
        sites.near.script.reasons = {"answer_s": 2.00001}
        assert (await sites.ask())[1][0]["site"] == "tokyo", "ten microseconds are less than any way"
        sites.near.script.reasons = {"answer_s": 4.0}
        assert (await sites.ask())[1][0]["site"] == "osaka"


async def test_a_full_site_is_left_at_once_and_both_refuse_together(sites) -> None:
    sites.near.script.refuse = Overloaded("all workers are busy", retry_after=7)
    assert (await sites.ask())[1][0]["site"] == "osaka"
    assert sites.spilled("full") == 1
    sites.far.script.refuse = Overloaded("busy too", retry_after=9)
    with pytest.raises(openai.InternalServerError) as caught:
        await sites.ask()
    assert caught.value.response.headers["retry-after"] == "7", "what its own site says is what the client is told"


async def test_one_that_is_held_back_goes_where_there_is_room(sites) -> None:
    sites.near.script.held_s = 10.0
    assert (await sites.ask())[1][0]["site"] == "osaka"
    assert sites.spilled("full") == 1
    sites.far.script.held_s = 10.0
    running = asyncio.create_task(sites.ask())
    await sites.far.until(lambda: len(sites.far.router.asks) == 2 and sites.far.router.live == 0)
    assert not running.done(), "it waits in the line of its own site"
    sites.near.script.room.set()
    text, [plan] = await running
    assert (text, plan["site"]) == (TEXT, "tokyo")


async def test_one_that_is_held_back_for_a_moment_waits(sites) -> None:
    sites.near.script.held_s = 0.9
    running = asyncio.create_task(sites.ask())
    await sites.near.until(lambda: len(sites.near.router.asks) == 1)
    sites.near.script.room.set()
    assert (await running)[1][0]["site"] == "tokyo"
    assert sites.far.router.asks == []


async def test_a_long_prompt_is_no_reason_to_go(sites) -> None:
    """What another site computes again takes time from its own requests."""
    sites.near.script.reasons = {"compute_s": 9.0, "first_token_s": 10.0, "answer_s": 12.0}
    assert (await sites.ask())[1][0]["site"] == "tokyo"
    assert sites.far.router.asks == []


async def test_without_workers_here_those_there_serve(sites) -> None:
    sites.near.show([])
    await sites.until_serves("tokyo", False)
    assert sites.gateway.view.ready
    text, [plan] = await sites.ask()
    assert (text, plan["site"]) == (TEXT, "osaka")
    assert sites.spilled("away") == 1
    sites.near.set_view(ready=True)
    await sites.until_serves("tokyo", True)
    assert (await sites.ask())[1][0]["site"] == "tokyo"


async def test_workers_that_would_say_something_else_are_not_asked(sites) -> None:
    """Other weights, or other numbers: a request that moved would go on with another model's tokens."""
    sites.far.show([sites.far.served(spec=replace(sites.far.spec, dtype="bfloat16"))])
    await sites.until_serves("osaka", False)
    sites.near.script.refuse = Overloaded("all workers are busy")
    with pytest.raises(openai.InternalServerError):
        await sites.ask()
    assert sites.far.router.asks == []


async def test_an_answer_goes_on_at_home_when_the_other_site_is_lost(sites) -> None:
    sites.near.script.reasons = LONG
    sites.far.script.decode_dies_after = 2

    def died(worker, request):
        sites.far.script.refuse = Unavailable("the site is cut off")
        return None

    sites.far.script.generate = died
    text, [plan] = await sites.ask()
    assert text == TEXT, "each token once"
    assert (plan["plan"], plan["site"]) == (2, "tokyo")


async def test_a_hint_reaches_all_sites(sites) -> None:
    models = sites.gateway.reception.models
    await models.first.hint("s", ReturnHint(ended=True))
    assert len(sites.near.router.hints) == len(sites.far.router.hints) == 1
    sites.far.router.away = True
    await models.first.hint("s", ReturnHint(ended=True))
    assert len(sites.near.router.hints) == 2, "a site that is away fails nobody's hint"
    sites.near.router.away = True
    with pytest.raises(Unavailable):
        await models.first.hint("s", ReturnHint(ended=True))


async def test_an_eviction_reaches_all_sites_or_fails(sites) -> None:
    evict = sites.gateway.reception.sites.evict
    order = router_pb2.EvictRequest(namespace=b"n" * 16)
    assert [member.address for member in await evict(order)] == [sites.near.address, sites.far.address]
    sites.far.router.away = True
    with pytest.raises(Unavailable):
        await evict(order)
    assert (len(sites.near.router.evicted), len(sites.far.router.evicted)) == (2, 1)


async def test_lines_of_batches_stay_at_home(sites) -> None:
    sites.near.script.reasons = LONG
    plans = sites.gateway.reception.sites.plans(lambda: 10.0)
    try:
        assert (await plans.ask(REQUEST, 0, {})).site == "osaka"
    finally:
        plans.close()
    plans = sites.gateway.reception.sites.plans(lambda: 10.0)
    try:
        assert (await plans.ask(replace(REQUEST, yields=True), 0, {})).site == "tokyo"
    finally:
        plans.close()


@pytest.mark.parametrize(
    "far", [["osaka"], ["=10.0.0.1:7"], ["osaka=nowhere"], ["tokyo=10.0.0.1:7"], ["a=10.0.0.1:7", "a=10.0.0.2:7"]]
)
def test_settings_that_name_no_other_site(model_dir, far) -> None:
    with pytest.raises(ConfigError) as caught:
        GatewayConfig(router="127.0.0.1:1", model_dir=model_dir, site="tokyo", far=tuple(far))
    assert str(caught.value).startswith("far = ")
