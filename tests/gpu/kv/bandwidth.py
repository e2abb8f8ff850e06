"""How fast blocks move between host and device. `python -m tests.gpu.kv.bandwidth` prints it as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from penstock.kv.bytes.arena import Arena, Layout
from penstock.kv.device.cuda import open_cuda
from penstock.kv.device.memory import Device, DeviceArena
from penstock.kvstore.tiers.device.copier import Copier, Move


def bandwidth(device: Device, *, blocks: int = 256, block_bytes: int = 1 << 20, rounds: int = 5) -> dict[str, float]:
    """GB/s, the median of some rounds, through a store's arena before and after it is registered.

    `checked` is the store's way up: copied, read back, and compared with the checksum.
    """
    layout_bytes = blocks * (block_bytes + 64) + (1 << 20)
    host = Arena(layout_bytes)
    host.format(Layout.fit(layout_bytes, block_bytes))
    arena = device.allocate(blocks * block_bytes)
    figures: dict[str, float] = {}
    try:
        figures |= _both_ways(arena, host, blocks, block_bytes, rounds, "pageable")
        if arena.register(host.whole()):
            figures |= _both_ways(arena, host, blocks, block_bytes, rounds, "registered")
    finally:
        arena.close()
        host.close()
    return figures


def _both_ways(
    arena: DeviceArena, host: Arena, blocks: int, block_bytes: int, rounds: int, name: str
) -> dict[str, float]:
    copies = [(number * block_bytes, host.block(number, block_bytes)) for number in range(blocks)]
    copier, batch = Copier(arena, block_bytes, 16), 16
    zeros = _checksum(block_bytes)

    def checked() -> None:
        for start in range(0, blocks, batch):
            copier.up([Move(offset, view, zeros) for offset, view in copies[start : start + batch]])

    size = blocks * block_bytes
    return {
        f"{name}_up": _rate(size, rounds, lambda: arena.upload(copies).wait()),
        f"{name}_down": _rate(size, rounds, lambda: arena.download(copies).wait()),
        f"{name}_up_checked": _rate(size, rounds, checked),
    }


def _checksum(size: int) -> bytes:
    from penstock.kv.bytes.checksum import checksum

    return checksum(bytes(size))


def _rate(size: int, rounds: int, job: Callable[[], object]) -> float:
    job()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return size / sorted(seconds)[rounds // 2] / 1e9


if __name__ == "__main__":
    found = open_cuda()
    print(json.dumps({"device": found.info.name, "unit": "GB/s"} | bandwidth(found), indent=1))
