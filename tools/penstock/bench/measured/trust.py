"""The section about what guards cost and what tests notice: `penstock bench trust`."""

from __future__ import annotations

from penstock.bench.measured.results import Line, Results, figures
from penstock.bench.trust.faults.acts import ACTS
from penstock.bench.trust.faults.measure import pause_id

_LINES = (
    Line("unix_vs_tcp_ttft", "TTFT over Unix sockets : over ports of 127.0.0.1", 3),
    Line("unix_vs_tcp_tokens_per_s", "tokens/s of eight streams over Unix sockets : over ports", 3),
    Line("unix_ttft_ms", "TTFT over Unix sockets, ms"),
    Line("tcp_ttft_ms", "TTFT over ports, ms"),
)
_TRIED = (
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
_FAULTS = (
    Line("fault_cells", "combinations of service, fault and phase"),
    Line("fault_streams_lost", "streams lost"),
    Line("fault_tokens_wrong", "tokens wrong"),
    Line("fault_leaks", "leaks at rest"),
    Line("fault_overdue_s", "by how much a request outlived its deadline, at most, s", 2),
    Line("fault_back_s", "after the fault, until a new request was answered, at most, s", 2),
    Line("fault_late_s", "by how much the clients' process itself was late, at most, s", 2),
    *(Line(pause_id(act), f"longest pause of a stream, {act}: {what}, s", 2) for act, what in ACTS.items()),
)
_MATRIX = """Each kind of service gets each fault, in a mesh of two gateways, routers, prefill and decode workers, a
store with a disk, a draft service and Redis: while nothing runs, and while requests wait, are computed, are handed
over, are decoded, and are decoded with a schema. The store has the memory that `penstock up` gives it. Clients ask
another gateway where theirs is silent for a second and a half once their stream has begun, or else for six seconds, so
those of a gateway that stands still, or is cut off, wait for that first. Each answer is compared with that of the same
request when nothing is wrong."""
_SEALING = """[Sealed](design/identity.md#blocks-are-sealed) blocks, 256 MiB of them, put into a store's shared memory
and got from there, beside memcpy between two processes' mappings and beside plain blocks."""


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown; of the figures that the run has."""
    other = "" if earlier is None else f" The other run: {earlier.machine}."
    sealed = [line for line in _SEALED if now.has(line.id)]
    sealing = f"\n{_SEALING}\n\n{figures(sealed, now, earlier)}\n{now.elsewhere('sealed_')}" if sealed else ""
    struck = [line for line in _FAULTS if now.has(line.id)]
    matrix = f"\n{_MATRIX}\n\n{figures(struck, now, earlier)}\n{now.elsewhere('fault_')}" if struck else ""
    return f"""## Trust

`penstock bench trust`: what guards cost. `penstock up --prefill 1` of the embedded model, whose services reach each
other over Unix sockets, beside the same over ports; prompts of 64 tokens, one after the other, and eight streams.

{figures(_LINES, now, earlier)}
{sealing}{_tried(now, earlier)}{matrix}
Measured on {now.machine}.{other}
"""


def _tried(now: Results, earlier: Results | None) -> str:
    tried = [line for line in _TRIED if now.has(line.id)]
    if not tried:
        return ""
    return f"""
Attacks are the tests with that mark.
{_changes(now)}
{figures(tried, now, earlier)}
{now.elsewhere(tried[0].id)}"""


def _changes(now: Results) -> str:
    if not now.has("mutants_noticed"):
        return ""
    return f"""
And what tests notice: comparisons turned, bounds moved, calls left out in the scheduler, the routing policy, the block
table, the flow of a request, the names of blocks and the sampler, one at a time; the tests of each run until one fails.
{now.against("mutants_noticed")}.
"""
