"""One trace through all six services, from the `traceparent` of the HTTP request on, as an OTLP collector gets it."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections import defaultdict
from dataclasses import replace

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from penstock.engine.request import SamplingParams
from penstock.testing.checkpoints import write_checkpoint
from penstock.testing.mesh import MeshSetup

from .conftest import TINY
from .support import BLOCK, DRAFTING, body_of, drafting, fail_once, prompt, settled, up

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
PLAIN = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
BEFORE_FIRST = ("body", "tokenize", "plan", "prompt")
REQUESTS = 7
WITHIN = 0.05


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported to it, by trace."""

    def __init__(self):
        self._spans = defaultdict(list)
        self.services = defaultdict(set)
        """Names of those that had a part in a trace."""
        self.address = ""
        self._news = asyncio.Event()

    async def Export(self, request, context):
        for process in request.resource_spans:
            for scope in process.scope_spans:
                for span in scope.spans:
                    self._spans[span.trace_id.hex()].append(span)
                    self.services[span.trace_id.hex()].add(attributes(process.resource)["service.name"])
        self._news.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def spans(self, trace_id, *expected):
        """Those of a trace, when it has spans of these names."""
        async with asyncio.timeout(20):
            while not set(expected) <= {span.name for span in self._spans[trace_id]}:
                self._news.clear()
                await self._news.wait()
        return list(self._spans[trace_id])


@pytest.fixture(scope="module")
async def collector():
    """The process has one provider of traces, from its first use on."""
    provider = TracerProvider(shutdown_on_exit=False)
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    exporter = OTLPSpanExporter(endpoint=collector.address, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=50))
    trace.set_tracer_provider(provider)
    yield collector
    await asyncio.to_thread(provider.shutdown)
    await server.stop(None)


@pytest.fixture(scope="module")
async def mesh(tiny, meshes, collector, http):
    async with meshes(MeshSetup(model=tiny, draft=str(tiny), decode=2, engine=DRAFTING)) as mesh:
        await drafting(http, mesh)
        yield mesh


def context(sampled=True):
    """A trace of its own, and the header that says so."""
    trace_id = os.urandom(16).hex()
    return trace_id, {"traceparent": f"00-{trace_id}-{PARENT}-0{int(sampled)}"}


def seconds(span):
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def attributes(found):
    """Of a span or an event."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in found.attributes}


async def traced(http, mesh, collector, tokens, *calls):
    """The spans of one request by name, the last of each name, and below each the names of those that it caused. It
    waits for the spans of `calls` too."""
    trace_id, headers = context()
    answer = await http.post(f"{mesh.url}/v1/completions", json=body_of(tokens, PLAIN), headers=headers)
    assert answer.status_code == 200, answer.text
    spans = await collector.spans(trace_id, "POST /v1/completions", "Decode/Generate", *calls)
    names = {span.span_id: span.name for span in spans}
    below = defaultdict(set)
    for span in spans:
        below[names.get(span.parent_span_id, "")].add(span.name)
    return {span.name: span for span in spans}, below


async def test_every_service_is_in_the_trace(collector, mesh, http):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "traced"}
    answer = await http.post(f"{mesh.url}/v1/completions", json=body_of(prompt("trace", 200), PLAIN), headers=headers)
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
        "Draft/Sequence",
    }
    spans = await collector.spans(TRACE, *expected)
    by_name = {span.name: span for span in spans}
    door = by_name["POST /v1/completions"]
    assert door.parent_span_id.hex() == PARENT, "the client's span"
    # Prefill and decode are siblings: neither waits inside the other.
    assert by_name["Prefill/Prefill"].parent_span_id == by_name["Decode/Generate"].parent_span_id == door.span_id


async def test_stages_are_spans_below_their_worker_and_drafts_an_event(collector, mesh, http):
    tokens = prompt("stages", 200)
    spans, below = await traced(http, mesh, collector, tokens, "Prefill/Prefill")
    assert {"body", "tokenize", "plan", "prompt", "handoff", "decode"} <= below["POST /v1/completions"]
    assert {"fetch", "queue", "prefill"} <= below["Prefill/Prefill"]
    assert {"handoff", "queue", "prefill", "decode"} <= below["Decode/Generate"]
    door = spans["POST /v1/completions"]
    assert attributes(door)["gen_ai.usage.input_tokens"] == 200
    prompted = attributes(spans["prompt"])
    assert prompted["penstock.tokens.computed"] == 200
    told = sum(prompted[f"penstock.{name}_s"] for name in ("queue", "fetch", "prefill", "call"))
    assert told == pytest.approx(seconds(spans["prompt"]), abs=1e-6)
    decode = [span for span in await collector.spans(door.trace_id.hex()) if span.name == "decode" and span.events]
    [drafts] = decode[0].events
    assert drafts.name == "drafts"
    found = attributes(drafts)
    assert found["passes"] > 0 and found["accepted.model"] == found["verified.model"] > 0, "it drafts for itself"

    await settled(mesh, tokens[: len(tokens) // BLOCK * BLOCK])
    spans, _ = await traced(http, mesh, collector, tokens)
    prompted = attributes(spans["prompt"])
    tiers = sum(count for name, count in prompted.items() if name.startswith("penstock.tokens.") and "comp" not in name)
    assert tiers + prompted["penstock.tokens.computed"] == 200 and tiers >= 176, "found by tier"


async def test_a_fail_over_shows(collector, mesh, http, monkeypatch):
    fail_once(mesh, monkeypatch)
    spans, _ = await traced(http, mesh, collector, prompt("moves", 40))
    [lost] = [event for event in spans["POST /v1/completions"].events if event.name == "worker lost"]
    told = attributes(lost)
    assert told["stage"] == "decode" and told["worker"] and "failed" in told["error"]
    assert seconds(spans["failover"]) >= 0


async def test_who_is_not_sampled_costs_no_span(collector, mesh, http):
    """Nor does a mesh without an exporter, whose spans are not recorded either."""
    trace_id, headers = context(sampled=False)
    body = body_of(prompt("unsampled", 60), PLAIN)
    assert (await http.post(f"{mesh.url}/v1/completions", json=body, headers=headers)).status_code == 200
    await traced(http, mesh, collector, prompt("sampled", 60))
    assert await collector.spans(trace_id) == []


@pytest.mark.parametrize("bad", ["", "00-xyz", f"00-{'0' * 32}-{PARENT}-01", "ff" * 200])
async def test_a_malformed_traceparent_starts_a_new_trace(mesh, http, bad):
    answer = await http.post(
        f"{mesh.url}/v1/completions", json=body_of(prompt("bad", 20), PLAIN), headers={"traceparent": bad}
    )
    assert answer.status_code == 200


@pytest.fixture(scope="module")
async def wide(tmp_path_factory, meshes, collector):
    """Its prompts take much longer than a client's own work."""
    model = replace(TINY, hidden_size=256, intermediate_size=1024, layers=6)
    directory = write_checkpoint(tmp_path_factory.mktemp("wide") / "tiny", model)
    async with meshes(MeshSetup(model=directory)) as mesh:
        yield mesh


async def first_token(http, mesh, number, headers):
    """Seconds by the client's clock."""
    content = json.dumps(body_of(prompt(f"first/{number}", 1900), PLAIN) | {"stream": True}).encode()
    begun = time.perf_counter()
    first = None
    async with http.stream("POST", f"{mesh.url}/v1/completions", content=content, headers=headers) as answer:
        async for _ in answer.aiter_lines():
            first = first or time.perf_counter() - begun
    return first


async def test_the_parts_sum_to_what_the_client_measures(collector, wide, http):
    """Medians of requests, one after the other: of the gateway's own spans, and with those of the worker that computed
    the prompt in the place of `prompt`. What these leave stands in an attribute, and is little."""
    coarse, fine, rest = [], [], []
    for number in range(REQUESTS):
        trace_id, headers = context()
        measured = await first_token(http, wide, number, headers)
        spans = await collector.spans(trace_id, "POST /v1/completions", "Decode/Generate", "Prefill/Prefill")
        own = {span.name: span for span in spans if parent_name(spans, span) == "POST /v1/completions"}
        parts = [seconds(own[name]) if name in own else 0.0 for name in BEFORE_FIRST]
        stages = [seconds(span) for span in spans if parent_name(spans, span) == "Prefill/Prefill" and stage(span)]
        left = attributes(own["prompt"])["penstock.call_s"]
        coarse.append(sum(parts) / measured)
        fine.append((sum(parts[:-1]) + sum(stages) + left) / measured)
        rest.append(left / measured)
    assert statistics.median(coarse) == pytest.approx(1, abs=WITHIN), coarse
    assert statistics.median(fine) == pytest.approx(1, abs=WITHIN), fine
    assert statistics.median(rest) < 0.5, "most of the time is told by its worker"


async def test_processes_export_to_the_collector_that_the_environment_names(collector, http, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    trace_id, headers = context()
    async with up("--prefill", "1") as (_, _, url):
        body = {"model": "penstock-mini", "prompt": "Once upon a time " * 40, "max_tokens": 20}
        answer = await http.post(f"{url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        await collector.spans(trace_id, "POST /v1/completions", "Decode/Generate", "KvStore/Lease", "decode", "prompt")
    assert {"penstock-gateway", "penstock-decode", "penstock-kvstore"} <= collector.services[trace_id]


def stage(span):
    return span.name in ("fetch", "queue", "prefill")


def parent_name(spans, span):
    return next((other.name for other in spans if other.span_id == span.parent_span_id), "")
