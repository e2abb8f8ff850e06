"""A mesh of fakes on real sockets: the router plans as it is told, the workers say what a script says."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.engine.request import Update
from penstock.errors import PenstockError, Unavailable
from penstock.kv.identity import KEY_BYTES
from penstock.kv.spec import KvSpec, spec_to_message
from penstock.rpc.server import serve
from penstock.runtime.drafts import MODEL as DRAFT_MODEL
from penstock.runtime.drafts import DraftAccount
from penstock.runtime.tasks import end
from penstock.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from penstock.worker.convert import drafts_to_message, token_from_message
from penstock.worker.serving.listening import Listeners, say_told

MODEL = "tiny"
BLOCK = 4
CONTEXT = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = Path(__file__).parents[3] / "libs/penstock/models/chat_template.jinja"


CORPUS = ("the quick brown fox jumps over the lazy dog", '{"name": "get_weather", "arguments": {"city": "Oslo"}}')


def make_model(directory: Path, corpus: Sequence[str] = CORPUS) -> Tokenizer:
    """Writes a model directory without weights: a small byte-level BPE with ChatML tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus] * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE.read_text()}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


REASONS = {
    "first_token_s": 0.5,
    "answer_s": 2.0,
    "queue_s": 0.25,
    "compute_s": 0.125,
    "fetch_s": 0.0625,
    "pull_s": 0.03125,
    "penalty_s": 0.015625,
    "handoff_s": 0.5,
    "room_s": 0.0,
    "decode_s": 1.0,
    "held_s": 4.0,
    "cached_tokens": 8,
    "remote_tokens": 4,
    "resident_tokens": 2,
    "store_tokens": 1,
    "awaited_tokens": 1,
    "uncached_tokens": 16,
    "expected_output": 32,
    "choices": 2,
    "other_s": 3.0,
    "home": True,
}
"""What the router says of every plan."""


@dataclass
class Script:
    """What the fake workers do. `say` gives the tokens of an answer to a request."""

    say: Callable[[common_pb2.Request], Sequence[int]]
    eos: int
    prefill: bool = True
    """Whether plans name a prefill worker."""
    places: dict[str, int] = field(default_factory=dict)
    """Which of the workers serve a model; all of them serve one that is not named."""
    cached: dict[str, int] = field(default_factory=dict)
    batch: int = 1
    """Tokens per decode event."""
    pace_s: float = 0.0
    """Between two events of decode."""
    repeat: bool = False
    """Decode sends token 0 again."""
    handoff_fails: bool = False
    miscount: int = 0
    """Tokens that workers count too many."""
    prefill_hangs: bool = False
    """The first prefill worker never answers, and decode waits for its hand-off."""
    handoff_hangs: bool = False
    """The first prefill worker gives its token, and decode waits for its hand-off."""
    prefill_dies: bool = False
    prefill_dies_late: bool = False
    """The first prefill dies when it has handed off, before it gives its token to the gateway."""
    decode_dies_after: int | None = None
    """Tokens after which the first decode call breaks."""
    generate: Callable[[Worker, decode_pb2.GenerateRequest], PenstockError | None] = lambda worker, request: None
    """What a decode worker fails with instead of generating."""
    hang: bool = False
    """Decode waits after the first token until `gate` is set."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refuse: PenstockError | None = None
    """What the router answers."""
    reasons: dict[str, Any] = field(default_factory=dict)
    """What it says of its plans, other than REASONS."""
    held_s: float = 0.0
    """It holds requests back, for so long as it predicts, until `room` is set; 0: it does not."""
    room: asyncio.Event = field(default_factory=asyncio.Event)
    logprobs: bool = True
    retained: common_pb2.Retained | None = None
    """What decode says that it keeps."""
    listens: bool = True
    """Whether decode knows listeners."""


class Router(router_pb2_grpc.RouterServicer):
    """Plans by script and remembers what it was asked."""

    def __init__(self, mesh: FakeMesh) -> None:
        self._mesh = mesh
        self.asks: list[router_pb2.PlanAsk] = []
        """With all keys, also where a message brought only the new ones."""
        self.chains: dict[bytes, bytes] = {}
        """All keys of the prompts so far, by their last."""
        self.brought: list[int] = []
        """Number of keys in each message."""
        self.progress: list[router_pb2.PlanProgress] = []
        self.hints: list[common_pb2.SessionHint] = []
        self.evicted: list[bytes] = []
        """Namespaces."""
        self.away = False
        self.live = 0
        self.view = router_pb2.MeshView()
        self.changed = asyncio.Event()

    async def Plan(self, request_iterator, context):
        self.live += 1
        try:
            epoch = 0
            async for message in request_iterator:
                if message.HasField("progress"):
                    self.progress.append(message.progress)
                    self._mesh.tick()
                    continue
                if message.HasField("hint"):
                    self.hints.append(message.hint)
                    continue
                if not self._whole(message.ask):
                    yield router_pb2.PlanResponse(keys_wanted=True)
                    continue
                epoch += 1
                self.asks.append(message.ask)
                self._mesh.tick()
                if (held_s := self._mesh.script.held_s) > 0:
                    yield router_pb2.PlanResponse(held=router_pb2.HeldBack(wait_s=held_s))
                    await self._mesh.script.room.wait()
                yield self._mesh.plan(message.ask, epoch)
        finally:
            self.live -= 1
            self._mesh.tick()

    def _whole(self, ask: router_pb2.PlanAsk) -> bool:
        """Puts the keys before the new ones; False when they are not known."""
        self.brought.append(len(ask.block_keys) // KEY_BYTES)
        if ask.after and ask.after not in self.chains:
            return False
        ask.block_keys = self.chains.get(ask.after, b"") + ask.block_keys
        if ask.block_keys:
            self.chains[ask.block_keys[-KEY_BYTES:]] = ask.block_keys
        return True

    async def Hint(self, request, context):
        if self.away:
            raise Unavailable("the router is going away")
        self.hints.extend(request.hints)
        return common_pb2.HintResponse()

    async def Evict(self, request, context):
        if self.away:
            raise Unavailable("the router is going away")
        self.evicted.append(request.namespace)
        member = router_pb2.MemberEvicted(member_id="store", address=self._mesh.address, answered=True)
        return router_pb2.EvictResponse(members=[member])

    async def Watch(self, request, context):
        while True:
            self.changed.clear()  # first: what changes while the view is on its way is told after it
            yield self.view
            await self.changed.wait()


class Worker(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """A prefill and decode worker in one."""

    def __init__(self, mesh: FakeMesh, name: str) -> None:
        self._mesh = mesh
        self.name = name
        self.address = ""
        self.live = 0
        self.requests: list[common_pb2.Request] = []
        self.handoffs: list[decode_pb2.HandoffSource | None] = []
        self.listeners = Listeners()
        self.listened: list[str] = []
        """The listener that each call has named, or ''."""
        self.listening = 0
        """Listeners that are there."""
        self.batches: list[decode_pb2.TokenBatch] = []
        """What went to listeners."""
        self.cut = asyncio.Event()
        """Set it to break the streams of listeners."""

    async def Prefill(self, request, context):
        self.live += 1
        self.requests.append(request.request)
        script = self._mesh.script
        try:
            self._mesh.tick()
            if script.prefill_hangs and self.name == "prefill-0":
                await asyncio.Event().wait()
            if script.prefill_dies:
                raise Unavailable("the worker is going away")
            if script.prefill_dies_late and self.name == "prefill-0":
                await self._mesh.until(lambda: any(worker.live for worker in self._mesh.decodes))
                raise RuntimeError("the worker has a fault")
            start = len(request.request.output_ids)
            tokens = self._tokens(request.request)
            event = prefill_pb2.PrefillEvent(token=self._token(request.request, start, tokens[start]))
            event.finish = _finish(request.request, tokens, start, script.eos)
            event.cache.CopyFrom(self._cache(request.request))
            event.times.CopyFrom(common_pb2.StageTimes(queue=0.01, fetch=0.02, prefill=0.03))
            yield event
        finally:
            self.live -= 1
            self._mesh.tick()

    async def Generate(self, request, context):
        self.live += 1
        self.requests.append(request.request)
        self.listened.append(request.to.listener)
        self.handoffs.append(request.handoff if request.HasField("handoff") else None)
        self._mesh.tick()
        try:
            error = self._mesh.script.generate(self, request)
            if error is not None:
                raise error
            script = self._mesh.script
            hangs = script.prefill_hangs or script.handoff_hangs
            if hangs and request.handoff.address == self._mesh.prefills[0].address:
                await asyncio.Event().wait()
            async with self.listeners.way(request.to, partial(say_told, context)) as way:
                async for event in self._generate(request):
                    if _plain(event) and (relay := way.relay()) is not None:
                        await Said(event).to(relay)
                    elif not await way.send(event):
                        yield event
        finally:
            self.live -= 1
            self._mesh.tick()

    async def Listen(self, request, context):
        if not self._mesh.script.listens:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there was no such call once")
        self.listening += 1
        try:
            with self.listeners.opened(request.listener) as listener:
                reading = asyncio.ensure_future(self._read(listener, context))
                cut = asyncio.ensure_future(self.cut.wait())
                try:
                    await asyncio.wait([reading, cut], return_when=asyncio.FIRST_COMPLETED)
                    raise Unavailable("the worker is going away")
                finally:
                    await end(reading, cut)
            yield
        finally:
            self.listening -= 1
            self._mesh.tick()

    async def _read(self, listener, context):
        async for batch in listener.batches():
            self.batches.append(batch)
            await context.write(batch)

    async def _generate(self, request):
        script, asked = self._mesh.script, request.request
        failed = request.HasField("handoff") and (script.handoff_fails or script.prefill_dies)
        own = failed or not request.HasField("handoff")
        tokens = self._tokens(asked)
        start = len(asked.output_ids) + (0 if own or script.repeat else 1)
        dies, script.decode_dies_after = script.decode_dies_after, None
        for at in range(start, len(tokens), script.batch):
            if dies is not None and at >= dies:
                raise Unavailable("the worker is going away")
            if script.hang and at > 0:
                await script.gate.wait()
            await asyncio.sleep(script.pace_s)
            many = range(at, min(at + script.batch, len(tokens)))
            event = decode_pb2.GenerateEvent(tokens=[self._token(asked, index, tokens[index]) for index in many])
            event.finish = _finish(asked, tokens, many[-1], script.eos)
            event.drafts.CopyFrom(drafts_to_message(one_pass(8, 3)))
            if own and (at == start or event.finish):
                event.cache.CopyFrom(self._cache(asked))
            if event.finish:
                event.times.CopyFrom(common_pb2.StageTimes(decode=0.5))
                event.handoff_failed = failed
                if script.retained is not None:
                    event.retained.CopyFrom(script.retained)
            yield event

    def _tokens(self, request: common_pb2.Request) -> list[int]:
        tokens = [*self._mesh.script.say(request)]
        if not request.sampling.ignore_eos:
            tokens.append(self._mesh.script.eos)
        return tokens[: request.sampling.max_tokens]

    def _token(self, request: common_pb2.Request, index: int, id: int) -> common_pb2.Token:
        token = common_pb2.Token(index=index, id=id)
        if request.sampling.HasField("logprobs"):
            token.logprob = -0.25 * (index + 1)
            for other in range(request.sampling.logprobs):
                token.top.add(id=(id + other) % 300, logprob=-0.25 * (index + 1 + other))
        return token

    def _cache(self, request: common_pb2.Request) -> common_pb2.CacheUse:
        cached = self._mesh.script.cached
        given = len(request.prompt_ids) + len(request.output_ids)
        computed = given - sum(cached.values()) + self._mesh.script.miscount
        return common_pb2.CacheUse(computed=computed, **cached)


def one_pass(drafted: int, accepted: int) -> DraftAccount:
    """The account of one step with drafts of a draft model."""
    account = DraftAccount()
    account.count([(DRAFT_MODEL, drafted)], accepted)
    return account


class Said:
    """An event's tokens, as the engine hands them to a listener."""

    def __init__(self, event: decode_pb2.GenerateEvent) -> None:
        self._event = event
        self._taken = asyncio.Event()

    @property
    def more(self) -> bool:
        return not self._taken.is_set()

    def passed(self) -> Update:
        self._taken.set()
        tokens = tuple(map(token_from_message, self._event.tokens))
        return Update(tokens, None, 0, 0, 0, one_pass(8, 3), 0, 0.0, 0.0, 0.0, 0.0)

    async def to(self, relay) -> None:
        """Returns when they were taken."""
        relay(self)
        await self._taken.wait()


def _plain(event: decode_pb2.GenerateEvent) -> bool:
    """Whether the engine would leave it to the relay."""
    return not (event.finish or event.HasField("cache") or event.HasField("times"))


def _finish(request: common_pb2.Request, tokens: Sequence[int], index: int, eos: int) -> common_pb2.Finish.ValueType:
    if index < len(tokens) - 1:
        return common_pb2.FINISH_UNSPECIFIED
    return common_pb2.FINISH_STOP if tokens[index] == eos else common_pb2.FINISH_LENGTH


class FakeMesh:
    """A router, and two workers of each kind."""

    def __init__(self, script: Script, spec: KvSpec) -> None:
        self.script = script
        self.spec = spec
        self.router = Router(self)
        self.prefills = [Worker(self, "prefill-0"), Worker(self, "prefill-1")]
        self.decodes = [Worker(self, "decode-0"), Worker(self, "decode-1")]
        self.address = ""
        self._ticked = asyncio.Event()
        self.set_view(ready=True)

    async def reset(self, script: Script) -> None:
        """As new: another script, nothing remembered, nothing open."""
        await self.until(lambda: self.live == 0)
        self.script = script
        self.router.asks.clear()
        self.router.progress.clear()
        self.router.hints.clear()
        for worker in (*self.prefills, *self.decodes):
            worker.requests.clear()
            worker.handoffs.clear()
            worker.batches.clear()
            worker.cut.clear()

    @property
    def live(self) -> int:
        """Calls that are open anywhere."""
        workers = (*self.prefills, *self.decodes)
        return self.router.live + sum(worker.live + worker.listening for worker in workers)

    def set_view(self, *, ready: bool, context: int = CONTEXT, silent: Sequence[str] = ()) -> None:
        self.show([self.served(ready=ready, context=context)], silent)

    def served(
        self, name: str = MODEL, spec: KvSpec | None = None, *, ready: bool = True, context: int = CONTEXT
    ) -> router_pb2.ServedModel:
        message = spec_to_message(spec or self.spec)
        return router_pb2.ServedModel(name=name, spec=message, max_model_len=context, ready=ready)

    def show(self, models: Sequence[router_pb2.ServedModel], silent: Sequence[str] = ()) -> None:
        """What the router tells gateways from now on."""
        self.router.view = router_pb2.MeshView(models=models, silent=silent)
        self.router.changed.set()

    def tick(self) -> None:
        self._ticked.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Waits, without polling, until a call's end has made `condition` true. Where it matters how soon that is, the
        test says so itself."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._ticked.clear()
                await self._ticked.wait()

    def plan(self, ask: router_pb2.PlanAsk, epoch: int) -> router_pb2.PlanResponse:
        if self.script.refuse is not None:
            raise self.script.refuse
        plan = router_pb2.PlanResponse(epoch=epoch, reasons=router_pb2.PlanReasons(**REASONS | self.script.reasons))
        place = self.script.places.get(ask.model_name)
        mine = slice(None) if place is None else slice(place, place + 1)
        plan.decode.CopyFrom(_pick(self.decodes[mine], ask))
        if self.script.prefill:
            plan.prefill.CopyFrom(_pick(self.prefills[mine], ask))
        return plan


def _pick(workers: Sequence[Worker], ask: router_pb2.PlanAsk) -> router_pb2.Placement:
    wanted = [worker for worker in workers if worker.name not in ask.avoid] or workers
    return router_pb2.Placement(member_id=wanted[0].name, address=wanted[0].address)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@asynccontextmanager
async def open_mesh(script: Script, tokenizer_file: Path) -> AsyncIterator[FakeMesh]:
    """Serves the fakes for the length of the block."""
    tokenizer = digest(tokenizer_file)
    mesh = FakeMesh(
        script,
        KvSpec(model="m" * 64, tokenizer=tokenizer, layout="test", dtype="float32", block_size=BLOCK, block_bytes=1024),
    )
    async with AsyncExitStack() as stack:

        def both(worker):
            def register(server):
                prefill_pb2_grpc.add_PrefillServicer_to_server(worker, server)
                decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)

            return register

        for worker in (*mesh.prefills, *mesh.decodes):
            server = await stack.enter_async_context(serve("127.0.0.1:0", both(worker), [], grace=0.1))
            worker.address = f"127.0.0.1:{server.port}"
        server = await stack.enter_async_context(
            serve(
                "127.0.0.1:0",
                lambda server: router_pb2_grpc.add_RouterServicer_to_server(mesh.router, server),
                [],
                grace=0.1,
            )
        )
        mesh.address = f"127.0.0.1:{server.port}"
        yield mesh
