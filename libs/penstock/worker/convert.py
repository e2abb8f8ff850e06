"""Converts requests, tokens and accounts between protobuf and the engine's dataclasses."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engine.request import FinishReason, Request, TokenOut, Update
from penstock.errors import InvalidRequest
from penstock.kv.bounds import check_namespace
from penstock.kv.client.origin import Origin
from penstock.kv.identity import KEY_BYTES
from penstock.kv.sealing import SEAL_KEY_BYTES
from penstock.pictures.picture import ShownPicture
from penstock.pictures.reading import MOST_PICTURES
from penstock.rpc.bounds import bad, check_count, check_id, check_length, check_name, check_session
from penstock.runtime.drafts import DraftAccount, proposer_name, proposer_number
from penstock.v1 import common_pb2
from penstock.worker.order import Mark, Order
from penstock.worker.pictures import HeldPictures
from penstock.worker.retaining import Kept
from penstock.worker.sampling import sampling_from_message

_FINISH = {
    None: common_pb2.FINISH_UNSPECIFIED,
    "stop": common_pb2.FINISH_STOP,
    "length": common_pb2.FINISH_LENGTH,
}
_MAX_MARKS = 5
"""Marks of one request: at most four of its messages, and the request as a whole."""
_MAX_SOURCES = 64
_MAX_PRIORITY = 1000


def order_from_message(message: common_pb2.Request, pictures: HeldPictures, max_tokens: int | None = None) -> Order:
    """An order from the wire, whose pictures are among `pictures`; `max_tokens` replaces the message's. Raises
    InvalidRequest that names the field, and Unavailable for a picture that is not there."""
    check_id("request_id", message.request_id)
    check_length("cache_root", message.cache_root, KEY_BYTES)
    check_session("session", message.session)
    check_namespace("namespace", message.namespace)
    check_length("seal_key", message.seal_key, 0, SEAL_KEY_BYTES)
    check_count("sources", message.sources, _MAX_SOURCES)
    check_name("adapter", message.adapter)
    if not message.prompt_ids:
        raise InvalidRequest("prompt_ids is empty; a prompt has at least one token", field="prompt_ids")
    request = Request(
        id=message.request_id,
        prompt=tuple(message.prompt_ids),
        output=tuple(message.output_ids),
        sampling=sampling_from_message(message.sampling, max_tokens),
        owner=message.namespace,
        seal=message.seal_key,
        adapter=message.adapter,
        session=message.session.encode(),
        priority=_priority(message.priority),
        yields=message.yields,
        resumed=message.resumed,
        pictures=_pictures(message, pictures),
    )
    origin = Origin(message.session, message.namespace, tuple(message.sources), message.seal_key)
    return Order(request=request, cache_root=message.cache_root, origin=origin, marks=_marks(message))


def _pictures(message: common_pb2.Request, held: HeldPictures) -> tuple[ShownPicture, ...]:
    check_count("pictures", message.pictures, MOST_PICTURES)
    return tuple(
        ShownPicture(held.find(message.namespace, one.digest), one.first, one.count) for one in message.pictures
    )


def _priority(value: int) -> int:
    if abs(value) > _MAX_PRIORITY:
        raise bad("priority", str(value), f"must be from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")
    return value


def _marks(message: common_pb2.Request) -> tuple[Mark, ...]:
    check_count("retain", message.retain, _MAX_MARKS)
    if message.retain and not message.namespace:
        raise InvalidRequest("retain needs a namespace: a promise is made to a tenant", field="namespace")
    for wish in message.retain:
        if not 0 < wish.ttl_s < float("inf"):
            raise bad("retain.ttl_s", str(wish.ttl_s), "must be a number of seconds, more than 0")
    return tuple(Mark(wish.ttl_s, wish.blocks or None) for wish in message.retain)


def token_to_message(token: TokenOut) -> common_pb2.Token:
    """One token for the wire."""
    return common_pb2.Token(
        index=token.index,
        id=token.token,
        logprob=token.logprob,
        top=[common_pb2.TopLogprob(id=id, logprob=logprob) for id, logprob in token.top],
        proposer=None if token.proposer is None else proposer_number(token.proposer),
    )


def token_from_message(message: common_pb2.Token) -> TokenOut:
    """One token from the wire."""
    return TokenOut(
        index=message.index,
        token=message.id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple((top.id, top.logprob) for top in message.top),
        proposer=proposer_name(message.proposer) if message.HasField("proposer") else None,
    )


def cache_to_message(computed: int, fetched: Mapping[str, int]) -> common_pb2.CacheUse:
    """Where the KV of the given tokens came from, in tokens: computed by steps, and fetched and used, by tier.

    The engine counts the first, the worker counts the second; this function does not force their sum to agree.
    """
    return common_pb2.CacheUse(computed=computed, **fetched)


def retained_to_message(kept: Kept) -> common_pb2.Retained:
    """A promise of the store, for the wire."""
    return common_pb2.Retained(seconds=kept.seconds, blocks=kept.blocks)


def drafts_to_message(account: DraftAccount) -> common_pb2.Drafts:
    """What was drafted so far, for the wire."""
    return common_pb2.Drafts(
        passes=account.passes,
        verified=account.verified,
        accepted=account.right,
        verified_at=account.verified_at,
        accepted_at=account.right_at,
        waited_s=account.waited_s,
    )


def finish_to_message(finish: FinishReason | None) -> common_pb2.Finish.ValueType:
    """Why a sequence ended, for the wire."""
    return _FINISH[finish]


def times_to_message(update: Update) -> common_pb2.StageTimes:
    """Seconds by stage, for the wire."""
    return common_pb2.StageTimes(
        queue=update.queue_s, fetch=update.load_s, prefill=update.prefill_s, decode=update.decode_s
    )
