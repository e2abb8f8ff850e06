"""The metrics of vLLM 1 (0.2x) that the mesh exports too: names, types, labels and bounds of buckets as they are there.

vLLM's label `engine` is left out: it numbers engines of one process, and here each has a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = ("model_name",)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""vLLM ends them at the model's context."""
STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Theirs:
    """A family of vLLM."""

    kind: str
    labels: tuple[str, ...] = MODEL
    bounds: tuple[float, ...] = ()


FAMILIES = {
    # of a gateway: requests
    "vllm:prompt_tokens": Theirs("counter"),
    "vllm:prompt_tokens_by_source": Theirs("counter", (*MODEL, "source")),
    "vllm:prompt_tokens_cached": Theirs("counter"),
    "vllm:prompt_tokens_cached_by_source": Theirs("counter", (*MODEL, "source")),
    "vllm:generation_tokens": Theirs("counter"),
    "vllm:request_success": Theirs("counter", (*MODEL, "finished_reason")),
    "vllm:request_prompt_tokens": Theirs("histogram", bounds=SIZES),
    "vllm:request_generation_tokens": Theirs("histogram", bounds=SIZES),
    "vllm:request_max_num_generation_tokens": Theirs("histogram", bounds=SIZES),
    "vllm:request_prefill_kv_computed_tokens": Theirs("histogram", bounds=SIZES),
    "vllm:request_params_max_tokens": Theirs("histogram", bounds=SIZES),
    "vllm:request_params_n": Theirs("histogram", bounds=(1, 2, 5, 10, 20)),
    "vllm:time_to_first_token_seconds": Theirs("histogram", bounds=FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": Theirs("histogram", bounds=TOKEN),
    "vllm:time_per_output_token_seconds": Theirs("histogram", bounds=TOKEN),  # the name before the one above
    "vllm:request_time_per_output_token_seconds": Theirs("histogram", bounds=TOKEN),
    "vllm:e2e_request_latency_seconds": Theirs("histogram", bounds=LATENCY),
    "vllm:request_queue_time_seconds": Theirs("histogram", bounds=LATENCY),
    "vllm:request_prefill_time_seconds": Theirs("histogram", bounds=LATENCY),
    "vllm:request_decode_time_seconds": Theirs("histogram", bounds=LATENCY),
    "vllm:request_inference_time_seconds": Theirs("histogram", bounds=LATENCY),
    "vllm:spec_decode_num_drafts": Theirs("counter"),
    "vllm:spec_decode_num_draft_tokens": Theirs("counter"),
    "vllm:spec_decode_num_accepted_tokens": Theirs("counter"),
    "vllm:spec_decode_num_accepted_tokens_per_pos": Theirs("counter", (*MODEL, "position")),
    # of a worker: its engine
    "vllm:num_requests_running": Theirs("gauge"),
    "vllm:num_requests_waiting": Theirs("gauge"),
    "vllm:num_requests_waiting_by_reason": Theirs("gauge", (*MODEL, "reason")),
    "vllm:kv_cache_usage_perc": Theirs("gauge"),
    "vllm:num_preemptions": Theirs("counter"),
    "vllm:request_num_preemptions": Theirs("histogram", bounds=(1, 2, 3, 4, 5, 10, 20)),
    "vllm:prefix_cache_queries": Theirs("counter"),
    "vllm:prefix_cache_hits": Theirs("counter"),
    "vllm:external_prefix_cache_queries": Theirs("counter"),
    "vllm:external_prefix_cache_hits": Theirs("counter"),
    "vllm:iteration_tokens_total": Theirs("histogram", bounds=STEP),
    "vllm:cache_config_info": Theirs(
        "gauge", ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
    ),  # some of its labels
}

LEFT_OUT = {
    "vllm:admission_rejections": "penstock_requests_refused and penstock_plans_refused, whose reasons are others",
    "vllm:corrupted_requests": "an answer that is not finite is an error here",
    "vllm:diffusion_num_denoising_steps": "no such models",
    "vllm:engine_sleep_state": "engines do not sleep",
    "vllm:kv_block_lifetime_seconds": "blocks live in the stores",
    "vllm:lora_requests_info": "no adapters",
    "vllm:mm_cache_queries": "no pictures",
    "vllm:num_requests_kv_fetch_by_stage": "the reason deferred of vllm:num_requests_waiting_by_reason",
    "vllm:watermark_requests": "no watermarks",
}
"""What vLLM exports and the mesh does not, and why."""
