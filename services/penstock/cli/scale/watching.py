"""Reads a mesh: what a router says of its members, as for `penstock ctl top`, and gateways of TTFT and ITL."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import structlog

from penstock.cli.asking import DoorAccess, MeshAccess, members, of_first
from penstock.cli.scale.actuators.base import Actuator, WorkerPlace
from penstock.cli.scale.actuators.local import StorePlace
from penstock.cli.scale.config import ScaleConfig
from penstock.cli.scale.judging import ITL, TTFT, Gathered, Judge, figures
from penstock.cli.scale.metering import MeshCounts
from penstock.cli.scale.needs import WorkerPace
from penstock.cli.scale.state import ROLES, WorkerSeen, WorkRole
from penstock.cli.scale.web import NoAnswer, call
from penstock.engine.fit import LinearFit
from penstock.errors import InvalidRequest, Refused
from penstock.rpc.shown.figures import role_of, state_of
from penstock.v1 import router_pb2

_RATE, _STEP_S, _SEQUENCE_S = 2000.0, 0.02, 0.02 / 32
"""Of a worker, as long as none has measured them: the router's own first guess."""
_METRICS_S = 2.0
_READY = frozenset({"ready"})
_DRAINS = frozenset({"draining", "drained"})


class MeshWatch:
    """Owner of what is known of a mesh from one reading to the next."""

    def __init__(self, config: ScaleConfig) -> None:
        self._config = config
        self.mesh = MeshAccess(router=config.router, member_tls=config.member_tls)
        self._log = structlog.get_logger("penstock.scale")
        self._door = DoorAccess(gateway=config.gateway_http, key_file=config.key_file)
        self._done, self._told = Gathered(), Gathered()
        self._judge = Judge()
        self._step = LinearFit((1.0, 16.0))
        self.model = config.model_name
        """The model's name, once it is known."""
        self.places: dict[str, WorkerPlace] = {}
        """The workers of the last reading."""
        self.listed: set[str] = set()
        """All workers that the router named then."""
        self.left_alone = 0
        """Workers that have both roles."""

    async def store(self) -> StorePlace:
        """The first store that has joined. Raises PenstockError."""
        found = await of_first(self.mesh, members)
        stores = [one for one in found.members if one.role == router_pb2.ROLE_KVSTORE]
        return StorePlace(stores[0].address, stores[0].host_id) if stores else StorePlace()

    async def read(
        self,
        at: float,
        actuator: Actuator,
        *,
        starting: Mapping[WorkRole, int],
        can_add: bool,
        gone: Collection[str],
    ) -> MeshCounts:
        """The mesh now, without workers that are `gone`. Raises PenstockError."""
        found = await of_first(self.mesh, members)
        listed = self._of_model(found)
        self.listed = {one.member_id for one in listed}
        workers = [one for one in listed if one.member_id not in gone]
        self.places = {one.member_id: WorkerPlace(one.member_id, one.address) for one in workers}
        told = await self._gateways(found)
        self._judge.add(told, at)
        done = self._done.add({one.member_id: _done(one) for one in workers if one.HasField("counts")})
        decoding = [one for one in workers if role_of(one) == "decode"]
        targets = self._config.knobs().targets
        waiting, begun = sum(one.waiting for one in workers), told.get(f"{TTFT}_count", 0.0)
        return MeshCounts(
            at=at,
            arrived=begun + found.held + waiting,
            begun=begun,
            computed_tokens=done.get("prompts", 0.0),
            answer_tokens=done.get("generated", 0.0),
            accepted_tokens=done.get("accepted", 0.0),
            queued_tokens=sum(one.queued_prefill_tokens for one in workers),
            held=found.held,
            sequences=sum(one.running + one.waiting for one in decoding),
            kv_used=sum(one.kv_usage for one in decoding),
            pace=self._pace(workers),
            workers=[
                WorkerSeen(
                    id=one.member_id,
                    role=_role(one),
                    ready=state_of(one) in _READY,
                    draining=state_of(one) in _DRAINS,
                    busy=one.running + one.waiting,
                    removable=actuator.removes(self.places[one.member_id]),
                )
                for one in workers
            ],
            starting=starting,
            judged=int(self._judge.count(TTFT)),
            ttft_met=self._judge.met(TTFT, targets.ttft_s),
            itl_met=self._judge.met(ITL, targets.itl_s),
            can_add=can_add,
        )

    def _of_model(self, found: router_pb2.MembersResponse) -> list[router_pb2.JoinedMember]:
        workers = [one for one in found.members if one.role != router_pb2.ROLE_KVSTORE]
        if not self.model:
            models = sorted({one.model_name for one in workers})
            if len(models) > 1:
                raise Refused(f"the mesh has several models: name one of {', '.join(models)} with --model-name")
            self.model = models[0] if models else ""
        mine = [one for one in workers if one.model_name == self.model]
        self.left_alone = sum(role_of(one) not in ROLES for one in mine)
        return [one for one in mine if role_of(one) in ROLES]

    async def _gateways(self, found: router_pb2.MembersResponse) -> Mapping[str, float]:
        """Sums of what all gateways have counted; those that do not answer add nothing new."""
        tls = {one.http_address: one.tls for one in found.gateways}
        addresses: Sequence[str] = self._config.gateway_http or [*tls]
        guess = any(tls.values())  # of an address that no router knows by that name
        texts = await asyncio.gather(*(self._metrics(one, tls=tls.get(one, guess)) for one in addresses))
        pairs = zip(addresses, texts, strict=True)
        return self._told.add({address: figures(text, self.model) for address, text in pairs if text})

    async def _metrics(self, address: str, *, tls: bool) -> str:
        """What a gateway has counted, in Prometheus' form; empty where it does not say so."""
        url = f"http{'s' * tls}://{address}/metrics"
        try:
            headers = dict(self._door.metadata(router_pb2.MeshWatcher(address=address, tls=tls)))
            answer = await call(url, headers=headers, ca=self._config.ca, timeout_s=_METRICS_S)
        except (NoAnswer, InvalidRequest) as error:
            self._log.debug("a gateway does not say what it has counted", gateway=address, reason=str(error))
            return ""
        return answer.body.decode(errors="replace") if answer.status == 200 else ""

    def _pace(self, workers: Sequence[router_pb2.JoinedMember]) -> WorkerPace:
        rates = [one.prefill_tokens_per_s for one in workers if one.prefill_tokens_per_s > 0]
        for one in workers:
            if one.running and one.decode_step_s > 0:
                self._step.add(one.decode_step_s, (1.0, float(one.running)))
        base_s, sequence_s = self._step.known
        known = base_s > 0 or sequence_s > 0
        return WorkerPace(
            prefill_rate=sum(rates) / len(rates) if rates else _RATE,
            step_s=base_s if known else _STEP_S,
            sequence_s=sequence_s if known else _SEQUENCE_S,
            max_running=min((one.max_running for one in workers if one.max_running), default=1),
        )


def _done(member: router_pb2.JoinedMember) -> dict[str, float]:
    counts = member.counts
    return {
        "prompts": float(counts.prompts.computed),
        "generated": float(counts.generated),
        "accepted": float(counts.accepted),
    }


def _role(member: router_pb2.JoinedMember) -> WorkRole:
    return "prefill" if member.role == router_pb2.ROLE_PREFILL else "decode"
