"""A service of the operator's that starts and ends workers, called as Standard Webhooks has it.

The body says what is wanted; `webhook-id` is the same for each attempt of one wish, so that the service can tell that
it has fulfilled it; `webhook-signature` is `v1,` and the base64 of HMAC-SHA256 over `ID.TIMESTAMP.BODY`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from penstock.cli.scale.actuators.base import ActuatorFailed, WorkerPlace
from penstock.cli.scale.state import WorkRole
from penstock.cli.scale.web import NoAnswer, call

_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25
_AGAIN = frozenset({408, 409, 425, 429})
"""Statuses that may be others the next time, besides those from 500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookTarget:
    """Where wishes go."""

    url: str
    key: bytes = field(repr=False)
    ca: Path | None = None


class WebhookActuator:
    """Owner of the wishes of which it is not known whether they were heard."""

    adds = True

    def __init__(self, target: WebhookTarget, pause_s: float = _FIRST_PAUSE_S) -> None:
        """`pause_s`: before the second attempt; twice as long before each further one."""
        self._target = target
        self._pause_s = pause_s
        self._open: dict[WorkRole, str] = {}
        """Ids of additions that failed: the next one is the same wish."""
        self._ends: dict[str, str] = {}
        """Likewise, of removals, by worker."""

    def removes(self, worker: WorkerPlace) -> bool:
        """Any."""
        return True

    async def add(self, role: WorkRole) -> None:
        """Wishes for one more. Raises ActuatorFailed."""
        id = self._open.setdefault(role, f"add-{uuid4().hex}")
        await self._wish(id, {"wish": "add", "role": role})
        del self._open[role]

    async def remove(self, worker: WorkerPlace) -> None:
        """Wishes that a drained worker ends. Raises ActuatorFailed."""
        id = self._ends.setdefault(worker.id, f"remove-{uuid4().hex}")
        await self._wish(id, {"wish": "remove", "worker": worker.id, "address": worker.address})
        del self._ends[worker.id]

    async def give_up(self, role: WorkRole, joined: Set[str]) -> None:
        """Whoever heard the wish may still fulfil it."""

    async def _wish(self, id: str, what: dict[str, str]) -> None:
        body, pause_s, reason = json.dumps({"id": id, **what}).encode(), self._pause_s, ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                answer = await call(
                    self._target.url, method="POST", body=body, headers=self._headers(id, body), ca=self._target.ca
                )
            except NoAnswer as error:
                reason = str(error)
                continue
            if 200 <= answer.status < 300:
                return
            reason = f"{self._target.url}: {answer.status}: {answer.start}"
            if answer.status < 500 and answer.status not in _AGAIN:
                break
        raise ActuatorFailed(reason)

    def _headers(self, id: str, body: bytes) -> dict[str, str]:
        at = str(int(time.time()))
        signature = hmac.new(self._target.key, b".".join((id.encode(), at.encode(), body)), hashlib.sha256).digest()
        return {
            "content-type": "application/json",
            "webhook-id": id,
            "webhook-timestamp": at,
            "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
        }
