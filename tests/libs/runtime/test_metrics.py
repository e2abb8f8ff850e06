"""Metrics: their own registry each, and a page to read them from."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client import Histogram

from penstock.runtime import metrics
from penstock.runtime.config import ConfigError
from penstock.runtime.metrics import Metrics, RouterMetrics, exposed
from penstock.runtime.request_metrics import TOKEN_S

FIGURES = {metrics.WorkerMetrics.RUNNING: 3.0, metrics.WorkerMetrics.PREEMPTIONS: 2.0}


def worker_metrics() -> Metrics:
    worker = metrics.WorkerMetrics("tiny")
    worker.watch(lambda: FIGURES)
    return worker


def store_metrics() -> Metrics:
    store = metrics.StoreMetrics()
    store.watch(lambda: {"hits": 5.0}, dict, lambda: {"promoted": 7.0, "slots": 9.0}, dict)
    return store


KINDS = [metrics.GatewayMetrics, worker_metrics, metrics.RouterMetrics, metrics.DraftMetrics, store_metrics]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_two_in_one_process_do_not_meet(kind: Callable[[], Metrics]) -> None:
    first, second = kind(), kind()  # prometheus_client refuses a name that its registry knows already
    assert first.registry is not second.registry
    assert first.text()


def test_what_a_data_structure_says_of_itself_is_read_when_asked() -> None:
    text = worker_metrics().text()
    assert b'vllm:num_requests_running{model_name="tiny"} 3.0' in text
    assert b'vllm:num_preemptions_total{model_name="tiny"} 2.0' in text
    assert b"penstock_store_hits_total 5.0" in store_metrics().text()
    assert b"penstock_store_gpu_promoted_total 7.0" in store_metrics().text()
    assert b"penstock_store_gpu_slots 9.0" in store_metrics().text()


def test_a_count_shows_in_its_own_text_only() -> None:
    one, other = RouterMetrics(), RouterMetrics()
    one.plans.labels("worker").inc()
    assert b'penstock_plans_total{prefill="worker"} 1.0' in one.text()
    assert b"penstock_plans_total{" not in other.text()


async def test_tasks_of_the_loop_are_counted_from_another_thread() -> None:
    metrics = RouterMetrics()
    assert b"penstock_tasks 0.0" in metrics.text()
    metrics.watch_tasks(asyncio.get_running_loop())

    async def counted() -> int:
        text = (await asyncio.to_thread(metrics.text)).decode()
        [line] = [line for line in text.splitlines() if line.startswith("penstock_tasks ")]
        return int(float(line.split()[1]))

    before, over = await counted(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(over.wait())
        assert await counted() == before + 3
        over.set()
    assert await counted() == before


async def test_the_page_is_served_and_goes_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    with exposed(RouterMetrics(), f"127.0.0.1:{port}"):
        page = await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
        assert b"penstock_indexed_blocks" in page
    with socket.create_server(("127.0.0.1", port)):
        pass


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
    return body


def test_no_address_serves_nothing() -> None:
    with exposed(RouterMetrics(), ""):
        pass


def test_a_taken_address_is_a_setting_to_correct() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match="metrics_address"), exposed(RouterMetrics(), f"127.0.0.1:{port}"):
            pass


def test_what_is_counted_with_every_token_reads_like_any_other_metric():
    found = metrics.GatewayMetrics()
    tiny = found.of("tiny")
    plain = Histogram("plain", "Of prometheus_client", ("model_name",), registry=found.registry, buckets=TOKEN_S)
    for seconds in (0.0, 0.001, 0.0010001, 0.07, 120.0, 500.0):
        tiny.requests.itl.observe(seconds)
        plain.labels("tiny").observe(seconds)
    for _ in range(3):
        tiny.requests.generation_tokens.inc()
        tiny.replans.inc()
    lines = found.text().decode().splitlines()

    def values(name: str) -> list[str]:
        return [line.removeprefix(name) for line in lines if line.startswith(name) and "_created" not in line]

    both = values("vllm:inter_token_latency_seconds"), values("vllm:time_per_output_token_seconds")
    assert both == (values("plain"), values("plain")) and both[0]
    assert values("vllm:generation_tokens_total") == values("penstock_replans_total") == ['{model_name="tiny"} 3.0']
    assert {line.rsplit(" ", 1)[-1] for line in lines if "generation_tokens_total" in line and "TYPE" in line} == {
        "counter"
    }
