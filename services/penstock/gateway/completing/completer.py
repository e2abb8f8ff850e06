"""Turns a typed ask into a running request: prepares prompts, makes choices, and ends both with their caller."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from math import inf

import msgspec
import structlog

from penstock.chat.model import ChatModel
from penstock.chat.sessions import Sessions
from penstock.chat.stops import StopAutomaton
from penstock.errors import DeadlineExceeded, Overloaded, PenstockError
from penstock.gateway.accounts.auth import Auth
from penstock.gateway.accounts.entry import of_request
from penstock.gateway.accounts.ledger import UsageLedger
from penstock.gateway.accounts.limiter import Limiter
from penstock.gateway.accounts.pot import TenantPot
from penstock.gateway.completing.answer import Answer, draw
from penstock.gateway.completing.calls import call_grammar, sampling_of
from penstock.gateway.completing.chronicle import chronicle
from penstock.gateway.completing.completion import Caller, Completion, Speaker
from penstock.gateway.completing.constraining import recipe_of, without_end
from penstock.gateway.completing.counting import count
from penstock.gateway.completing.cutting import last_tokens, room_for_answer
from penstock.gateway.completing.fingerprint import system_fingerprint
from penstock.gateway.completing.flow import Flow, Grown
from penstock.gateway.completing.heard import Heard
from penstock.gateway.completing.past import PastRequests
from penstock.gateway.completing.prompts import (
    Naming,
    Prepared,
    has_pictures,
    opening,
    prepare,
    weight,
    with_output,
    without_links,
)
from penstock.gateway.completing.repeating import place_of, request_parts, secret_of
from penstock.gateway.completing.stored_answers import AnswerStore
from penstock.gateway.completing.threads import Threads
from penstock.gateway.completing.tokens import Tokens
from penstock.gateway.completing.tracing import trace_request
from penstock.gateway.completing.volatile import VolatileLines
from penstock.gateway.config import GatewayConfig
from penstock.gateway.mesh.sites import Sites
from penstock.gateway.mesh.view import RouterView
from penstock.gateway.mesh.workers import WorkerChannels, Workers
from penstock.gateway.request.ask import Ask, Conversation, Prompt
from penstock.gateway.request.bounds import share
from penstock.gateway.request.work import ChoiceRequest, KeepWish, SampledToken
from penstock.grammar.compiling import GrammarCompiler
from penstock.grammar.recipe import Recipe
from penstock.kv.hint import ReturnHint
from penstock.kv.identity import NAMESPACE_BYTES, root_key
from penstock.kv.sealing import is_sealed
from penstock.runtime.metrics import GatewayMetrics
from penstock.runtime.tasks import beside

_PICTURES_S = 20.0
"""Seconds that decoding a request's pictures may take, those that wait for their turn included."""
_LAST_WORDS_S = 5.0
"""Seconds after the deadline to report it to a slow reader; then the gateway gives up the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What the completers of all models use together."""

    auth: Auth
    ledger: UsageLedger
    limiter: Limiter
    view: RouterView
    sites: Sites
    workers: WorkerChannels
    threads: Threads
    sessions: Sessions
    past: PastRequests
    answers: AnswerStore | None
    pixels: TenantPot
    """Bytes of pictures, while something is answered about them."""
    metrics: GatewayMetrics


class Completer:
    """Makes completions of one model."""

    def __init__(
        self,
        config: GatewayConfig,
        model: ChatModel,
        *,
        name: str,
        compiler: GrammarCompiler,
        shared: SharedParts,
    ) -> None:
        """`name` is the model's, `compiler` is for its tokens."""
        self.name = name
        self.base = ""
        """The model to which an adapter is added; empty: there is none."""
        self._config = config
        self._model = model
        self._auth = shared.auth
        self._ledger = shared.ledger
        self._limiter = shared.limiter
        self._view = shared.view
        self._sites = shared.sites
        self._workers = shared.workers
        self._threads = shared.threads
        self._compiler = compiler
        self._metrics = shared.metrics
        self._own = shared.metrics.of(name)
        self.sessions = shared.sessions
        self._past = shared.past
        self._answers = shared.answers
        self._pixels = shared.pixels
        self._volatile = VolatileLines(config.volatile_lines, config.volatile_pattern)
        self.tokens = Tokens(model, shared.threads, self._volatile)
        self._running: set[Completion] = set()
        self._fingerprint = lru_cache(maxsize=4)(
            partial(system_fingerprint, model=model, settings=(config.volatile_lines, config.volatile_pattern))
        )
        self._log = structlog.get_logger("penstock.gateway")

    def adapted(self, name: str) -> Completer:
        """The same for this model with an adapter, which is asked for by `name`; what runs is counted together."""
        other = copy(self)
        other.name, other.base = name, self.name
        return other

    @property
    def adapters(self) -> list[str]:
        """The names of this model with each of its adapters."""
        return self._view.adapted(self.name)

    def has(self, name: str) -> bool:
        """Whether one of these has this name; also where no worker of the model is known, so that none can be."""
        return self._view.known(self.name) is None or name in self.adapters

    @property
    def ready(self) -> bool:
        """Whether a request would succeed now."""
        return self._view.serves(self.name)

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and its answer; None before a worker has said so."""
        known = self._view.known(self.name)
        return known.max_model_len if known else None

    @asynccontextmanager
    async def open(self, ask: Ask, caller: Caller) -> AsyncIterator[Completion]:
        """Runs `ask`; leaving the block early ends everything that runs for it. Raises PenstockError."""
        ask.sampling.check_vocabulary(self._model.vocab_size)
        ask = without_end(self._model, ask)
        served = await self._view.model(self.name, self._patience_s(caller))
        begin = time.perf_counter()
        root = root_key(served.spec, self._auth.namespace(caller.tenant), served.adapter)
        context = served.max_model_len
        room = room_for_answer(ask.sampling.max_tokens, context)
        naming = Naming(
            root,
            served.spec.block_size,
            context,
            last=last_tokens(ask, context),
            room=room,
            field=ask.prompts_field,
            sealed=is_sealed(served.spec),
            by_text=caller.repeat is not None,
            adapter=served.adapter,
        )
        size = sum(map(weight, ask.prompts))
        prompts = [await self._prepare(prompt, caller, naming, size) for prompt in ask.prompts]
        ask = replace(ask, prompts=[*map(without_links, ask.prompts)])
        with self._room_for_pictures(caller.tenant, prompts):
            try:
                async with asyncio.timeout(self._left(caller)):
                    grammars = [await self._grammar(ask, prompt, caller, size) for prompt in prompts]
            except TimeoutError:
                raise DeadlineExceeded("the request took too long", code="timeout") from None
            took = time.perf_counter() - begin
            completion = Completion(
                ask,
                caller,
                prompts=len(prompts),
                block_size=naming.block_size,
                fingerprint=self._fingerprint(served.spec, adapter=served.adapter),
                tokenize_s=took,
                metrics=self._own.requests,
                answered=partial(self._answered, caller),
                account=self._count,
            )
            self._add_choices(completion, prompts, naming, grammars)
            if caller.repeat is not None:
                ids = [prompt.ids for prompt in prompts]
                seen = [one.picture.digest for prompt in prompts for one in prompt.pictures]
                parts = chain(request_parts(completion.seed, completion.fingerprint, ask, ids, grammars), seen)
                secret = secret_of(caller.repeat, parts)
                completion.place = place_of(caller.repeat, secret, len(completion.choices))
                if self._answers is not None and ask.sampling.tokens_alone:
                    completion.stored = self._answers.of(secret, len(completion.choices))
                    recalled = await completion.stored.read(self._threads, caller.tenant)
                    completion.recall(recalled, interrupted=not completion.stored.over)
            try:
                async with (
                    asyncio.timeout(self._left(caller) + _LAST_WORDS_S),
                    beside(
                        completion.run, name="request", on_failure="stop", failed=self._metrics.task_failed
                    ) as running,
                ):
                    self._running.add(completion)
                    yield completion
                    await running.ended()
            except TimeoutError:
                raise DeadlineExceeded("the request took too long", code="timeout") from None
            finally:
                self._running.discard(completion)
                completion.close()

    @contextmanager
    def _room_for_pictures(self, tenant: str, prompts: Sequence[Prepared]) -> Iterator[None]:
        """Room for the pixels of the prompts' pictures, for the length of the block. Raises Overloaded."""
        size = sum(one.picture.pixels.nbytes for prompt in prompts for one in prompt.pictures)
        if size and not self._pixels.take(tenant, size):
            raise Overloaded("too many pictures are being looked at; try again", code="overloaded", retry_after=1.0)
        try:
            yield
        finally:
            if size:
                self._pixels.give_back(tenant, size)

    def give_up(self, error: PenstockError) -> None:
        """Ends all running completions with `error`."""
        for completion in self._running:
            completion.outbox.fail(error)

    async def hint(self, session: str, hint: ReturnHint) -> None:
        """Tells the router when a session returns, or that it has ended. Raises Unavailable when the call fails."""
        await self._sites.hint(session, hint)

    def _left(self, caller: Caller) -> float:
        """Seconds that the request may still take."""
        most_s = math.inf if caller.yields else self._config.request_timeout_s
        deadline = caller.began + min(most_s, caller.patience_s)
        return max(deadline - time.perf_counter(), 0.0)

    def _patience_s(self, caller: Caller) -> float:
        """Seconds that the request may go without workers."""
        left = self._left(caller)
        return left if caller.patience_s < math.inf else min(left, self._config.failover_s)

    async def _prepare(self, prompt: Prompt, caller: Caller, naming: Naming, size: int) -> Prepared:
        if isinstance(prompt, Conversation):
            prompt = self._volatile.steady(prompt)
        key = f"{self.name}/{caller.session or opening(prompt)}"  # other models have other tokens
        branches = () if caller.yields else self.sessions.branches(caller.tenant, key)
        work = partial(prepare, self._model, prompt, naming, branches)
        if isinstance(prompt, Conversation):
            prepared = await self._rendered(work, size, caller, pictures=has_pictures(prompt))
        else:
            prepared = await self._threads.run(work, size, caller.tenant)
        use = None if caller.yields else prepared.session  # a line has no next turn
        if use is not None:
            self._metrics.remembered.inc(use.branch.prompt.reused)
            self._metrics.spliced.inc(use.spliced_tokens)
            self._metrics.diverged.inc(use.divergence is not None)
            self.sessions.put(caller.tenant, key, use.branch, replaces=use.replaces())
        return replace(prepared, session_key=key)

    async def _rendered(self, work: Callable[[], Prepared], size: int, caller: Caller, *, pictures: bool) -> Prepared:
        """A conversation's prompt, unless waiting for a thread, the template, or decoding pictures takes too long."""
        left = self._left(caller)
        try:
            async with asyncio.timeout(min(_PICTURES_S, left) if pictures else left):
                return await self._threads.render(work, size, caller.tenant)
        except TimeoutError:
            what = "the pictures took too long to decode" if pictures else "the prompt took too long to prepare"
            raise DeadlineExceeded(what, code="timeout") from None

    async def _grammar(self, ask: Ask, prompt: Prepared, caller: Caller, size: int) -> str:
        """The grammar of the answers to a prompt; empty: any text."""

        async def compiled(written: Callable[[], Recipe]) -> str:
            recipe = await self._threads.run(written, size, caller.tenant)
            return await self._compiler.grammar(recipe, tenant=caller.tenant)

        if prompt.calling is not None and prompt.rendered is not None and self._model.family.written is not None:
            return await call_grammar(self._model, prompt.calling, prompt.thinking, ask.constraint, compiled)
        recipe = recipe_of(self._model, ask, prompt)
        return "" if recipe is None else await self._compiler.grammar(recipe, tenant=caller.tenant)

    def _answered(self, caller: Caller, speaker: Speaker) -> None:
        """Keeps an answer for its session's next turn; one that a stop string cut does not end between two tokens."""
        use = speaker.prompt.session
        if use is None or caller.yields or speaker.answer.ended or not speaker.heard:
            return
        branch = replace(use.branch, answer=speaker.heard.spoken())
        self.sessions.put(caller.tenant, speaker.prompt.session_key, branch, replaces=use.branch)

    def _add_choices(
        self, completion: Completion, prompts: Sequence[Prepared], naming: Naming, grammars: Sequence[str]
    ) -> None:
        ask = completion.ask
        stops = StopAutomaton(ask.stops) if ask.stops else None
        for number in range(len(prompts) * ask.n):
            prepared, copy = prompts[number // ask.n], number % ask.n
            request = self._request(completion, number, prepared, naming, (completion.seed + copy) % 2**64)
            sampling = sampling_of(self._model, ask, prepared, grammars[number // ask.n])
            request = replace(request, sampling=sampling)
            answer = self._answer(number, completion, prepared, stops)
            heard = Heard(self._model.eos_ids | frozenset(ask.sampling.stop_token_ids))
            accept = partial(completion.accept, answer, heard)
            flow = self._flow(completion.caller, request, accept, partial(with_output, naming.block_size))
            completion.add(Speaker(prepared, flow, answer, heard))

    def _request(
        self, completion: Completion, number: int, prepared: Prepared, naming: Naming, seed: int
    ) -> ChoiceRequest:
        ask, caller = completion.ask, completion.caller
        max_tokens = self._max_tokens(ask, len(prepared.ids), naming.context)
        return ChoiceRequest(
            id=f"{caller.request_id[:64]}.{completion.work_id}.{number}",
            model=self.name,
            adapter=naming.adapter,
            tenant=caller.tenant,
            namespace=self._auth.namespace(caller.tenant)[:NAMESPACE_BYTES],
            session=caller.session,
            prompt_ids=prepared.ids,
            pictures=prepared.pictures,
            root=naming.root,
            keys=prepared.keys,
            seal_key=self._auth.seal_key(caller.tenant) if naming.sealed else b"",
            known_keys=prepared.session.known_keys() if prepared.session else 0,
            sampling=ask.sampling,
            max_tokens=max_tokens,
            seed=seed,
            keep=() if caller.yields else [*prepared.keep, *([KeepWish(ask.retain_s)] if ask.retain_s else ())],
            weight=self._limiter.weight(caller.tenant),
            priority=ask.urgency.priority,
            # The other choices wait for the first; and who gives way has no target.
            first_token_by=inf if number % ask.n or caller.yields else caller.began + ask.urgency.ttft_s,
            token_s=inf if caller.yields else ask.urgency.itl_s,
            yields=caller.yields,
        )

    def _answer(self, number: int, completion: Completion, prepared: Prepared, stops: StopAutomaton | None) -> Answer:
        ask, repeat, parser = completion.ask, completion.caller.repeat, None
        if prepared.rendered is not None:
            offered = prepared.calling.names if prepared.calling else None
            parser = self._model.parser(thinking=prepared.thinking, offered=offered)
        eos = frozenset() if ask.sampling.ignore_eos else self._model.eos_ids
        return Answer(
            number,
            self._model,
            parser=parser,
            stops=stops,
            ends=frozenset(ask.sampling.stop_token_ids) | eos,
            min_tokens=ask.sampling.min_tokens,
            show_stop=ask.show_stop,
            keep_ids=ask.return_token_ids,
            keep_proposers=ask.sampling.proposers,
            draw=draw if repeat is None else partial(repeat.call, number),
        )

    def _flow(
        self, caller: Caller, request: ChoiceRequest, accept: Callable[[SampledToken], bool], grown: Grown
    ) -> Flow:
        def remaining() -> float:
            return self._left(caller)

        async def hopeful(pause_s: float) -> None:
            async with asyncio.timeout(remaining()):
                await self._view.hopeful(self.name, pause_s)

        plans = self._sites.plans(remaining)
        workers = Workers(self._workers, self._view, remaining)
        patience_s = self._patience_s(caller)
        return Flow(
            request, plans, workers, accept, hopeful=hopeful, failover_s=patience_s, taken=caller.taken, grown=grown
        )

    def _max_tokens(self, ask: Ask, prompt_tokens: int, context: int) -> int:
        """Tokens that may be generated. What the client asks for is an upper bound, so it is lowered to the room there
        is: many clients send the same number with every prompt."""
        room = min(context - prompt_tokens, self._config.max_output_tokens)
        room = min(room, share(self._config.max_request_tokens, len(ask.prompts) * ask.n))
        asked = ask.sampling.max_tokens
        return room if asked is None else min(asked, room)

    def _count(self, completion: Completion) -> None:
        usage = completion.usage()
        trace_request(completion, usage)
        self._log.info(
            "request ended",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            seconds=round(usage.times["total"], 4),
        )
        self._metrics.usage_defects.inc(completion.usage_defects)
        count(completion, usage, self._own)
        counts = of_request(
            usage.computed_tokens, usage.cached, usage.completion_tokens, reasoning=usage.reasoning_tokens
        )
        self._ledger.add(completion.caller.tenant, self.name, counts)  # which a request need not name
        caller = completion.caller
        record = msgspec.json.encode(chronicle(completion, usage))
        self._past.add(caller.tenant, caller.request_id, completion.id, record)
        if not caller.yields:
            self._limiter.spend(caller.tenant, counts.input_tokens + counts.output_tokens)
