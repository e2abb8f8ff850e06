"""Limits of tenants: exact over time, refused at once, and nobody else's affair."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import grpc
import openai
import pytest

from penstock.errors import Overloaded, RateLimited
from penstock.gateway.accounts.admission import Admission
from penstock.gateway.accounts.limiter import Limiter
from penstock.gateway.accounts.pot import TenantPot
from penstock.gateway.accounts.terms import Limits, Terms
from penstock.runtime.metrics import GatewayMetrics
from penstock.testing.keys import key_file
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

HELLO = [{"role": "user", "content": "hello"}]


class Clock:
    """Time that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def limiter(clock: Clock, spent: float = 0.0, **limits) -> Limiter:
    return Limiter(Terms(by_tenant={"t": Limits(**limits)}), lambda tenant: spent, clock)


def admitted(limiter: Limiter, tenant: str = "t") -> bool:
    try:
        with limiter.one(tenant):
            return True
    except RateLimited:
        return False


def test_requests_per_minute_over_time():
    clock = Clock()
    limited = limiter(clock, requests_per_minute=60)
    assert [admitted(limited) for _ in range(61)] == [True] * 60 + [False]
    count = 0
    for _ in range(6000):
        clock.now += 0.1
        count += admitted(limited)
    assert count == 600
    clock.now += 3600
    assert sum(admitted(limited) for _ in range(100)) == 60, "an hour's rest gives a minute's allowance"


def test_tokens_are_a_debt_that_is_paid_by_waiting():
    clock = Clock()
    limited = limiter(clock, tokens_per_minute=600)
    assert admitted(limited)
    limited.spend("t", 1200)
    with pytest.raises(RateLimited) as refused, limited.one("t"):
        pass
    assert refused.value.retry_after == pytest.approx(60.1)
    clock.now += 60.2
    assert admitted(limited)


def test_concurrency_and_spend():
    limited = limiter(Clock(), concurrency=2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limited.one("t"))
        assert not admitted(limited) and admitted(limited, "other")
    assert admitted(limited)
    assert admitted(limiter(Clock(), 4.99, spend_per_day=5.0))
    with pytest.raises(RateLimited) as refused, limiter(Clock(), 5.0, spend_per_day=5.0).one("t"):
        pass
    assert refused.value.code == "insufficient_quota" and 0 < refused.value.retry_after <= 86_400


def test_a_refused_request_takes_nothing():
    clock = Clock()
    limited = limiter(clock, requests_per_minute=2, concurrency=1)
    for _ in range(3):
        limited.check("t")
    with limited.one("t"):
        assert not admitted(limited)
    assert admitted(limited) and not admitted(limited)
    assert not admitted(limiter(clock, requests_per_minute=0))


def test_a_place_is_free_before_everything_is_cleared_away_but_not_without_bound():
    admission = Admission(TenantPot(2, several=False), GatewayMetrics())
    with ExitStack() as stack:
        for _ in range(4):
            leave = stack.enter_context(admission.one("t"))
            assert admission.live == 1 and not admission._idle.is_set()
            leave()
            leave()
            assert admission.live == 0 and not admission._idle.is_set()
        with pytest.raises(Overloaded), admission.one("t"):
            pass
    assert admission.live == 0 and admission._idle.is_set()
    with admission.one("t"), admission.one("t"), pytest.raises(Overloaded), admission.one("t"):
        pass


TERMS = """
[limits.default]
requests_per_minute = 3
tokens_per_minute = 600
[limits.b]
concurrency = 1
"""


@pytest.fixture
async def limited(opened, tmp_path):
    (tmp_path / "terms.toml").write_text(TERMS)
    keys = key_file(tmp_path / "keys.json", {"key-a": "a", "key-b": "b", "key-c": "c"})
    settings = {"api_keys": keys, "server_key": "ab" * 16, "terms": tmp_path / "terms.toml"}
    async with opened(**settings, api_key="key-a") as setup:
        yield setup


async def test_a_client_is_told_what_is_left_and_when_to_come_back(limited):
    create = limited.client.chat.completions.with_raw_response.create
    left = []
    for _ in range(3):
        answer = await create(model="tiny", messages=HELLO)
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        used = answer.parse().usage.total_tokens
    assert left == [2, 1, 0]
    with pytest.raises(openai.RateLimitError) as refused:
        await create(model="tiny", messages=HELLO)
    headers = refused.value.response.headers
    assert 15 <= int(headers["retry-after"]) <= 20
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert 600 - 3 * used <= int(headers["x-ratelimit-remaining-tokens"]) < 600 - 2 * used
    assert refused.value.type == "rate_limit_error" and "3 requests per minute" in str(refused.value)
    other = limited.client.with_options(api_key="key-c")
    assert await other.chat.completions.create(model="tiny", messages=HELLO)


async def test_the_limits_of_one_do_not_touch_another_and_hold_at_both_doors(limited):
    limited.script.hang = True
    b = limited.client.with_options(api_key="key-b")
    stream = await b.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    with pytest.raises(openai.RateLimitError):
        await b.chat.completions.create(model="tiny", messages=HELLO)
    async with grpc.aio.insecure_channel(limited.gateway.grpc_address) as channel:
        request = gateway_pb2.ChatCompletionRequest(
            model="tiny", messages=[gateway_pb2.ChatMessage(role="user", content="hi")]
        )
        call = gateway_pb2_grpc.GatewayStub(channel).ChatCompletion(request, metadata=[("x-api-key", "key-b")])
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with asyncio.timeout(5):
        limited.script.gate.set()
        async for _ in stream:
            pass
    limited.script.hang = False
    assert await b.chat.completions.create(model="tiny", messages=HELLO)


async def test_a_refusal_reads_no_body(limited):
    """The limit is checked before the first byte of a body is read."""
    for _ in range(3):
        await limited.client.chat.completions.create(model="tiny", messages=HELLO)
    reader, writer = await asyncio.open_connection(limited.gateway.address.host, limited.gateway.address.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: key-a\r\ncontent-length: 1000000\r\n\r\n"
    )
    async with asyncio.timeout(5):
        assert b" 429 " in await reader.readline()
    writer.close()
