"""The section about the gateway alone."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("events_vs_bare_64", "events/s of one core over 64 streams, gateway : bare SSE application"),
    Line("events_vs_bare_1000", "the same over 1,000 streams"),
    Line("token_in_gateway_ms_p99", "p99 of a token's way from worker to client at half load, ms", 1),
    Line("overload_goodput", "answers/s at 3 x the capacity : at capacity"),
    Line("refusal_ms_p99", "p99 of a refusal meanwhile, ms", 1),
    Line("overload_grown_mb", "growth of the gateway's memory meanwhile, MB", 1),
    Line("next_turn_us_100k_over_1k", "next turn after 100,000 tokens : after 1,000"),
    Line("next_turn_us_1k", "next turn after 1,000 tokens, us", 0),
    Line("next_turn_us_10k", "after 10,000", 0),
    Line("next_turn_us_100k", "after 100,000", 0),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The earlier run was on a busier machine: {earlier.machine}."
    scale = ", ".join(
        f"{words} {now.rate(f'{name}_events_{streams}')} over {streams:,} streams"
        for name, words in (("gateway", "the gateway"), ("bare", "the bare application"))
        for streams in (64, 1000)
    )
    return f"""## The gateway alone

`penstock bench gateway`: a gateway before a mesh that computes nothing and emits tokens as fast as they are taken, one
per message. Rates are events per second of the processor that the process used, once all streams stand; the bare
application, starlette under uvicorn, encodes a chunk of JSON for every event and has nobody behind it. A token's way
is from the worker's process to the client's, a turn's from the client's first byte to the worker's call.

{figures(_LINES, now, earlier)}

Events per second of a core: {scale}. Measured on {now.machine}.{other}
"""
