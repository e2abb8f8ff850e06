"""The section about what large models are made of."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("oracle_families", "architectures of which every test beside transformers passes", 0),
    Line("mla_kv_bytes_vs_gqa", "a token's KV with DeepSeek V3's latent attention : with 8 heads of 128"),
    Line("tp2_vs_threads2", "tokens/s of one stream: two processes of one core each : one process with two threads"),
    Line("tp2_vs_threads2_8", "the same of 8 streams"),
    Line("tp2_vs_threads2_prompt", "the same of a prompt of 1,024 tokens"),
    Line("ep2_vs_threads2", "tokens/s of one stream, with half of the experts in each of two processes : two threads"),
    Line("ep2_vs_threads2_8", "the same of 8 streams"),
    Line("pp2_speedup_16", "tokens/s of 16 streams: two stages of one core each : one process with one thread"),
    Line("pp2_speedup_prompt", "the same of a prompt of 1,024 tokens"),
    Line("pp2_hosted_1", "tokens/s of one stream: two stages, one of them at a service of its own : both here"),
    Line("pp2_hosted_16", "the same of 16 streams"),
    Line("pp2_hosted_prompt", "the same of a prompt of 1,024 tokens"),
    Line("rank_death_s", "seconds from the death of a rank until its engine says so"),
    Line("picture_tiles_vs_transformers", "pictures/s of the vision encoder of Llama 4's form: ours : transformers'"),
    Line("picture_whole_vs_transformers", "the same of Qwen2.5-VL's form"),
    Line(
        "picture_again_ttft", "time to first token: of a picture that was shown before : of one that nobody has shown"
    ),
    Line("picture_first_ttft_ms", "of one that nobody has shown, ms", 0),
)
_BESIDE = (
    Line("moe_decode_vs_best", "tokens/s of one stream of a model of experts: ours : the best peer's"),
    Line("moe_decode8_vs_best", "the same of 8 streams"),
    *(
        Line(f"{cell}_moe_{engine}_tokens_per_s", f"{engine}, {streams}, tokens/s", 1)
        for cell, streams in (("decode_b1", "one stream"), ("decode_b8", "8 streams"))
        for engine in ("penstock", "llamacpp", "transformers")
    ),
    Line("lora_8_in_batch_vs_base", "tokens/s of 8 streams: each with its own adapter : all of the base model"),
    Line("lora_8_in_batch_vs_base_embedded", "the same with the embedded model"),
)
_FETCHED = (
    Line("sliding_fetch_bytes", "bytes that are read, of 16,384 tokens : all of them"),
    Line("sliding_fetch_s_mapped", "seconds out of the store's memory : those of all of them"),
    Line("sliding_fetch_s_streamed", "the same as a stream"),
)
_SHAPES = (("deepseek", "DeepSeek V3's form"), ("llama4", "Llama 4's form"))
_FORMS = (
    *(
        line
        for shape, name in _SHAPES
        for line in (
            Line(f"{shape}_decode_vs_best", f"{name}, tokens/s of one stream: ours : the best peer's"),
            Line(f"{shape}_decode8_vs_best", "the same of 8 streams"),
            Line(f"{shape}_decode_vs_torch", f"{name}, tokens/s of one stream: with kernels : without"),
            Line(f"{shape}_decode8_vs_torch", "the same of 8 streams"),
        )
    ),
    Line("deepseek_decode_4k_vs_best", "DeepSeek V3's form behind 4,096 tokens, tokens/s: ours : the best peer's"),
    Line("deepseek_decode_4k_vs_torch", "the same: with kernels : without"),
    Line("deepseek_verify3_4k_vs_step", "seconds of a step there that verifies two drafts : of one with one token"),
    Line("deepseek_verify5_4k_vs_step", "the same of four drafts"),
    *(
        Line(f"{cell}_{shape}_{engine}_tokens_per_s", f"{name}, {words}, {streams}, tokens/s", 1)
        for shape, name in _SHAPES
        for cell, streams in (("decode_b1", "one stream"), ("decode_b8", "8 streams"))
        for engine, words in (
            ("penstock", "penstock"),
            ("penstock_torch", "penstock without kernels"),
            ("transformers", "transformers"),
        )
    ),
)
_OF_FORMS = """Forms: two models of a thousand million random parameters in bfloat16, of which a token uses a quarter;
the bare engine with two threads beside transformers on the same weights and beside itself without kernels. One keeps as
much of a token as DeepSeek V3, a vector of 512 numbers and 64 rotated ones, for 32 heads, and has a shared expert and
48 others, of which a token uses four, chosen by sigmoids, a correction and groups. The other is a Llama 4 with a shared
expert and 16 others, of which a token uses one. They are not beside llama.cpp, because the bench writes its files for
Llama and Mixtral alone."""


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    measured = [line for line in _FORMS if now.has(line.id)]
    forms = f"\n{_OF_FORMS}\n\n{figures(measured, now, earlier)}\n{now.elsewhere('deepseek_')}" if measured else ""
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    return f"""## What large models are made of

`penstock bench large`. Architectures: tiny random checkpoints in float32, whole prompts, chunks, cached prefixes and
verified drafts, each logit within 1e-4. KV: of the blocks that an engine makes in bfloat16. Experts: a Mixtral of
about a thousand million random parameters in bfloat16, 16 experts of which a token uses two; the bare engine with two
threads beside llama.cpp and transformers on the same weights, which take turns. Ranks and stages: a Llama of 400
million, split over two processes; experts in groups: of the Mixtral. Adapters: of rank 16 on all matrices of a layer,
beside four layers of a model of 1B. Pictures: of 336 pixels along a side, noise, through encoders of six layers with
random weights in float32; and through the whole mesh as it comes.

{figures(_LINES, now, earlier)}
{forms}
Measured on {now.machine}.{other}

Experts and adapters:

{figures(_BESIDE, now, earlier)}
{now.elsewhere("moe_decode")}
What is fetched of a long prefix where five layers in six look at 1,024 tokens: by a worker's own code, of blocks that a
store has, up to the first token, in turns with all of each block.

{figures(_FETCHED, now, earlier)}
{now.elsewhere("sliding_fetch")}"""
