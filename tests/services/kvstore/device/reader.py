"""A process that leases blocks on the store's device, says what it sees there, and stays until it is ended.

`python reader.py '["127.0.0.1:1234", "host", {spec}, ["key in hex", ...], "cuda"]'` prints a JSON list: the sha256 of
each block that it found on the device.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

import torch

from penstock.kv.client.client import open_store
from penstock.kv.device.cuda import open_cuda
from penstock.kv.spec import KvSpec
from penstock.rpc.channels import open_channels
from penstock.testing.twin import TwinDevice


async def main() -> None:
    address, host, fields, names, kind = json.loads(sys.argv[1])
    device = open_cuda() if kind == "cuda" else TwinDevice()
    async with open_channels() as channels:
        channel = channels.to(address, "store")
        async with open_store(channel, "reader", KvSpec(**fields), host, device=device, timeout_s=20) as client:
            async with client.lease([bytes.fromhex(name) for name in names], on_device=True) as leased:
                copies = [torch.from_dlpack(view).cpu() for view in leased.on_device.views]
                assert leased.still_valid()
                print(json.dumps([hashlib.sha256(bytes(copy.numpy())).hexdigest() for copy in copies]), flush=True)
                await asyncio.sleep(600)


asyncio.run(main())
