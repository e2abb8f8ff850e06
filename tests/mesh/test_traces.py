"""One trace through all six services, from the `traceparent` of the HTTP request on."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.engine.request import SamplingParams
from penstock.testing.mesh import MeshSetup

from .support import DRAFTING, body_of, drafting, prompt, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PLAIN = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


async def test_every_service_is_in_the_trace(spans, tiny, meshes, http):
    async with meshes(MeshSetup(model=tiny, draft=str(tiny), engine=DRAFTING)) as mesh:
        await drafting(http, mesh)
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "x-request-id": "traced"}
        answer = await http.post(
            f"{mesh.url}/v1/completions", json=body_of(prompt("trace", 200), PLAIN), headers=headers
        )
        assert answer.headers["x-request-id"] == "traced"
        expected = {
            "POST /v1/completions",
            "Router/Plan",
            "Prefill/Prefill",
            "Prefill/Handoff",
            "Decode/Generate",
            "KvStore/Lease",
            "KvStore/Reserve",
            "KvStore/Commit",
        }
        await until(lambda: expected <= names(spans), "spans of the request")
    assert "Draft/Sequence" in names(spans)
    by_name = {span.name: span for span in spans.get_finished_spans() if in_trace(span)}
    door = by_name["POST /v1/completions"].context.span_id
    # Prefill and decode are siblings: neither waits inside the other.
    assert by_name["Prefill/Prefill"].parent.span_id == by_name["Decode/Generate"].parent.span_id == door


@pytest.mark.parametrize("bad", ["", "00-xyz", f"00-{'0' * 32}-00f067aa0ba902b7-01", "ff" * 200])
async def test_a_malformed_traceparent_starts_a_new_trace(spans, tiny, meshes, http, bad):
    async with meshes(MeshSetup(model=tiny)) as mesh:
        answer = await http.post(
            f"{mesh.url}/v1/completions", json=body_of(prompt("bad", 20), PLAIN), headers={"traceparent": bad}
        )
        assert answer.status_code == 200


def in_trace(span):
    return f"{span.context.trace_id:032x}" == TRACE


def names(spans):
    return {span.name for span in spans.get_finished_spans() if in_trace(span)}
