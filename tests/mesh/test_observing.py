"""What a mesh exports: the names that dashboards for vLLM look for, the counts that requests must give, and no metric
that docs, boards and alerts do not know, or know in vain."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from penstock.engine.request import SamplingParams
from penstock.observing.__main__ import files
from penstock.observing.catalogue import catalogue
from penstock.testing.mesh import MeshSetup

from .support import BLOCK, DRAFTING, ask, body_of, drafting, fail_once, prompt, settled
from .vllm_families import FAMILIES, LEFT_OUT

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
TINY = {"model_name": "tiny"}
SERVICES = ("gateway", "router", "prefill, decode", "kvstore", "draft")
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
async def mesh(tiny, other, meshes, http):
    """Its draft model is often wrong."""
    async with meshes(MeshSetup(model=tiny, draft=str(other), decode=2, engine=DRAFTING)) as mesh:
        await drafting(http, mesh)
        await mesh.gateway.reception.admission.idle()
        yield mesh


def registries(mesh):
    """Of each service."""
    workers = [worker.metrics.registry for worker in mesh.workers]
    others = (mesh.gateway, mesh.router, mesh.kvstore, mesh.draft)
    gateway, router, store, draft = ([other.metrics.registry] for other in others)
    return dict(zip(SERVICES, (gateway, router, workers, store, draft), strict=True))


def samples(mesh):
    """All samples of the mesh, by name and labels, those of several workers added up."""
    found = Counter()
    for several in registries(mesh).values():
        for registry in several:
            for family in registry.collect():
                for sample in family.samples:
                    if not sample.name.endswith("_created"):
                        found[sample.name, tuple(sorted(sample.labels.items()))] += sample.value
    return found


class Gained:
    """What has been counted since it was made."""

    def __init__(self, mesh):
        self._mesh, self._before = mesh, samples(mesh)

    def __call__(self, name, **labels):
        return self.plain(name, **TINY | labels)

    def plain(self, name, **labels):
        """Of a metric that has no label for the model."""
        key = name, tuple(sorted(labels.items()))
        return samples(self._mesh)[key] - self._before[key]


async def ended(mesh):
    """Returns when the mesh has counted all requests that have ended."""
    await mesh.gateway.reception.admission.idle()


async def test_a_known_series_of_requests_is_counted_exactly(mesh, http):
    """Four prompts, each asked twice, the second time found in the store or in pages; one with three choices."""
    gained = Gained(mesh)
    prompts = [prompt(f"observing/{number}", 90 + number) for number in range(4)]
    answers = []
    for _ in range(2):
        for tokens in prompts:
            answers.append(await ask(http, mesh, tokens, SAMPLING))
            await settled(mesh, tokens[: len(tokens) // BLOCK * BLOCK])
    body = body_of(prompt("observing/copies", 70), replace(SAMPLING, max_tokens=10)) | {"n": 3}
    copies = (await http.post(f"{mesh.url}/v1/completions", json=body)).json()
    await ended(mesh)

    lengths = [len(tokens) for tokens in prompts * 2] + [70]
    generated = [24] * 8 + [30]
    assert gained("vllm:prompt_tokens_total") == sum(lengths)
    assert gained("vllm:generation_tokens_total") == sum(generated)
    assert gained("vllm:request_success_total", finished_reason="length") == 9
    assert all(gained("vllm:request_success_total", finished_reason=how) == 0 for how in ("stop", "abort", "error"))
    for name, values in {
        "prompt_tokens": lengths,
        "generation_tokens": generated,
        "max_num_generation_tokens": [24] * 8 + [10],
        "params_max_tokens": [24] * 8 + [10],
        "params_n": [1] * 8 + [3],
    }.items():
        assert gained(f"vllm:request_{name}_count") == 9, name
        assert gained(f"vllm:request_{name}_sum") == sum(values), name
    assert gained("vllm:request_prompt_tokens_bucket", le="100.0") == 9
    assert gained("vllm:request_prompt_tokens_bucket", le="50.0") == 0
    for name in ("queue", "prefill", "decode", "inference"):
        assert gained(f"vllm:request_{name}_time_seconds_count") == 9
    assert gained("vllm:time_to_first_token_seconds_count") == gained("vllm:e2e_request_latency_seconds_count") == 9
    assert gained("vllm:inter_token_latency_seconds_count") == 8 * 23, "of several choices nobody waits for one"
    assert gained("vllm:time_per_output_token_seconds_count") == 8 * 23
    assert gained("vllm:request_time_per_output_token_seconds_count") == 9

    usages = [answer.usage for answer in answers] + [copies["usage"]]
    cached = Counter()
    for usage in usages:
        cached.update(usage["penstock"]["cached_tokens"])
    computed = sum(usage["penstock"]["computed_tokens"] for usage in usages)
    assert cached.total() > 4 * 64, "the second time it was there"
    assert gained("vllm:prompt_tokens_cached_total") == cached.total()
    assert gained("penstock_prompt_tokens_total", source="host") == cached["host"]
    by_source = {"local_compute": computed, "local_cache_hit": cached["worker"]}
    by_source["external_kv_transfer"] = cached.total() - cached["worker"]
    for source, tokens in by_source.items():
        assert gained("vllm:prompt_tokens_by_source_total", source=source) == tokens
    tiers = {"device": cached["worker"] + cached["gpu"], "host": cached["host"], "disk": cached["nvme"]}
    for tier, tokens in tiers.items():
        assert gained("vllm:prompt_tokens_cached_by_source_total", source=tier) == tokens
    assert gained("vllm:request_prefill_kv_computed_tokens_sum") == computed

    drafts = Counter()
    for usage in usages:
        found = usage["penstock"]["drafts"]
        drafts.update(
            {"verified": usage["penstock"]["drafted_tokens"], "accepted": usage["penstock"]["accepted_tokens"]}
        )
        drafts["passes"] += found["passes"]
    assert drafts["verified"] > 0
    assert gained("vllm:spec_decode_num_drafts_total") == drafts["passes"]
    assert gained("vllm:spec_decode_num_draft_tokens_total") == drafts["verified"]
    assert gained("vllm:spec_decode_num_accepted_tokens_total") == drafts["accepted"]
    places = [gained("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(64)]
    assert sum(places) == drafts["accepted"]


async def test_what_the_parts_of_a_request_say_adds_up(mesh, http):
    gained = Gained(mesh)
    for number in range(3):
        await ask(http, mesh, prompt(f"parts/{number}", 200), SAMPLING)
    await ended(mesh)
    total = gained("vllm:e2e_request_latency_seconds_sum")
    parts = {dict(labels)["part"] for name, labels in samples(mesh) if name == "penstock_request_part_seconds_sum"}
    assert sum(gained("penstock_request_part_seconds_sum", part=part) for part in parts) == pytest.approx(total)
    stages = {name: gained(f"vllm:request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode")}
    assert gained("vllm:request_inference_time_seconds_sum") == pytest.approx(stages["prefill"] + stages["decode"])
    rest = sum(gained("penstock_request_part_seconds_sum", part=part) for part in ("body", "tokenize", "send"))
    assert sum(stages.values()) + rest == pytest.approx(total)


async def test_workers_count_what_they_computed_found_and_gave(mesh, http):
    gained = Gained(mesh)
    tokens = prompt("counted by workers", 96)
    for _ in range(2):
        await ask(http, mesh, tokens, SAMPLING)
        await settled(mesh, tokens)
    await ended(mesh)
    queries, own = gained("vllm:prefix_cache_queries_total"), gained("vllm:prefix_cache_hits_total")
    asked = gained("vllm:external_prefix_cache_queries_total")
    stored = gained("vllm:external_prefix_cache_hits_total")
    assert queries == 2 * 96 and asked == queries - own
    assert own + stored >= 80, "all but the last block of the second one"
    given = Counter()
    for (name, labels), value in samples(mesh).items():
        if name == "penstock_worker_prompt_tokens_total":
            given[dict(labels)["source"]] += value
    total = samples(mesh)
    assert total["vllm:prefix_cache_queries_total", (("model_name", "tiny"),)] == given.total()
    assert gained("vllm:request_num_preemptions_count") == 2 and gained("vllm:request_num_preemptions_sum") == 0
    computed = gained("vllm:iteration_tokens_total_sum") - 2 * SAMPLING.max_tokens
    assert 0 <= queries - own - stored - computed <= 2, "a single token of a prompt is a row like any other"
    steps = sum(worker.engine.stats().steps for worker in mesh.workers)
    assert samples(mesh)["vllm:iteration_tokens_total_count", tuple(TINY.items())] == steps
    assert gained.plain("penstock_worker_busy_seconds_total") > 0


async def test_a_client_that_leaves_and_targets_are_counted(mesh, http):
    gained = Gained(mesh)
    body = body_of(prompt("leaves", 40), replace(SAMPLING, max_tokens=900)) | {"stream": True}
    async with http.stream("POST", f"{mesh.url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                break
    await ended(mesh)
    assert gained("vllm:request_success_total", finished_reason="abort") == 1
    body = body_of(prompt("targets", 40), SAMPLING) | {"penstock": {"slo": {"ttft": 600.0, "itl": 60.0}}}
    assert (await http.post(f"{mesh.url}/v1/completions", json=body)).status_code == 200
    await ended(mesh)
    assert gained("penstock_requests_with_target_total", outcome="met") == 1


async def test_fail_overs_are_counted_by_stage_and_reason(mesh, http, monkeypatch):
    gained = Gained(mesh)
    fail_once(mesh, monkeypatch)
    await ask(http, mesh, prompt("moves", 40), SAMPLING)
    await ended(mesh)
    assert gained("penstock_workers_lost_total", stage="decode", reason="failed") == 1
    assert gained("penstock_replans_total") == gained("penstock_failover_seconds_count") == 1


def test_the_families_of_vllm_have_its_names_types_labels_and_bounds(mesh):
    found = {one.name: one for families in catalogue().values() for one in families if one.name.startswith("vllm:")}
    assert found.keys() == FAMILIES.keys()
    assert not found.keys() & LEFT_OUT.keys()
    for name, theirs in FAMILIES.items():
        assert (found[name].kind, found[name].labels) == (theirs.kind, theirs.labels), name
    bounds = {}
    for name, labels in samples(mesh):
        if name.endswith("_bucket"):
            bounds.setdefault(name.removesuffix("_bucket"), set()).add(dict(labels)["le"])
    for name, theirs in FAMILIES.items():
        assert {str(float(bound)) for bound in theirs.bounds} <= bounds.get(name, set()), name


def test_a_running_mesh_exports_exactly_what_the_table_says(mesh):
    said = catalogue()
    for service, several in registries(mesh).items():
        known = {one.name: one for one in said[service]}
        for registry in several:
            for family in registry.collect():
                assert (known[family.name].kind, known[family.name].what) == (family.type, family.documentation)
                for sample in family.samples:
                    assert set(sample.labels) - {"le"} == set(known[family.name].labels), sample
        exported = {family.name for registry in several for family in registry.collect()}
        missing = known.keys() - exported
        assert all(name.startswith("penstock_store_nvme_") for name in missing), "this mesh has no disk"


def test_labels_have_few_values(mesh):
    """None of them names a request, a session or a tenant."""
    labels = {label for families in catalogue().values() for one in families for label in one.labels}
    assert not labels & {"tenant", "request_id", "session", "user", "key", "id"}
    values = {}
    for _, pairs in samples(mesh):
        for label, value in pairs:
            values.setdefault(label, set()).add(value)
    assert {label: found for label, found in values.items() if len(found) > 32 and label != "le"} == {}


def queries():
    """Every expression of boards and alerts, and where it stands."""
    for path in sorted((ROOT / "deploy/grafana/boards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"]
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def test_boards_and_alerts_ask_for_what_the_mesh_exports(mesh):
    """Names, and labels that a query compares or groups by."""
    known = {name: one for families in catalogue().values() for one in families for name in one.samples}
    asked = set()
    for where, expr in queries():
        labels = set()
        for name in re.findall(r"\b(?:vllm:|penstock_)\w+", expr):
            assert name in known, f"{where}: {name}"
            asked.add(name)
            labels |= {*known[name].labels, "instance", "job", "le"}
        compared = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expr)
        grouped = [label.strip() for found in re.findall(r"\bby \(([^)]*)\)", expr) for label in found.split(",")]
        if where != "PenstockDown":
            assert {*compared, *grouped} <= labels, f"{where}: {expr}"
    exported = {name for name, _ in samples(mesh)}
    unseen = {name for name in asked - exported if not known[name].labels}
    assert all(name.startswith("penstock_store_nvme_") for name in unseen), (
        "with samples, unless it has labels or a disk"
    )


def test_what_is_generated_is_up_to_date():
    for path, text in files().items():
        assert (ROOT / path).read_text() == text, f"{path}: run `make boards`"
