"""Page memory that another process opens: on a twin here, on a device in tests/gpu."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from penstock.engine.kernels.cuda.arena import PoolArena
from penstock.kv.device.leased import LeasedPool, PoolLease
from penstock.kv.device.memory import Device, DeviceFault
from penstock.testing.twin import TwinDevice

PROGRAM = (
    "import sys, json, hashlib\n"
    "from penstock.kv.device.leased import LeasedPool, PoolLease\n"
    "{imports}\n"
    "said = json.loads(sys.argv[1])\n"
    "said['handle'] = bytes.fromhex(said['handle'])\n"
    "pool = LeasedPool({device}, PoolLease(**said))\n"
    "print(hashlib.sha256(bytes({content})).hexdigest())\n"
    "pool.close()\n"
)


def seen_elsewhere(lease: PoolLease, page: int, imports: str, device: str, content: str) -> str:
    """The hash of a page as another process reads it."""
    said = json.dumps(asdict(lease) | {"handle": lease.handle.hex()})
    program = PROGRAM.format(imports=imports, device=device, content=content.format(page=page))
    done = subprocess.run([sys.executable, "-c", program, said], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def lends(device: Device) -> tuple[PoolLease, torch.Tensor]:
    """A pool of 5 pages of 4096 bytes, each with content of its own."""
    arena = PoolArena(device, 5 * 4096)
    assert not arena.bytes.any(), "zeros at first"
    arena.bytes.view(5, 4096)[3] = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    return arena.lease(4096, 5), arena.bytes


def test_another_process_reads_a_page():
    lease, content = lends(TwinDevice())
    seen = seen_elsewhere(
        lease,
        3,
        "import numpy\nfrom penstock.testing.twin import TwinDevice",
        "TwinDevice()",
        "numpy.from_dlpack(pool.page({page}))",
    )
    assert seen == hashlib.sha256(bytes(content.view(5, 4096)[3].numpy())).hexdigest()


def test_what_is_no_such_pool_is_refused():
    device = TwinDevice()
    lease, content = lends(device)
    with pytest.raises(DeviceFault, match="not on"):
        LeasedPool(device, replace(lease, uuid="another"))
    with pytest.raises(DeviceFault, match="6 pages of 4096 bytes don't fit 20480"):
        LeasedPool(device, replace(lease, pages=6))
    pool = LeasedPool(device, lease)
    for page in (0, 5, -1):
        with pytest.raises(ValueError, match="page"):
            pool.page(page)
    pool.close()
    assert content.shape == (5 * 4096,)
