"""The section about the engine and its peers."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, table

_LINES = (
    Line("decode_b1_1b_bf16_vs_best", "decode alone, 1B bf16 : best peer"),
    Line("decode_b1_1b_int8_vs_llamacpp", "decode alone, 1B int8 : llama.cpp q8_0"),
    Line("decode_b1_1b_int4_vs_llamacpp", "decode alone, 1B int4 : llama.cpp q4_0"),
    Line("decode_b8_1b_int4_vs_llamacpp", "decode of 8, 1B int4 : llama.cpp q4_0"),
    Line("decode_b1_1b_int4_vs_int8", "decode alone, 1B int4 : our own int8"),
    Line("decode_b8_1b_int4_vs_int8", "decode of 8, 1B int4 : our own int8"),
    Line("decode_b1_1b_bf16_vs_bandwidth", "decode alone, 1B bf16 : reading the weights"),
    Line("decode_b1_135m_bf16_vs_best", "decode alone, 135M bf16 : best peer"),
    Line("decode_b8_1b_bf16_vs_best", "decode of 8, 1B : best peer"),
    Line("decode_b8_135m_bf16_vs_best", "decode of 8, 135M : best peer"),
    Line("decode_b32_1b_bf16_vs_best", "decode of 32, 1B : best peer"),
    Line("decode_b32_135m_bf16_vs_best", "decode of 32, 135M : best peer"),
    Line("prefill_512_1b_bf16_vs_best", "prefill 512, 1B : best peer"),
    Line("prefill_2048_1b_bf16_vs_best", "prefill 2,048, 1B : best peer"),
    Line("prefill_512_135m_bf16_vs_best", "prefill 512, 135M : best peer"),
    Line("prefill_2048_135m_bf16_vs_best", "prefill 2,048, 135M : best peer"),
    Line("decode_b1_1b_lossless_vs_bf16", "decode alone, 1B lossless : our own bf16"),
    Line("verify5_vs_step_1b", "verifying 5 tokens : a step of 1, 1B, time"),
    Line("decode_8k_1b_vs_kv_cost", "step more at 8k context : reading its KV, 1B, time"),
    Line("embedded_tokens_per_s", "embedded model, one stream, tokens/s", 0),
    Line("load_1b_s", "start to first token, 1B, warm page cache, s"),
    Line("peak_over_weights_mb", "peak memory over weights and KV pool, 1B, MB", 0),
    Line("step_overhead_us_b32", "step overhead at batch 32, us", 0),
)
_ENGINES = ("penstock", "llamacpp", "openvino", "transformers", "vllm")
_CELLS = {"decode_b1": "alone", "decode_b8": "8", "decode_b32": "32", "prefill_512": "prefill 512"}
_CELLS |= {"prefill_2048": "prefill 2,048"}
_SHAPES = {"1b": "1B", "135m": "135M"}
_BEST = "best peer: "


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    return f"""## The engine beside its peers

`penstock bench engine` measures two shapes with random weights (Llama-3.2-1B's and one of 135M) and the embedded
model, with 2 threads everywhere. Peers are llama.cpp, OpenVINO GenAI, `transformers` and vLLM's CPU build, each in an
environment and a process of its own:

```
python -m loadtest.peers.install                 # once; to $PENSTOCK_PEERS, else runs/peers; compiles llama.cpp
penstock bench engine --json > engine.json       # half an hour; --quick a few minutes; 12 GiB of memory
```

- All get the same weights (GGUF and OpenVINO's files are written from our safetensors), decode greedily, and take
  turns round by round. *Best* is the peer beside which ours looks worst in that cell. A peer that is missing or fails
  is named with its reason. Memory's read rate is taken right before and after every sample.
- Ours is the real engine with its event loop. Where prompts are only there to be continued, ours gets their KV from a
  source; peers compute it, uncounted.
- OpenVINO and vLLM keep the prompts of a batch in their prefix caches. `transformers` and vLLM compute in float32 where
  the processor has no bfloat16: there it is several times as fast.
- Rows are medians of the rounds' ratios; prefill of 2,048 is one round.

{_comparisons(now, earlier)}

{_rates(now)}

Measured on {now.machine}.{_of_earlier(earlier)}

Memory gave {now.number("memory_read_gbs_1b", 1)} GB/s to the bench's own reader, and more to others for moments, so a
share of it can be above 1. In int8 ours gives {now.rate("decode_b1_1b_penstock_int8_tokens_per_s")} and llama.cpp
{now.rate("decode_b1_1b_llamacpp_int8_tokens_per_s")} tokens/s alone (without its AMX products, which end its process on
such a machine); lossless weights give {now.rate("decode_b1_1b_penstock_lossless_tokens_per_s")}. The embedded model
gives {now.rate("embedded_float32_b1_tokens_per_s")} tokens/s in float32, the default,
{now.rate("embedded_bfloat16_b1_tokens_per_s")} in bfloat16 and {now.rate("embedded_int8_b1_tokens_per_s")} in int8.
{_what_is_missed(now)}"""


def _comparisons(now: Results, earlier: Results | None) -> str:
    heads = ["figure", "median", "min to max", "goal", "best peer"] + (["other run"] if earlier else [])
    rows = []
    for line in _LINES:
        against = now.against(line.id)
        best = against.removeprefix(_BEST) if against.startswith(_BEST) else ""
        cells = [line.words, now.number(line.id, line.digits), now.span(line.id, line.digits), now.goal(line.id), best]
        rows.append([*cells, earlier.number(line.id, line.digits)] if earlier else cells)
    return table(heads, rows)


def _rates(now: Results) -> str:
    cells = [(shape, cell) for shape in _SHAPES for cell in _CELLS]
    heads = ["tokens/s", *(f"{_SHAPES[shape]} {_CELLS[cell]}" for shape, cell in cells)]
    rows = [
        [engine, *(now.rate(f"{cell}_{shape}_{engine}_tokens_per_s") for shape, cell in cells)] for engine in _ENGINES
    ]
    return table(heads, rows)


def _of_earlier(earlier: Results | None) -> str:
    if earlier is None:
        return ""
    return (
        f" The other run, of an earlier version beside llama.cpp and OpenVINO alone, was on a processor without"
        f" bfloat16 instructions: {earlier.machine}. Its embedded model ran in float32."
    )


def _what_is_missed(now: Results) -> str:
    if not now.missed("decode_8k_1b_vs_kv_cost"):
        return ""
    return """
What holds back the long context: at 8k tokens attention computes about as long as it reads (turning values and the
weights' exponentials are most of it), and the two overlap little, as the keys of a head lie far apart.
"""
