"""The section about the whole mesh beside other servers."""

from __future__ import annotations

from penstock.bench.measured.results import Results, table

_LINES = {
    "agent_tokens_per_s_vs_best_1": "tokens/s, one agent",
    "agent_tokens_per_s_vs_best_4": "tokens/s, 4 agents",
    "agent_tokens_per_s_vs_best_8": "tokens/s, 8 agents",
    "agent_tokens_per_s_vs_best_16": "tokens/s, 16 agents",
    "agent_turn1_ttft_vs_best_1": "TTFT of a first turn, one agent",
    "agent_turn1_ttft_vs_best_4": "TTFT of first turns, 4 agents",
    "agent_turn1_ttft_vs_best_8": "TTFT of first turns, 8 agents",
    "agent_turn1_ttft_vs_best_16": "TTFT of first turns, 16 agents",
    "agent_turn2_ttft_vs_best_1": "TTFT of a second turn, one agent",
    "agent_turn2_ttft_vs_best_4": "TTFT of second turns, 4 agents",
    "agent_turn2_ttft_vs_best_8": "TTFT of second turns, 8 agents",
    "agent_turn2_ttft_vs_best_16": "TTFT of second turns, 16 agents",
    "fanout16_tokens_per_s_vs_best": "tokens/s, one agent and its 16 children",
    "fanout16_ttft_vs_best": "TTFT of 16 children of one agent",
    "agent_turn_ttft_after_restart_vs_best": "TTFT of an old session's turn after a restart of everything",
    "agent_pause_after_kill_vs_best": "wait for the next token after a worker was killed",
    "agent_turn1_ttft_after_rest_vs_best": "TTFT of a first turn after two minutes without requests",
    "plain_tokens_per_s_vs_best_1": "tokens/s, one plain request",
    "plain_tokens_per_s_vs_best_8": "tokens/s, 8 plain requests",
    "plain_tokens_per_s_vs_best_32": "tokens/s, 32 plain requests",
    "mixed_tokens_per_s_vs_best": "tokens/s, streams beside long prompts",
    "mixed_itl_p90_vs_best": "p90 between tokens beside long prompts",
    "coding_tokens_per_s_vs_best": "tokens/s, recorded sessions of coding agents",
    "coding_first_ttft_vs_best": "TTFT of their first turns",
    "coding_later_ttft_vs_best": "TTFT of their later turns",
    "mesh_cpu_s_per_1k_vs_best": "processor time per token, 8 agents",
    "mesh_memory_vs_best": "memory of all processes, 8 agents",
    "mesh_memory_vs_best_16": "memory of all processes, 16 agents",
    "shared_prefix_memory_ratio": "memory that a session with a common prefix adds : its own part",
    "step8k_vs_read": "step more at 8k context : reading its KV, 1B",
}
_PARTS = ("affinity", "store", "shared_pages", "draft", "disaggregation")
_WITHOUT = "the mesh with it; without: "
_ENDS = {"tokens_per_s": "tokens/s", "turn1_ttft": "TTFT of turn 1", "turn2_ttft": "TTFT of turn 2"}
_SHAPES = {"": "135M", "_1b": "1B"}
_BEST = "best peer: "
_SERVERS = ("mesh", "mesh_disaggregated", "mesh_aggregated", "llamaserver", "vllm", "openvino")
_VALUES = {
    "output_token_throughput": "tokens/s",
    "time_to_first_token_turn1_p50": "TTFT of turn 1, ms",
    "time_to_first_token_turn2_p50": "of turn 2",
    "inter_token_latency_p50": "ITL p50, ms",
    "cached_share": "cached",
    "cpu_s_per_1k": "CPU s per 1,000",
    "memory_mb": "MB",
}


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    return f"""## The mesh beside other servers

`penstock bench e2e`: the mesh as `penstock up` comes, with bfloat16 weights and without drafts (the text of random
weights repeats itself), beside llama-server, vLLM's server and OpenVINO GenAI behind a server of a few lines, which
serve the same random weights to one client. Agents begin together with the same 1,200 tokens, bring 150 new tokens in
each of 6 turns, and get 64; plain requests bring 512 and get 128.{_coding(now)}
Figures are ours : the best peer's, round by round; *best* is the peer beside which ours looks worst. AIPerf's names:
TTFT is the time to first token, ITL the inter-token latency. In this run: {_servers(now)}; where a range has equal
ends, there was one round.

```
python -m loadtest.peers.install llamaserver vllm openvino    # once
penstock bench e2e --json > e2e.json
```

{_comparisons(now, earlier)}

With 8 agents:

{_scale(now)}
{_ablations(now)}
Measured on {now.machine}.{other}
"""


def _comparisons(now: Results, earlier: Results | None) -> str:
    heads = ["figure", "median", "min to max", "goal", "best peer"] + (["other run"] if earlier else [])
    rows = []
    for suffix, shape in _SHAPES.items():
        for line, words in _LINES.items():
            id = line + suffix
            if not now.has(id):
                continue
            best = now.against(id).removeprefix(_BEST) if now.against(id).startswith(_BEST) else ""
            named = any(name in words for name in _SHAPES.values())
            cells = [words if named else f"{words}, {shape}", now.number(id), now.span(id), now.goal(id)]
            rows.append([*cells, best, *([earlier.number(id)] if earlier else [])])
    return table(heads, rows)


def _coding(now: Results) -> str:
    """A sentence, where they were measured."""
    if not now.has("coding_tokens_per_s_vs_best"):
        return ""
    return (
        " Sessions of coding agents are recorded ones, 32 times shorter than they were, which begin at random, one in"
        " two seconds, and think for two seconds at most."
    )


def _ablations(now: Results) -> str:
    """A paragraph and its table, where they were measured."""
    rows = []
    for part in _PARTS:
        ids = [f"ablation_{part}_{end}" for end in _ENDS]
        if any(map(now.has, ids)):
            without = now.against(ids[0]).removeprefix(_WITHOUT)
            rows.append([part.replace("_", " "), without, *(f"{now.number(id)} ({now.span(id)})" for id in ids)])
    if not rows:
        return ""
    heads = ["part", "without it", *_ENDS.values()]
    return f"""
What parts of the mesh are worth: `penstock bench e2e --ablations`, the embedded model, 8 agents as above. Figures are
without the part : with it, median and range; a part that is worth something has less than 1 of tokens/s, and more than
1 of a TTFT.

{table(heads, rows)}
{now.elsewhere("ablation_")}"""


def _servers(now: Results) -> str:
    """Those that were measured with 8 agents."""
    ids = {f"agents_8_{shape.lower()}_{server}_memory_mb": server for shape in _SHAPES.values() for server in _SERVERS}
    return ", ".join(dict.fromkeys(server for id, server in ids.items() if now.has(id)))


def _scale(now: Results) -> str:
    rows = []
    for shape in _SHAPES.values():
        for server in _SERVERS:
            ids = [f"agents_8_{shape.lower()}_{server}_{value}" for value in _VALUES]
            if any(map(now.has, ids)):
                rows.append([f"{server}, {shape}", *map(now.rate, ids)])
    return table(["server", *_VALUES.values()], rows)
