"""Every error of the tree survives the wire."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from penstock import errors
from penstock.errors import PenstockError
from penstock.rpc.errors import from_rpc, is_raised, status_code, to_trailers

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)]
AS_BASES = {
    errors.Unprocessable: errors.InvalidRequest,
    errors.UnsupportedEncoding: errors.InvalidRequest,
    errors.RateLimited: errors.Overloaded,  # for a gRPC client, with its own code
}
WIRE = [kind for kind in ALL if kind not in (PenstockError, *AS_BASES)]


def sent(error: PenstockError) -> PenstockError:
    trailers = grpc.aio.Metadata(*to_trailers(error))
    return from_rpc(grpc.aio.AioRpcError(status_code(error), grpc.aio.Metadata(), trailers, error.message))


@pytest.mark.parametrize("kind", WIRE, ids=lambda kind: kind.__name__)
def test_kind_message_field_code_and_pause_arrive(kind: type[PenstockError]) -> None:
    error = sent(kind("words for the caller", field="messages.0", code="a_code", retry_after=1.25))
    assert type(error) is kind
    assert (error.message, error.field, error.code, error.retry_after) == (
        "words for the caller",
        "messages.0",
        "a_code",
        1.25,
    )


def test_what_is_not_set_stays_unset() -> None:
    error = sent(errors.NotFound("x"))
    assert (error.field, error.code, error.retry_after) == (None, None, None)


def test_every_kind_has_its_own_code() -> None:
    assert len({status_code(kind("x")) for kind in WIRE}) == len(WIRE)
    assert all(400 <= kind.http_status < 600 for kind in ALL)


def test_details_that_are_not_ours_are_ignored() -> None:
    for junk in (b"\xff\xff\xff", b""):
        trailers = grpc.aio.Metadata(("grpc-status-details-bin", junk), ("other", "1"))
        error = from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, "gone"))
        assert (type(error), error.message, error.field) == (errors.Unavailable, "gone", None)


def test_an_unknown_code_is_internal() -> None:
    error = from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, grpc.aio.Metadata(), grpc.aio.Metadata(), "x"))
    assert type(error) is errors.Internal


def test_kinds_of_http_alone_travel_as_others() -> None:
    for kind, base in AS_BASES.items():
        assert type(sent(kind("x"))) is base


def test_what_the_other_side_raised_is_told_from_what_the_transport_made():
    none = grpc.aio.Metadata()
    raised = grpc.aio.Metadata(*to_trailers(errors.Unavailable("full")))
    assert is_raised(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, raised, "full"))
    assert not is_raised(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "gone"))


ECHO = """
import grpc
from concurrent.futures import ThreadPoolExecutor

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)

server = grpc.server(ThreadPoolExecutor(2), [Echo()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


@pytest.fixture
def echo() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server that sends back what it is sent, and its process."""
    with subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"127.0.0.1:{int(server.stdout.readline())}", server
        finally:
            server.kill()


async def test_a_stream_that_breaks_under_a_write_means_that_the_other_side_is_away(
    echo: tuple[str, subprocess.Popen[str]],
) -> None:
    """grpc.aio calls it an internal error when it knows of the end, and the event loop does not yet."""
    address, server = echo
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/toy.Toy/Echo")()
        await call.write(b"x")
        assert await call.read() == b"x"
        server.kill()
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            pass  # not with `await`, which would let the loop know
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.write(b"y")
            await call.read()
    assert type(from_rpc(caught.value)) is errors.Unavailable
