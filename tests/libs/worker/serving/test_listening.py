"""Listeners: one batch in flight, nothing queued beside the engine, everything in order, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.engine.delivery.outlet import Outlet
from penstock.engine.hooks import Relay
from penstock.engine.request import Request, SamplingParams, TokenOut, Update
from penstock.engine.sampling.choice import Chosen
from penstock.engine.scheduling.live import new_live
from penstock.errors import InvalidRequest, Unavailable
from penstock.runtime.drafts import LOOKUP, DraftAccount
from penstock.v1 import common_pb2, decode_pb2
from penstock.worker.convert import token_to_message
from penstock.worker.serving.listening import Listener, Listeners, Way

MOST = 1024


class Sequence:
    """One call as the engine and the servicer run it."""

    def __init__(
        self, listeners: Listeners, number: int, *, name: str = "gateway", logprob: float | None = None
    ) -> None:
        self.drafts = DraftAccount()
        self.own: list[decode_pb2.GenerateEvent] = []
        """Events for the call's own stream."""
        self._tokens: list[TokenOut] = []
        self._made = 0
        self._logprob = logprob
        self._relay: Relay | None = None
        self._finish = asyncio.Event()
        self.running = asyncio.ensure_future(self._run(listeners, decode_pb2.Destination(listener=name, number=number)))
        self.running.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, whoever waits for it

    def make(self, many: int = 1) -> None:
        """Generates tokens."""
        tokens = range(self._made, self._made + many)
        self._tokens += [TokenOut(index, 1000 + index, self._logprob) for index in tokens]
        self._made += many
        if self._relay is not None:
            self._relay(self)

    def finish(self) -> None:
        """Ends it; the tokens that were not taken come with the end."""
        self._finish.set()

    @property
    def more(self) -> bool:
        return bool(self._tokens) and not self._finish.is_set()

    def passed(self) -> Update:
        taken, self._tokens = tuple(self._tokens[:MOST]), self._tokens[MOST:]
        return Update(taken, None, 0, 0, 0, self.drafts, 0, 0.0, 0.0, 0.0, 0.0)

    async def _run(self, listeners: Listeners, to: decode_pb2.Destination) -> None:
        async with listeners.way(to) as way:
            await self._send(way, decode_pb2.GenerateEvent(cache=common_pb2.CacheUse(computed=1)))
            self._relay = way.relay()
            if self._relay is not None and self.more:
                self._relay(self)
            await self._finish.wait()
            tokens = [token_to_message(token) for token in self._tokens]
            await self._send(way, decode_pb2.GenerateEvent(tokens=tokens, finish=common_pb2.FINISH_STOP))

    async def _send(self, way: Way, event: decode_pb2.GenerateEvent) -> None:
        if not await way.send(event):
            self.own.append(event)


class Reader:
    """A gateway's end of its stream: it takes a batch when it is told to."""

    def __init__(self, listener: Listener) -> None:
        self._batches = listener.batches()
        self._asked: asyncio.Future[decode_pb2.TokenBatch] | None = None

    def ask(self) -> None:
        """The last batch was written; the next one may come."""
        self._asked = asyncio.ensure_future(anext(self._batches))

    async def next(self) -> decode_pb2.TokenBatch:
        """The next batch, as if its writing took until the next call."""
        if self._asked is None:
            self.ask()
        asked, self._asked = self._asked, None
        async with asyncio.timeout(1):
            return await asked

    async def begun(self, *calls: Sequence) -> None:
        """Takes the first events of the calls, and lets them go on."""
        events = 0
        while events < len(calls):
            events += len((await self.next()).events)
        self.ask()
        await turns()

    async def close(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)
        await self._batches.aclose()


async def turns() -> None:
    """Lets the others run until each waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def listening(listeners: Listeners, name: str = "gateway") -> AsyncIterator[Reader]:
    with listeners.opened(name) as listener:
        reader = Reader(listener)
        try:
            assert await reader.next() == decode_pb2.TokenBatch(), "it says that the listener stands"
            yield reader
        finally:
            await reader.close()


def rows(batch: decode_pb2.TokenBatch) -> list[tuple[int, int, int]]:
    return list(zip(batch.calls, batch.indices, batch.ids, strict=True))


async def test_tokens_that_are_ready_together_travel_together() -> None:
    listeners = Listeners()
    async with listening(listeners) as reader:
        calls = [Sequence(listeners, number) for number in (1, 2, 3)]
        await reader.begun(*calls)
        for call in calls:
            call.make()
        assert rows(await reader.next()) == [(1, 0, 1000), (2, 0, 1000), (3, 0, 1000)]
        calls[1].make()
        calls[1].make()
        calls[0].make()
        assert rows(await reader.next()) == [(2, 1, 1001), (2, 2, 1002), (1, 1, 1001)], "while the first was written"
        for call in calls:
            call.finish()
        events = list((await reader.next()).events)
        while len(events) < 3:
            events += (await reader.next()).events
        assert all(event.event.finish for event in events)


async def test_a_listener_that_has_nothing_to_say_says_how_long_tokens_may_take(monkeypatch) -> None:
    monkeypatch.setattr("penstock.worker.serving.listening._BEAT_S", 0.01)
    listeners = Listeners(patience=iter((3.0, 4.0, 5.0)).__next__)
    with listeners.opened("gateway") as listener:
        batches = listener.batches()
        for patience_s in (3.0, 4.0, 5.0):
            async with asyncio.timeout(5):
                assert await anext(batches) == decode_pb2.TokenBatch(patience_s=patience_s)
        await batches.aclose()


async def test_the_end_comes_after_the_tokens_and_the_call_ends_after_it() -> None:
    listeners = Listeners()
    async with listening(listeners) as reader:
        call = Sequence(listeners, 7)
        await reader.begun(call)
        call.make(2)
        assert rows(await reader.next()) == [(7, 0, 1000), (7, 1, 1001)]
        call.make(2)
        call.finish()
        await turns()
        batch = await reader.next()
        assert not batch.calls, "what was not taken comes with the end"
        [last] = batch.events
        assert [token.index for token in last.event.tokens] == [2, 3] and last.event.finish
        assert not call.running.done(), "the end was not written yet"
        reader.ask()
        await call.running


async def test_logprobs_and_drafts_are_told() -> None:
    listeners = Listeners()
    async with listening(listeners) as reader:
        plain, full = Sequence(listeners, 1), Sequence(listeners, 2, logprob=-0.5)
        await reader.begun(plain, full)
        plain.drafts.count([(LOOKUP, 4)], 2)
        plain.make()
        full.make()
        batch = await reader.next()
        [event] = batch.events
        assert (event.call, [token.logprob for token in event.event.tokens]) == (2, [-0.5])
        assert rows(batch) == [(1, 0, 1000)]
        [counts] = batch.drafts
        assert counts == decode_pb2.CallDrafts(
            call=1,
            drafts=common_pb2.Drafts(
                passes=1,
                verified=[0, 4, 0, 0],
                accepted=[0, 2, 0, 0],
                verified_at=[1, 1, 1, 1],
                accepted_at=[1, 1, 0, 0],
            ),
        )
        plain.make()
        assert not (await reader.next()).drafts, "nothing was drafted since"


async def test_a_reader_that_pauses_holds_nothing_but_one_batch() -> None:
    """Tokens stay with the engine, one entry a call; then they come in batches of a bounded size."""
    listeners = Listeners()
    async with listening(listeners) as reader:
        calls = [Sequence(listeners, number) for number in range(1, 9)]
        await reader.begun(*calls)
        for _ in range(4000):
            for call in calls:
                call.make()
        listener = listeners.named("gateway")
        assert listener is not None and len(listener._ready) <= len(calls) and not listener._posted
        found = [rows(await reader.next())]
        while sum(map(len, found)) < 8 * 4000:
            found.append(rows(await reader.next()))
        assert max(map(len, found)) <= 2 * 2048
        assert {call for some in found[:4] for call, _, _ in some} == set(range(1, 9)), "each has its turn"
        for number in range(1, 9):
            assert [index for some in found for call, index, _ in some if call == number] == list(range(4000))


async def test_without_its_listener_a_call_has_its_own_stream() -> None:
    call = Sequence(Listeners(), 1, name="")
    call.make(3)
    call.finish()
    await call.running
    assert [len(event.tokens) for event in call.own] == [0, 3]


async def test_two_listeners_do_not_meet() -> None:
    listeners = Listeners()
    async with listening(listeners, "a") as one, listening(listeners, "b") as other:
        first, second = Sequence(listeners, 1, name="a"), Sequence(listeners, 1, name="b")
        await one.begun(first)
        await other.begun(second)
        first.make(2)
        second.make(1)
        assert rows(await one.next()) == [(1, 0, 1000), (1, 1, 1001)]
        assert rows(await other.next()) == [(1, 0, 1000)]


async def test_a_reader_that_leaves_ends_its_calls_and_no_others() -> None:
    listeners = Listeners()
    async with listening(listeners, "stays") as stays:
        other = Sequence(listeners, 1, name="stays")
        await stays.begun(other)
        async with listening(listeners, "leaves") as leaves:
            waiting, sending = Sequence(listeners, 1, name="leaves"), Sequence(listeners, 2, name="leaves")
            await leaves.begun(waiting, sending)
            sending.finish()
            await turns()
        for call in (waiting, sending):
            with pytest.raises(Unavailable, match="the listener has gone"):
                await call.running
        other.make()
        assert rows(await stays.next()) == [(1, 0, 1000)]
        assert listeners.named("leaves") is None


async def test_names_and_numbers_belong_to_one() -> None:
    listeners = Listeners()
    async with listening(listeners) as reader:
        with pytest.raises(InvalidRequest, match="another stream has this name"), listeners.opened("gateway"):
            pass
        with pytest.raises(InvalidRequest, match="listener"), listeners.opened("no name!"):
            pass
        call = Sequence(listeners, 3)
        await reader.begun(call)
        with pytest.raises(InvalidRequest, match=r"to\.number = 3"):
            await Sequence(listeners, 3).running


async def test_a_call_that_fails_knows_what_it_has_sent() -> None:
    told: list[int] = []
    listeners = Listeners()
    async with listening(listeners) as reader:

        async def call(number: int, tokens: int) -> None:
            async with listeners.way(decode_pb2.Destination(listener="gateway", number=number), told.append) as way:
                sent = [token_to_message(TokenOut(index, 7, None)) for index in range(tokens)]
                await way.send(decode_pb2.GenerateEvent(tokens=sent))
                raise Unavailable("the step failed")

        calls = [asyncio.ensure_future(call(number, number)) for number in range(3)]
        await reader.next()
        reader.ask()
        assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [Unavailable] * 3
        assert sorted(told) == [0, 1, 2]
        sequence = Sequence(listeners, 9)
        await turns()
        sequence.make(3)
        await reader.next()
        sequence.running.cancel()
    async with listeners.way(decode_pb2.Destination(listener="nobody", number=1), told.append) as way:
        assert not await way.send(decode_pb2.GenerateEvent(tokens=[token_to_message(TokenOut(0, 7, None))]))
        assert way.told == 0
    assert len(told) == 3, "nothing failed"


async def test_what_comes_of_a_call_that_has_left_is_told_to_nobody() -> None:
    """A step's tokens are handed out after its reader has left."""
    live = new_live(Request("r", (1, 2), SamplingParams(max_tokens=9)), 1, frozenset(), now=0.0)
    outlet, told = Outlet(live, None, DraftAccount()), list[object]()
    ending = asyncio.ensure_future(outlet.end(told.append))
    await asyncio.sleep(0)
    outlet.enter()
    outlet.timeline.step_begins(0.5)
    outlet.add([Chosen(5)], 1.0)
    outlet.tell()
    assert told == [outlet]
    ending.cancel()
    outlet.live.gone = True
    outlet.add([Chosen(6)], 2.0)
    outlet.tell()
    assert told == [outlet]
