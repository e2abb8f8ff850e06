"""The section about what guards cost and what tests notice: `penstock bench trust`."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures

_LINES = (
    Line("unix_vs_tcp_ttft", "TTFT over Unix sockets : over ports of 127.0.0.1", 3),
    Line("unix_vs_tcp_tokens_per_s", "tokens/s of eight streams over Unix sockets : over ports", 3),
    Line("unix_ttft_ms", "TTFT over Unix sockets, ms"),
    Line("tcp_ttft_ms", "TTFT over ports, ms"),
    Line("attacks_tried", "attacks tried"),
    Line("attacks_succeeded", "attacks that succeeded"),
    Line("mutants_noticed", "small changes of the code that decides which make a test fail, share", 3),
)
_SEALED = tuple(
    Line(f"sealed_{id}{ends}", f"{what}, blocks of {size}", 2)
    for ends, size in (("", "1 MiB"), ("_384kib", "384 KiB"), ("_64kib", "64 KiB"))
    for id, what in (
        ("get_vs_memcpy", "sealed get : memcpy"),
        ("put_vs_memcpy", "sealed put : memcpy"),
        ("get_vs_plain", "sealed get : plain"),
        ("put_vs_plain", "sealed put : plain"),
        ("remote_get_vs_plain", "sealed get from another host : plain"),
    )
)
_SEALING = """[Sealed](design/identity.md#blocks-are-sealed) blocks, 256 MiB of them, put into a store's shared memory
and got from there, beside memcpy between two processes' mappings and beside plain blocks."""


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown; of the figures that the run has."""
    other = "" if earlier is None else f" The earlier run: {earlier.machine}."
    sealed = [line for line in _SEALED if now.has(line.id)]
    sealing = f"\n{_SEALING}\n\n{figures(sealed, now, earlier)}\n" if sealed else ""
    return f"""## Trust

`penstock bench trust`: what guards cost. `penstock up --prefill 1` of the embedded model, whose services reach each
other over Unix sockets, beside the same over ports; prompts of 64 tokens, one after the other, and eight streams.
Attacks are the tests with that mark.
{_changes(now)}
{figures([line for line in _LINES if now.has(line.id)], now, earlier)}
{sealing}
Measured on {now.machine}.{other}
"""


def _changes(now: Results) -> str:
    if not now.has("mutants_noticed"):
        return ""
    return f"""
And what tests notice: comparisons turned, bounds moved, calls left out in the scheduler, the routing policy, the block
table, the flow of a request, the names of blocks and the sampler, one at a time; the tests of each run until one fails.
{now.against("mutants_noticed")}.
"""
