"""What a store refuses, by name, and what it does with blocks that arrive in chunks."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tests.services.kvstore.helpers import (
    BLOCK_BYTES,
    ROOT,
    keys,
    puts,
    raw,
    settings,
    spec,
)

from penstock.kv.bytes.checksum import checksum
from penstock.kvstore.service import open_kvstore
from penstock.rpc.errors import from_rpc
from penstock.runtime.config import ConfigError
from penstock.v1 import kvstore_pb2

pytestmark = pytest.mark.attack


WRITE = kvstore_pb2.Reservation.STATE_WRITE


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Lookup", kvstore_pb2.LookupRequest(keys=[ROOT, b"short"]), "keys[1]"),
        ("Lookup", kvstore_pb2.LookupRequest(keys=[ROOT] * 65537), "keys"),
        ("Lease", kvstore_pb2.LeaseRequest(keys=[b""]), "keys[0]"),
        ("Lease", kvstore_pb2.LeaseRequest(lease_s=-1), "lease_s"),
        ("Lease", kvstore_pb2.LeaseRequest(lease_s=float("nan")), "lease_s"),
        ("Reserve", kvstore_pb2.ReserveRequest(length=1), "length"),
        (
            "Reserve",
            kvstore_pb2.ReserveRequest(length=BLOCK_BYTES, blocks=[kvstore_pb2.ReserveBlock(key=ROOT, parent=b"x")]),
            "blocks[0].parent",
        ),
        ("Commit", kvstore_pb2.CommitRequest(blocks=[kvstore_pb2.CommitBlock(key=b"x")]), "blocks[0].key"),
        (
            "Commit",
            kvstore_pb2.CommitRequest(blocks=[kvstore_pb2.CommitBlock(key=ROOT, checksum=b"x")]),
            "blocks[0].checksum",
        ),
        ("Quarantine", kvstore_pb2.QuarantineRequest(key=b"x"), "key"),
        ("Release", kvstore_pb2.ReleaseRequest(attachment_id="guess"), "attachment_id"),
        ("Lease", kvstore_pb2.LeaseRequest(attachment_id="guess", keys=[ROOT]), "attachment_id"),
    ],
)
async def test_bad_input_is_refused_by_name(method: str, request_: Any, field: str) -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        await one.attach()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(one.stub, method)(request_)
        assert from_rpc(caught.value).field == field
        assert "Traceback" not in (caught.value.details() or "")


async def test_bad_specs_are_refused_by_name() -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        for bad, field in (
            (spec(block_bytes=0), "spec.block_bytes"),
            (spec(block_size=0), "spec.block_size"),
            (spec(model="x" * 300), "spec.model"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.attach(bad)
            assert from_rpc(caught.value).field == field


async def test_the_largest_question_fits_one_message() -> None:
    names = keys(65_536)
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        await one.attach()
        assert await one.lookup(names) == 0
        wanted = [kvstore_pb2.ReserveBlock(key=name, parent=ROOT, first_token=1 << 20) for name in names[:2_049]]
        request = kvstore_pb2.ReserveRequest(attachment_id=one.attached.attachment_id, length=BLOCK_BYTES)
        request.blocks.extend(wanted[:2_048])
        rooms = (await one.stub.Reserve(request)).blocks
        assert [room.state for room in rooms].count(WRITE) == 64
        request.blocks.append(wanted[-1])
        with pytest.raises(grpc.aio.AioRpcError, match="blocks = 2049 entries: must have at most 2048"):
            await one.stub.Reserve(request)


def _chunks(attachment: str, block: Any, epoch: int, digest: bytes, pieces: list[tuple[int, bytes]]) -> list[Any]:
    chunks = [kvstore_pb2.BlockChunk(at=at, data=data) for at, data in pieces]
    chunks[0].attachment_id = attachment
    chunks[0].block.CopyFrom(kvstore_pb2.CommitBlock(key=block.key, epoch=epoch, checksum=digest))
    return [kvstore_pb2.BlockChunks(chunks=chunks[:1]), kvstore_pb2.BlockChunks(chunks=chunks[1:])]


async def test_streamed_blocks_are_verified_before_they_are_found() -> None:
    block = puts(1)[0]
    data, half = bytes(block.data), BLOCK_BYTES // 2
    whole = [(0, data[:half]), (half, data[half:])]
    torn = [(0, data[:half]), (half, data[half - 1 : -1])]
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        attachment = await one.attach()
        for pieces, digest, good in ((torn, checksum(data), False), (whole, b"", False), (whole, checksum(data), True)):
            epoch = (await one.reserve([block])).blocks[0].epoch
            answer = await one.stub.Write(iter(_chunks(attachment, block, epoch, digest, pieces)))
            assert list(answer.committed) == [good]
            assert await one.lookup([block.key]) == good
        assert store.stats().reserved == 0


@pytest.mark.parametrize(
    ("pieces", "field"),
    [
        ([(0, b"x" * 10), (20, b"y")], "at"),
        ([(0, b"x" * (BLOCK_BYTES + 1))], "at"),
        ([(0, b"x" * 10)], "data"),
    ],
)
async def test_chunks_out_of_order_are_refused(pieces: list[tuple[int, bytes]], field: str) -> None:
    block = puts(1)[0]
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        attachment = await one.attach()
        epoch = (await one.reserve([block])).blocks[0].epoch
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.stub.Write(iter(_chunks(attachment, block, epoch, checksum(block.data), pieces)))
        assert from_rpc(caught.value).field == field
        assert await one.lookup([block.key]) == 0


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("host_bytes", 1 << 60, "this machine has"),
        ("host_bytes", 1, "at least 64KiB"),
        ("address", "nowhere", "host:port"),
        ("router", "nowhere:99999", "host:port"),
        ("lease_s", 0, "seconds"),
        ("cooling_s", -1, "seconds"),
        ("max_clients", 0, "1 to"),
        ("log_level", "loud", "must be debug"),
        ("host_id", "", "a name"),
    ],
)
def test_a_bad_setting_is_refused_with_what_would_be_right(field: str, value: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field} = .*{word}"):
        settings(**{field: value})
