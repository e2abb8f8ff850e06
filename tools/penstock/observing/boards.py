"""The boards: for users of the mesh, for its operators, and for those who decide how much of it there is."""

from __future__ import annotations

from penstock.observing.panels import Board, BoardChoice, Panel, Query, quantile, quantiles, rate, ratio, share

_M = 'model_name=~"$model"'
_FAILED = 'outcome=~"error|unavailable|timeout|overloaded"'
_UNTIL_FIRST = 'part!~"handoff|decode|send"'

USERS = Board(
    "users",
    "what users see",
    "Latencies, failures and goodput, as the gateways measure them.",
    {
        "How soon": [
            Panel(
                "Time to first token",
                "From a request's first byte to its first token. High: see where it goes, on the right.",
                "s",
                quantiles("vllm:time_to_first_token_seconds", _M),
            ),
            Panel(
                "Where the time to the first token goes",
                "Mean seconds by part. plan: the router held requests back; queue: a worker was busy.",
                "s",
                [
                    Query(
                        share(
                            rate("penstock_request_part_seconds_sum", f"{_M}, {_UNTIL_FIRST}", "part"),
                            rate("penstock_request_part_seconds_count", f'{_M}, part="body"'),
                        ),
                        "{{part}}",
                    )
                ],
                stacked=True,
            ),
            Panel(
                "Between two tokens",
                "Of streams, one token to the next. Drafts that are accepted arrive together.",
                "s",
                quantiles("vllm:inter_token_latency_seconds", _M),
            ),
            Panel(
                "Whole requests",
                "First byte in to last byte out.",
                "s",
                quantiles("vllm:e2e_request_latency_seconds", _M),
            ),
            Panel(
                "Waiting",
                "Held back by the router, and in a worker's queue.",
                "s",
                quantiles("vllm:request_queue_time_seconds", _M),
            ),
            Panel(
                "Prefill and decode",
                "Medians of the two halves of a request, once it has its turn.",
                "s",
                [
                    Query(quantile(0.5, "vllm:request_prefill_time_seconds", _M), "prefill"),
                    Query(quantile(0.5, "vllm:request_decode_time_seconds", _M), "decode"),
                ],
            ),
        ],
        "How well": [
            Panel(
                "Goodput",
                "Shares of requests with their first token, and of tokens, within the targets above.",
                "percentunit",
                [
                    Query(
                        ratio(
                            rate("vllm:time_to_first_token_seconds_bucket", f'{_M}, le="$first_token"'),
                            rate("vllm:time_to_first_token_seconds_count", _M),
                        ),
                        "first token in time",
                    ),
                    Query(
                        ratio(
                            rate("vllm:inter_token_latency_seconds_bucket", f'{_M}, le="$between"'),
                            rate("vllm:inter_token_latency_seconds_count", _M),
                        ),
                        "tokens in time",
                    ),
                ],
                most=1,
            ),
            Panel(
                "Requests with targets of their own",
                "Of those that sent penstock.slo: in time (met), first token too late, tokens too slow.",
                "reqps",
                [Query(rate("penstock_requests_with_target_total", _M, "outcome"), "{{outcome}}")],
                stacked=True,
            ),
            Panel(
                "Failures",
                "Share of requests that failed for a reason of the mesh: errors, no workers, too late, no room.",
                "percentunit",
                [Query(ratio(rate("penstock_requests_total", _FAILED), rate("penstock_requests_total")), "failed")],
            ),
            Panel(
                "Refused before they began",
                "By HTTP status and code of the error: 4xx are mistakes or limits of clients, 503 want of room.",
                "reqps",
                [Query(rate("penstock_requests_refused_total", by="status, reason"), "{{status}} {{reason}}")],
                stacked=True,
            ),
            Panel(
                "How requests ended",
                "stop and length are answers; abort: the client left or its time was over.",
                "reqps",
                [Query(rate("vllm:request_success_total", _M, "finished_reason"), "{{finished_reason}}")],
                stacked=True,
            ),
            Panel(
                "Requests in flight",
                "Between first and last byte, by gateway.",
                "short",
                [Query("sum by (instance) (penstock_requests_live)", "{{instance}}")],
                stacked=True,
            ),
        ],
        "How much": [
            Panel(
                "Tokens",
                "Of prompts, and generated.",
                "tokens/s",
                [
                    Query(rate("vllm:prompt_tokens_total", _M), "prompt"),
                    Query(rate("vllm:generation_tokens_total", _M), "generated"),
                ],
            ),
            Panel(
                "Sizes of requests",
                "Medians.",
                "tokens",
                [
                    Query(quantile(0.5, "vllm:request_prompt_tokens", _M), "prompt"),
                    Query(quantile(0.5, "vllm:request_prefill_kv_computed_tokens", _M), "computed of it"),
                    Query(quantile(0.5, "vllm:request_generation_tokens", _M), "generated"),
                ],
            ),
            Panel(
                "Reused",
                "Share of prompt tokens whose KV did not have to be computed.",
                "percentunit",
                [
                    Query(
                        ratio(rate("vllm:prompt_tokens_cached_total", _M), rate("vllm:prompt_tokens_total", _M)),
                        "reused",
                    )
                ],
                most=1,
            ),
        ],
    },
    [
        BoardChoice("first_token", "First token within (s)", ("1.0", "0.1", "0.25", "0.5", "2.5", "5.0", "10.0")),
        BoardChoice("between", "Tokens within (s)", ("0.1", "0.01", "0.025", "0.05", "0.2", "0.5", "1.0")),
    ],
)

OPERATORS = Board(
    "operators",
    "how the mesh works",
    "Queues in seconds, tiers, hits, drafts, fail-overs and predictions.",
    {
        "Queues": [
            Panel(
                "Queue",
                "Seconds until a request that comes now begins to compute, by worker.",
                "s",
                [Query("max by (instance) (penstock_queue_seconds)", "{{instance}}")],
            ),
            Panel(
                "Held back",
                "Requests that the router holds until a worker has room, and those of batches that yield.",
                "short",
                [
                    Query("sum(penstock_held_requests)", "requests"),
                    Query("sum(penstock_held_yielding_requests)", "lines of batches"),
                ],
            ),
            Panel(
                "How long held back",
                "Of requests that got their plan.",
                "s",
                quantiles("penstock_held_seconds"),
            ),
            Panel(
                "Running and waiting",
                "Sequences in the batches of all workers, and those that wait: for a place, or for their KV.",
                "short",
                [
                    Query(f"sum(vllm:num_requests_running{{{_M}}})", "running"),
                    Query(f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{_M}}})", "{{reason}}"),
                ],
                stacked=True,
            ),
            Panel(
                "Plans",
                "By who computes the prompt: a worker of its own, or the decode worker itself.",
                "reqps",
                [
                    Query(rate("penstock_plans_total", by="prefill"), "{{prefill}}"),
                    Query(rate("penstock_plans_refused_total", by="reason"), "refused: {{reason}}"),
                ],
            ),
            Panel("Deciding", "The router's time for one plan.", "s", quantiles("penstock_plan_seconds")),
        ],
        "Tiers": [
            Panel(
                "Prompt tokens by where their KV came from",
                "computed is what was new; worker: its own pages; remote: another store.",
                "tokens/s",
                [Query(rate("penstock_prompt_tokens_total", _M, "source"), "{{source}}")],
                stacked=True,
            ),
            Panel(
                "Hit rates",
                "Of the tokens that sequences began with: in the worker's own pages; of the rest: in a store.",
                "percentunit",
                [
                    Query(
                        ratio(
                            rate("vllm:prefix_cache_hits_total", _M),
                            rate("vllm:prefix_cache_queries_total", _M),
                        ),
                        "own pages",
                    ),
                    Query(
                        ratio(
                            rate("vllm:external_prefix_cache_hits_total", _M),
                            rate("vllm:external_prefix_cache_queries_total", _M),
                        ),
                        "stores",
                    ),
                    Query(
                        ratio(
                            rate("penstock_store_hits_total"),
                            f"({rate('penstock_store_hits_total')} + {rate('penstock_store_misses_total')})",
                        ),
                        "blocks asked of stores",
                    ),
                ],
                most=1,
            ),
            Panel(
                "Full",
                "Used part of each tier of the stores. A full tier evicts.",
                "percentunit",
                [
                    Query("sum(penstock_store_blocks) / (sum(penstock_store_slots) > 0)", "host memory"),
                    Query("sum(penstock_store_nvme_blocks) / (sum(penstock_store_nvme_slots) > 0)", "disk"),
                    Query("sum(penstock_store_gpu_blocks) / (sum(penstock_store_gpu_slots) > 0)", "device"),
                ],
                most=1,
            ),
            Panel(
                "Evictions",
                "Blocks that left a tier because others needed their slots.",
                "ops",
                [
                    Query(rate("penstock_store_evictions_total"), "host memory"),
                    Query(rate("penstock_store_nvme_evictions_total"), "disk"),
                    Query(rate("penstock_store_gpu_evictions_total"), "device"),
                ],
            ),
            Panel(
                "Bytes between tiers",
                "From and to disks, and from other stores.",
                "Bps",
                [
                    Query(rate("penstock_store_nvme_read_bytes_total"), "read"),
                    Query(rate("penstock_store_nvme_written_bytes_total"), "written"),
                    Query(rate("penstock_store_pulled_bytes_total"), "from other stores"),
                ],
            ),
            Panel(
                "Recomputed for want of blocks",
                "Store calls and hand-offs that became a recompute, and fetches from other stores that ended early.",
                "ops",
                [
                    Query(rate("penstock_store_faults_total", by="what"), "store: {{what}}"),
                    Query(rate("penstock_handoff_faults_total"), "hand-off"),
                    Query(rate("penstock_store_pull_faults_total", by="reason"), "pull: {{reason}}"),
                ],
            ),
        ],
        "Drafts": [
            Panel(
                "Accepted",
                "Share of drafts that were right.",
                "percentunit",
                [
                    Query(
                        ratio(
                            rate("vllm:spec_decode_num_accepted_tokens_total", _M),
                            rate("vllm:spec_decode_num_draft_tokens_total", _M),
                        ),
                        "all",
                    ),
                    Query(
                        ratio(
                            rate("penstock_drafts_accepted_total", by="proposer"),
                            rate("penstock_drafts_verified_total", by="proposer"),
                        ),
                        "{{proposer}}",
                    ),
                ],
                most=1,
            ),
            Panel(
                "Accepted by place",
                "Of steps with drafts: how often the first, the second and so on was right.",
                "percentunit",
                [
                    Query(
                        share(
                            rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", _M, "position"),
                            rate("vllm:spec_decode_num_drafts_total", _M),
                        ),
                        "{{position}}",
                    )
                ],
                most=1,
            ),
            Panel(
                "Draft service",
                "Share of the time in which it computes, and seconds by second for which workers wait for it.",
                "percentunit",
                [
                    Query("rate(penstock_draft_busy_seconds_total[$__rate_interval])", "busy {{instance}}"),
                    Query(rate("penstock_draft_wait_seconds_total"), "waited for"),
                    Query(rate("penstock_draft_faults_total"), "waits in vain, by second"),
                ],
            ),
        ],
        "Faults and predictions": [
            Panel(
                "Fail-overs",
                "Workers that failed a request, so that it moved: by stage and reason.",
                "ops",
                [Query(rate("penstock_workers_lost_total", _M, "stage, reason"), "{{stage}} {{reason}}")],
                stacked=True,
            ),
            Panel(
                "How long moving takes",
                "From the loss of a request's workers to its next plan.",
                "s",
                quantiles("penstock_failover_seconds", _M),
            ),
            Panel(
                "Failed background tasks",
                "Should be empty.",
                "ops",
                [Query(f"{rate('penstock_task_failures_total', by='instance, task')} > 0", "{{instance}} {{task}}")],
            ),
            Panel(
                "Actual over predicted seconds",
                "1 is right. first_token: from the plan to the first token; token: all those after it.",
                "short",
                [
                    Query(
                        ratio(
                            rate("penstock_plan_actual_seconds_total", by="what"),
                            rate("penstock_plan_predicted_seconds_total", by="what"),
                        ),
                        "{{what}}",
                    )
                ],
            ),
            Panel(
                "Spread of predictions",
                "How many times as long as predicted the first token took.",
                "short",
                quantiles("penstock_plan_error_ratio", 'what="first_token"'),
            ),
            Panel(
                "Members",
                "Joined, by role, as each router sees it.",
                "short",
                [Query("max by (role) (penstock_members)", "{{role}}")],
            ),
        ],
    },
)

CAPACITY = Board(
    "capacity",
    "how much there is",
    "KV use, backlog, worker time and headroom: whether to add workers, memory or disks.",
    {
        "Workers": [
            Panel(
                "Worker time",
                "Share of the time in which a worker computes. Near 1 for long: it is saturated.",
                "percentunit",
                [Query("rate(penstock_worker_busy_seconds_total[$__rate_interval])", "{{instance}}")],
                most=1,
            ),
            Panel(
                "Headroom",
                "Part of all workers' time that is left.",
                "percentunit",
                [Query("1 - avg(rate(penstock_worker_busy_seconds_total[$__rate_interval]))", "left")],
                most=1,
            ),
            Panel(
                "Backlog",
                "Tokens of prompts that are still to be computed, by worker.",
                "tokens",
                [Query("sum by (instance) (penstock_queued_tokens)", "{{instance}}")],
                stacked=True,
            ),
            Panel(
                "Backlog in seconds",
                "The same, at the rate that each worker measures.",
                "s",
                [Query("max by (instance) (penstock_queue_seconds)", "{{instance}}")],
            ),
            Panel(
                "Prompt tokens computed",
                "By all workers, and what they could compute if they did nothing else.",
                "tokens/s",
                [
                    Query(rate("penstock_worker_prompt_tokens_total", 'source="computed"'), "computed"),
                    Query("sum(penstock_prefill_tokens_per_second)", "measured rates together"),
                ],
            ),
            Panel(
                "Tokens generated",
                "By worker.",
                "tokens/s",
                [Query(rate("penstock_worker_generated_tokens_total", by="instance"), "{{instance}}")],
                stacked=True,
            ),
            Panel(
                "Tokens of a step",
                "Of prompts, and generated: how full batches are.",
                "tokens",
                quantiles("vllm:iteration_tokens_total", _M),
            ),
            Panel(
                "Waiting for cores",
                "Seconds by second for which workers wait for their turn on cores that they share.",
                "s",
                [Query(rate("penstock_turn_wait_seconds_total", by="instance"), "{{instance}}")],
            ),
            Panel(
                "Lines of batches",
                "That fill what live requests leave idle.",
                "short",
                [
                    Query("sum(penstock_batch_lines_running)", "running"),
                    Query("sum(penstock_batch_lines_waiting)", "waiting"),
                ],
            ),
        ],
        "KV": [
            Panel(
                "KV use",
                "Used part of each worker's page pool. Near 1: sequences wait, or are preempted.",
                "percentunit",
                [Query(f"max by (instance) (vllm:kv_cache_usage_perc{{{_M}}})", "{{instance}}")],
                most=1,
            ),
            Panel(
                "KV room",
                "Tokens whose KV all page pools hold, and that are in use.",
                "tokens",
                [
                    Query("sum(penstock_kv_capacity_tokens)", "room"),
                    Query(
                        "sum(penstock_kv_capacity_tokens * on(instance) group_left() "
                        "max by (instance) (vllm:kv_cache_usage_perc))",
                        "in use",
                    ),
                ],
            ),
            Panel(
                "Preemptions",
                "Sequences that lost their pages to others and were computed again.",
                "ops",
                [Query(rate("vllm:num_preemptions_total", _M), "preemptions")],
            ),
            Panel(
                "Bytes in stores",
                "By tier.",
                "bytes",
                [
                    Query("sum(penstock_store_used_bytes)", "host memory"),
                    Query("sum(penstock_store_nvme_used_bytes)", "disk"),
                    Query("sum(penstock_store_gpu_used_bytes)", "device"),
                ],
                stacked=True,
            ),
            Panel(
                "Written to disks today",
                "Against the budget of --nvme-write-bytes-per-day.",
                "bytes",
                [Query("sum by (instance) (penstock_store_nvme_written_today)", "{{instance}}")],
            ),
            Panel(
                "Pages of draft services",
                "That nobody uses.",
                "short",
                [Query("sum by (instance) (penstock_draft_free_pages)", "{{instance}}")],
            ),
        ],
    },
)

BOARDS = (USERS, OPERATORS, CAPACITY)
