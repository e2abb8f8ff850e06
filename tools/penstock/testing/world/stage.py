"""Puts the pretended time, network and chance in the place of the real ones, for the length of a block."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest.mock import patch

import grpc

from penstock.runtime import threads
from penstock.testing.world.calls import PretendChannel
from penstock.testing.world.network import Network
from penstock.testing.world.serving import PretendServer
from penstock.testing.world.virtual import PretendProcess, VirtualLoop

_EPOCH_S = 1.7e9
"""What `time.time` says at 0."""


class _AtOnce(Executor):
    """Runs each job where it is submitted."""

    def __init__(self, *_: Any) -> None:
        """Takes what a pool of threads takes."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Runs it."""
        done: Future[Any] = Future()
        try:
            done.set_result(job(*args, **more))
        except BaseException as error:
            done.set_exception(error)
        return done

    def __enter__(self) -> Self:
        return self


class _NobodyElse:
    """A barrier for nobody."""

    def __init__(self, count: int) -> None:
        """Takes what `threading.Barrier` takes."""

    def wait(self) -> int:
        """Nobody is waited for."""
        return 0

    def abort(self) -> None:
        """Nobody waits."""


@contextmanager
def staged(network: Network, seed: int) -> Iterator[None]:
    """Whatever runs within the block, on the network's loop, has its time, its connections and its seed's chance."""
    loop, chance = network.loop, random.Random(f"names {seed}")

    def channel(address: str, options: Sequence[Any] = (), **_: Any) -> PretendChannel:
        return PretendChannel(network, _process(loop), address, options)

    def server(*, interceptors: Sequence[Any] = (), **_: Any) -> PretendServer:
        return PretendServer(network, _process(loop), interceptors)

    def token_hex(count: int = 16) -> str:
        return chance.randbytes(count).hex()

    before = random.getstate()
    random.seed(seed)
    with ExitStack() as stack:
        for place, name, instead in (
            (time, "monotonic", loop.time),
            (time, "perf_counter", loop.time),
            (time, "time", lambda: _EPOCH_S + loop.now),
            (secrets, "token_hex", token_hex),
            (grpc.aio, "insecure_channel", channel),
            (grpc.aio, "server", server),
            (threads, "ThreadPoolExecutor", _AtOnce),
            (threads, "Barrier", _NobodyElse),
        ):
            stack.enter_context(patch.object(place, name, instead))
        try:
            yield
        finally:
            random.setstate(before)


def _process(loop: VirtualLoop) -> PretendProcess:
    assert loop.current is not None, "only processes have servers and channels"
    return loop.current
