"""Router messages to and from plain objects. What a peer sent is checked here, once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from penstock.errors import InvalidRequest
from penstock.kv.identity import KEY_BYTES
from penstock.router.planner import PlanAsk, Planned
from penstock.router.policy import Role
from penstock.router.registry import Member, Report, Seat, Served
from penstock.rpc.convert import spec_from_message, spec_to_message
from penstock.v1 import common_pb2, router_pb2

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_TEXT = 512
_MAX_SESSION = 64
_ROLES = {
    router_pb2.ROLE_PREFILL: Role.PREFILL,
    router_pb2.ROLE_DECODE: Role.DECODE,
    router_pb2.ROLE_BOTH: Role.BOTH,
}


def member(hello: router_pb2.Hello) -> Member:
    """What a peer says of itself. Raises InvalidRequest."""
    if not _ID.fullmatch(hello.member_id):
        raise _bad("hello.member_id", "1 to 128 letters, digits or . _ : -")
    if hello.role != router_pb2.ROLE_KVSTORE and hello.role not in _ROLES:
        raise _bad("hello.role", "prefill, decode, both or kvstore")
    if ":" not in hello.address or len(hello.address) > _MAX_TEXT:
        raise _bad("hello.address", "where the mesh reaches this member, host:port")
    if len(hello.host_id) > _MAX_TEXT:
        raise _bad("hello.host_id", f"at most {_MAX_TEXT} characters")
    if hello.role == router_pb2.ROLE_KVSTORE:
        return Member(hello.member_id, None, hello.address, hello.host_id)
    return _worker(hello)


def _worker(hello: router_pb2.Hello) -> Member:
    if not hello.model_name or len(hello.model_name) > _MAX_TEXT:
        raise _bad("hello.model_name", f"1 to {_MAX_TEXT} characters")
    for field in ("max_model_len", "max_running", "kv_capacity_tokens"):
        if getattr(hello, field) == 0:
            raise _bad(f"hello.{field}", "more than 0")
    if not hello.spec.model or hello.spec.block_size == 0 or hello.spec.block_bytes == 0:
        raise _bad("hello.spec", "the model's fingerprint, block_size and block_bytes")
    return Member(
        hello.member_id,
        _ROLES[hello.role],
        hello.address,
        hello.host_id,
        hello.model_name,
        spec_from_message(hello.spec),
        hello.max_model_len,
        hello.max_running,
        hello.kv_capacity_tokens,
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


def check_keys(keys: Iterable[bytes], field: str) -> None:
    """Raises InvalidRequest for a key that can't be a block's."""
    if any(len(key) != KEY_BYTES for key in keys):
        raise _bad(field, f"keys of {KEY_BYTES} bytes")


def hint(message: common_pb2.SessionHint) -> common_pb2.SessionHint:
    """A session hint. Raises InvalidRequest."""
    if len(message.session) > _MAX_SESSION:
        raise _bad("hint.session", f"at most {_MAX_SESSION} characters")
    if message.state not in common_pb2.SessionState.values():
        raise _bad("hint.state", "one of SessionState")
    if not 0 <= message.returns_in_s < math.inf:
        raise _bad("hint.returns_in_s", "a number of seconds, 0 or more")
    return message


def ask(message: router_pb2.PlanAsk) -> PlanAsk:
    """A gateway's question. Raises InvalidRequest."""
    if message.prompt_tokens == 0:
        raise _bad("ask.prompt_tokens", "more than 0")
    if not message.model_name:
        raise _bad("ask.model_name", "the name of a served model")
    check_keys(message.block_keys, "ask.block_keys")
    return PlanAsk(
        model=message.model_name,
        prompt_tokens=message.prompt_tokens,
        max_tokens=max(1, message.max_tokens),
        tenant=message.tenant,
        session=message.session,
        block_keys=message.block_keys,
        avoid=frozenset(message.avoid),
        output_tokens=message.output_tokens,
    )


def plan(planned: Planned, epoch: int) -> router_pb2.PlanResponse:
    """The answer."""
    response = router_pb2.PlanResponse(
        decode=_placement(planned.decode, planned.decode_sources),
        cached_tokens=planned.cached_tokens,
        predicted_s=planned.first_token_s,
        epoch=epoch,
    )
    if planned.prefill is not None:
        response.prefill.CopyFrom(_placement(planned.prefill, planned.prefill_sources))
    return response


def view(served: list[Served]) -> router_pb2.MeshView:
    """What gateways watch."""
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
            for model in served
        ]
    )


def stores(addresses: Iterable[str]) -> router_pb2.JoinResponse:
    """What stores are told of each other."""
    return router_pb2.JoinResponse(stores=router_pb2.Stores(addresses=addresses))


def _placement(place: Member, sources: Sequence[str]) -> router_pb2.Placement:
    return router_pb2.Placement(member_id=place.id, address=place.address, sources=sources)


def _bad(field: str, right: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: must be {right}", field=field)
