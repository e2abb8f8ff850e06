"""Where files and batches are kept: a directory and a Redis do the same."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.gateway.batches.in_directory import open_directory_batches
from penstock.gateway.batches.in_redis import open_redis_batches
from penstock.gateway.batches.store import ClaimLost, is_id, tenant_name
from penstock.runtime.config import ConfigError
from penstock.testing.redis_server import redis_server

from .helpers import content, pieces, stored_batch, stored_file


@pytest.fixture(scope="module")
async def redis_url(tmp_path_factory):
    async with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(params=["directory", "redis"])
async def make(request, tmp_path, redis_url):
    """Opens the same store once more, as another gateway would."""
    if request.param == "directory":
        return lambda: open_directory_batches(tmp_path / "batches")
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
    return lambda: open_redis_batches(redis_url, lambda name: None, lease_s=60)


@pytest.fixture
async def store(make):
    async with make() as opened:
        yield opened


async def test_a_file_is_there_as_it_was_sent(store, make):
    file = stored_file(size=200_003)
    data = os.urandom(200_000) + b"\n\r\n"
    await store.write("t", file.id, pieces(data[:5], data[5:]))
    assert await store.files("t") == [], "nobody sees it before it is whole"
    await store.add_file(file)
    async with make() as other:
        assert await other.files("t") == [file] and await other.file("t", file.id) == file
        assert await content(other, "t", file.id) == data
        assert await other.delete_file("t", file.id) and not await other.delete_file("t", file.id)
    assert await store.file("t", file.id) is None and await content(store, "t", file.id) == b""


async def test_nothing_is_left_of_an_upload_that_breaks(store, tmp_path):
    async def broken():
        yield b"half"
        raise ValueError("the client has left")

    with pytest.raises(ValueError, match="left"):
        await store.write("t", "file-" + "0" * 24, broken())
    assert await content(store, "t", "file-" + "0" * 24) == b""
    assert not [*tmp_path.rglob("*.part")]


async def test_tenants_see_their_own(store):
    file, batch = stored_file("one"), stored_batch("one")
    await store.write("one", file.id, pieces(b"abc"))
    await store.add_file(file)
    await store.add_batch(batch)
    assert await store.file("two", file.id) is None and await store.batch("two", batch.id) is None
    assert await store.files("two") == [] and await store.batches("two") == []
    assert not await store.delete_file("two", file.id) and await content(store, "one", file.id) == b"abc"
    assert await content(store, "two", file.id) == b""


async def test_one_at_a_time_runs_a_batch(store, make):
    batch = stored_batch()
    await store.add_batch(batch)
    async with make() as other:
        async with store.claim(batch) as claim:
            assert claim is not None and claim.batch == batch
            async with other.claim(batch) as second:
                assert second is None
        async with other.claim(batch) as second:
            assert second is not None
            await second.save(replace(batch, status="completed", completed_at=5))
        async with store.claim(batch) as third:
            assert third is None, "it is over"
    assert await store.open_batches() == []
    [found] = await store.batches("t")
    assert found.status == "completed"


async def test_results_are_added_and_stay(store, make):
    batch = stored_batch()
    await store.add_batch(batch)
    async with store.claim(batch) as claim:
        await claim.append([b"a\n", b"b\n"], [])
        await claim.append([], [b"x\n"])
        await claim.append([b"c\n"], [b"y\n"])
        await claim.append([], [])
        await claim.save(replace(batch, status="in_progress", completed=3))
    async with make() as other:
        assert await content(other, "t", batch.results(True)) == b"a\nb\nc\n"
        assert await content(other, "t", batch.results(False)) == b"x\ny\n"
        [found] = await other.open_batches()
        assert (found.status, found.completed) == ("in_progress", 3)


async def test_what_others_wish_is_seen_at_once(store, make):
    batch = stored_batch()
    await store.add_batch(batch)
    async with make() as other, store.claim(batch) as claim:
        await other.cancel(batch, 7)
        await other.cancel(batch, 9)
        [found] = await store.batches("t")
        assert (found.status, found.cancelling_at) == ("cancelling", 7), "the first time counts"
        assert (await store.batch("t", batch.id)).status == "cancelling"
        await claim.save(replace(batch, status="completed"))
        assert (await other.batch("t", batch.id)).status == "completed", "too late"


async def test_what_is_kept_no_longer_is_deleted(store):
    old, new, read = stored_file(expires_at=500), stored_file(expires_at=5000), stored_file(expires_at=500)
    for file in (old, new, read):
        await store.write("t", file.id, pieces(b"abc"))
        await store.add_file(file)
    over, running = (
        stored_batch(status="completed", created_at=100),
        stored_batch(created_at=100, input_file_id=read.id),
    )
    fresh = stored_batch(status="failed", created_at=990)
    slow = stored_batch(status="completed", created_at=100, completed_at=990)
    for batch in (over, running, fresh, slow):
        await store.add_batch(batch)
    await store.sweep(1000, 600)
    assert {file.id for file in await store.files("t")} == {new.id, read.id}
    assert await content(store, "t", old.id) == b"", "of what no batch reads any more"
    assert {batch.id for batch in await store.batches("t")} == {running.id, fresh.id, slow.id}
    assert await content(store, "t", new.id) == await content(store, "t", read.id) == b"abc"


def test_no_other_text_becomes_a_part_of_a_path():
    assert is_id("file-" + "0a" * 12) and is_id("file-" + "0a" * 12 + "e") and is_id("batch_" + "0a" * 12)
    for text in (
        "",
        "..",
        "file-",
        "file-" + "0" * 23,
        "file-../" + "0" * 21,
        "batch_" + "G" * 24,
        "file-" + "0" * 24 + "\n",
    ):
        assert not is_id(text), text
    assert tenant_name("../../etc") == tenant_name("../../etc") != tenant_name("../etc")


async def test_a_line_that_a_crash_has_cut_is_taken_away(tmp_path):
    async with open_directory_batches(tmp_path) as store:
        batch = stored_batch()
        await store.add_batch(batch)
        path = store.results(batch, True)
        for left, whole in ((b"a\nb\nhal", b"a\nb\n"), (b"half", b""), (b"", b""), (b"a\n", b"a\n")):
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(left)
            async with store.claim(batch) as claim:
                await claim.append([b"c\n"], [])
            assert path.read_bytes() == whole + b"c\n"


async def test_what_the_disk_did_not_take_is_not_there(tmp_path, monkeypatch):
    async with open_directory_batches(tmp_path) as store:
        batch = stored_batch()
        await store.add_batch(batch)
        async with store.claim(batch) as claim:
            await claim.append([b"a\n"], [])
            written = os.write

            def full(descriptor: int, data: bytes) -> int:
                written(descriptor, data[:1])
                raise OSError(28, "no space left on device")

            monkeypatch.setattr(os, "write", full)
            with pytest.raises(OSError, match="no space"):
                await claim.append([b"b\n"], [])
            monkeypatch.undo()
            await claim.append([b"c\n"], [])
        assert store.results(batch, True).read_bytes() == b"a\nc\n"


async def test_a_batch_of_which_only_the_mark_is_there_was_never_begun(tmp_path):
    async with open_directory_batches(tmp_path) as store:
        mark = tmp_path / "open" / f"{tenant_name('t')}.batch_{'0' * 24}"
        mark.touch()
        assert await store.open_batches() == [] and mark.exists(), "its record may be on its way"
        os.utime(mark, (1, 1))
        assert await store.open_batches() == [] and not mark.exists()


HOLDER = """
import asyncio, sys
from pathlib import Path
from penstock.gateway.batches.in_directory import open_directory_batches
async def main():
    async with open_directory_batches(Path(sys.argv[1])) as store:
        [batch] = await store.open_batches()
        async with store.claim(batch) as claim:
            print("held" if claim else "refused", flush=True)
            await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_the_lock_of_a_process_that_is_killed_is_free_at_once(tmp_path):
    async with open_directory_batches(tmp_path) as store:
        batch = stored_batch()
        await store.add_batch(batch)
        command = (sys.executable, "-c", HOLDER, str(tmp_path))
        holder = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert await holder.stdout.readline() == b"held\n"
            async with store.claim(batch) as claim:
                assert claim is None
        finally:
            holder.kill()
            await holder.wait()
        async with store.claim(batch) as claim:
            assert claim is not None


async def test_a_lease_that_ran_out_is_another_gateways_and_late_writes_are_refused(redis_url):
    import redis.asyncio

    async with (
        open_redis_batches(redis_url, lambda name: None, lease_s=60) as store,
        open_redis_batches(redis_url, lambda name: None, lease_s=60) as other,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        batch = stored_batch("fenced")
        await store.add_batch(batch)
        async with store.claim(batch) as late:
            await late.append([b"a\n"], [])
            await client.delete(f"penstock:batches:{tenant_name('fenced')}:lease:{batch.id}")
            async with other.claim(batch) as claim:
                assert claim is not None
                with pytest.raises(ClaimLost):
                    await late.append([b"b\n"], [])
                with pytest.raises(ClaimLost):
                    await late.save(replace(batch, status="failed"))
                await asyncio.wait_for(late.lost(), 10)
                await claim.append([b"c\n"], [])
                assert await content(store, "fenced", batch.results(True)) == b"a\nc\n"
        async with store.claim(batch) as again:
            assert again is not None, "who lost it has not taken the other's with it"


async def test_a_lease_is_renewed_and_lost_without_its_redis(tmp_path):
    async with redis_server(tmp_path) as server:
        async with open_redis_batches(server.url, lambda name: None, lease_s=0.4) as store:
            batch = stored_batch()
            await store.add_batch(batch)
            async with store.claim(batch) as claim:
                assert claim is not None
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(claim.lost(), 1.0)
                await claim.append([b"a\n"], [])
                await server.kill()
                await asyncio.wait_for(claim.lost(), 30)
                with pytest.raises(OSError):
                    await store.open_batches()


async def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path):
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ConfigError, match="batch_store"):
        async with open_directory_batches(tmp_path):
            pass


async def test_a_damaged_record_holds_up_no_other(store, request, tmp_path, redis_url):
    """It may be of another version: its tenant's files and batches stay as they are, those of others go on."""
    damaged, good = stored_batch("d", created_at=100), stored_batch("g", created_at=100)
    old = {tenant: stored_file(tenant, expires_at=500) for tenant in ("d", "g")}
    for batch in (damaged, good):
        await store.add_batch(batch)
        await store.write(batch.tenant, old[batch.tenant].id, pieces(b"abc"))
        await store.add_file(old[batch.tenant])
    if "directory" in request.node.name:
        (tmp_path / "batches" / tenant_name("d") / "batches" / f"{damaged.id}.json").write_text('{"status": 7}')
    else:
        import redis.asyncio

        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.hset(f"penstock:batches:{tenant_name('d')}:batches", damaged.id, b'{"status": 7}')
    assert [batch.id for batch in await store.open_batches()] == [good.id]
    await store.sweep(1000, 600)
    assert await store.file("g", old["g"].id) is None and await store.file("d", old["d"].id) is not None
    with pytest.raises(OSError, match="no record of a StoredBatch"):
        await store.batch("d", damaged.id)
