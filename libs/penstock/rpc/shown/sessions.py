"""The sessions that routers remember, as one list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.rpc.shown.figures import Json
from penstock.v1 import router_pb2


def addresses(found: router_pb2.MembersResponse) -> dict[str, str]:
    """Where the members are, by their ids."""
    return {one.member_id: one.address for one in found.members}


def sessions_of(answers: Sequence[router_pb2.SessionsResponse], there: Mapping[str, str], most: int) -> Json:
    """The latest `most` sessions of the routers' answers, each once; 0: all. `there` are the members' addresses."""
    latest: dict[tuple[str, str], router_pb2.KnownSession] = {}
    for one in _all(answers):
        known = latest.get((one.model_name, one.session))
        # A router that has planned its last request knows more than one that was told of it.
        if known is None or (not one.tenant, one.age_s) < (not known.tenant, known.age_s):
            latest[one.model_name, one.session] = one
    shown = sorted(latest.values(), key=lambda one: one.age_s)[: most or None]
    return {
        "known": max((answer.known for answer in answers), default=0),
        "sessions": [_session(one, there) for one in shown],
    }


def _all(answers: Sequence[router_pb2.SessionsResponse]) -> Iterable[router_pb2.KnownSession]:
    return (one for answer in answers for one in answer.sessions)


def _session(one: router_pb2.KnownSession, there: Mapping[str, str]) -> Json:
    return {
        "session": one.session,
        "tenant": one.tenant,
        "model": one.model_name,
        "prefill": there.get(one.prefill, one.prefill),
        "decode": there.get(one.decode, one.decode),
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "answer_tokens": one.answer_tokens,
        "requests": one.requests,
        "age_s": round(one.age_s, 3),
    }
