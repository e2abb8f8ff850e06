"""The gateway's own way of filling in a prompt gives what protobuf's gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.mesh.wire import generate_request, plan_ask
from penstock.gateway.request.ask import Sampling
from penstock.gateway.request.work import Assignment, ChoiceRequest, Placement
from penstock.v1 import common_pb2


def choice(ids: list[int]) -> ChoiceRequest:
    return ChoiceRequest(
        id="r",
        model="m",
        tenant="t",
        namespace=b"n" * 16,
        session="",
        prompt_ids=ids,
        root=b"r" * 32,
        keys=[],
        sampling=Sampling(),
        max_tokens=3,
        seed=5,
    )


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
@example([1] * 31)
@example([1] * 32)
@example([7] * 5000)
def test_a_prompt_arrives_as_it_was(ids):
    request = generate_request(choice(ids), [9], Assignment(Placement("d", "a:1"))).request
    assert list(request.prompt_ids) == ids
    assert request.request_id == "r" and list(request.output_ids) == [9] and request.sampling.seed == 5
    by_protobuf = common_pb2.Request()
    by_protobuf.CopyFrom(request)
    del by_protobuf.prompt_ids[:]
    by_protobuf.prompt_ids.extend(ids)
    assert by_protobuf == request
    assert common_pb2.Request.FromString(request.SerializeToString()) == request


@pytest.mark.parametrize(("asked", "then"), [(0, -60), (100, 40), (-1000, -1000)])
def test_an_answer_that_goes_on_comes_earlier(asked, then):
    """For the router and for the worker, which refuse what is out of bounds; but not one that its client had left."""
    one, chosen = replace(choice([1]), priority=asked), Assignment(Placement("d", "a:1"))
    cut = replace(one, interrupted=True)
    for request, output, expected in ((one, [], asked), (cut, [], asked), (one, [9], asked), (cut, [9], then)):
        assert generate_request(request, output, chosen).request.priority == expected
        ask = plan_ask(request, len(output), {}).ask
        assert (ask.priority, ask.output_tokens) == (expected, len(output))
        assert ask.returned == (bool(output) and not request.interrupted)
