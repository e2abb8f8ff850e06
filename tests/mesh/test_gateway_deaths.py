"""A gateway that dies takes its connections along, and no client's answer: who asks again gets the rest."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import httpx2
import psutil
import pytest
import redis

from .support import REDIS, found, until, up

WISH = "Tell me of the sea, and of a whale. " * 4
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 400}
SCHEMA = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]}
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": WISH}], "max_tokens": 1800, "ignore_eos": True},
    RESPONSES: {
        "input": WISH,
        "max_output_tokens": 1200,
        "text": {"format": {"type": "json_schema", "name": "numbers", "schema": SCHEMA}},
    },
}


class Client:
    """Asks for one answer, of whichever gateway answers, until it has all of it."""

    def __init__(self, urls: list[str], key: str, path: str, **fields: Any) -> None:
        self._urls = urls
        self._path = path
        self._body = {"model": "penstock-mini", "stream": True, "temperature": 0.8, **BODIES[path], **fields}
        self._headers = {"idempotency-key": key}
        self.text = ""
        self.events = 0
        """Of a response."""
        self.broken = 0
        self.id = ""
        """Of the answer."""
        self.heard = asyncio.Event()
        """Set after 10 pieces."""

    async def ask(self) -> str:
        """The whole text."""
        pieces, seen = 0, ""
        while True:
            for url in self._urls:
                try:
                    async with httpx2.AsyncClient(timeout=60) as http:
                        request = http.stream("POST", url + self._path, json=self._body, headers=self._headers)
                        async with request as answer:
                            if answer.status_code == 503:
                                continue  # that gateway has not seen the workers yet
                            assert answer.status_code == 200, await answer.aread()
                            async for line in answer.aiter_lines():
                                if line == "data: [DONE]":
                                    return self.text
                                if line.startswith("id: "):
                                    seen = line[4:]  # what comes after it may not arrive
                                elif line.startswith("data: "):
                                    if self._read(json.loads(line[6:])):
                                        return self.text
                                    if seen:
                                        self._headers["last-event-id"] = seen
                                    pieces += 1
                                    if pieces > 10:
                                        self.heard.set()
                except httpx2.TransportError:
                    self.broken += 1

    async def recalled(self, url: str) -> int:
        """Tokens of the answer that this gateway did not have generated again."""
        async with httpx2.AsyncClient() as http:
            return (await http.get(f"{url}/v1/requests/{self.id}")).json()["tokens"]["recalled"]

    def _read(self, event: dict[str, Any]) -> bool:
        """Takes the text of an event; whether it was the last of a response."""
        assert not event.get("error") and event.get("type") != "error", event
        self.id = event.get("id") or event.get("response", {}).get("id") or self.id
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
        if "type" not in event:
            return False
        assert event["sequence_number"] == self.events, "each event once"
        self.events += 1
        if event["type"] == "response.output_text.delta":
            self.text += event["delta"]
        if event["type"] not in ("response.completed", "response.incomplete"):
            return False
        assert event["response"]["output"][0]["content"][0]["text"] == self.text
        return True


@pytest.mark.parametrize(
    ("number", "path", "more"),
    [(signal.SIGKILL, CHAT, ["--redis"]), (signal.SIGSTOP, CHAT, []), (signal.SIGKILL, RESPONSES, [])],
)
async def test_a_gateway_that_dies_or_stands_still_costs_no_answer(number, path, more):
    """Sampled, without a seed; a client that hears nothing for a while of a gateway that stands still leaves it. Where
    gateways share a Redis, what one had generated is not generated again."""
    async with up("--gateways", "2", "--draft", "none", *more) as (process, _, url):
        others = [child for child in psutil.Process(process.pid).children() if "penstock.gateway" in child.cmdline()]
        assert len(others) == 2
        addresses = {_option(child, "--http-address"): child.pid for child in others}
        first = url.removeprefix("http://")
        urls = [url, *(f"http://{address}" for address in addresses if address != first)]
        names = [f"answer {count}" for count in range(3)]
        apart = {"logprobs": True} if path == CHAT else {}  # of such an answer nothing is kept
        expected = [await Client(urls[1:], name, path, **apart).ask() for name in names]
        clients = [Client(urls, name, path) for name in names]
        running = [asyncio.create_task(client.ask()) for client in clients]
        await asyncio.gather(*(client.heard.wait() for client in clients))
        with standing(found(process.pid, "penstock.decode")):  # so that not all answers end before the gateway
            if more:
                await until(partial(kept, process.pid, len(clients)), "answers in Redis")
            assert not all(task.done() for task in running)
            os.kill(addresses[first], number)
        if number is signal.SIGSTOP:
            for task in running:
                task.cancel()  # as a client does whose patience has ended
            await asyncio.wait(running)
            for client in clients:
                client._urls = urls[1:]
            running = [asyncio.create_task(client.ask()) for client in clients]
        async with asyncio.timeout(60):
            assert await asyncio.gather(*running) == expected
        if number is signal.SIGKILL:
            assert any(client.broken for client in clients)
            recalled = [await client.recalled(urls[1]) for client in clients if client.broken]
            assert any(recalled) == bool(more)
        else:
            os.kill(addresses[first], signal.SIGCONT)


@contextmanager
def standing(workers: Sequence[psutil.Process]) -> Iterator[None]:
    """These do nothing for the length of the block."""
    assert workers
    for worker in workers:
        worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            worker.resume()


def kept(supervisor: int, answers: int) -> bool:
    """Whether the Redis of a mesh has tokens of so many answers."""
    [server] = found(supervisor, REDIS)
    path = server.cmdline()[0].partition("unixsocket:")[2]
    with redis.Redis(unix_socket_path=path) as client:
        names = cast("list[bytes]", client.keys("penstock:answers:*"))
    return sum(not name.endswith(b":over") for name in names) >= answers


def _option(child: psutil.Process, name: str) -> str:
    words = child.cmdline()
    return words[words.index(name) + 1]
