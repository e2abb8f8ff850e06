"""The pictures that a worker holds: by tenant, bounded, and taken in only as they were named."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from tests.libs.pictures.test_tiles import form as form_of_tiles

from penstock.errors import Overloaded, Unavailable
from penstock.pictures.picture import Grid, picture_of
from penstock.rpc.server import serve
from penstock.v1 import pictures_pb2, pictures_pb2_grpc
from penstock.worker.pictures import HeldPictures
from penstock.worker.serving.picturing import PicturesService

ONE, SIDE, SIZE = b"a" * 16, 28, 28 * 28 * 3
OTHER = b"b" * 16


def drawn(seed, grid=(1, 1), side=SIDE):
    grid = Grid(*grid)
    tiles = grid.rows * grid.columns
    shape = (tiles + (tiles > 1), side, side, 3)
    return picture_of(grid, side, np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def test_pictures_stay_while_they_are_held_and_the_latest_a_while_longer():
    held, (first, second, third) = HeldPictures(2 * SIZE), map(drawn, range(3))
    with held.held(ONE, {first.digest: SIZE}) as lacking:
        assert lacking == [first.digest] and held.used_bytes == SIZE, "those that are to come have room"
        held.add(ONE, first)
        for other in (second, third):
            with held.held(ONE, {other.digest: SIZE}):
                held.add(ONE, other)
        assert held.find(ONE, first.digest) is first and held.used_bytes == 2 * SIZE
        with pytest.raises(Unavailable):
            held.find(ONE, second.digest)
        with (
            held.held(ONE, {third.digest: SIZE}) as lacking,
            pytest.raises(Overloaded),
            held.held(ONE, {second.digest: SIZE}),
        ):
            pass
        assert lacking == [] and held.find(ONE, third.digest) is third, "what finds no room takes none"
    with held.held(ONE, {second.digest: SIZE}):
        held.add(ONE, second)
    assert held.find(ONE, third.digest) is third, "the oldest has made room"
    with pytest.raises(Unavailable):
        held.find(ONE, first.digest)
    assert not held._held and not held._holds


def test_a_tenant_does_not_find_what_another_shows():
    held, picture = HeldPictures(1 << 20), drawn(1)
    with held.held(ONE, {picture.digest: SIZE}):
        held.add(ONE, picture)
    with held.held(OTHER, {picture.digest: SIZE}) as lacking:
        assert lacking == [picture.digest]
    with pytest.raises(Unavailable, match="a picture of the request is not here"):
        held.find(OTHER, picture.digest)


def test_a_tenant_holds_all_alone_and_half_beside_others():
    held, pictures = HeldPictures(4 * SIZE), [drawn(number) for number in range(5)]
    with held.held(ONE, {one.digest: SIZE for one in pictures[:4]}):
        pass
    with held.held(OTHER, {pictures[0].digest: SIZE}), held.held(ONE, {one.digest: SIZE for one in pictures[1:3]}):
        with pytest.raises(Overloaded), held.held(ONE, {pictures[3].digest: SIZE}):
            pass
        with held.held(OTHER, {pictures[4].digest: SIZE}):
            pass


@pytest.fixture
async def service():
    """A stub, and the pictures of the worker behind it."""
    form = form_of_tiles(tile=SIDE, most=4)
    engine = SimpleNamespace(checkpoint=SimpleNamespace(pictures=SimpleNamespace(form=form)), no_pictures="")
    config = SimpleNamespace(picture_bytes=40 * SIZE)
    worker = SimpleNamespace(pictures=HeldPictures(config.picture_bytes), engine=engine, config=config)

    def register(server):
        pictures_pb2_grpc.add_PicturesServicer_to_server(PicturesService(worker), server)

    async with (
        serve("127.0.0.1:0", register, ["penstock.v1.Pictures"]) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield pictures_pb2_grpc.PicturesStub(channel), worker.pictures


def names(*pictures, namespace=ONE, **more):
    found = [
        pictures_pb2.PictureName(
            **{"digest": one.digest, "rows": one.grid.rows, "columns": one.grid.columns, "side": SIDE, **more}
        )
        for one in pictures
    ]
    return pictures_pb2.PictureNews(names=pictures_pb2.PictureNames(namespace=namespace, pictures=found))


def news(picture, size=1000):
    content = picture.pixels.tobytes()
    return [pictures_pb2.PictureNews(pixels=content[at : at + size]) for at in range(0, len(content), size)]


async def test_only_what_is_lacking_is_sent(service):
    stub, held = service
    one, other = drawn(1), drawn(2, (2, 1))
    first = stub.Hold()
    await first.write(names(one))
    assert list((await first.read()).wanted) == [0]
    for message in news(one):
        await first.write(message)
    assert not (await first.read()).wanted
    again = stub.Hold()
    await again.write(names(one, other))
    assert list((await again.read()).wanted) == [1]
    for message in news(other, 5000):
        await again.write(message)
    assert not (await again.read()).wanted
    assert held.find(ONE, other.digest) == other
    strange = stub.Hold()
    await strange.write(names(one, namespace=OTHER))
    assert list((await strange.read()).wanted) == [0], "another tenant's"
    for call in (first, again, strange):
        call.cancel()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([pictures_pb2.PictureNews(pixels=b"x")], "names: come first, and name a picture"),
        ([names()], "names: come first, and name a picture"),
        ([names(*[drawn(1)] * 33)], "must have at most 32"),
        ([names(drawn(1), drawn(1))], "names.pictures: each is named once"),
        ([names(*[drawn(number, (2, 2)) for number in range(9)])], "must be at most 94080: see picture_bytes"),
        ([names(drawn(1), digest=b"short")], "names.pictures.digest = 5 bytes"),
        ([names(drawn(1), namespace=b"short")], "names.namespace = 5 bytes"),
        ([names(drawn(1)), *news(drawn(2))], "pixels: are not those that the name's digest is of"),
        ([names(drawn(1)), pictures_pb2.PictureNews()], "what was to come has not come, or was empty"),
        ([names(drawn(1)), *news(drawn(1)), *news(drawn(1))], "nothing more is to be sent"),
        (
            [names(drawn(1)), pictures_pb2.PictureNews(pixels=bytes(SIZE + 1))],
            "2353 bytes: must be 2352 for",
        ),
    ],
)
async def test_what_a_gateway_may_not_say(service, said, error):
    stub, held = service
    call = stub.Hold(iter(said))
    with pytest.raises(grpc.aio.AioRpcError, match=error) as refused:
        async for _ in call:
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert held.used_bytes in (0, SIZE) and not held._held


@pytest.mark.parametrize("other", [{"side": 27}, {"rows": 5}, {"rows": 0}])
async def test_a_picture_in_another_form_is_for_another_worker(service, other):
    stub, _ = service
    call = stub.Hold(iter([names(drawn(1), **other)]))
    with pytest.raises(grpc.aio.AioRpcError, match="are not what this worker's model takes") as refused:
        async for _ in call:
            pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_finds_no_room_is_not_sent(service):
    stub, held = service
    with held.held(OTHER, {bytes([number]) * 32: SIZE for number in range(20)}):
        call = stub.Hold()
        await call.write(names(*[drawn(number) for number in range(21)]))
        with pytest.raises(grpc.aio.AioRpcError, match="are shown at a time") as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
