"""Router messages to and from plain objects. Every field that a peer sends is checked here, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from msgspec.structs import astuple

from penstock.errors import Forbidden, InvalidRequest, Refused
from penstock.kv.bounds import check_key, check_namespace, keys_of
from penstock.kv.identity import KEY_BYTES
from penstock.kv.spec import spec_from_message, spec_to_message
from penstock.router.line import HeldAsk
from penstock.router.plans import PlanAsk, Planned
from penstock.router.registry import HeldAdapter, Measured, Member, Registry, RegistryView, Report, Seat
from penstock.router.running import RunningPlan
from penstock.router.workers import Role
from penstock.rpc.bounds import (
    check_address,
    check_count,
    check_id,
    check_length,
    check_name,
    check_seconds,
    check_session,
)
from penstock.rpc.capability import PLAN_KEY_BYTES, PlanTerms
from penstock.rpc.checkup import WIRE, own_version
from penstock.rpc.identity import CallingMember, MemberRole
from penstock.runtime.addresses import HostPort, SocketAddress
from penstock.v1 import common_pb2, router_pb2

MAX_WEIGHT = 1000.0
MAX_PRIORITY = 1000
_STATES = frozenset(common_pb2.SessionState.values())
_MOST_HINTS = 512
"""Most hints of one call: the router passes them on in one step of its event loop."""
_MOST_AVOIDED = 256
"""Members that one request may have lost; a stream that moves more often has long been given up."""
_MOST_VERSION = 64
_MOST_ADAPTERS = 1024
_LONGEST_PATH = 4096
_ROLES = {
    router_pb2.ROLE_PREFILL: Role.PREFILL,
    router_pb2.ROLE_DECODE: Role.DECODE,
    router_pb2.ROLE_BOTH: Role.BOTH,
}
_CERTIFICATES: Mapping[router_pb2.Role.ValueType, MemberRole] = {
    **dict.fromkeys(_ROLES, "worker"),
    router_pb2.ROLE_KVSTORE: "store",
    router_pb2.ROLE_DRAFT: "draft",
}
"""The role of the certificate that a member of each role shows."""

_TO_MESSAGE = {role: message for message, role in _ROLES.items()}


def member(hello: router_pb2.Hello, caller: CallingMember | None = None) -> Member:
    """A worker or a store, as it describes itself. Raises InvalidRequest, Refused for another wire, and Forbidden for
    what its certificate does not cover."""
    if hello.role != router_pb2.ROLE_KVSTORE and hello.role not in _ROLES:
        raise _bad("hello.role", "prefill, decode, both or kvstore, or draft on a stream of its own")
    _check_member(hello, caller)
    if hello.role == router_pb2.ROLE_KVSTORE:
        who = hello.member_id
        return Member(id=who, role=None, address=hello.address, host_id=hello.host_id, version=hello.version)
    return _worker(hello)


def drafter(hello: router_pb2.Hello, caller: CallingMember | None = None) -> Member:
    """A draft service, as it describes itself; its role is None. Raises like `member`."""
    _check_member(hello, caller)
    check_name("hello.model_name", hello.model_name)
    return Member(
        id=hello.member_id,
        role=None,
        address=hello.address,
        host_id=hello.host_id,
        model=hello.model_name,
        version=hello.version,
    )


def _check_member(hello: router_pb2.Hello, caller: CallingMember | None) -> None:
    """What all members say of themselves."""
    check_id("hello.member_id", hello.member_id)
    check_name("hello.version", hello.version, most=_MOST_VERSION)
    check_wire(f"member {hello.member_id}", hello.version, hello.wire)
    address = check_address("hello.address", hello.address)
    if caller is not None:
        _check_covered(hello, address, caller)
    check_name("hello.host_id", hello.host_id)


def check_wire(who: str, version: str, wire: int) -> None:
    """Raises Refused for a peer that may mean something else by what it says."""
    if (theirs := wire or 1) != WIRE:
        raise Refused(
            f"{who} of version {version or '?'} has wire {theirs}, and this router of version {own_version()} has wire"
            f" {WIRE}: services of one mesh need the same",
            code="wire_mismatch",
        )


def _check_covered(hello: router_pb2.Hello, address: SocketAddress, caller: CallingMember) -> None:
    right = _CERTIFICATES[hello.role]
    if caller.role != right:
        role = router_pb2.Role.Name(hello.role).removeprefix("ROLE_").lower()
        raise Forbidden(f"hello.role = {role}: needs a certificate of a {right}, not of a {caller.role}")
    if isinstance(address, HostPort) and not caller.may_listen_at(address.host):
        hosts = ", ".join(sorted(caller.hosts))
        raise Forbidden(f"hello.address = {address}: the certificate of {caller.name} is for {hosts}")


def _worker(hello: router_pb2.Hello) -> Member:
    check_name("hello.model_name", hello.model_name, least=1)
    for field in ("max_model_len", "max_running", "kv_capacity_tokens"):
        if getattr(hello, field) == 0:
            raise _bad(f"hello.{field}", "more than 0")
    if not hello.spec.model or hello.spec.block_size == 0 or hello.spec.block_bytes == 0:
        raise _bad("hello.spec", "the model's fingerprint, block_size and block_bytes")
    for field in ("model", "tokenizer", "layout", "dtype"):
        check_name(f"hello.spec.{field}", getattr(hello.spec, field))
    return Member(
        id=hello.member_id,
        role=_ROLES[hello.role],
        address=hello.address,
        host_id=hello.host_id,
        model=hello.model_name,
        spec=spec_from_message(hello.spec),
        max_model_len=hello.max_model_len,
        max_running=hello.max_running,
        kv_capacity_tokens=hello.kv_capacity_tokens,
        routers=max(1, hello.routers),
        version=hello.version,
    )


def adapters(field: str, told: Sequence[router_pb2.Adapter]) -> dict[str, HeldAdapter]:
    """A worker's adapters, by name. Raises InvalidRequest."""
    check_count(field, told, _MOST_ADAPTERS)
    for one in told:
        check_name(f"{field}.name", one.name, least=1)
        check_name(f"{field}.fingerprint", one.fingerprint, least=1)
        check_name(f"{field}.directory", one.directory, most=_LONGEST_PATH)
    return {one.name: HeldAdapter(one.fingerprint, one.directory) for one in told}


def plan_key(field: str, key: bytes) -> bytes:
    """The key with which plans are proved to a worker; empty: it asks for no proof. Raises InvalidRequest."""
    check_length(field, key, 0, PLAN_KEY_BYTES)
    return key


def role(message: router_pb2.Role.ValueType, field: str) -> Role:
    """A worker's role. Raises InvalidRequest."""
    if message not in _ROLES:
        raise _bad(field, "prefill, decode or both")
    return _ROLES[message]


def role_message(role: Role | None) -> router_pb2.Role.ValueType:
    """A member's role, for the wire; None: a store's."""
    return router_pb2.ROLE_KVSTORE if role is None else _TO_MESSAGE[role]


def assign(registry: Registry, seat: Seat, new: router_pb2.Role.ValueType) -> Role:
    """A worker's new role, into the registry. Raises InvalidRequest."""
    if seat.member.role is None:
        raise _bad("role", "that of a worker, and this is a store")
    registry.assign(seat, assigned := role(new, "role"))
    return assigned


def order(role: Role | None, *, drain: bool, end: bool = False) -> router_pb2.JoinResponse:
    """What a worker is told: its role, or whether to drain, and to end then."""
    if role is None:
        return router_pb2.JoinResponse(command=router_pb2.MemberCommand(drain=drain, exit=end))
    return router_pb2.JoinResponse(command=router_pb2.MemberCommand(role=_TO_MESSAGE[role]))


def joined(seat: Seat, *, silent: bool) -> router_pb2.JoinedMember:
    """A member, for people."""
    member, report = seat.member, seat.report
    told = router_pb2.JoinedMember(
        member_id=member.id,
        role=router_pb2.ROLE_KVSTORE,
        address=member.address,
        host_id=member.host_id,
    )
    if member.role is not None:
        told.role = _TO_MESSAGE[member.role]
        told.model_name, told.draining, told.silent = member.model, seat.draining, silent
        told.running, told.waiting, told.queued_prefill_tokens = report.running, report.waiting, report.queued_tokens
        told.adapters.extend(
            router_pb2.Adapter(name=name, fingerprint=held.fingerprint, directory=held.directory)
            for name, held in seat.adapters.items()
        )
        told.kv_usage = 1 - min(1.0, report.free_kv_tokens / member.kv_capacity_tokens)
    return told


def hear(seat: Seat, load: router_pb2.Load, now: float) -> None:
    """A load report, into the seat. Raises InvalidRequest."""
    if seat.member.role is None:
        raise _bad("load", "not for stores")
    rates = (load.prefill_tokens_per_s, load.fetch_bytes_per_s, load.remote_bytes_per_s)
    step = (load.step.base_s, load.step.sequence_s, load.step.token_s)
    progress = load.progress
    overheads = (load.fetch_overhead_s, load.remote_overhead_s)
    near, far = load.handoff, load.far_handoff
    handoffs = (near.overhead_s, near.bytes_per_s, far.overhead_s, far.bytes_per_s)
    prompt = (load.prompt.token_s, load.prompt.context_s)
    seconds = (load.decode_step_s, progress.in_step_s, progress.limit_s)
    if any(not math.isfinite(one) or one < 0 for one in (*rates, *step, *overheads, *handoffs, *prompt, *seconds)):
        raise _bad("load", "rates that are finite and not negative")
    overdue = progress.in_step_s > progress.limit_s
    queued, free = load.queued_prefill_tokens, load.free_kv_tokens
    seat.hear(Report(load.running, load.waiting, queued, free, overdue, load.store_away, load.yielding), now)
    if not any(step):
        step = astuple(seat.step_of(load.decode_step_s))
    seat.measure(Measured(*rates, *step, *overheads, *handoffs, *prompt), now)


def hints(request: common_pb2.HintRequest) -> list[common_pb2.SessionHint]:
    """The session hints of a request. Raises InvalidRequest."""
    check_count("hints", request.hints, _MOST_HINTS)
    return [hint(message) for message in request.hints]


def hint(message: common_pb2.SessionHint) -> common_pb2.SessionHint:
    """A session hint. Raises InvalidRequest."""
    check_session("hint.session", message.session)
    if message.state not in _STATES:
        raise _bad("hint.state", "one of SessionState")
    check_seconds("hint.returns_in_s", message.returns_in_s)
    return message


def ask(message: router_pb2.PlanAsk) -> PlanAsk:
    """A gateway's question. Raises InvalidRequest."""
    if message.prompt_tokens == 0:
        raise _bad("ask.prompt_tokens", "more than 0")
    check_name("ask.model_name", message.model_name, least=1)
    check_name("ask.tenant", message.tenant)
    check_session("ask.session", message.session)
    check_count("ask.avoid", message.avoid, _MOST_AVOIDED)
    for member_id in message.avoid:
        check_id("ask.avoid", member_id)
    check_count("ask.full", message.full, _MOST_AVOIDED)
    if message.after:
        check_key("ask.after", message.after)
    if message.request_id:
        check_id("ask.request_id", message.request_id)
    check_namespace("ask.namespace", message.namespace)
    check_length("ask.cache_root", message.cache_root, 0, KEY_BYTES)
    return PlanAsk(
        model=message.model_name,
        prompt_tokens=message.prompt_tokens,
        max_tokens=max(1, message.max_tokens),
        tenant=message.tenant,
        session=message.session,
        block_keys=keys_of("ask.block_keys", message.block_keys),
        avoid=frozenset(message.avoid),
        full=frozenset(message.full),
        output_tokens=message.output_tokens,
        after=message.after,
        kept=_kept(message.kept) if message.HasField("kept") else None,
        weight=_weight(message.weight),
        priority=_priority(message.priority),
        first_token_s=_target("ask.first_token_s", message.first_token_s if message.HasField("first_token_s") else inf),
        token_s=_target("ask.token_s", message.token_s if message.HasField("token_s") else inf),
        yields=message.yields,
        returned=message.returned,
        request_id=message.request_id,
        namespace=message.namespace,
        cache_root=message.cache_root,
    )


def _kept(message: router_pb2.Kept) -> RunningPlan:
    if message.prefill:
        check_id("ask.kept.prefill", message.prefill)
    check_id("ask.kept.decode", message.decode)
    check_name("ask.kept.plan", message.plan)
    return RunningPlan(message.prefill, message.decode, message.plan)


def kept(charged: RunningPlan, epoch: int, plan: str) -> router_pb2.PlanResponse:
    """The answer to an ask whose workers are known."""
    response = router_pb2.PlanResponse(epoch=epoch, plan=plan)
    response.decode.member_id, response.prefill.member_id = charged.decode, charged.prefill
    return response


def _weight(value: float) -> float:
    if not 0 <= value <= MAX_WEIGHT:  # also for a NaN
        raise _bad("ask.weight", f"from 0 to {MAX_WEIGHT:g}")
    return max(value, 1 / MAX_WEIGHT) if value else 1.0


def _priority(value: int) -> int:
    if abs(value) > MAX_PRIORITY:
        raise _bad("ask.priority", f"from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


def _target(field: str, value: float) -> float:
    if not value >= 0:  # also for a NaN
        raise _bad(field, "0 or more")
    return value


def keys_wanted() -> router_pb2.PlanResponse:
    """The answer to an ask whose first keys are not known."""
    return router_pb2.PlanResponse(keys_wanted=True)


def held_back(held: HeldAsk) -> router_pb2.PlanResponse:
    """The first answer to an ask whose workers have no room yet."""
    return router_pb2.PlanResponse(held=router_pb2.HeldBack(wait_s=held.wait_s))


def plan(
    planned: Planned, ask: PlanAsk, epoch: int, name: str, key_of: Callable[[str], bytes]
) -> router_pb2.PlanResponse:
    """The answer; `name` is the plan's, among those of all routers. `key_of` gives a member's plan key."""
    response = router_pb2.PlanResponse(
        decode=_placement(planned.decode, planned.decode_sources),
        epoch=epoch,
        plan=name,
        reasons=_reasons(planned),
    )
    if planned.prefill is not None:
        response.prefill.CopyFrom(_placement(planned.prefill, planned.prefill_sources))
        _prove(response.prefill, response, ask, key_of)
    _prove(response.decode, response, ask, key_of)
    return response


def _prove(
    place: router_pb2.Placement, plan: router_pb2.PlanResponse, ask: PlanAsk, key_of: Callable[[str], bytes]
) -> None:
    """Adds the proof for one worker of a plan."""
    if key := key_of(place.member_id):
        place.mac = PlanTerms(
            request_id=ask.request_id,
            epoch=plan.epoch,
            namespace=ask.namespace,
            cache_root=ask.cache_root,
            prefill=plan.prefill.address,
            decode=plan.decode.address,
            sources=tuple(place.sources),
        ).mac(key)


def view(seen: RegistryView) -> router_pb2.MeshView:
    """The view that gateways watch."""
    return router_pb2.MeshView(
        models=[
            router_pb2.ServedModel(
                name=model.model,
                spec=spec_to_message(model.spec),
                max_model_len=model.max_model_len,
                ready=model.ready,
                prefill_workers=model.prefill_workers,
                decode_workers=model.decode_workers,
                adapter=model.adapter,
                base=model.base,
            )
            for model in seen.models
        ],
        silent=seen.silent,
    )


def stores(addresses: Iterable[str]) -> router_pb2.JoinResponse:
    """The message that introduces the stores to each other."""
    return router_pb2.JoinResponse(stores=router_pb2.Stores(addresses=addresses))


def _reasons(planned: Planned) -> router_pb2.PlanReasons:
    decision, chosen = planned.decision, planned.decision.chosen
    return router_pb2.PlanReasons(
        first_token_s=chosen.first_token_s,
        answer_s=chosen.total_s,
        queue_s=chosen.prompt.queue_s,
        cached_tokens=decision.cached_tokens,
        remote_tokens=decision.prompt.remote,
        resident_tokens=decision.prompt.resident,
        awaited_tokens=decision.prompt.awaited,
        uncached_tokens=decision.uncached_tokens,
        expected_output=planned.expected_output,
        choices=decision.choices,
        other_s=decision.other_s,
        home=planned.home,
        held_s=planned.held_s,
        compute_s=chosen.prompt.compute_s,
        fetch_s=chosen.prompt.fetch_s,
        pull_s=chosen.prompt.pull_s,
        penalty_s=chosen.prompt.penalty_s,
        handoff_s=chosen.handoff_s,
        room_s=chosen.room_s,
        decode_s=chosen.answer_s,
        store_tokens=decision.prompt.fetched,
    )


def _placement(place: Member, sources: Sequence[str]) -> router_pb2.Placement:
    return router_pb2.Placement(member_id=place.id, address=place.address, sources=sources)


def _bad(field: str, right: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: must be {right}", field=field)
