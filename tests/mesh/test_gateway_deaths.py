"""A gateway that dies takes its connections along, and no client's answer: who asks again gets the rest."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx2
import psutil
import pytest

from .support import up

BODY = {
    "model": "penstock-mini",
    "messages": [{"role": "user", "content": "Tell me of the sea, and of a whale. " * 4}],
    "stream": True,
    "max_tokens": 1200,
    "ignore_eos": True,
    "temperature": 0.8,
}


class Client:
    """Asks for one answer, of whichever gateway answers, until it has all of it."""

    def __init__(self, urls: list[str], key: str) -> None:
        self._urls = urls
        self._headers = {"idempotency-key": key}
        self.text = ""
        self.broken = 0
        self.heard = asyncio.Event()
        """Set after 10 pieces."""

    async def ask(self) -> str:
        """The whole text."""
        pieces = 0
        while True:
            for url in self._urls:
                try:
                    async with httpx2.AsyncClient(timeout=60) as http:
                        request = http.stream("POST", f"{url}/v1/chat/completions", json=BODY, headers=self._headers)
                        async with request as answer:
                            if answer.status_code == 503:
                                continue  # that gateway has not seen the workers yet
                            assert answer.status_code == 200, await answer.aread()
                            async for line in answer.aiter_lines():
                                if line == "data: [DONE]":
                                    return self.text
                                if line.startswith("id: "):
                                    self._headers["last-event-id"] = line[4:]
                                elif line.startswith("data: "):
                                    chunk = json.loads(line[6:])
                                    assert "error" not in chunk, chunk
                                    for choice in chunk["choices"]:
                                        self.text += choice["delta"].get("content") or ""
                                    pieces += 1
                                    if pieces > 10:
                                        self.heard.set()
                except httpx2.TransportError:
                    self.broken += 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_gateway_that_dies_or_stands_still_costs_no_answer(number):
    """Sampled, without a seed; a client that hears nothing for a while of a gateway that stands still leaves it."""
    async with up("--gateways", "2", "--draft", "none") as (process, _, url):
        others = [child for child in psutil.Process(process.pid).children() if "penstock.gateway" in child.cmdline()]
        assert len(others) == 2
        addresses = {_option(child, "--http-address"): child.pid for child in others}
        first = url.removeprefix("http://")
        urls = [url, *(f"http://{address}" for address in addresses if address != first)]
        names = [f"answer {count}" for count in range(3)]
        expected = [await Client(urls[1:], name).ask() for name in names]
        clients = [Client(urls, name) for name in names]
        running = [asyncio.create_task(client.ask()) for client in clients]
        await asyncio.gather(*(client.heard.wait() for client in clients))
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
        else:
            os.kill(addresses[first], signal.SIGCONT)


def _option(child: psutil.Process, name: str) -> str:
    words = child.cmdline()
    return words[words.index(name) + 1]
