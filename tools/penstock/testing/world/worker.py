"""A worker that computes nothing but takes its time: it joins with `stay_joined`, meets its store as a client of it,
hands off, and tells its tokens by listeners, as real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from penstock.engine.request import TokenOut, Update
from penstock.errors import Overloaded, Unavailable
from penstock.kv.client.client import BlockPut, Origin, StoreClient, StoreFault, open_store
from penstock.kv.identity import Chain
from penstock.kv.pace import Pace
from penstock.kv.spec import spec_to_message
from penstock.rpc.capability import PlanKeys, plan_terms
from penstock.rpc.channels import Channels, open_channels
from penstock.rpc.context import outgoing
from penstock.rpc.join import stay_joined
from penstock.rpc.server import serve
from penstock.runtime.drafts import DraftAccount
from penstock.runtime.tasks import beside, end, start
from penstock.testing.world import model
from penstock.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
)
from penstock.worker.publishing import BlockSink
from penstock.worker.serving.listening import Listeners, Way, say_told
from penstock.worker.serving.offering import Handoffs

_NO_DRAFTS = DraftAccount()
_HANDOFF_WAIT_S = 5.0
_HANDOFF_KEPT_S = 2.0
_STORE_S = 1.0
"""Time limit of the store."""
_STEP_LIMIT_S = 2.0
_PATIENCE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class WorkerTraits:
    """What a pretended worker is like."""

    name: str
    address: str
    host_id: str
    role: router_pb2.Role.ValueType
    routers: Sequence[str]
    store: str
    token_s: float
    """To compute a token of a prompt."""
    step_s: float
    """From each token of an answer to the next."""
    room: int
    """Most sequences at a time; more are refused."""


@dataclass(slots=True)
class _Said:
    """Tokens that wait for their listener: what an engine has of a call."""

    tokens: list[TokenOut] = field(default_factory=list)

    @property
    def more(self) -> bool:
        return bool(self.tokens)

    def passed(self) -> Update:
        tokens, self.tokens = tuple(self.tokens), []
        return Update(tokens, None, 0, 0, 0, _NO_DRAFTS, 0, 0.0, 0.0, 0.0, 0.0)


class PretendWorker(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """Serves prefill and decode. Made by `open_worker`."""

    def __init__(
        self, traits: WorkerTraits, store: StoreClient, channels: Channels, wrong: Callable[[str], None]
    ) -> None:
        """`wrong` hears of what must not be."""
        self.traits = traits
        self.store = store
        self.running = 0
        self.slowness = 1.0
        """How many times as long everything takes."""
        self.plan_keys = PlanKeys(asyncio.get_running_loop().time)
        self.handoffs = Handoffs(_HANDOFF_WAIT_S, _HANDOFF_KEPT_S)
        self.publishing: set[asyncio.Task[None]] = set()
        self._channels = channels
        self._wrong = wrong
        self._listeners = Listeners(patience=lambda: _PATIENCE_S)
        self._stuck_since: float | None = None
        self._unstuck = asyncio.Event()
        self._unstuck.set()
        self._clock = asyncio.get_running_loop().time

    # -- how it stands

    def hang(self, hangs: bool) -> None:
        """Its engine hangs, while its event loop goes on; or gets on again."""
        if hangs:
            self._stuck_since = self._stuck_since or self._clock()
            self._unstuck.clear()
        else:
            self._stuck_since = None
            self._unstuck.set()

    def load(self) -> router_pb2.Load:
        """As it is reported."""
        in_step_s = 0.0 if self._stuck_since is None else self._clock() - self._stuck_since
        return router_pb2.Load(
            running=self.running,
            free_kv_tokens=8 * model.CONTEXT,
            prefill_tokens_per_s=1 / self.traits.token_s,
            decode_step_s=self.traits.step_s,
            progress=router_pb2.Progress(in_step_s=in_step_s, limit_s=_STEP_LIMIT_S),
            store_away=not self.store.connected,
        )

    def hello(self) -> router_pb2.Hello:
        """As it joins; another process of its name is another member."""
        traits = self.traits
        return router_pb2.Hello(
            member_id=f"{traits.name}:{self._clock():.6f}",
            role=traits.role,
            address=traits.address,
            host_id=traits.host_id,
            model_name=model.NAME,
            spec=spec_to_message(model.SPEC),
            max_model_len=model.CONTEXT,
            max_running=traits.room,
            kv_capacity_tokens=8 * model.CONTEXT,
            routers=len(traits.routers),
        )

    async def _takes(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.slowness)
        await self._unstuck.wait()

    @contextmanager
    def _one(self) -> Any:
        if self.running >= self.traits.room:
            raise Overloaded("the worker has no room", retry_after=1.0)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    # -- prefill

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        message = request.request
        chain = Chain(message.cache_root, model.BLOCK_SIZE)
        sink = BlockSink(publisher=None, chain=chain)  # type: ignore[arg-type]  # it publishes nothing
        self._check_planned(message, request.capability)
        name = (message.request_id, request.capability.epoch, request.capability.mac)
        with self._one(), self.handoffs.offer(name, sink) as entry:
            async with self._prompt(message) as use:
                index = len(message.output_ids)
                made = model.token(message.sampling.seed, index)
                sink.finished(len(message.prompt_ids) + index, None)
                entry.finish(TokenOut(index, made))
                event = prefill_pb2.PrefillEvent(token=common_pb2.Token(index=index, id=made), cache=use)
                if index + 1 == message.sampling.max_tokens:
                    event.finish = common_pb2.FINISH_LENGTH
                yield event

    async def Handoff(
        self, request: prefill_pb2.HandoffRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.HandoffEvent]:
        entry = await self.handoffs.take((request.request_id, request.epoch, request.mac))
        ready = False
        while not ready:
            entry.sink.changed.clear()
            ready = entry.ready
            if entry.failed:
                raise Unavailable("the prefill ended before its first token")
            if not ready:
                ready = not await entry.news(_STORE_S)
        assert entry.token is not None
        token = common_pb2.Token(index=entry.token.index, id=entry.token.token)
        yield prefill_pb2.HandoffEvent(done=prefill_pb2.Handoff(token=token))

    # -- decode

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        with self._one():
            async with (
                self._listeners.way(request.to, partial(say_told, context)) as way,
                aclosing(self._events(request, way)) as events,
            ):
                async for event in events:
                    if not await way.send(event):
                        yield event

    async def _events(
        self, request: decode_pb2.GenerateRequest, way: Way
    ) -> AsyncGenerator[decode_pb2.GenerateEvent, None]:
        message = request.request
        seed, most = message.sampling.seed, message.sampling.max_tokens
        at = len(message.output_ids)
        self._check_planned(message, request.capability)
        handed = request.HasField("handoff") and await self._take_over(request, message)
        async with self._prompt(message) as use:
            cache = None if handed else use
        at += handed
        said, relay = _Said(), None
        while at < most:
            await self._takes(self.traits.step_s)
            token = TokenOut(at, model.token(seed, at))
            at += 1
            if relay is not None and at < most:
                said.tokens.append(token)
                relay(said)
                continue
            tokens = [common_pb2.Token(index=one.index, id=one.token) for one in (*said.tokens, token)]
            said.tokens.clear()
            event = decode_pb2.GenerateEvent(tokens=tokens, cache=cache)
            event.handoff_failed = request.HasField("handoff") and not handed
            if at == most:
                event.finish = common_pb2.FINISH_LENGTH
            yield event
            relay = way.relay()
        chain = Chain(message.cache_root, model.BLOCK_SIZE, [*message.prompt_ids, *model.answer(seed, at)])
        self._publish(message, chain.keys[len(message.prompt_ids) // model.BLOCK_SIZE :], chain)

    def _check_planned(self, request: common_pb2.Request, capability: common_pb2.Capability) -> None:
        if not self.plan_keys.prove(plan_terms(request, capability), capability.mac):
            raise Unavailable("no router of this worker has planned this, or not lately", code="not_planned")

    async def _take_over(self, asked: decode_pb2.GenerateRequest, message: common_pb2.Request) -> bool:
        """Whether the prefill worker hands off."""
        stub = prefill_pb2_grpc.PrefillStub(self._channels.to(asked.handoff.address, "worker"))
        wanted = prefill_pb2.HandoffRequest(
            request_id=message.request_id, epoch=asked.capability.epoch, mac=asked.handoff.mac
        )
        call = stub.Handoff(wanted, metadata=outgoing())
        try:
            async for event in call:
                token = event.done.token
                if token.id != model.token(message.sampling.seed, token.index):
                    self._wrong(f"{self.traits.name} was handed a wrong token")
                return token.index == len(message.output_ids)  # as the engine has it: another one can't follow
        except grpc.aio.AioRpcError:
            pass
        finally:
            call.cancel()
        return False

    async def Listen(self, request: decode_pb2.ListenRequest, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:
        with self._listeners.opened(request.listener) as listener:
            async for batch in listener.batches():
                await self._unstuck.wait() if batch.calls else None
                yield batch

    # -- the store

    @asynccontextmanager
    async def _prompt(self, message: common_pb2.Request) -> AsyncIterator[common_pb2.CacheUse]:
        """Fetches what is stored, computes the rest and says how much was which; publishes the rest with the block's
        end."""
        given = [*message.prompt_ids, *message.output_ids]
        chain = Chain(message.cache_root, model.BLOCK_SIZE, given)
        most = (len(given) - 1) // model.BLOCK_SIZE
        origin = Origin(message.session, message.namespace)
        number = self.store.next_claim()
        try:
            found = await self._fetch(chain.keys[:most], origin)
            found += await self._wait(number, chain.keys[found:most], origin)
            cached = found * model.BLOCK_SIZE
            await self._takes(self.traits.token_s * (len(given) - cached))
            yield common_pb2.CacheUse(computed=len(given) - cached, host=cached)
        except BaseException:
            self.store.withdraw(number)
            raise
        self._publish(message, chain.keys[found:], chain, number)

    async def _wait(self, number: int, keys: Sequence[bytes], origin: Origin) -> int:
        """Claims the blocks, after a wait for those that others compute; returns how many could be fetched."""
        if not keys:
            return 0
        pace = Pace(queue_s=0.0, block_s=self.traits.token_s * model.BLOCK_SIZE)
        try:
            claimed = await self.store.claim(number, keys, pace)
        except StoreFault:
            return 0
        return await self._fetch(keys[: claimed.found], origin) if claimed.found else 0

    async def _fetch(self, keys: Sequence[bytes], origin: Origin) -> int:
        buffers = [bytearray(model.BLOCK_BYTES) for _ in keys]
        try:
            tiers = await self.store.fetch(keys, [memoryview(buffer) for buffer in buffers], origin)
        except StoreFault:
            return 0
        for key, buffer in zip(keys[: len(tiers)], buffers, strict=False):
            if buffer != model.content(key):
                self._wrong(f"{self.traits.name} got other bytes for a block")
        return len(tiers)

    def _publish(self, message: common_pb2.Request, keys: Sequence[bytes], chain: Chain, number: int = 0) -> None:
        """Puts blocks into the store, beside everything else; then nothing is claimed any more."""
        places = {key: at for at, key in enumerate(chain.keys)}
        puts = [
            BlockPut(key, chain.parent(places[key]), places[key] * model.BLOCK_SIZE, memoryview(model.content(key)))
            for key in keys
        ]

        async def put() -> None:
            try:
                if puts:
                    with suppress(StoreFault):
                        await self.store.put(puts, Origin(message.session, message.namespace))
            finally:
                if number:
                    self.store.withdraw(number)

        task = start(put, name="publishing", on_failure="log", failed=lambda name: self._wrong(f"{name} failed"))
        self.publishing.add(task)
        task.add_done_callback(self.publishing.discard)

    async def close(self) -> None:
        """Publishes nothing any more."""
        await end(*self.publishing)


@asynccontextmanager
async def open_worker(traits: WorkerTraits, wrong: Callable[[str], None]) -> AsyncIterator[PretendWorker]:
    """A worker that serves until the block ends."""

    def failed(task: str) -> None:
        wrong(f"{traits.name}: {task} failed")

    async with open_channels() as channels:
        store = channels.to(traits.store, "store") if traits.store else None
        async with (
            open_store(store, traits.name, model.SPEC, traits.host_id, timeout_s=_STORE_S, failed=failed) as client,
            AsyncExitStack() as stack,
        ):
            worker = PretendWorker(traits, client, channels, wrong)
            stack.push_async_callback(worker.close)

            def register(server: grpc.aio.Server) -> None:
                prefill_pb2_grpc.add_PrefillServicer_to_server(worker, server)
                decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)

            async with serve(traits.address, register, [], grace=0.2, reflects=False):
                hello = worker.hello()
                joins = [
                    partial(
                        stay_joined,
                        channels.to(router, "router"),
                        hello,
                        worker.load,
                        plan_keys=worker.plan_keys,
                    )
                    for router in traits.routers
                ]
                async with _all_beside(joins, failed):
                    yield worker


@asynccontextmanager
async def _all_beside(jobs: Sequence[Callable[[], Any]], failed: Callable[[str], None]) -> AsyncIterator[None]:
    if not jobs:
        yield
        return
    async with beside(jobs[0], name="join", on_failure="restart", failed=failed), _all_beside(jobs[1:], failed):
        yield
