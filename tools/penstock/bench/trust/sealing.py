"""Sealed blocks beside plain ones and beside memcpy, as workers put and get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.bench.harness import Figure, figure, interleave
from penstock.bench.kv.bulk import open_bulk
from penstock.bench.kv.limits import open_limits

_SIZE = 256 << 20
_MEMCPY = "memcpy between two processes' mappings"
_PLAIN = "the same without a seal"
_GOAL = 0.6
_BLOCKS = {"": 1 << 20, "_384kib": 384 << 10, "_64kib": 64 << 10}
"""By what ends the id: a block of a model of the 1B class, of 135M, and of the embedded one, more or less."""


async def sealing_figures(quick: bool) -> Sequence[Figure]:
    """Rounds in which plain and sealed puts and gets of 256 MiB and memcpy take turns."""
    found: list[Figure] = []
    async with open_limits(_SIZE) as (limits, _):
        for ends, block_bytes in _BLOCKS.items():
            size = _SIZE - _SIZE % block_bytes
            async with open_bulk(size, block_bytes) as plain, open_bulk(size, block_bytes, seals=True) as sealed:
                got = await interleave(
                    {
                        "memcpy in": limits.copy_in,
                        "put": sealed.put,
                        "plain put": plain.put,
                        "get": sealed.get,
                        "plain get": plain.get,
                        "memcpy out": limits.copy_out,
                        "remote get": sealed.get_remote,
                        "plain remote get": plain.get_remote,
                    },
                    3 if quick else 9,
                )
            found += rates(got, ends)
    return found


def rates(got: Mapping[str, Sequence[float]], ends: str = "") -> list[Figure]:
    """Of blocks of one size: bytes/s by what was done, round by round."""

    def beside(id: str, ours: str, other: str, against: str, goal: float | None = None) -> Figure:
        ratios = [one / limit for one, limit in zip(got[ours], got[other], strict=True)]
        return figure(f"sealed_{id}{ends}", ratios, "ratio", against, goal)

    return [
        beside("get_vs_memcpy", "get", "memcpy out", _MEMCPY, _GOAL),
        beside("put_vs_memcpy", "put", "memcpy in", _MEMCPY, _GOAL),
        beside("get_vs_plain", "get", "plain get", _PLAIN),
        beside("put_vs_plain", "put", "plain put", _PLAIN),
        beside("remote_get_vs_plain", "remote get", "plain remote get", _PLAIN),
        figure(f"sealed_get_gbs{ends}", [rate / 1e9 for rate in got["get"]], "GB/s", "for scale"),
        figure(f"sealed_put_gbs{ends}", [rate / 1e9 for rate in got["put"]], "GB/s", "for scale"),
    ]
