"""Every metric name of the mesh, in one module; `token_metrics` has the kinds that count every token.

Each class belongs to one process of its kind and owns its registry, so that two of them in one process do
not meet. Where a name exists that dashboards for vLLM look for, that name is used.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.runtime.addresses import HostPort
from penstock.runtime.config import ConfigError
from penstock.runtime.drafts import DraftAccount, by_proposer
from penstock.runtime.figures import GPU, STORE, FigureCollector, LabelCollector, Scraped
from penstock.runtime.request_metrics import MODEL as _MODEL
from penstock.runtime.request_metrics import PREEMPTIONS, STEP_TOKENS, PrefixQueries, RequestFamilies, RequestMetrics
from penstock.runtime.token_metrics import TokenBuckets, TokenHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """A registry and its text form."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._task_failures = self._counter("penstock_task_failures", "Failures of background tasks, by name", "task")
        self._tasks = self._gauge("penstock_tasks", "Tasks of the event loop: background tasks, and those of requests")

    def watch_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Counts the tasks of `loop` at each scrape, which may come from another thread."""
        self._tasks.set_function(lambda: len(asyncio.all_tasks(loop)))

    def task_failed(self, name: str) -> None:
        """Counts a failure of the background task `name`; see `penstock.runtime.tasks`."""
        self._task_failures.labels(name).inc()

    def text(self) -> bytes:
        """The Prometheus exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(name, what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(name, what, labels, registry=self.registry, buckets=_SECONDS)


@contextmanager
def exposed(metrics: Metrics, address: str | None) -> Iterator[None]:
    """Serves the text form on `address` ("127.0.0.1:9100") from a thread for the length of the block; without an
    address nowhere. Raises ConfigError when the process cannot listen there.
    """
    if not address:
        yield
        return
    try:
        where = HostPort(address)
        server, thread = start_http_server(where.port, where.host, metrics.registry)
    except (OSError, ValueError) as error:
        raise ConfigError("metrics_address", address, f"cannot listen there: {error}") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _by_place(counts: Iterable[int]) -> Mapping[str, int]:
    return {str(place): count for place, count in enumerate(counts)}


class _ByPartition(Collector):
    """Figures of each partition of a store, read at each scrape. The label is its number: a partition changes its
    model, so a label of models would grow with all that there ever were. One family says whose it is now."""

    def __init__(self, read: Callable[[], Mapping[int, PartitionFigures]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One family for each figure."""
        parts = self._read()
        for name in ("slots", "blocks", "hits", "misses", "evictions", "attachments"):
            family = CounterMetricFamily if STORE[name].total else GaugeMetricFamily
            what = f"{STORE[name].what}, of a partition"
            found = family(f"penstock_store_partition_{name}", what, labels=["partition"])
            for number, part in parts.items():
                found.add_metric([f"{number}"], getattr(part, name))
            yield found
        models = GaugeMetricFamily(
            "penstock_store_partition_model", "1: the model whose partition it is", labels=["partition", _MODEL]
        )
        for number, part in parts.items():
            if part.model:
                models.add_metric([f"{number}", part.model], 1.0)
        yield models


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFigures:
    """What metrics say of one partition's host memory."""

    model: str
    """Fingerprint of the weights; empty: it is nobody's yet."""
    slots: int
    blocks: int
    hits: int
    misses: int
    evictions: int
    attachments: int


class GatewayMetrics(Metrics):
    """Requests as the client sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self._counter("penstock_requests", "Requests ended, by outcome", "outcome")
        self.refused = self._counter(
            "penstock_requests_refused",
            "Requests that ended before they began, by HTTP status and code of the error",
            "status",
            "reason",
        )
        self.live = self._gauge("penstock_requests_live", "Requests between first and last byte")
        self.batch_lines = self._counter(
            "penstock_batch_lines", "Lines of batches that have a result: answered or failed", "outcome"
        )
        self.batch_waiting = self._gauge(
            "penstock_batch_lines_waiting", "Lines of the batches that this gateway runs which have not begun"
        )
        self.batch_running = self._gauge("penstock_batch_lines_running", "Lines of batches between begin and answer")
        self._requests = RequestFamilies(self.registry)
        self._draft_passes = self._counter("vllm:spec_decode_num_drafts", "Steps that verified drafts", _MODEL)
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafts that were verified", _MODEL)
        self._accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Verified drafts that were right", _MODEL
        )
        self._accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Verified drafts that were right, by place in a step, from 0",
            _MODEL,
            "position",
        )
        self._again = self._counter(
            "penstock_prompt_tokens_again",
            "Tokens that workers counted and no request was charged for: it had moved, or had several choices",
            _MODEL,
            "source",
        )
        self._told_again = self._counter(
            "penstock_generated_tokens_again",
            "Tokens of workers that were not sent to clients: there before, or after the end",
            _MODEL,
        )
        self._recalled = self._counter(
            "penstock_recalled_tokens", "Tokens of answers that another run of the request had generated", _MODEL
        )
        self._replans = self._counter("penstock_replans", "Requests that moved to other workers", _MODEL)
        self._spilled = self._counter(
            "penstock_spilled",
            "Plans taken at another site, by site and why this one has none: sooner there, full here, away here",
            "site",
            "reason",
        )
        self.usage_defects = self._counter(
            "penstock_usage_defects", "Reports of workers whose tokens are not those of their request"
        )
        self.remembered = self._counter(
            "penstock_prompt_tokens_remembered", "Prompt tokens known from the session's last turn, not encoded again"
        )
        self.spliced = self._counter(
            "penstock_answer_tokens_spliced", "Generated tokens that the session's next prompt took over as they were"
        )
        self.diverged = self._counter(
            "penstock_session_divergences", "Prompts that left what was known of their session, so that less was reused"
        )
        self._lost = self._counter(
            "penstock_workers_lost",
            "Workers that failed a request, so that it moved: by stage, and whether they were full, silent or failed",
            _MODEL,
            "stage",
            "reason",
        )
        self._moving = Histogram(
            "penstock_failover_seconds",
            "From the loss of a request's workers to its next plan",
            (_MODEL,),
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._targets = self._counter(
            "penstock_requests_with_target",
            "Requests that said how soon they want their tokens: in time (met), first token too late, tokens too slow",
            _MODEL,
            "outcome",
        )

    def spill(self, site: str, reason: str) -> None:
        """Counts a plan that was taken at another site."""
        self._spilled.labels(site, reason).inc()

    def of(self, model: str) -> ModelMetrics:
        """Those of one of the models that are served; names that clients send are none."""
        return ModelMetrics(
            requests=self._requests.of(model),
            again=lambda source: self._again.labels(model, source),
            told_again=self._told_again.labels(model),
            recalled=self._recalled.labels(model),
            draft_passes=self._draft_passes.labels(model),
            drafted=self._drafted.labels(model),
            accepted=self._accepted.labels(model),
            accepted_at=lambda place: self._accepted_at.labels(model, place),
            replans=self._replans.labels(model),
            lost=lambda stage, reason: self._lost.labels(model, stage, reason),
            moving=self._moving.labels(model),
            targets={outcome: self._targets.labels(model, outcome) for outcome in ("met", "late", "slow")},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """The part of a gateway's metrics that is counted for each model, of one model."""

    requests: RequestMetrics
    again: Callable[[str], Counter]
    told_again: Counter
    recalled: Counter
    draft_passes: Counter
    drafted: Counter
    accepted: Counter
    accepted_at: Callable[[int], Counter]
    replans: Counter
    lost: Callable[[str, str], Counter]
    moving: Histogram
    targets: Mapping[str, Counter]


class StoringMetrics(Metrics):
    """Whoever computes KV and has it stored."""

    def __init__(self) -> None:
        super().__init__()
        self.store_faults = self._counter("penstock_store_faults", "Store calls that became a recompute", "what")
        self.fetched = self._counter("penstock_blocks_fetched", "Blocks loaded from the store")
        self.published = self._counter("penstock_blocks_published", "Blocks committed to the store")
        self.touched = self._counter(
            "penstock_blocks_touched", "Blocks used from pages of this process, as told to the store that has them too"
        )


class WorkerMetrics(StoringMetrics):
    """A prefill or decode worker."""

    RUNNING = "vllm:num_requests_running"
    WAITING = "vllm:num_requests_waiting"
    KV_USAGE = "vllm:kv_cache_usage_perc"
    PREEMPTIONS = "vllm:num_preemptions"
    RESIDENT = "penstock_resident_pages"
    LENT = "penstock_lent_pages"
    UNSAVED = "penstock_blocks_left_unsaved"
    SHARED = "penstock_shared_pages"
    TAIL_TOKENS = "penstock_tail_tokens"
    DRAFT_FAULTS = "penstock_draft_faults"
    DRAFT_WAIT_S = "penstock_draft_wait_seconds"
    LOOKUP_DEFECTS = "penstock_lookup_defects"
    TURNS = "penstock_turns"
    TURN_WAIT_S = "penstock_turn_wait_seconds"
    TURNS_GIVEN_UP = "penstock_turns_given_up"
    QUEUE_S = "penstock_queue_seconds"
    QUEUED_TOKENS = "penstock_queued_tokens"
    PREFILL_RATE = "penstock_prefill_tokens_per_second"
    BUSY_S = "penstock_worker_busy_seconds"
    KV_TOKENS = "penstock_kv_capacity_tokens"
    EXPERT_IMBALANCE = "penstock_expert_imbalance"
    ADAPTERS = "penstock_adapters"
    ADAPTERS_HELD = "penstock_adapters_in_memory"
    ADAPTER_BYTES = "penstock_adapter_bytes"
    ADAPTER_LOADS = "penstock_adapter_loads"
    PICTURES = "penstock_pictures"
    PICTURE_BYTES = "penstock_picture_bytes"
    TILES_COMPUTED = "penstock_picture_tiles_computed"
    TILES_FOUND = "penstock_picture_tiles_found"
    TILE_S = "penstock_picture_tile_seconds"
    FIGURES: Mapping[str, Scraped] = {
        RUNNING: Scraped("Sequences in the batch"),
        WAITING: Scraped("Sequences that wait for a place in it, and those whose KV is being fetched"),
        KV_USAGE: Scraped("Used part of the page pool, 0 to 1"),
        PREEMPTIONS: Scraped("Times that a sequence lost its pages to another and was computed again", total=True),
        RESIDENT: Scraped("Pages that hold a block under its key"),
        LENT: Scraped("Pages from which the store may take their block"),
        UNSAVED: Scraped("Lent blocks that left their pages before the store had copied them", total=True),
        SHARED: Scraped("Pages that more than one request or sink holds"),
        TAIL_TOKENS: Scraped("Tokens of incomplete blocks whose KV was copied from another request's page", total=True),
        DRAFT_FAULTS: Scraped("Steps that waited for the draft service in vain", total=True),
        DRAFT_WAIT_S: Scraped("Seconds for which steps waited for the draft service", total=True),
        LOOKUP_DEFECTS: Scraped("Texts that could not be taken in for the lookup", total=True),
        TURNS: Scraped("Steps computed in turn with other workers on the same cores", total=True),
        TURN_WAIT_S: Scraped("Seconds for which steps waited for their turn", total=True),
        TURNS_GIVEN_UP: Scraped("Waits that ended because another worker's turn took far too long", total=True),
        QUEUE_S: Scraped("Seconds until a request that comes now begins to compute; 0 until the rate is measured"),
        QUEUED_TOKENS: Scraped("Tokens of prompts that are still to be computed"),
        PREFILL_RATE: Scraped("Tokens of prompts that it computes in a second; 0 until measured"),
        BUSY_S: Scraped("Seconds in which it computed steps", total=True),
        KV_TOKENS: Scraped("Tokens whose KV its page pool holds"),
        EXPERT_IMBALANCE: Scraped("Rows at experts of the busiest of the groups that --ep makes : the average of all"),
        ADAPTERS: Scraped("LoRA adapters that requests can name"),
        ADAPTERS_HELD: Scraped("Those of them that are in memory"),
        ADAPTER_BYTES: Scraped("Bytes of the adapters in memory"),
        ADAPTER_LOADS: Scraped("Adapters read from their directories", total=True),
        PICTURES: Scraped("Pictures that were shown and are still there"),
        PICTURE_BYTES: Scraped("Bytes of their pixels, and of those on their way"),
        TILES_COMPUTED: Scraped("Tiles of pictures that went through the vision encoder", total=True),
        TILES_FOUND: Scraped("Times that embeddings of a tile had been computed before", total=True),
        TILE_S: Scraped("Seconds that the vision encoder took", total=True),
    }

    def __init__(self, model: str = "") -> None:
        """`model` is the name by which it is served."""
        super().__init__()
        self._model = model
        self.lent = self._counter("penstock_blocks_lent", "Blocks that the store may take from the worker's own pages")
        self.saved = self._counter("penstock_blocks_saved", "Lent blocks that the store copied before they left")
        self.claim_waits = self._counter(
            "penstock_claim_waits",
            "Waits for blocks that other workers computed: they were stored, the worker left them, or it was too late",
            "end",
        )
        self.awaited = self._counter(
            "penstock_blocks_awaited", "Blocks that other workers stored while one waited for them"
        )
        self.handoff_faults = self._counter("penstock_handoff_faults", "Hand-offs that became a recompute")
        self.unproven = self._counter("penstock_unproven_plans", "Requests refused because no router had planned them")
        self._given = self._counter(
            "penstock_worker_prompt_tokens",
            "Tokens that sequences began with, by where their KV came from, as told to gateways",
            "stage",
            "source",
        )
        self.given: defaultdict[str, int] = defaultdict(int)
        """The same of all stages, by source."""
        self.registry.register(PrefixQueries(model, self.given))
        self._preempted = Histogram(
            "vllm:request_num_preemptions",
            "Times that a sequence was preempted, of those that ended here",
            (_MODEL,),
            registry=self.registry,
            buckets=PREEMPTIONS,
        ).labels(model)
        self.told = self._counter("penstock_worker_generated_tokens", "Tokens told to gateways", "stage")

    def count_given(self, stage: str, computed: int, fetched: Mapping[str, int]) -> None:
        """Counts the tokens that one sequence began with; `fetched` by tier."""
        for source, tokens in {**fetched, "computed": computed}.items():
            self._given.labels(stage, source).inc(tokens)
            self.given[source] += tokens

    def count_ended(self, preemptions: int) -> None:
        """A sequence has come to its end."""
        self._preempted.observe(preemptions)

    def watch(self, read: Callable[[], Mapping[str, float]]) -> None:
        """From now on `read` gives figures by some of the names above. Not twice for one of them."""
        self.registry.register(FigureCollector("", read, self.FIGURES, {_MODEL: self._model}))

    def watch_steps(self, tokens: TokenBuckets, waiting: Callable[[], Mapping[str, int]]) -> None:
        """From now on with the tokens of each step, in `STEP_TOKENS`, and with what waits, by reason. Not twice."""
        steps = TokenHistogram(
            ("vllm:iteration_tokens_total",), "Tokens of a step: of prompts, and generated", (_MODEL,), STEP_TOKENS
        )
        steps.put(tokens, self._model)
        self.registry.register(steps)
        name = "vllm:num_requests_waiting_by_reason"
        what = "Waiting sequences, by what they wait for: a place in the batch (capacity), or their KV (deferred)"
        labels = {_MODEL: self._model}
        self.registry.register(LabelCollector(name, what, "reason", waiting, labels, total=False))

    def describe(self, *, block_size: int, pages: int, dtype: str) -> None:
        """Says once what the page pool is."""
        info = {"block_size": f"{block_size}", "num_gpu_blocks": f"{pages}", "cache_dtype": dtype}
        info["enable_prefix_caching"] = "True"
        self._gauge("vllm:cache_config_info", "1: the page pool, in the labels", *info).labels(*info.values()).set(1)

    def watch_drafts(self, read: Callable[[], DraftAccount]) -> None:
        """From now on with what was drafted, by proposer and by place. Not twice."""
        verified, right = "Drafts that steps verified", "Verified drafts that were right"
        for name, what, label, counts in (
            ("penstock_drafts_verified", verified, "proposer", lambda: by_proposer(read().verified)),
            ("penstock_drafts_accepted", right, "proposer", lambda: by_proposer(read().right)),
            ("penstock_drafts_verified_at", verified, "position", lambda: _by_place(read().verified_at)),
            ("penstock_drafts_accepted_at", right, "position", lambda: _by_place(read().right_at)),
        ):
            self.registry.register(LabelCollector(name, what, label, counts))


class StoreMetrics(Metrics):
    """The kvstore's own figures, under `penstock_store_`; those of its device tier under `penstock_store_gpu_`."""

    def watch(
        self,
        read: Callable[[], Mapping[str, float]],
        faults: Callable[[], Mapping[str, int]],
        gpu: Callable[[], Mapping[str, float]],
        partitions: Callable[[], Mapping[int, PartitionFigures]],
    ) -> None:
        """From now on with these figures, all but those of `partitions` of the whole store; `faults` are fetches from
        other stores that ended early, by reason."""
        self.registry.register(FigureCollector("penstock_store_", read, STORE))
        what = "Fetches from other stores that ended early"
        self.registry.register(LabelCollector("penstock_store_pull_faults", what, "reason", faults))
        self.registry.register(FigureCollector("penstock_store_gpu_", gpu, GPU))
        self.registry.register(_ByPartition(partitions))


class RouterMetrics(Metrics):
    """Decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.members = self._gauge("penstock_members", "Joined members", "role")
        self.plans = self._counter("penstock_plans", "Plans made", "prefill")
        self._planned = self._counter(
            "penstock_planned_tokens", "Prompt tokens of plans, by where their KV is expected to come from", "source"
        )
        self.refused = self._counter("penstock_plans_refused", "Plans refused", "reason")
        self.indexed = self._gauge("penstock_indexed_blocks", "Blocks in the index")
        self.hints = self._counter("penstock_session_hints", "Session hints passed on to the stores", "state")
        self.decision = self._histogram("penstock_plan_seconds", "Time to decide")
        self.held = self._gauge("penstock_held_requests", "Requests that the router holds back")
        self.yielding = self._gauge("penstock_yielding_plans", "Live plans of requests that yield: lines of batches")
        self.held_yielding = self._gauge("penstock_held_yielding_requests", "Requests that yield and have no place yet")
        self.held_seconds = self._histogram(
            "penstock_held_seconds", "Seconds for which a planned request was held back"
        )
        self._happened = Histogram(
            "penstock_plan_error_ratio",
            "How many times as long as the plan predicted something took",
            ("what",),
            registry=self.registry,
            buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10),
        )
        self._predicted = self._counter("penstock_plan_predicted_seconds", "Seconds that plans predicted", "what")
        self._took = self._counter(
            "penstock_plan_actual_seconds", "Seconds that what plans predicted took in the end", "what"
        )
        self.state_behind = self._gauge(
            "penstock_state_behind_seconds", "Since the shared state last answered; 0 while it does"
        )
        self.state_failures = self._counter("penstock_state_failures", "Failed round trips to the shared state")
        self.state_lost = self._counter("penstock_state_lost_leases", "Writes refused because the lease was over")
        self.state_refused = self._counter("penstock_state_refused", "Shared records that are none of ours, or damaged")
        self._bias = self._gauge(
            "penstock_plan_bias", "How many times as long as it says a worker is believed to take", "what", "member"
        )

    def count_happened(self, what: str, member: str, *, predicted_s: float, ratio: float, bias: float) -> None:
        """Something took `ratio` times as long as was predicted, and what is predicted of the worker next is multiplied
        by `bias`."""
        self._happened.labels(what).observe(ratio)
        self._predicted.labels(what).inc(predicted_s)
        self._took.labels(what).inc(ratio * predicted_s)
        self._bias.labels(what, member).set(bias)

    def forget_bias(self, member: str) -> None:
        """The worker has left."""
        self._bias.remove_by_labels({"member": member})

    def count_planned(self, tokens: Mapping[str, int]) -> None:
        """Counts the prompt of one plan, by source."""
        for source, count in tokens.items():
            self._planned.labels(source).inc(count)


class DraftMetrics(StoringMetrics):
    """What the draft service guesses."""

    BUSY_S = "penstock_draft_busy_seconds"
    SEQUENCES = "penstock_draft_sequences"
    FREE_PAGES = "penstock_draft_free_pages"
    DROPPED = "penstock_draft_tokens_dropped"
    EVICTED = "penstock_draft_evictions"
    REFUSED = "penstock_draft_refusals"
    FIGURES: Mapping[str, Scraped] = {
        BUSY_S: Scraped("Seconds in which it computed; their share of all seconds is its utilisation", total=True),
        SEQUENCES: Scraped("Sequences that it guesses for"),
        FREE_PAGES: Scraped("Pages for KV that nobody uses"),
        DROPPED: Scraped("Guesses of which the text went another way", total=True),
        EVICTED: Scraped("Times that a sequence lost its KV to another", total=True),
        REFUSED: Scraped("Times that a sequence got no guesses for lack of room", total=True),
    }

    def __init__(self) -> None:
        super().__init__()
        self.proposals = self._counter("penstock_draft_proposals", "Guesses sent, counted once for each sequence")
        self.tokens = self._counter("penstock_draft_tokens", "Tokens guessed")
        self.state_bytes = self._counter("penstock_draft_state_bytes", "Bytes of hidden states told to a draft head")

    def watch(self, read: Callable[[], Mapping[str, float]], told: Callable[[], Mapping[str, int]]) -> None:
        """From now on `read` gives figures by the names above, and `told` the tokens that were told, by where their KV
        came from. Not twice."""
        self.registry.register(FigureCollector("", read, self.FIGURES))
        what = "Tokens that were told, by where their KV came from"
        self.registry.register(LabelCollector("penstock_draft_told_tokens", what, "source", told))
