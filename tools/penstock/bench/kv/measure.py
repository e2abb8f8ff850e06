"""`penstock bench kv`: every figure of the store beside its limit, in one run.

Each part measures its subjects and their limits in the same interleaved rounds. Figures are ratios; the rates behind
them are given for scale, in GB/s (10^9 bytes).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.bench.harness import BenchReport, Figure, figure, interleave
from penstock.bench.kv.bulk import open_bulk
from penstock.bench.kv.calls import CLIENTS, Calls, open_callers
from penstock.bench.kv.disk import DiskRates, open_busy_gets, open_disk_reads
from penstock.bench.kv.growth import FEW, MANY, Costs, open_filled
from penstock.bench.kv.limits import MachineLimits, open_limits

_SIZE = 256 << 20
_MIB, _64_KIB = 1 << 20, 64 << 10
_MEMCPY = "memcpy between two processes' mappings"
_STREAM = "one grpc.aio byte stream of 1 MiB messages"
_FILE = "sequential file read, 1 or 4 calls at a time"
_EMPTY = "an empty unary call"


async def measure(quick: bool) -> BenchReport:
    """Runs the bench."""
    rounds = 3 if quick else 9
    figures: list[Figure] = []
    async with open_limits(_SIZE) as (limits, peer):
        figures += await _large(limits, rounds)
        figures += await _small(limits, rounds)
        figures += await _calls(peer, rounds, 200 if quick else 1000)
    figures += await _disk(rounds)
    figures += await _growth(rounds, 5 if quick else 20)
    return BenchReport("kv", figures)


def ratio(id: str, ours: Sequence[float], limit: Sequence[float], against: str, goal: float | None = None) -> Figure:
    """Ours over the limit, round by round: more is better."""
    return figure(id, [one / other for one, other in zip(ours, limit, strict=True)], "ratio", against, goal)


def _cost(id: str, ours: Sequence[float], limit: Sequence[float], against: str, goal: float | None = None) -> Figure:
    """Ours over the limit, round by round: less is better."""
    ratios = [one / other for one, other in zip(ours, limit, strict=True)]
    return figure(id, ratios, "ratio", against, goal, lower_is_better=True)


def _rate(id: str, samples: Sequence[float]) -> Figure:
    return figure(id, [sample / 1e9 for sample in samples], "GB/s", "for scale")


async def _large(limits: MachineLimits, rounds: int) -> list[Figure]:
    async with open_bulk(_SIZE, _MIB) as bulk:
        got = await interleave(
            {
                "memcpy in": limits.copy_in,
                "put": bulk.put,
                "get": bulk.get,
                "memcpy out": limits.copy_out,
                "tcp": limits.tcp,
                "remote get": bulk.get_remote,
                "grpc stream": limits.stream,
            },
            rounds,
        )
    return [
        ratio("get_1mib_vs_memcpy", got["get"], got["memcpy out"], _MEMCPY, 0.7),
        ratio("put_1mib_vs_memcpy", got["put"], got["memcpy in"], _MEMCPY, 0.5),
        ratio("remote_get_vs_stream", got["remote get"], got["grpc stream"], _STREAM, 0.6),
        ratio("remote_get_vs_tcp", got["remote get"], got["tcp"], "loopback TCP"),
        _rate("memcpy_in_gbs", got["memcpy in"]),
        _rate("memcpy_out_gbs", got["memcpy out"]),
        _rate("loopback_tcp_gbs", got["tcp"]),
        _rate("grpc_stream_gbs", got["grpc stream"]),
        _rate("put_1mib_gbs", got["put"]),
        _rate("get_1mib_gbs", got["get"]),
        _rate("remote_get_gbs", got["remote get"]),
    ]


async def _small(limits: MachineLimits, rounds: int) -> list[Figure]:
    async with open_bulk(_SIZE, _64_KIB) as bulk:
        got = await interleave(
            {"memcpy in": limits.copy_in, "put": bulk.put, "get": bulk.get, "memcpy out": limits.copy_out}, rounds
        )
    return [
        ratio("get_64kib_vs_memcpy", got["get"], got["memcpy out"], _MEMCPY, 0.4),
        ratio("put_64kib_vs_memcpy", got["put"], got["memcpy in"], _MEMCPY),
        _rate("put_64kib_gbs", got["put"]),
        _rate("get_64kib_gbs", got["get"]),
    ]


async def _calls(peer: str, rounds: int, calls: int) -> list[Figure]:
    async with open_callers(peer, calls) as callers:
        got = await interleave({"empty": callers.empty, "lookup": callers.lookup}, rounds)
    empty, lookup = got["empty"], got["lookup"]

    def microseconds(id: str, samples: Sequence[float]) -> Figure:
        return figure(id, [sample * 1e6 for sample in samples], "us", "for scale")

    def rates(samples: Sequence[Calls]) -> list[float]:
        return [sample.rate for sample in samples]

    return [
        _cost("lookup_4096_vs_empty_rpc", [c.p50 for c in lookup], [c.p50 for c in empty], f"{_EMPTY}, p50", 1.5),
        ratio("lookups_vs_empty_rpc_rate", rates(lookup), rates(empty), f"{_EMPTY}, {CLIENTS} clients", 0.7),
        microseconds("lookup_p50_us", [c.p50 for c in lookup]),
        microseconds("empty_rpc_p50_us", [c.p50 for c in empty]),
        figure("lookups_per_s", rates(lookup), "1/s", f"for scale, {CLIENTS} clients"),
        figure("empty_rpcs_per_s", rates(empty), "1/s", f"for scale, {CLIENTS} clients"),
        microseconds("lookup_p99_us", [c.p99 for c in lookup]),
        microseconds("empty_rpc_p99_us", [c.p99 for c in empty]),
    ]


async def _disk(rounds: int) -> list[Figure]:
    tier: list[DiskRates] = []

    async with open_disk_reads() as reads:

        async def read(round: int) -> float:
            tier.append(await reads.read(round))
            return tier[-1].read

        got = await interleave(
            {
                "file read": reads.file.read,
                "nvme read": read,
                "file write": reads.scratch.write,
                "file read singly": reads.file.read_singly,
            },
            rounds,
        )
    limit = list(map(max, got["file read"], got["file read singly"]))
    gets_of = [rates.get for rates in tier[1:]]  # without the warm-up round
    async with open_busy_gets(gets=8) as gets:
        times = await interleave({"idle": gets.idle, "busy": gets.busy}, rounds)
    return [
        ratio("nvme_read_vs_file", got["nvme read"], limit, _FILE, 0.7),
        ratio("nvme_get_vs_file", gets_of, limit, f"{_FILE}; with the client's checked copy"),
        _cost("nvme_write_get_slowdown", times["busy"], times["idle"], "host-tier gets without writes", 1.2),
        _rate("file_read_gbs", limit),
        _rate("file_write_gbs", got["file write"]),
        _rate("nvme_read_gbs", got["nvme read"]),
        _rate("nvme_get_gbs", gets_of),
        _rate("nvme_write_while_getting_gbs", gets.write_rates[1:]),
    ]


async def _growth(rounds: int, calls: int) -> list[Figure]:
    async with open_filled(FEW, calls) as few, open_filled(MANY, calls) as many:
        got = await interleave({"10^3": few.measure, "10^6": many.measure}, rounds)
        entry = many.entry_bytes

    def column(samples: Sequence[Costs], name: str) -> list[float]:
        return [getattr(sample, name) for sample in samples]

    against = "the same at 10^3 blocks"
    growth = [
        _cost(f"{name}_us_growth_1e3_1e6", column(got["10^6"], name), column(got["10^3"], name), against, goal)
        for name, goal in (("lookup", 1.25), ("get", None), ("put", None))
    ]
    times = [
        figure(f"{name}_256_us_1e6", [s * 1e6 for s in column(got["10^6"], name)], "us", "for scale")
        for name in ("lookup", "get", "put")
    ]
    return [*growth, *times, figure("entry_bytes", [entry], "bytes", "memory of the store per block, data aside")]
