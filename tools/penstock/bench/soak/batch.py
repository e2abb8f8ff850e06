"""A batch that runs in what a soak leaves idle, and outlasts the gateways that run it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from penstock.bench.soak.asks import CHAT, SoakAsk
from penstock.bench.soak.heard import SoakAnswer

_LOOK_S = 0.2
_PATIENCE_S = 20.0
_OVER = ("completed", "failed", "expired", "cancelled")

BatchAnswers = Mapping[str, tuple[str, SoakAnswer | None]]
"""By the line's own id: the name of what it asked, and the answer; None: there is none."""


class SoakBatch:
    """Lines of a pool, in a batch of one tenant. Calls are made while all gateways are there."""

    def __init__(self, url: str, key: str, asks: Sequence[SoakAsk], count: int) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}
        chats = [ask for ask in asks if ask.path == CHAT]
        self._lines = {f"line {number}": chats[number % len(chats)] for number in range(count)}
        self._id = ""

    async def begin(self) -> None:
        """Hands it in. Raises httpx2.HTTPError."""
        lines = [
            {"custom_id": id, "method": "POST", "url": CHAT, "body": {**ask.body, "return_token_ids": True}}
            for id, ask in self._lines.items()
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        async with self._http() as http:
            files = {"file": ("lines.jsonl", content)}
            file = _told(await http.post("/v1/files", files=files, data={"purpose": "batch"}))
            asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
            self._id = _told(await http.post("/v1/batches", json=asked))["id"]

    async def answers(self, seconds: float) -> BatchAnswers:
        """When it is over; after so many seconds those that there are. Raises httpx2.HTTPError."""
        heard: dict[str, SoakAnswer] = {}
        async with self._http() as http:
            batch = await self._over(http, seconds)
            if file := batch.get("output_file_id"):
                content = (await http.get(f"/v1/files/{file}/content")).raise_for_status().text
                for line in content.splitlines():
                    entry = json.loads(line)
                    heard[entry["custom_id"]] = answer = SoakAnswer()
                    answer.whole(entry["response"]["body"], 0.0)
        return {id: (ask.name, heard.get(id)) for id, ask in self._lines.items()}

    async def _over(self, http: httpx2.AsyncClient, seconds: float) -> Mapping[str, Any]:
        end = asyncio.get_running_loop().time() + seconds
        while True:
            batch = _told(await http.get(f"/v1/batches/{self._id}"))
            if batch["status"] in _OVER or asyncio.get_running_loop().time() > end:
                return batch
            await asyncio.sleep(_LOOK_S)

    def _http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self._url, headers=self._headers, timeout=_PATIENCE_S)


def _told(answer: httpx2.Response) -> Mapping[str, Any]:
    found: Mapping[str, Any] = answer.raise_for_status().json()
    return found
