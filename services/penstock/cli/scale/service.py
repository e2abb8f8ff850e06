"""The planner's process: looks, decides, says why, and has it done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NoReturn

import structlog

from penstock.cli.mesh import MeshOptions
from penstock.cli.scale.acting import ScaleActs
from penstock.cli.scale.actuators.base import Actuator, NoActuator
from penstock.cli.scale.actuators.kubernetes import KubernetesAccess, KubernetesActuator
from penstock.cli.scale.actuators.local import LocalMesh, local_actuator
from penstock.cli.scale.actuators.webhook import WebhookActuator, WebhookTarget
from penstock.cli.scale.config import ScaleConfig
from penstock.cli.scale.decision import decide
from penstock.cli.scale.metering import LoadMeter
from penstock.cli.scale.metrics import ScaleMetrics
from penstock.cli.scale.state import ROLES, MeshSeen, ScaleDecision, ScaleMemory
from penstock.cli.scale.watching import MeshWatch
from penstock.errors import PenstockError
from penstock.runtime.service import service_main
from penstock.runtime.tasks import beside

_LOG = structlog.get_logger("penstock.scale")


class ScalePlanner:
    """A running planner. Made by `open_scale`."""

    address = ""

    def __init__(self, config: ScaleConfig, acts: ScaleActs, actuator: Actuator, watch: MeshWatch) -> None:
        self._config, self._acts, self._actuator, self._watch = config, acts, actuator, watch
        self._knobs = config.knobs()
        self._meter, self._memory = LoadMeter(), ScaleMemory()
        self._seen_at = time.monotonic()
        self._blind = self._told_alone = False
        self.metrics = acts.metrics
        self.routers = config.router

    async def keep(self) -> NoReturn:
        """Looks again and again. What it does not see it does not decide about."""
        while True:
            try:
                await self.look()
            except PenstockError as error:
                if not self._blind:
                    _LOG.warning("the mesh cannot be seen; nothing is decided", reason=error.message)
                self._blind = True
            else:
                if self._blind:
                    _LOG.info("the mesh is seen again")
                self._blind, self._seen_at = False, time.monotonic()
            self.metrics.blind.set(time.monotonic() - self._seen_at if self._blind else 0.0)
            await asyncio.sleep(self._config.every_s)

    async def look(self) -> ScaleDecision | None:
        """One look and what follows from it; None at the first. Raises PenstockError."""
        acts, watch = self._acts, self._watch
        usable = self._actuator.adds and acts.can_use_actuator
        counts = await watch.read(
            time.monotonic(), self._actuator, starting=acts.starting(), can_add=usable, gone=acts.gone
        )
        self._say_alone()
        await acts.welcome(counts.workers, watch.listed)
        acts.show(counts.workers)
        if not counts.workers or acts.missing():
            return None  # nor is anything measured: who is not named now has not ended
        await acts.settle(self._actuator, watch.places)
        seen = self._meter.look(counts)
        if seen is None:
            return None
        decision, memory = decide(seen, self._memory, self._knobs)
        self._show(seen, decision)
        self._memory = memory
        for action in decision.actions:
            self.metrics.decisions.labels(action.kind, action.role).inc()
            line = {"action": action.kind, "role": action.role, "worker": action.worker, "reason": action.reason}
            _LOG.info("would act" if self._config.dry_run else "acts", **line)
            if not self._config.dry_run:
                await acts.do(action, watch.places, self._actuator)
        return decision

    def _show(self, seen: MeshSeen, decision: ScaleDecision) -> None:
        for role in ROLES:
            self.metrics.wanted.labels(role).set(decision.want[role])
        self.metrics.met.labels("ttft").set(seen.ttft_met)
        self.metrics.met.labels("itl").set(seen.itl_met)
        _LOG.debug("looked", want=dict(decision.want), why=dict(decision.why), memory=dict(self._memory.strain))

    def _say_alone(self) -> None:
        if self._watch.left_alone and not self._told_alone:
            self._told_alone = True
            _LOG.warning("workers that have both roles are left alone", workers=self._watch.left_alone)


@asynccontextmanager
async def open_scale(config: ScaleConfig) -> AsyncIterator[ScalePlanner]:
    """Looks for the length of the block; after it the workers that it drained get work again, and those that it has
    started as local processes have ended."""
    metrics = ScaleMetrics()
    watch = MeshWatch(config)
    acts = ScaleActs(watch.mesh, metrics, time.monotonic, start_s=config.start_s)
    async with AsyncExitStack() as stack:
        actuator = await _actuator(config, stack, acts, watch)
        planner = ScalePlanner(config, acts, actuator, watch)
        stack.push_async_callback(acts.bring_back)
        async with beside(planner.keep, name="scale", on_failure="restart", failed=metrics.task_failed):
            yield planner


async def _actuator(config: ScaleConfig, stack: AsyncExitStack, acts: ScaleActs, watch: MeshWatch) -> Actuator:
    match config.actuator:
        case "local":
            options = MeshOptions(models=(config.model,), engine=config.engine, log_level=config.log_level)
            mesh = LocalMesh(
                options=options,
                routers=config.router,
                store=watch.store,
                lost=acts.lost,
                failed=acts.metrics.task_failed,
                most=config.max_prefill + config.max_decode,
                more=_for_workers(config),
            )
            return await stack.enter_async_context(local_actuator(mesh))
        case "kubernetes":
            namespace, resource, name = config.workload()
            access = KubernetesAccess(
                api=config.kubernetes_api,
                namespace=namespace,
                resource=resource,
                name=name,
                token_file=config.kubernetes_token,
                ca=config.kubernetes_ca if config.kubernetes_api.startswith("https:") else None,
                most=config.max_prefill + config.max_decode,
            )
            return KubernetesActuator(access)
        case "webhook":
            return WebhookActuator(WebhookTarget(url=config.webhook, key=config.webhook_key(), ca=config.ca))
        case _:
            return NoActuator()


def _for_workers(config: ScaleConfig) -> tuple[str, ...]:
    """What local workers are told as those of the mesh are."""
    tls = () if config.worker_tls is None else ("--member-tls", str(config.worker_tls))
    return (*(("--seal",) if config.seal else ()), *tls)


app = service_main(
    "scale",
    "Watches a mesh, and has as many workers of each role there as its targets need.",
    ScaleConfig,
    open_scale,
    tells=lambda planner: {"watches": ", ".join(planner.routers)},
)
