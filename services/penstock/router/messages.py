"""Router messages to and from plain objects. Every field that a peer sends is checked here, once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from penstock.errors import InvalidRequest
from penstock.kv.bounds import check_key, keys_of
from penstock.kv.spec import spec_from_message, spec_to_message
from penstock.router.planner import PlanAsk, Planned
from penstock.router.policy import Role
from penstock.router.registry import Member, RegistryView, Report, Seat
from penstock.rpc.bounds import check_address, check_count, check_id, check_name, check_seconds, check_session
from penstock.v1 import common_pb2, router_pb2

_STATES = frozenset(common_pb2.SessionState.values())
_MOST_HINTS = 512
"""Most hints of one call: the router passes them on in one step of its event loop."""
_MOST_AVOIDED = 256
"""Members that one request may have lost; a stream that moves more often has long been given up."""
_ROLES = {
    router_pb2.ROLE_PREFILL: Role.PREFILL,
    router_pb2.ROLE_DECODE: Role.DECODE,
    router_pb2.ROLE_BOTH: Role.BOTH,
}


def member(hello: router_pb2.Hello) -> Member:
    """A peer, as it describes itself. Raises InvalidRequest."""
    check_id("hello.member_id", hello.member_id)
    if hello.role != router_pb2.ROLE_KVSTORE and hello.role not in _ROLES:
        raise _bad("hello.role", "prefill, decode, both or kvstore")
    check_address("hello.address", hello.address)
    check_name("hello.host_id", hello.host_id)
    if hello.role == router_pb2.ROLE_KVSTORE:
        return Member(id=hello.member_id, role=None, address=hello.address, host_id=hello.host_id)
    return _worker(hello)


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
    )


def hear(seat: Seat, load: router_pb2.Load, now: float) -> None:
    """A load report, into the seat. Raises InvalidRequest."""
    if seat.member.role is None:
        raise _bad("load", "not for stores")
    rates = (load.prefill_tokens_per_s, load.decode_step_s, load.fetch_bytes_per_s)
    if any(not math.isfinite(rate) or rate < 0 for rate in (*rates, load.remote_bytes_per_s)):
        raise _bad("load", "rates that are finite and not negative")
    seat.hear(Report(load.running, load.waiting, load.queued_prefill_tokens, load.free_kv_tokens), now)
    seat.measure(*rates, now, load.remote_bytes_per_s)


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
    if message.after:
        check_key("ask.after", message.after)
    return PlanAsk(
        model=message.model_name,
        prompt_tokens=message.prompt_tokens,
        max_tokens=max(1, message.max_tokens),
        tenant=message.tenant,
        session=message.session,
        block_keys=keys_of("ask.block_keys", message.block_keys),
        avoid=frozenset(message.avoid),
        output_tokens=message.output_tokens,
        after=message.after,
    )


def keys_wanted() -> router_pb2.PlanResponse:
    """The answer to an ask whose first keys are not known."""
    return router_pb2.PlanResponse(keys_wanted=True)


def plan(planned: Planned, epoch: int) -> router_pb2.PlanResponse:
    """The answer."""
    response = router_pb2.PlanResponse(
        decode=_placement(planned.decode, planned.decode_sources),
        epoch=epoch,
        reasons=_reasons(planned),
    )
    if planned.prefill is not None:
        response.prefill.CopyFrom(_placement(planned.prefill, planned.prefill_sources))
    return response


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
            )
            for model in seen.models
        ],
        silent=seen.silent,
    )


def stores(addresses: Iterable[str]) -> router_pb2.JoinResponse:
    """The message that introduces the stores to each other."""
    return router_pb2.JoinResponse(stores=router_pb2.Stores(addresses=addresses))


def _reasons(planned: Planned) -> router_pb2.PlanReasons:
    decision = planned.decision
    return router_pb2.PlanReasons(
        first_token_s=decision.first_token_s,
        answer_s=decision.total_s,
        queue_s=decision.queue_s,
        cached_tokens=decision.cached_tokens,
        remote_tokens=decision.prompt.remote,
        resident_tokens=decision.prompt.resident,
        awaited_tokens=decision.prompt.awaited,
        uncached_tokens=decision.uncached_tokens,
        expected_output=planned.expected_output,
        choices=decision.choices,
        other_s=decision.other_s,
        home=planned.home,
    )


def _placement(place: Member, sources: Sequence[str]) -> router_pb2.Placement:
    return router_pb2.Placement(member_id=place.id, address=place.address, sources=sources)


def _bad(field: str, right: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: must be {right}", field=field)
