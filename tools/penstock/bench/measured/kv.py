"""The section about the store and its machine."""

from __future__ import annotations

from penstock.bench.measured.results import NOTHING, Line, Results, figures

_LINES = (
    Line("get_1mib_vs_memcpy", "get of 256 blocks of 1 MiB : memcpy"),
    Line("get_64kib_vs_memcpy", "get of 4,096 blocks of 64 KiB : memcpy"),
    Line("put_1mib_vs_memcpy", "put of 256 blocks of 1 MiB : memcpy"),
    Line("put_64kib_vs_memcpy", "put of 4,096 blocks of 64 KiB : memcpy"),
    Line("remote_get_vs_stream", "get from another host : one grpc.aio stream"),
    Line("nvme_read_vs_file", "read from disk, verified, into shared memory : file read"),
    Line("nvme_write_get_slowdown", "get while the disk tier writes : get while it does not, time"),
    Line("lookup_4096_vs_empty_rpc", "lookup of 4,096 tokens : empty call, p50"),
    Line("lookups_vs_empty_rpc_rate", "lookups/s of 16 clients : empty calls/s"),
    Line("lookup_us_growth_1e3_1e6", "lookup at 10^6 blocks : at 10^3, time"),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    other = "" if earlier is None else f" The other run was on a busier machine: {earlier.machine}."
    return f"""## The store beside its machine

`penstock bench kv` (3 minutes on an idle machine). Store, client and limit are measured in the same interleaved rounds,
so a slow minute falls on all of them: one memcpy between two processes' mappings, loopback TCP, a grpc.aio stream of
1 MiB messages, a plain file beside the disk tier's, an empty call to a bare grpc.aio server. Gets and puts include
control calls and checksums.

{figures(_LINES, now, earlier)}

Measured on {now.machine}.{other} On a loaded machine the rows about memory and the lookup rate are near their goals,
not far beyond them.

Memcpy gave {now.number("memcpy_out_gbs", 1)} GB/s, one grpc stream {now.number("grpc_stream_gbs")}, loopback TCP
{now.number("loopback_tcp_gbs", 1)}, the file {now.number("file_read_gbs", 1)}; p99 of a lookup among 16 clients was
{_ms(now, "lookup_p99_us")} ms, of an empty call {_ms(now, "empty_rpc_p99_us")} ms. A get from disk that ends with the
client's own checked copy reaches {now.number("nvme_get_vs_file")} of the file: it is a read and then a copy, one after
the other. {_lookups(now)}A put of 64 KiB blocks reaches {now.number("put_64kib_vs_memcpy")} of memcpy: messages and the
block table, in Python, cost more per block than its copy. A get of 256 small blocks costs
{now.number("get_us_growth_1e3_1e6")} times as much at 10^6 blocks as at 10^3, a put into a full store
{now.number("put_us_growth_1e3_1e6")} times; nothing scans. A block takes {now.number("entry_bytes", 0)} bytes of the
store's own memory.
"""


def _ms(now: Results, id: str) -> str:
    value = now.value(id)
    return NOTHING if value is None else f"{value / 1e3:.0f}"


def _lookups(now: Results) -> str:
    if not now.missed("lookups_vs_empty_rpc_rate"):
        return ""
    return (
        "The lookup rate is missed: a lookup carries 8 KiB of keys and goes through a full server (limits on what is\n"
        "in flight, error mapping, request ids), the empty call carries nothing to a bare one. "
    )
