"""Requests in the families that dashboards for vLLM read, by model.

Names, types, labels and bounds are those of vLLM, where a family means the same. vLLM's label `engine` numbers engines
within a process; here each has a process of its own, which Prometheus' `instance` names. Bounds may be more than
vLLM's, so that queries for one of its own find it. What is known once is counted once: families that say the same in
other words are read from it at each scrape.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.runtime.token_metrics import TokenBuckets, TokenCount, TokenCounter, TokenHistogram

MODEL = "model_name"
Ended = Literal["stop", "length", "abort", "error"]
"""How a request ended: the client left, or was too late (abort), or got an error; else as its choices, `length` if one
of them was cut."""
ENDS: tuple[Ended, ...] = ("stop", "length", "abort", "error")
_SUMS = ("first_token", "total")
"""Times that are no parts."""
LATENCY_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20)
STEP_TOKENS = (1, *(2**exponent for exponent in range(3, 15)))
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_PART_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)

_SOURCES: Mapping[str, tuple[str, str]] = {
    "computed": ("local_compute", ""),
    "worker": ("local_cache_hit", "device"),
    "gpu": ("external_kv_transfer", "device"),
    "host": ("external_kv_transfer", "host"),
    "nvme": ("external_kv_transfer", "disk"),
    "remote": ("external_kv_transfer", "p2p"),
}
"""Where the KV of a prompt's tokens comes from, in our words; the same in vLLM's, and its name of the tier."""
_By = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """What is counted of a request that has ended. One with several choices is one request."""

    ended: Ended
    prompt_tokens: int
    sources: Mapping[str, int]
    """Prompt tokens by where their KV came from, as far as a worker has said so."""
    generated_tokens: int
    """Of all choices."""
    longest: int
    """Of one choice, at most."""
    choices: int
    max_tokens: int | None
    """As the client asked."""
    times: Mapping[str, float]
    """Seconds by part."""
    live: bool
    """Somebody waits for it: it is no line of a batch."""


class PromptTokens(Collector):
    """Prompt tokens by model and source: in our words, and in vLLM's."""

    def __init__(self) -> None:
        self._tokens: dict[str, Counts[str]] = {}

    def of(self, model: str) -> Counts[str]:
        """Those of one model, to be added to."""
        return self._tokens.setdefault(model, Counts(dict.fromkeys(_SOURCES, 0)))

    def collect(self) -> Iterator[Metric]:
        """One family for each way to say it."""
        own = ("penstock_prompt_tokens", "Prompt tokens of ended requests by the tier that their KV came from")
        yield self._family(*own, lambda source: source, "source")
        yield self._family("vllm:prompt_tokens", "Prompt tokens of ended requests that workers computed or reused")
        what = "Prompt tokens of ended requests, by where their KV came from in vLLM's words"
        yield self._family("vllm:prompt_tokens_by_source", what, lambda source: _SOURCES[source][0], "source")
        yield self._family("vllm:prompt_tokens_cached", "Prompt tokens of ended requests that were reused", _reused)
        what = "Prompt tokens of ended requests that were reused, by tier in vLLM's words"
        yield self._family("vllm:prompt_tokens_cached_by_source", what, lambda source: _SOURCES[source][1], "source")

    def _family(self, name: str, what: str, by: _By = lambda _source: "all", *label: str) -> CounterMetricFamily:
        """`by` gives the value of the label for a source; for empty ones nothing is counted."""
        family = CounterMetricFamily(name, what, labels=[MODEL, *label])
        for model, tokens in self._tokens.items():
            sums = Counts[str]()
            for source, count in tokens.items():
                sums[by(source)] += count
            for value, count in sums.items():
                if value:
                    family.add_metric([model, value][: 1 + len(label)], count)
        return family


class PrefixQueries(Collector):
    """Tokens that a worker's sequences began with, as what was asked of its own pages and of stores."""

    def __init__(self, model: str, given: Mapping[str, int]) -> None:
        """`given` are tokens by source, and goes on counting."""
        self._model, self._given = model, given

    def collect(self) -> Iterator[Metric]:
        """Four families."""
        given = dict(self._given)
        total, own = sum(given.values()), given.get("worker", 0)
        stored = total - own - given.get("computed", 0)
        for name, what, tokens in (
            ("vllm:prefix_cache_queries", "Tokens that sequences began with", total),
            ("vllm:prefix_cache_hits", "Tokens that sequences began with whose KV was in the worker's own pages", own),
            (
                "vllm:external_prefix_cache_queries",
                "Tokens that sequences began with whose KV was not in the worker's own pages",
                total - own,
            ),
            ("vllm:external_prefix_cache_hits", "Tokens that sequences began with whose KV came from a store", stored),
        ):
            family = CounterMetricFamily(name, what, labels=[MODEL])
            family.add_metric([self._model], tokens)
            yield family


class RequestFamilies:
    """The families, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, what: str, bounds: Sequence[float], *labels: str) -> TokenHistogram:
            made = TokenHistogram((name,), what, (MODEL, *labels), bounds)
            registry.register(made)
            return made

        def seconds(name: str, what: str) -> TokenHistogram:
            return histogram(f"vllm:{name}_seconds", what, LATENCY_S)

        def tokens(name: str, what: str) -> TokenHistogram:
            return histogram(f"vllm:request_{name}", what, TOKENS)

        self._prompt_tokens = PromptTokens()
        self._generated = TokenCounter("vllm:generation_tokens", "Tokens sent to clients", MODEL)
        self._itl = TokenHistogram(
            ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            "Between two tokens of a stream; older versions of vLLM call it time per output token",
            (MODEL,),
            TOKEN_S,
        )
        for each in (self._prompt_tokens, self._generated, self._itl):
            registry.register(each)
        what = "Requests ended, by how: stop, length, abort, error"
        self._success = Counter("vllm:request_success", what, (MODEL, "finished_reason"), registry=registry)
        what = "First byte in to first token out"
        self._ttft = histogram("vllm:time_to_first_token_seconds", what, FIRST_TOKEN_S)
        self._e2e = seconds("e2e_request_latency", "First byte in to last byte out")
        what = "Decode time by token after the first, of each request"
        self._stages = {
            "queue": seconds("request_queue_time", "Until workers were chosen, and in the queue of the first of them"),
            "prefill": seconds("request_prefill_time", "Fetching and computing the prompt, and the way there and back"),
            "decode": seconds("request_decode_time", "From the first token to the last, the hand-off included"),
            "inference": seconds("request_inference_time", "Prefill and decode time together"),
            "per_token": histogram("vllm:request_time_per_output_token_seconds", what, TOKEN_S),
        }
        what = "Seconds of a request by part; the parts follow each other"
        self._parts = histogram("penstock_request_part_seconds", what, _PART_S, "part")
        self._sizes = {
            "prompt": tokens("prompt_tokens", "Prompt tokens of a request"),
            "answer": tokens("generation_tokens", "Generated tokens of a request, all choices together"),
            "longest": tokens("max_num_generation_tokens", "Generated tokens of a request's longest choice"),
            "computed": tokens("prefill_kv_computed_tokens", "Prompt tokens of a request whose KV was computed"),
            "n": histogram("vllm:request_params_n", "Choices that a request asked for", CHOICES),
            "max_tokens": tokens("params_max_tokens", "Tokens that a request asked for at most, where it says so"),
        }

    def of(self, model: str) -> RequestMetrics:
        """Those of one of the models that are served."""
        return RequestMetrics(
            prompt_tokens=self._prompt_tokens.of(model),
            generation_tokens=self._generated.labels(model),
            itl=self._itl.labels(model),
            ttft=self._ttft.labels(model),
            e2e=self._e2e.labels(model),
            success={ended: self._success.labels(model, ended) for ended in ENDS},
            stages={name: family.labels(model) for name, family in self._stages.items()},
            parts=lambda part: self._parts.labels(model, part),
            sizes={name: family.labels(model) for name, family in self._sizes.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """The families of one model."""

    prompt_tokens: Counts[str]
    generation_tokens: TokenCount
    itl: TokenBuckets
    ttft: TokenBuckets
    e2e: TokenBuckets
    success: Mapping[Ended, Counter]
    stages: Mapping[str, TokenBuckets]
    parts: Callable[[str], TokenBuckets]
    sizes: Mapping[str, TokenBuckets]

    def count(self, request: EndedRequest) -> None:
        """A request has ended."""
        self.success[request.ended].inc()
        self.prompt_tokens.update(request.sources)
        sizes = {
            "prompt": request.prompt_tokens,
            "answer": request.generated_tokens,
            "longest": request.longest,
            "computed": request.sources.get("computed", 0),
            "n": request.choices,
        }
        if request.max_tokens is not None:
            sizes["max_tokens"] = request.max_tokens
        for name, size in sizes.items():
            self.sizes[name].observe(size)
        if request.live:
            self.e2e.observe(request.times["total"])
            if request.generated_tokens:
                self._count_stages(request.times, request.longest)

    def _count_stages(self, times: Mapping[str, float], tokens: int) -> None:
        prefill, decode = times["fetch"] + times["prefill"] + times["call"], times["handoff"] + times["decode"]
        self.stages["queue"].observe(times["plan"] + times["queue"])
        self.stages["prefill"].observe(prefill)
        self.stages["decode"].observe(decode)
        self.stages["inference"].observe(prefill + decode)
        if tokens > 1:
            self.stages["per_token"].observe(decode / (tokens - 1))
        for part, seconds in times.items():
            if part not in _SUMS:
                self.parts(part).observe(seconds)


def _reused(source: str) -> str:
    return "" if source == "computed" else "all"
