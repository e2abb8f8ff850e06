"""What routers weighed when they planned a request."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.json_format import MessageToDict

from penstock.rpc.shown.figures import Json
from penstock.v1 import router_pb2

_MOST = 256


def plan_names(record: Json) -> list[str]:
    """The plans that a gateway's record of a request names."""
    attempts = [attempt for choice in record.get("choices", ()) for attempt in choice["attempts"]]
    return [attempt["plan"] for attempt in attempts if attempt["plan"]][:_MOST]


def plans_of(answers: Iterable[router_pb2.PlansResponse]) -> Json:
    """The plans of the routers' answers, by their names."""
    return {
        plan.plan: MessageToDict(plan, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for answer in answers
        for plan in answer.plans
    }
