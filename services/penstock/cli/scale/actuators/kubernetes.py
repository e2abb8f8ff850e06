"""The scale subresource of a Deployment, or whatever else has one, whose pods are the workers of a model.

One workload has workers of all roles: which role one has is said when it has joined. Before there is one pod less, the
pod of the drained worker is marked as the one that goes first (`controller.kubernetes.io/pod-deletion-cost`); whichever
goes drains by its `preStop` hook.
"""

from __future__ import annotations

import json
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.cli.scale.actuators.base import ActuatorFailed, WorkerPlace
from penstock.cli.scale.state import WorkRole
from penstock.cli.scale.web import NoAnswer, WebAnswer, call
from penstock.runtime.addresses import HostPort

_MERGE = "application/merge-patch+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesAccess:
    """Where the API server is, and who asks it."""

    api: str
    namespace: str
    resource: str
    """deployments, statefulsets, or another plural; with its group and version before it where that is not apps/v1."""
    name: str
    token_file: Path
    ca: Path | None
    most: int
    """Replicas: those that never get ready among them, which would be made up for by more and more."""

    @property
    def scale_url(self) -> str:
        """Of the scale subresource."""
        group, _, plural = self.resource.rpartition("/")
        where = f"apis/{group or 'apps/v1'}/namespaces/{quote(self.namespace)}/{plural}/{quote(self.name)}"
        return f"{self.api.rstrip('/')}/{where}/scale"

    @property
    def pods_url(self) -> str:
        """Of the pods beside it."""
        return f"{self.api.rstrip('/')}/api/v1/namespaces/{quote(self.namespace)}/pods"


class KubernetesActuator:
    """Owner of the number of replicas, as far as nobody else changes it."""

    adds = True

    def __init__(self, access: KubernetesAccess) -> None:
        self._access = access
        self._tried: tuple[int, int] | None = None
        """A change whose outcome is not known, and the replicas that there are if it was made."""

    def removes(self, worker: WorkerPlace) -> bool:
        """Any: all are pods of the workload."""
        return True

    async def add(self, role: WorkRole) -> None:
        """One replica more. Raises ActuatorFailed."""
        await self._change(1)

    async def remove(self, worker: WorkerPlace) -> None:
        """One replica less, that worker's if the workload heeds the cost of its pods. Raises ActuatorFailed."""
        await self._mark(worker)
        await self._change(-1)

    async def give_up(self, role: WorkRole, joined: Set[str]) -> None:
        """Its pod stays: one less might end another."""

    async def _change(self, by: int) -> None:
        scale = await self._ask("GET", self._access.scale_url)
        try:
            current, version = int(scale["spec"].get("replicas", 0)), scale["metadata"].get("resourceVersion")
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ActuatorFailed(f"{self._access.scale_url}: not a Scale: {str(scale)[:200]}") from None
        if self._tried == (by, current):  # its answer was lost, and it was made
            self._tried = None
            return
        if by > 0 and current >= self._access.most:
            raise ActuatorFailed(f"{self._access.name} has {current} replicas already, though not all may be ready")
        self._tried = (by, current + by)
        patch: dict[str, Any] = {"spec": {"replicas": max(0, current + by)}}
        if version:
            patch["metadata"] = {"resourceVersion": version}  # who changed it meanwhile makes this a conflict
        await self._ask("PATCH", self._access.scale_url, patch)
        self._tried = None

    async def _mark(self, worker: WorkerPlace) -> None:
        try:
            ip = HostPort(worker.address).host
        except ValueError as error:
            raise ActuatorFailed(f"the worker is no pod: {error}") from None
        which = quote(f"status.podIP={ip},status.phase=Running")
        pods = await self._ask("GET", f"{self._access.pods_url}?fieldSelector={which}")
        items = pods.get("items") or []
        if len(items) != 1:
            raise ActuatorFailed(f"{len(items)} pods of {self._access.namespace} have the address {ip} of the worker")
        name = items[0]["metadata"]["name"]
        cost = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": self._first_to_go()}}}
        await self._ask("PATCH", f"{self._access.pods_url}/{quote(name)}", cost)

    @staticmethod
    def _first_to_go() -> str:
        """Lower than any mark before: one that was marked and has stayed is not the first to go any more."""
        return str(-int(time.time()))

    async def _ask(self, method: str, url: str, patch: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"accept": "application/json"}
        if patch is not None:
            headers["content-type"] = _MERGE
        try:
            token = self._access.token_file.read_text().strip()  # it is renewed now and then
            headers["authorization"] = f"Bearer {token}"
            body = None if patch is None else json.dumps(patch).encode()
            answer = await call(url, method=method, body=body, headers=headers, ca=self._access.ca)
        except (NoAnswer, OSError) as error:
            raise ActuatorFailed(str(error)) from None
        if answer.status != 200:
            self._refused(answer)
            raise ActuatorFailed(f"{method} {url}: {answer.status}: {answer.start}")
        try:
            found: dict[str, Any] = json.loads(answer.body)
        except ValueError:
            raise ActuatorFailed(f"{method} {url}: not JSON: {answer.start}") from None
        return found

    def _refused(self, answer: WebAnswer) -> None:
        """What was refused was not done."""
        if 400 <= answer.status < 500:
            self._tried = None
