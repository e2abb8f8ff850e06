"""Conversions between messages of the mesh and the gateway's plain values, without any decisions."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from math import inf

from penstock.gateway.request.ask import Sampling
from penstock.gateway.request.bounds import BOUNDS
from penstock.gateway.request.work import (
    TIERS,
    Assignment,
    ChoiceRequest,
    Finish,
    Gain,
    Placement,
    Promised,
    PromptUse,
    Reason,
    Reasons,
    SampledToken,
)
from penstock.kv.hint import ReturnHint
from penstock.pictures.picture import Picture
from penstock.runtime.drafts import DraftAccount, proposer_name
from penstock.v1 import common_pb2, decode_pb2, pictures_pb2, prefill_pb2, router_pb2

_PROMPT_KEY = bytes([common_pb2.Request.PROMPT_IDS_FIELD_NUMBER << 3 | 2])
_GOES_ON_S = 60
_FINISH: dict[int, Finish] = {common_pb2.FINISH_STOP: "stop", common_pb2.FINISH_LENGTH: "length"}


def plan_ask(
    request: ChoiceRequest, generated: int, avoid: Mapping[str, Reason], known: int = 0
) -> router_pb2.PlanRequest:
    """Asks for workers; `generated` tokens of the answer exist, and the members in `avoid` have not helped. The router
    may have the `known` first keys."""
    return router_pb2.PlanRequest(
        ask=router_pb2.PlanAsk(
            model_name=request.model,
            tenant=request.tenant,
            session=request.session,
            prompt_tokens=len(request.prompt_ids),
            max_tokens=request.max_tokens,
            block_keys=b"".join(request.keys[known:]),
            avoid=avoid,
            full=[member for member, reason in avoid.items() if reason == "full"],
            output_tokens=generated,
            after=request.keys[known - 1] if known else b"",
            weight=request.weight,
            priority=_priority(request, generated),
            first_token_s=_left(request.first_token_by),
            token_s=None if request.token_s == inf else request.token_s,
            yields=request.yields,
            request_id=request.id,
            namespace=request.namespace,
            cache_root=request.root,
            returned=generated > 0 and not request.interrupted,
        )
    )


def _priority(request: ChoiceRequest, generated: int) -> int:
    """An answer that something has interrupted comes before what its tenant has asked for in the last minute: somebody
    is reading it."""
    if not (generated and request.interrupted):
        return request.priority
    return max(request.priority - _GOES_ON_S, int(BOUNDS["priority"].low))


def _left(until: float) -> float | None:
    """Seconds until then; None: for ever."""
    return None if until == inf else max(0.0, until - time.perf_counter())


def plan_kept(request: ChoiceRequest, generated: int, chosen: Assignment) -> router_pb2.PlanRequest:
    """Charges a router with what another one has planned; `generated` tokens of the answer exist."""
    message = plan_ask(request, generated, {}, len(request.keys))
    message.ask.after = b""  # a charge without keys counts whole
    kept = message.ask.kept
    kept.decode, kept.plan = chosen.decode.member, chosen.plan
    if chosen.prefill is not None and not generated:
        kept.prefill = chosen.prefill.member
    return message


def plan_progress(generated: int) -> router_pb2.PlanRequest:
    """Tells the router that the prompt is computed and that `generated` tokens exist."""
    return router_pb2.PlanRequest(progress=router_pb2.PlanProgress(prefill_done=True, generated=generated))


def plan_hint(hint: ReturnHint, *, waits_for_tool: bool) -> router_pb2.PlanRequest:
    """The hint about the session's next move after the request of this plan."""
    if hint.ended:
        state = common_pb2.SESSION_STATE_ENDED
    else:
        state = common_pb2.SESSION_STATE_TOOL if waits_for_tool else common_pb2.SESSION_STATE_USER
    return router_pb2.PlanRequest(hint=common_pb2.SessionHint(state=state, returns_in_s=hint.returns_at))


def session_hint(session: str, hint: ReturnHint) -> common_pb2.HintRequest:
    """A hint about a session, sent without a request of it."""
    state = common_pb2.SESSION_STATE_ENDED if hint.ended else common_pb2.SESSION_STATE_UNSPECIFIED
    said = common_pb2.SessionHint(session=session, state=state, returns_in_s=hint.returns_at)
    return common_pb2.HintRequest(hints=[said])


def assignment(message: router_pb2.PlanResponse) -> Assignment:
    """The router's answer."""
    prefill = _placement(message.prefill) if message.HasField("prefill") else None
    reasons = _reasons(message.reasons) if message.HasField("reasons") else None
    return Assignment(_placement(message.decode), prefill, message.epoch, reasons, message.plan)


def prefill_request(
    request: ChoiceRequest, output: Sequence[int], place: Placement, chosen: Assignment
) -> prefill_pb2.PrefillRequest:
    """The request to the worker that computes the prompt, of those that were chosen; `output` has the tokens that were
    emitted before."""
    message = prefill_pb2.PrefillRequest(capability=_capability(place, chosen))
    _fill(message.request, request, output, place.sources)
    return message


def generate_request(request: ChoiceRequest, output: Sequence[int], chosen: Assignment) -> decode_pb2.GenerateRequest:
    """The request to the worker that decodes."""
    message = decode_pb2.GenerateRequest(capability=_capability(chosen.decode, chosen))
    _fill(message.request, request, output, chosen.decode.sources)
    if chosen.prefill is not None:
        message.handoff.address, message.handoff.mac = chosen.prefill.address, chosen.prefill.mac
    return message


def _capability(place: Placement, chosen: Assignment) -> common_pb2.Capability:
    prefill = "" if chosen.prefill is None else chosen.prefill.address
    return common_pb2.Capability(epoch=chosen.epoch, prefill=prefill, decode=chosen.decode.address, mac=place.mac)


def prefill_gain(event: prefill_pb2.PrefillEvent) -> Gain | None:
    """The first token and the cost of the prompt; None for an event without a token."""
    if not event.HasField("token"):
        return None
    return Gain(
        stage="prefill",
        tokens=(_token(event.token),),
        finish=_FINISH.get(event.finish),
        use=_use(event.cache),
        times=_times(event.times),
        promised=_promised(event.retained) if event.HasField("retained") else None,
    )


def decode_gain(event: decode_pb2.GenerateEvent) -> Gain:
    """Further tokens; the first event and the last also report costs."""
    return Gain(
        stage="decode",
        tokens=[_token(token) for token in event.tokens],
        finish=_FINISH.get(event.finish),
        use=_use(event.cache) if event.HasField("cache") else None,
        times=_times(event.times) if event.HasField("times") else {},
        drafts=_drafts(event.drafts) if event.HasField("drafts") else None,
        promised=_promised(event.retained) if event.HasField("retained") else None,
    )


def drafts_gain(counts: decode_pb2.CallDrafts) -> Gain:
    """What the worker has drafted for one call."""
    return Gain(stage="decode", drafts=_drafts(counts.drafts))


def sampling_message(sampling: Sampling, max_tokens: int, seed: int) -> common_pb2.Sampling:
    """Sets every field, so that no worker's default applies."""
    return common_pb2.Sampling(
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature,
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=seed,
        logprobs=sampling.logprobs,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        grammar=sampling.grammar,
        no_drafts=not sampling.drafts,
        proposers=sampling.proposers,
        banned_token_ids=sampling.banned_token_ids,
        bad_words=[word.lstrip() for word in sampling.bad_words],  # who thinks in tokens writes a space first
    )


def _packed_prompt(ids: Sequence[int]) -> bytes:
    """A serialized message of the prompt alone.

    Protobuf's own way into a repeated field makes a Python integer of each token, which takes milliseconds for a long
    prompt. Packed fixed32 are the bytes of an array behind the field's key and their number:
    https://protobuf.dev/programming-guides/encoding/#packed
    """
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    return _PROMPT_KEY + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    said = bytearray()
    while number >= 0x80:
        said.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*said, number))


def _fill(message: common_pb2.Request, request: ChoiceRequest, output: Sequence[int], sources: Sequence[str]) -> None:
    message.request_id = request.id
    message.MergeFromString(_packed_prompt(request.prompt_ids))
    message.output_ids.extend(output)
    message.sampling.CopyFrom(sampling_message(request.sampling, request.max_tokens, request.seed))
    message.cache_root = request.root
    message.session = request.session
    message.namespace = request.namespace
    message.seal_key = request.seal_key
    message.adapter = request.adapter
    message.retain.extend(common_pb2.Retain(ttl_s=wish.seconds, blocks=wish.blocks) for wish in request.keep)
    message.sources.extend(sources)
    message.priority = _priority(request, len(output))
    message.yields = request.yields
    message.resumed = request.interrupted and len(output) > 0
    message.pictures.extend(
        common_pb2.PicturePlace(digest=one.picture.digest, first=one.first, count=one.count) for one in request.pictures
    )


def picture_names(request: ChoiceRequest) -> pictures_pb2.PictureNews:
    """Names the pictures of a request, each once."""
    names = [
        pictures_pb2.PictureName(digest=one.digest, rows=one.grid.rows, columns=one.grid.columns, side=one.side)
        for one in pictures_of(request)
    ]
    return pictures_pb2.PictureNews(names=pictures_pb2.PictureNames(namespace=request.namespace, pictures=names))


def pictures_of(request: ChoiceRequest) -> list[Picture]:
    """The pictures of a request, each once."""
    return list({one.picture.digest: one.picture for one in request.pictures}.values())


def _placement(message: router_pb2.Placement) -> Placement:
    return Placement(message.member_id, message.address, tuple(message.sources), message.mac)


def _reasons(message: router_pb2.PlanReasons) -> Reasons:
    return Reasons(
        first_token_s=message.first_token_s,
        answer_s=message.answer_s,
        queue_s=message.queue_s,
        compute_s=message.compute_s,
        fetch_s=message.fetch_s,
        pull_s=message.pull_s,
        penalty_s=message.penalty_s,
        handoff_s=message.handoff_s,
        room_s=message.room_s,
        decode_s=message.decode_s,
        held_s=message.held_s,
        cached_tokens=message.cached_tokens,
        remote_tokens=message.remote_tokens,
        resident_tokens=message.resident_tokens,
        store_tokens=message.store_tokens,
        awaited_tokens=message.awaited_tokens,
        uncached_tokens=message.uncached_tokens,
        expected_output=message.expected_output,
        choices=message.choices,
        other_s=message.other_s if message.HasField("other_s") else None,
        home=message.home,
    )


def _token(message: common_pb2.Token) -> SampledToken:
    logprob = message.logprob if message.HasField("logprob") else None
    proposer = proposer_name(message.proposer) if message.HasField("proposer") else None
    return SampledToken(message.index, message.id, logprob, [(top.id, top.logprob) for top in message.top], proposer)


def _use(message: common_pb2.CacheUse) -> PromptUse:
    return PromptUse(message.computed, {tier: getattr(message, tier) for tier in TIERS})


def _drafts(message: common_pb2.Drafts) -> DraftAccount:
    return DraftAccount(
        message.passes,
        list(message.verified),
        list(message.accepted),
        list(message.verified_at),
        list(message.accepted_at),
        message.waited_s,
    )


def _times(message: common_pb2.StageTimes) -> dict[str, float]:
    return {
        "queue": message.queue, "fetch": message.fetch, "prefill": message.prefill, "decode": message.decode,
    }  # fmt: skip


def _promised(message: common_pb2.Retained) -> Promised:
    return Promised(message.blocks, message.seconds)
