"""Messages of gRPC drawn from their descriptors: each is answered, or refused with a field's name."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import ParseDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.gateway.request.bounds import BOUNDS
from penstock.rpc.errors import from_rpc
from penstock.v1 import gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.attack


HELLO = {"role": "user", "content": "hi"}
ENDS = [end for bound in BOUNDS.values() for end in (bound.low, bound.high)]
NEAR = sorted({end + step for end in ENDS for step in (-1, 0, 1)})
WHOLE = [int(value) for value in NEAR if float(value).is_integer()]
SOME = ["", "a", "user", "tool", "auto", "{}", "[", '{"type": "object"}', "<|im_end|>"]
TEXTS = st.sampled_from(SOME) | st.text(max_size=6)
RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """What one field may hold, as protobuf's JSON."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(field.message_type)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return TEXTS
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in RANGES:
        low, high = RANGES[kind]
        return st.sampled_from([value for value in WHOLE if low <= value <= high]) | st.integers(0, 9)
    return st.sampled_from([*map(float, NEAR), "NaN", "Infinity", 0.5])


def messages(kind: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Messages of a type, as protobuf's JSON; of each group of alternatives at most one."""
    plain = {field.name: one_or_more(field) for field in kind.fields if field.containing_oneof is None or single(field)}
    drawn = st.fixed_dictionaries({}, optional=plain)
    groups = [group for group in kind.oneofs if not single(group.fields[0])]
    if not groups:
        return drawn
    [group] = groups
    chosen = st.sampled_from(list(group.fields)).flatmap(lambda one: values(one).map(lambda value: {one.name: value}))
    return st.tuples(drawn, chosen).map(lambda two: two[0] | two[1])


def single(field: FieldDescriptor) -> bool:
    """Whether its group of alternatives is only how protobuf writes `optional`."""
    return field.containing_oneof is not None and len(field.containing_oneof.fields) == 1


def one_or_more(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if not field.is_repeated:
        return values(field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return st.dictionaries(values(key).map(str), values(value), max_size=3)
    return st.lists(values(field), max_size=3)


@pytest.mark.parametrize(
    ("method", "kind", "base"),
    [
        ("ChatCompletion", gateway_pb2.ChatCompletionRequest, {"messages": [HELLO]}),
        ("Completion", gateway_pb2.CompletionRequest, {"prompts": ["hi"]}),
    ],
)
async def test_any_message(setup, method, kind, base):
    drawn = messages(kind.DESCRIPTOR)
    known = {field.name for field in kind.DESCRIPTOR.fields}

    def run_all(stub: gateway_pb2_grpc.GatewayStub) -> None:
        @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(drawn)
        def run(fields: dict[str, Any]) -> None:
            asked = ParseDict({**base, **fields, "model": "tiny"}, kind())
            try:
                last = list(getattr(stub, method)(asked, timeout=60))[-1]
            except grpc.RpcError as failed:
                assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT, (asked, failed)
                field = (from_rpc(failed).field or "").partition(".")[0].partition("[")[0]
                assert field in known and field in failed.details(), failed
            else:
                assert last.usage.prompt_tokens == last.usage.computed_tokens + last.usage.cached_tokens > 0

        run()

    with grpc.insecure_channel(setup.gateway.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        await asyncio.to_thread(run_all, stub)
        plain = ParseDict({**base, "model": "tiny"}, kind())
        assert await asyncio.to_thread(lambda: list(getattr(stub, method)(plain))), "it serves on"
    await setup.mesh.until(lambda: setup.mesh.live == 0)
