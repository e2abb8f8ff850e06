"""A gateway without doors: the flow of each request, with its plans and calls, as `Completer` puts them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from penstock.errors import PenstockError
from penstock.gateway.completing.flow import Flow
from penstock.gateway.completing.prompts import with_output
from penstock.gateway.mesh.plans import RouterCalls
from penstock.gateway.mesh.view import RouterView, open_view
from penstock.gateway.mesh.workers import WorkerChannels, Workers, open_worker_channels
from penstock.gateway.request.ask import Sampling
from penstock.gateway.request.work import ChoiceRequest, SampledToken
from penstock.kv.hint import ReturnHint
from penstock.kv.identity import block_keys, root_key
from penstock.rpc.channels import open_channels
from penstock.testing.world import model
from penstock.v1 import router_pb2

SITE = "here"
_NAMESPACE = b"n" * 32


@dataclass(frozen=True, kw_only=True)
class PretendAsk:
    """What a client asks for."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    seed: int
    session: str = ""
    stops_at: int | None = None
    """The client has what it wants with the token of that index."""
    patience_s: float = 30.0
    """Its deadline."""


@dataclass(slots=True)
class HeardAnswer:
    """What became of it."""

    wanted: PretendAsk
    began: float
    tokens: list[int] = field(default_factory=list)
    ended: float | None = None
    finish: str = ""
    error: BaseException | None = None
    left: bool = False
    """The client left, or its gateway died."""
    wrong: list[str] = field(default_factory=list)

    @property
    def expected(self) -> Sequence[int]:
        """The whole answer."""
        wanted = self.wanted
        most = wanted.max_tokens if wanted.stops_at is None else min(wanted.max_tokens, wanted.stops_at + 1)
        return model.answer(wanted.seed, most)

    def take(self, token: SampledToken) -> bool:
        """One more token; whether the client has what it wants."""
        if self.ended is not None:
            self.wrong.append(f"token {token.index} after the end")
        if token.index != len(self.tokens):
            self.wrong.append(f"token {token.index} where {len(self.tokens)} is next")
        if token.id != model.token(self.wanted.seed, token.index):
            self.wrong.append(f"token {token.index} is another one")
        self.tokens.append(token.id)
        return token.index == self.wanted.stops_at


class PretendGateway:
    """Serves requests. Made by `open_gateway`."""

    def __init__(self, routers: RouterCalls, view: RouterView, workers: WorkerChannels) -> None:
        self.view = view
        self.workers = workers
        self._routers = routers
        self._clock = asyncio.get_running_loop().time

    async def serve(self, heard: HeardAnswer) -> None:
        """Takes one request to its end."""
        wanted, clock = heard.wanted, self._clock

        def remaining() -> float:
            return max(0.0, heard.began + wanted.patience_s - clock())

        async def hopeful(pause_s: float) -> None:
            async with asyncio.timeout(remaining()):
                await self.view.hopeful(model.NAME, pause_s)

        flow = Flow(
            _request(wanted),
            self._routers.plans(remaining),
            Workers(self.workers, self.view, remaining),
            heard.take,
            hopeful=hopeful,
            failover_s=wanted.patience_s,
            grown=partial(with_output, model.BLOCK_SIZE),
        )
        try:
            heard.finish = await flow.run()
            heard.ended = clock()
            await flow.farewell(ReturnHint(), waits_for_tool=False)
        except PenstockError as error:
            heard.error = error
        except asyncio.CancelledError:
            heard.left = True
            raise
        except Exception as error:
            heard.error = error
            heard.wrong.append(f"the flow raised {error!r}")
        finally:
            heard.ended = heard.ended or clock()
            flow.close()


def _request(wanted: PretendAsk) -> ChoiceRequest:
    root = root_key(model.SPEC, _NAMESPACE)
    return ChoiceRequest(
        id=wanted.id,
        model=model.NAME,
        tenant="tenant",
        namespace=_NAMESPACE[:16],
        session=wanted.session,
        prompt_ids=wanted.prompt,
        root=root,
        keys=block_keys(root, wanted.prompt, model.BLOCK_SIZE),
        sampling=Sampling(),
        max_tokens=wanted.max_tokens,
        seed=wanted.seed,
    )


@asynccontextmanager
async def open_gateway(routers: Sequence[str], failed: Callable[[str], None]) -> AsyncIterator[PretendGateway]:
    """A gateway that serves until the block ends."""
    own: asyncio.Future[router_pb2.MeshWatcher] = asyncio.get_running_loop().create_future()
    own.set_result(router_pb2.MeshWatcher(address="10.0.3.1:8081", http_address="10.0.3.1:8080"))
    tokenizers = {model.NAME: model.SPEC.tokenizer}
    async with (
        open_channels() as channels,
        open_view(channels, {SITE: routers}, tokenizers=tokenizers, own=own, failed=failed) as view,
        open_worker_channels(channels, failed) as workers,
    ):
        yield PretendGateway(RouterCalls(channels, view, SITE), view, workers)
