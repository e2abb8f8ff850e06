"""The section about what large models are made of."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("moe_decode_vs_best", "tokens/s of one stream of a model of experts: ours : the best peer's"),
    Line("moe_decode8_vs_best", "the same of 8 streams"),
    *(
        Line(f"{cell}_moe_{engine}_tokens_per_s", f"{engine}, {streams}, tokens/s", 1)
        for cell, streams in (("decode_b1", "one stream"), ("decode_b8", "8 streams"))
        for engine in ("penstock", "llamacpp", "transformers")
    ),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The earlier run: {earlier.machine}."
    return f"""## What large models are made of

`penstock bench large`. Experts: a Mixtral of about a thousand million random parameters in bfloat16, 16 experts of
which a token uses two; the bare engine with two threads beside llama.cpp and transformers on the same weights, which
take turns.

{figures(_LINES, now, earlier)}

Measured on {now.machine}.{other}
"""
