"""A request between its two doors and the mesh: from a typed ask to a running set of choices."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from opentelemetry import trace

from penstock.chat.memory import PromptMemory
from penstock.chat.model import ChatModel
from penstock.chat.stops import StopAutomaton
from penstock.errors import DeadlineExceeded, Internal, InvalidRequest, NotFound, PenstockError, Unavailable
from penstock.gateway.answer import Answer
from penstock.gateway.ask import Ask, Prompt
from penstock.gateway.auth import Auth
from penstock.gateway.config import GatewayConfig
from penstock.gateway.delta import Outbox
from penstock.gateway.flow import Flow
from penstock.gateway.hints import closing_hint, send_hint
from penstock.gateway.mesh import Mesh
from penstock.gateway.peers import Peers
from penstock.gateway.planner import Planner
from penstock.gateway.prompts import THREAD_FROM, Naming, Prepared, opening, prepare, weight
from penstock.gateway.usage import TIERS, Usage
from penstock.kv.hint import ReturnHint
from penstock.kv.identity import NAMESPACE_BYTES, root_key
from penstock.rpc.channels import Channels
from penstock.runtime.metrics import GatewayMetrics
from penstock.v1 import common_pb2, router_pb2

Value = TypeVar("Value")

_LAST_WORDS_S = 5.0
"""After the deadline, for telling a slow reader so; then its connection is given up."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and since when."""

    tenant: str
    session: str
    """Digest of the client's session key; empty when it named none."""
    request_id: str
    began: float
    """`time.perf_counter` at the first byte."""
    patience_s: float = math.inf
    """How long the caller itself is willing to wait."""


@dataclass(slots=True)
class _Choice:
    """One choice: its way through the mesh and what it says."""

    prompt: Prepared
    flow: Flow
    answer: Answer


class Completion:
    """A running request. `outbox` gives its deltas; `usage` is complete when the outbox has ended."""

    def __init__(
        self, ask: Ask, caller: Caller, prompts: int, block_size: int, tokenize_s: float, metrics: GatewayMetrics
    ) -> None:
        self.ask = ask
        self.caller = caller
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.outbox = Outbox(prompts * ask.n)
        self._block_size = block_size
        self._tokenize_s = tokenize_s
        self._metrics = metrics
        self._begun = [asyncio.Event() for _ in range(prompts)]
        self._choices: list[_Choice] = []
        self._first_token: float | None = None
        self._last_token = 0.0

    def usage(self) -> Usage:
        """What it has cost so far."""
        usage = Usage()
        for number, choice in enumerate(self._choices):
            if number % self.ask.n == 0:
                usage.add_prompt(choice.prompt.tokens, choice.flow.account)
            usage.add_choice(choice.answer, choice.flow.account)
        for first in range(0, len(self._choices), self.ask.n):
            kept = [choice.flow.account.retained for choice in self._choices[first : first + self.ask.n]]
            usage.add_retained(kept, self._block_size)
        now = time.perf_counter() - self.caller.began
        usage.times |= {"tokenize": self._tokenize_s, "first_token": self._first_token or now, "total": now}
        return usage

    @property
    def replans(self) -> int:
        """How often its choices moved to other workers."""
        return sum(choice.flow.account.replans for choice in self._choices)

    def add(self, choice: _Choice) -> None:
        """Takes part in the request."""
        self._choices.append(choice)

    async def run(self, number: int) -> None:
        """Runs one choice to its end, or fails the request.

        Other choices of a prompt wait for the first token of its first: then the prompt is stored, and is fetched.
        """
        choice = self._choices[number]
        begun = self._begun[number // self.ask.n]
        try:
            if number % self.ask.n and choice.prompt.keys:
                await begun.wait()
            finish = await choice.flow.run()
            last = choice.answer.finish(finish)
            self.outbox.put(last)
            await choice.flow.farewell(closing_hint(self.ask.outlook, waits_for_tool=last.finish == "tool_calls"))
        except PenstockError as error:
            self.outbox.fail(error)
        except Exception:
            structlog.get_logger("penstock.gateway").exception("request failed")
            self.outbox.fail(Internal("internal error"))
        except asyncio.CancelledError:
            self.outbox.fail(Unavailable("the request was given up", retry_after=1))
            raise
        finally:
            choice.flow.close()
            begun.set()

    def accept(self, answer: Answer, token: common_pb2.Token) -> bool:
        """One more token of a choice; whether it was the last."""
        now = time.perf_counter()
        if self._first_token is None:
            self._first_token = now - self.caller.began
            self._metrics.ttft.observe(self._first_token)
        elif self.ask.n == 1:
            self._metrics.itl.observe(now - self._last_token)
        self._last_token = now
        self._begun[answer.choice // self.ask.n].set()
        self._metrics.generation_tokens.inc()
        self.outbox.put(answer.feed(token))
        return answer.ended


class Completer:
    """Makes completions; one per gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        model: ChatModel,
        mesh: Mesh,
        auth: Auth,
        channels: Channels,
        pool: ThreadPoolExecutor,
        metrics: GatewayMetrics,
    ) -> None:
        self.config = config
        self.model = model
        self.mesh = mesh
        self.auth = auth
        self.metrics = metrics
        self.memory = PromptMemory(config.max_sessions)
        self._channels = channels
        self._peers = Peers(channels)
        self._pool = pool

    async def in_thread(self, work: Callable[[], Value], size: int) -> Value:
        """Runs `work` here when it is quick, else in the pool, so that the event loop never waits for it."""
        if size < THREAD_FROM:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def check_model(self, name: str) -> None:
        """Raises NotFound for a model that is not served here."""
        if name != self.config.served_name:
            raise NotFound(f"the model {name[:100]!r} does not exist", field="model", code="model_not_found")

    @asynccontextmanager
    async def open(self, ask: Ask, caller: Caller) -> AsyncIterator[Completion]:
        """Runs `ask`; leaving the block early ends everything that runs for it. Raises PenstockError."""
        self.check_model(ask.model)
        ask.sampling.check_vocabulary(self.model.vocab_size)
        served = self.mesh.served()
        root = root_key(served.spec, self.auth.namespace(caller.tenant))
        begin = time.perf_counter()
        naming = Naming(root, served.spec.block_size, served.max_model_len)
        size = sum(map(weight, ask.prompts))
        prompts = [await self._prepare(prompt, caller, naming, size) for prompt in ask.prompts]
        took = time.perf_counter() - begin
        completion = Completion(ask, caller, len(prompts), naming.block_size, took, self.metrics)
        self._add_choices(completion, prompts, served.max_model_len)
        count = len(prompts) * ask.n
        # Not a TaskGroup: it would wrap an exception of the block's body, which is the door's to report.
        tasks = [asyncio.create_task(completion.run(number)) for number in range(count)]
        try:
            async with asyncio.timeout(self._left(caller) + _LAST_WORDS_S):
                yield completion
                await asyncio.gather(*tasks)
        except TimeoutError:
            raise DeadlineExceeded("the request took longer than it may", code="timeout") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._count(completion)

    async def hint(self, session: str, outlook: ReturnHint) -> None:
        """Tells the mesh what a session does. Raises Unavailable when the router can't be told."""
        await send_hint(self._channels, self.config.router, session, outlook)

    def _left(self, caller: Caller) -> float:
        """Seconds that the request may still take."""
        deadline = caller.began + min(self.config.request_timeout_s, caller.patience_s)
        return max(deadline - time.perf_counter(), 0.0)

    async def _prepare(self, prompt: Prompt, caller: Caller, naming: Naming, size: int) -> Prepared:
        session = caller.session or opening(prompt)
        earlier = self.memory.get(caller.tenant, session)
        prepared = await self.in_thread(lambda: prepare(self.model, prompt, naming, earlier), size)
        if prepared.remembered is not None:
            self.metrics.remembered.inc(prepared.remembered.encoded.reused)
            self.memory.put(caller.tenant, session, prepared.remembered)
        return prepared

    def _add_choices(self, completion: Completion, prompts: Sequence[Prepared], context: int) -> None:
        ask, caller = completion.ask, completion.caller
        stops = StopAutomaton(ask.stops) if ask.stops else None
        ends = frozenset(ask.sampling.stop_token_ids) | (frozenset() if ask.sampling.ignore_eos else self.model.eos_ids)
        seed = ask.sampling.first_seed()

        def remaining() -> float:
            return self._left(caller)

        for number in range(len(prompts) * ask.n):
            prepared, copy = prompts[number // ask.n], number % ask.n
            max_tokens = self._max_tokens(ask, prepared.tokens, context)
            parser = None
            if prepared.rendered is not None:
                parser = self.model.parser(prepared.rendered, tools=prepared.call_tools)
            answer = Answer(number, self.model, parser, stops, ends, ask.sampling.min_tokens, ask.return_token_ids)
            request = common_pb2.Request()
            request.CopyFrom(prepared.request)
            request.request_id = f"{caller.request_id[:64]}.{completion.id[:8]}.{number}"
            request.session = caller.session
            request.namespace = self.auth.namespace(caller.tenant)[:NAMESPACE_BYTES]
            if ask.retain_s:
                request.retain.add(ttl_s=ask.retain_s)
            request.sampling.CopyFrom(ask.sampling.message(max_tokens, (seed + copy) % 2**64))
            flow = Flow(
                Planner(self._channels, self.config.router, remaining),
                self._peers,
                request,
                self._plan_ask(request, caller.tenant, prepared),
                partial(completion.accept, answer),
                remaining,
                self.config.max_replans,
            )
            completion.add(_Choice(prepared, flow, answer))

    def _plan_ask(self, request: common_pb2.Request, tenant: str, prepared: Prepared) -> router_pb2.PlanAsk:
        return router_pb2.PlanAsk(
            model_name=self.config.served_name,
            tenant=tenant,
            session=request.session,
            prompt_tokens=prepared.tokens,
            max_tokens=request.sampling.max_tokens,
            block_keys=prepared.keys,
        )

    def _max_tokens(self, ask: Ask, prompt_tokens: int, context: int) -> int:
        """Tokens that may be generated: what was asked for, as far as the context has room."""
        asked = ask.sampling.max_tokens
        if asked is not None and asked > min(context, self.config.max_output_tokens):
            most = min(context, self.config.max_output_tokens)
            raise InvalidRequest(f"max_tokens is {asked}; at most {most} is possible", field="max_tokens")
        room = context - prompt_tokens
        return min(room, self.config.max_output_tokens, asked or room)

    def _count(self, completion: Completion) -> None:
        usage = completion.usage()
        trace.get_current_span().set_attributes(
            {
                "gen_ai.operation.name": "chat" if completion.ask.chat else "text_completion",
                "gen_ai.provider.name": "penstock",
                "gen_ai.request.model": completion.ask.model,
                "gen_ai.response.id": completion.id,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
        )
        structlog.get_logger("penstock.gateway").info(
            "request ended",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            seconds=round(usage.times["total"], 4),
        )
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        for tier in TIERS:
            self.metrics.prompt_by_source.labels(tier).inc(usage.cached[tier])
        self.metrics.prompt_by_source.labels("computed").inc(usage.computed_tokens)
        self.metrics.drafted.inc(usage.drafted)
        self.metrics.accepted.inc(usage.accepted)
        self.metrics.replans.inc(completion.replans)
        self.metrics.e2e.observe(usage.times["total"])
