"""Same request, same tokens, whatever else is going on; and everything that was taken is given back."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import pytest

from penstock.engine.checks import MOST_BIASED, SAMPLING_BOUNDS, check_sampling
from penstock.engine.config import EngineConfig
from penstock.engine.delivery import outlet
from penstock.engine.engine import Engine
from penstock.engine.errors import EngineBusy, EngineClosed, EngineError, RequestRefused, RequestTooLong
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.request.bounds import BOUNDS, MAX_LOGIT_BIAS
from penstock.testing.checkpoints import END_OF_TURN, EOS, TinyModel, write_checkpoint


@pytest.fixture
async def alone(config, kit):
    """The mixed requests, each run by itself."""
    async with Engine.open(config) as engine:
        return [await kit.read(engine, request) for request in kit.mixed()]


def assert_idle(engine):
    """Nothing runs and every page is back."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.loading) == (0, 0, 0)
    assert stats.free_pages == stats.total_pages


async def test_update_carries_the_numbers(config, kit):
    async with Engine.open(config) as engine:
        answer = await kit.read(engine, kit.request("a", 50, kit.seeded(1, logprobs=2)))
        assert [token.index for token in answer.tokens] == list(range(24))
        assert all(len(token.top) == 2 and token.logprob <= 0 for token in answer.tokens)
        assert [update.finish for update in answer.updates[:-1]] == [None] * (len(answer.updates) - 1)
        last = answer.last
        assert (last.finish, last.cached_tokens, last.computed_tokens) == ("length", 0, 50)
        assert min(last.queue_s, last.prefill_s, last.decode_s) > 0
        stats = engine.stats()
        assert stats.generated_tokens == 24 and stats.prefill_tokens_per_s > 0 and stats.decode_step_s > 0
        assert_idle(engine)


async def test_alone_and_in_a_batch(config, kit, alone):
    async with Engine.open(config) as engine:
        for one, other in zip(alone, await kit.read_all(engine, kit.mixed()), strict=True):
            kit.assert_same(one, other)
        assert_idle(engine)


@pytest.mark.parametrize("budget", [16, 37, 1000])
async def test_any_token_budget(config, kit, alone, budget):
    async with Engine.open(replace(config, max_batch_tokens=budget)) as engine:
        for one, other in zip(alone, await kit.read_all(engine, kit.mixed()), strict=True):
            kit.assert_same(one, other)


async def test_preemption_loses_nothing(config, kit):
    requests = [kit.request(str(number), 60, kit.seeded(number, 80, logprobs=1)) for number in range(6)]
    async with Engine.open(config) as engine:
        expected = await kit.read_all(engine, requests)
    async with Engine.open(replace(config, kv_pool_tokens=16 * 20)) as engine:
        sinks = [kit.Sink() for _ in requests]
        answers = await asyncio.gather(
            *[kit.read(engine, one, sink=sink) for one, sink in zip(requests, sinks, strict=True)]
        )
        assert engine.stats().preemptions > 0
        assert any(answer.last.preemptions for answer in answers)
        for one, other, sink in zip(expected, answers, sinks, strict=True):
            kit.assert_same(one, other)
            assert other.last.computed_tokens == 60
            assert sorted(sink.blocks) == list(range(139 // 16)), "no block is reported twice"
            assert sink.set_backs == other.last.preemptions
        assert_idle(engine)


@pytest.mark.parametrize("known", [1, 7, 16, 23])
async def test_continues_what_another_worker_began(config, kit, alone, known):
    async with Engine.open(config) as engine:
        for request, whole in zip(kit.mixed(), alone, strict=True):
            begun = replace(request, output=tuple(whole.ids[:known]))
            rest = await kit.read(engine, begun)
            assert rest.tokens[0].index == known
            assert rest.ids == whole.ids[known:] and rest.last.finish == whole.last.finish


async def test_given_output_may_be_the_end(config, kit):
    async with Engine.open(config) as engine:
        for output, finish in [((1, 2, 3), "length"), ((1, END_OF_TURN), "stop")]:
            request = Request("a", (1, 2), SamplingParams(max_tokens=3), output=output)
            answer = await kit.read(engine, request)
            assert answer.tokens == [] and answer.last.finish == finish
        assert_idle(engine)


async def test_stops(config, kit):
    async with Engine.open(config) as engine:
        free = await kit.read(engine, kit.request("a", 20, kit.seeded(3, 60)))
        stop = free.ids[10]
        first = free.ids.index(stop)
        stopped = await kit.read(engine, kit.request("a", 20, kit.seeded(3, 60, stop_token_ids=frozenset({stop}))))
        assert stopped.ids == free.ids[: first + 1] and stopped.last.finish == "stop"
        late = kit.seeded(3, 60, stop_token_ids=frozenset({stop}), min_tokens=first + 1)
        held = await kit.read(engine, kit.request("a", 20, late))
        assert stop not in held.ids[: first + 1] and len(held.ids) > first + 1
        for token in (EOS, END_OF_TURN):
            forced = kit.greedy(ignore_eos=False, logit_bias={token: 100.0})
            assert (await kit.read(engine, kit.request("a", 20, forced))).ids == [token]
            banned = replace(forced, min_tokens=5)
            ids = (await kit.read(engine, kit.request("a", 20, banned))).ids
            assert ids[5] == token and not {EOS, END_OF_TURN} & set(ids[:5])


# KV that comes and goes


async def filled(engine, kit, request):
    """(answer, sink) of a run whose blocks were kept."""
    sink = kit.Sink()
    return await kit.read(engine, request, sink=sink), sink


def blocks_of(sink):
    return [sink.blocks[number] for number in range(len(sink.blocks))]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 150])
async def test_what_a_sink_gets_serves_as_a_source_elsewhere(config, kit, length):
    request = kit.request("a", length, kit.seeded(8, 40, logprobs=2, repetition_penalty=1.1))
    async with Engine.open(config) as one, Engine.open(config) as other:
        answer, sink = await filled(one, kit, request)
        total = length + 40
        assert sink.valid_tokens == total - 1
        assert len(sink.blocks) == (total - 1) // 16 and (sink.tail is None) == ((total - 1) % 16 == 0)
        tokens = [*request.prompt, *answer.ids]
        assert all(list(ids) == tokens[16 * at : 16 * at + 16] for at, ids in sink.tokens.items())
        source, second = kit.Source(blocks_of(sink)[: length // 16], step=2), kit.Sink()
        again = await kit.read(other, request, source, second)
        kit.assert_same(answer, again)
        cached = min(length // 16 * 16, length - 1)
        assert (again.last.cached_tokens, again.last.computed_tokens) == (cached, length - cached)
        assert sorted(second.blocks) == list(range(length // 16, (total - 1) // 16)), "loaded ones are not reported"
        assert all(len(block) == one.spec.block_bytes == other.spec.block_bytes for block in blocks_of(sink))
        assert one.spec == other.spec
        assert_idle(one)
        assert_idle(other)


@pytest.mark.parametrize("length", [1, 16, 47, 48, 150])
async def test_hand_off_from_prefill_to_decode(config, kit, length):
    request = kit.request("a", length, kit.seeded(8, 30, logprobs=2, presence_penalty=0.5))
    first_only = replace(request, sampling=replace(request.sampling, max_tokens=1))
    async with Engine.open(config) as whole, Engine.open(config) as prefill, Engine.open(config) as decode:
        expected = await kit.read(whole, request)
        first, sink = await filled(prefill, kit, first_only)
        assert first.ids == expected.ids[:1] and sink.valid_tokens == length
        blocks = [*blocks_of(sink), *([] if sink.tail is None else [sink.tail])]
        result = kit.LoadResult(length, tuple(first.tokens), cached_tokens=3)
        rest = await kit.read(decode, request, kit.Source(blocks, result))
        assert [*first.ids, *rest.ids] == expected.ids
        assert [token.index for token in rest.tokens] == list(range(1, 30))
        assert (rest.last.cached_tokens, rest.last.computed_tokens) == (min(3, length), 0)
        assert decode.stats().computed_tokens == 29, "nothing but decode rows"


async def test_hand_off_of_a_token_that_ends_it(config, kit):
    request = kit.request("a", 20, kit.seeded(1, 30, ignore_eos=False))
    async with Engine.open(config) as engine:
        result = kit.LoadResult(0, (kit.TokenOut(0, EOS),))
        answer = await kit.read(engine, request, kit.Source([], result))
        assert answer.tokens == [] and answer.last.finish == "stop"
        assert_idle(engine)


async def test_bad_sources_cost_time_and_nothing_else(config, kit):
    request = kit.request("a", 100, kit.seeded(8, logprobs=1))
    async with Engine.open(config) as engine:
        expected, sink = await filled(engine, kit, request)
        blocks = blocks_of(sink)
        bad = [
            kit.Source(blocks[:3], RuntimeError("the store is gone")),
            kit.Source(blocks[:3], asyncio.CancelledError("its call was torn down")),
            kit.Source(blocks[:3], -1),
            kit.Source(blocks[:2], kit.LoadResult(32, (kit.TokenOut(5, 1),))),
            kit.Source(blocks[:2], kit.LoadResult(32, (kit.TokenOut(0, 10**6),))),
            kit.Source([b"short"], 16),
        ]
        for number, source in enumerate(bad, start=1):
            answer = await kit.read(engine, request, source)
            kit.assert_same(expected, answer)
            assert (answer.last.cached_tokens, answer.last.computed_tokens) == (0, 100)
            assert engine.stats().load_failures == number
            assert_idle(engine)
        boasting = kit.Source(blocks[:2], 10**6)
        answer = await kit.read(engine, request, boasting)
        kit.assert_same(expected, answer)
        assert answer.last.cached_tokens == 32, "what was not written is not believed"


async def test_short_pool_stops_a_loader(config, kit):
    request = kit.request("a", 100, kit.seeded(8))
    async with Engine.open(replace(config, kv_pool_tokens=16 * 10)) as engine:
        expected, sink = await filled(engine, kit, request)
        gate = asyncio.Event()
        first = kit.Source(blocks_of(sink)[:6], gate=gate)
        async with asyncio.TaskGroup() as tasks:
            one = tasks.create_task(kit.read(engine, request, first))
            await first.started.wait()
            second = kit.Source(blocks_of(sink)[:6])
            other = tasks.create_task(kit.read(engine, kit.renamed(request, "b"), second))
            await second.started.wait()
            assert second.written == 4
            gate.set()
        kit.assert_same(expected, one.result())
        kit.assert_same(expected, other.result())
        assert_idle(engine)


async def test_loaders_that_wait_with_all_pages_give_way(config, kit):
    """Both loaded sequences hold half of what they need; one gives its pages up, both finish."""
    requests = [kit.request(id, 120, kit.seeded(8)) for id in "ab"]
    async with Engine.open(replace(config, kv_pool_tokens=16 * 10)) as engine:
        filled_runs = [await filled(engine, kit, request) for request in requests]
        gate = asyncio.Event()
        sources = [kit.Source(blocks_of(sink)[:5], gate=gate) for _, sink in filled_runs]
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(kit.read(engine, request, source))
                for request, source in zip(requests, sources, strict=True)
            ]
            for source in sources:
                await source.started.wait()
            assert engine.stats().free_pages == 0
            gate.set()
        for (expected, _), reader in zip(filled_runs, readers, strict=True):
            kit.assert_same(expected, reader.result())
            assert reader.result().last.cached_tokens + reader.result().last.computed_tokens == 120
        assert_idle(engine)


async def test_loads_that_wait_for_each_other_end(config, kit):
    """One sequence waits for pages; a load that holds them waits for that very sequence to end."""
    tight = replace(config, kv_pool_tokens=16 * 8, stall_s=0.01)
    request = kit.request("a", 100, kit.seeded(8, 10))
    async with Engine.open(tight) as engine:
        expected, sink = await filled(engine, kit, request)
        ended = asyncio.Event()
        source = kit.Source(blocks_of(sink)[:5], gate=ended)
        async with asyncio.TaskGroup() as tasks:
            loaded = tasks.create_task(kit.read(engine, request, source))
            await source.started.wait()
            first = await kit.read(engine, kit.renamed(request, "b"))
            assert await source.writer.write(0, [memoryview(blocks_of(sink)[0])]) == 0
            ended.set()
        kit.assert_same(expected, first)
        kit.assert_same(expected, loaded.result())
        assert (loaded.result().last.cached_tokens, loaded.result().last.computed_tokens) == (0, 100)
        assert_idle(engine)


async def test_preemption_while_a_sink_holds_the_pages(config, kit):
    """A lent page does not come free by preemption; whoever needs one waits until the sink lets go."""
    requests = [kit.request(str(number), 40, kit.seeded(number, 60)) for number in range(4)]
    needed = 4  # pages of a whole request
    async with Engine.open(config) as engine:
        expected = await kit.read_all(engine, requests)
    async with Engine.open(replace(config, kv_pool_tokens=16 * 12)) as engine:
        sinks = [kit.Sink(hold=True) for _ in requests]
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(kit.read(engine, request, sink=sink))
                for request, sink in zip(requests, sinks, strict=True)
            ]
            for sink in itertools.cycle(sinks):  # in turns: whichever holds what another waits for comes up
                if not (await asyncio.wait(readers, timeout=0.002))[1]:  # a loop without a pause starves the steps
                    break
                if engine.stats().free_pages < needed:
                    sink.release()
        for sink in sinks:
            sink.release()
        for one, reader in zip(expected, readers, strict=True):
            kit.assert_same(one, reader.result())
        assert engine.stats().preemptions > 0
        assert_idle(engine)


async def test_late_write_touches_nothing(config, kit):
    request = kit.request("a", 100, kit.seeded(8))
    async with Engine.open(config) as engine:
        _, sink = await filled(engine, kit, request)
        source = kit.Source(blocks_of(sink)[:2])
        await kit.read(engine, request, source)
        assert await source.writer.write(0, [memoryview(blocks_of(sink)[0])]) == 0
        assert_idle(engine)


class Doubter:
    """A source with a harmed block, whose check tells."""

    def __init__(self, blocks, harmed, again):
        self.right, self.harmed, self.again = blocks, harmed, again
        self.counts = []

    async def load(self, pages):
        wrong = list(self.right)
        wrong[self.harmed] = bytes(len(wrong[0]))
        for blocks in [self.right, wrong] if self.again else [wrong]:
            views = [memoryview(block) for block in blocks]
            self.counts.append(await pages.write(0, views, partial(self._copy, blocks)))
        return len(self.right) * pages.block_size

    def _copy(self, blocks, index, into):
        into[:] = blocks[index]
        return blocks[index] == self.right[index]


@pytest.mark.parametrize("again", [False, True], ids=["at first", "over good ones"])
async def test_a_copy_that_is_refused_ends_what_is_loaded(config, kit, again):
    request = kit.request("a", 100, kit.seeded(8))
    async with Engine.open(config) as engine:
        expected, sink = await filled(engine, kit, request)
        blocks = blocks_of(sink)[:5]
        source = Doubter(blocks, 3, again)
        result = await kit.read(engine, request, source)
        assert source.counts == ([5, 3] if again else [3])
        kit.assert_same(expected, result)
        assert result.last.computed_tokens == 100 - 3 * 16
        assert_idle(engine)


async def test_sink_that_holds_pages_keeps_them(config, kit):
    request = kit.request("a", 70, kit.seeded(8))
    async with Engine.open(config) as engine:
        sink = kit.Sink(hold=True)
        await kit.read(engine, request, sink=sink)
        held = len(sink.held)
        assert held == len(sink.blocks) + (sink.tail is not None)
        assert engine.stats().free_pages == engine.stats().total_pages - held
        await kit.read_all(engine, kit.mixed())
        assert [bytes(page.view()) for page in sink.held[:-1]] == blocks_of(sink)
        sink.release()
        assert_idle(engine)


async def test_waits_for_pages_that_a_sink_holds(config, kit):
    async with Engine.open(replace(config, kv_pool_tokens=16 * 6)) as engine:
        request = kit.request("a", 60, kit.seeded(8, 20))
        sink = kit.Sink(hold=True)
        expected = await kit.read(engine, request, sink=sink)
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(kit.read(engine, kit.renamed(request, "b")))
            while engine.stats().waiting != 1:
                await asyncio.sleep(0)
            sink.release()
        kit.assert_same(expected, reader.result())
        assert_idle(engine)


async def test_broken_sink_is_counted_and_ignored(config, kit):
    class Broken:
        def filled(self, first_block, pages, tokens):
            raise RuntimeError("no")

        def finished(self, valid_tokens, tail):
            raise RuntimeError("no")

    async with Engine.open(config) as engine:
        request = kit.request("a", 40, kit.seeded(8))
        kit.assert_same(await kit.read(engine, request), await kit.read(engine, request, sink=Broken()))
        assert engine.stats().sink_failures == 3
        assert_idle(engine)


async def test_what_the_last_owner_left_is_gone(config, kit):
    """A source that wrote NaN spoils its own request, not the next owner's of its pages, and no tail carries it on."""
    tight = replace(config, kv_pool_tokens=16 * 14)
    requests = [kit.request(str(number), 20 + number, kit.greedy(12)) for number in range(4)]
    async with Engine.open(tight) as engine:
        expected = await kit.read_all(engine, requests)
        poison = b"\xff\xff\xff\x7f" * (engine.spec.block_bytes // 4)
        with pytest.raises(EngineError, match="not finite"):
            await kit.read(engine, kit.request("x", 200, kit.greedy(2)), kit.Source([poison] * 12))
        for one, other in zip(expected, await kit.read_all(engine, requests), strict=True):
            kit.assert_same(one, other)
        sink = kit.Sink()
        await kit.read(engine, kit.request("y", 20, kit.greedy(1)), sink=sink)
        layers = [sink.tail[at : at + len(sink.tail) // 6] for at in range(0, len(sink.tail), len(sink.tail) // 6)]
        assert all(any(layer[: 4 * 128]) and not any(layer[4 * 128 :]) for layer in layers)


# Comings and goings


async def test_dropped_while_loading_waiting_and_running(config, kit):
    async with Engine.open(replace(config, max_running=1)) as engine:
        _, sink = await filled(engine, kit, kit.request("x", 100, kit.seeded(8)))
        source = kit.Source(blocks_of(sink), gate=asyncio.Event())
        loading = asyncio.create_task(kit.read(engine, kit.request("x", 100, kit.seeded(8)), source))
        await source.started.wait()
        running = engine.generate(kit.request("a", 100, kit.seeded(1, 500)))
        await anext(running)
        waiting = asyncio.create_task(kit.read(engine, kit.request("b", 100, kit.seeded(1))))
        while engine.stats().waiting != 1:
            await asyncio.sleep(0)
        assert engine.stats().loading == 1
        for task in (loading, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await running.aclose()
        while engine.stats().free_pages != engine.stats().total_pages:
            await asyncio.sleep(0)
        assert_idle(engine)
        assert len((await kit.read(engine, kit.request("a", 10, kit.seeded(1)))).ids) == 24


async def test_dropped_before_its_load_began(config, kit):
    async with Engine.open(config) as engine:
        source = kit.Source([], gate=asyncio.Event())
        engine._drop(engine._accept(kit.request("a", 10, kit.seeded(1)), source, None))
        while engine.stats().loading:
            await asyncio.sleep(0)
        assert source.writer is None, "it never ran"
        assert_idle(engine)


async def test_source_that_will_not_be_cancelled(config, kit):
    class Stubborn(kit.Source):
        async def load(self, pages):
            try:
                return await super().load(pages)
            except asyncio.CancelledError:
                return 16

    async with Engine.open(config) as engine:
        _, sink = await filled(engine, kit, kit.request("a", 100, kit.seeded(8)))
        source = Stubborn(blocks_of(sink), gate=asyncio.Event())
        reader = asyncio.create_task(kit.read(engine, kit.request("a", 100, kit.seeded(8)), source))
        await source.started.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        while engine.stats().loading:
            await asyncio.sleep(0)
        assert_idle(engine)


async def test_large_copy_outlives_its_reader_but_not_its_pages(tmp_path, kit):
    """Blocks beyond the inline size are copied in a thread, which holds the pages until it is done."""
    directory = write_checkpoint(tmp_path / "wide", TinyModel(layers=4, head_dim=64, kv_heads=4))
    config = EngineConfig(directory, kv_pool_tokens=2048, threads=1)
    async with Engine.open(config) as engine:
        expected, sink = await filled(engine, kit, kit.request("a", 400, kit.seeded(8)))
        assert engine.spec.block_bytes * 20 > 1 << 20
        again = await kit.read(engine, kit.request("a", 400, kit.seeded(8)), kit.Source(blocks_of(sink)[:25]))
        kit.assert_same(expected, again)
        assert again.last.cached_tokens == 399
        pages_of = engine._runner.memory
        started, go = threading.Event(), threading.Event()
        write = pages_of.write

        def slow(pages, blocks, copy, **how):
            started.set()
            go.wait()
            return write(pages, blocks, copy, **how)

        pages_of.write = slow
        source = kit.Source(blocks_of(sink)[:20])
        reader = asyncio.create_task(kit.read(engine, kit.request("a", 400, kit.seeded(8)), source))
        while not started.is_set():
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert engine.stats().loading == 1 and engine.stats().free_pages == engine.stats().total_pages - 20
        go.set()  # until then the copy holds its pages and reads from the source's blocks
        while engine.stats().loading:
            await asyncio.sleep(0)
        assert_idle(engine)


async def test_reader_that_leaves_after_every_count_of_tokens(config, kit):
    async with Engine.open(config) as engine:
        steady = asyncio.create_task(kit.read(engine, kit.request("s", 80, kit.seeded(5, 150))))
        for count in range(12):
            async with aclosing(engine.generate(kit.request("a", 90, kit.seeded(1, 100)))) as updates:
                for _ in range(count):
                    await anext(updates)
        answer = await steady
        kit.assert_same(answer, await kit.read(engine, kit.request("s", 80, kit.seeded(5, 150))))
        assert_idle(engine)


async def test_slow_reader_gets_everything_merged(config, kit):
    async with Engine.open(config) as engine:
        request = kit.request("a", 30, kit.seeded(1, 200))
        expected = await kit.read(engine, request)
        slow = kit.Answer()
        async with aclosing(engine.generate(request)) as updates:
            slow.updates.append(await anext(updates))
            await kit.read(engine, kit.request("b", 30, kit.seeded(2, 400)))
            slow.updates.append(await anext(updates))
        kit.assert_same(expected, slow)


async def test_what_a_slow_reader_gets_at_once_is_bounded(config, kit, monkeypatch):
    monkeypatch.setattr(outlet, "_MOST", 64)
    async with Engine.open(config) as engine:
        request = kit.request("a", 30, kit.seeded(1, 200))
        expected, slow = await kit.read(engine, request), kit.Answer()
        async with aclosing(engine.generate(request)) as updates:
            slow.updates.append(await anext(updates))
            await kit.read(engine, kit.request("b", 30, kit.seeded(2, 400)))
            slow.updates += [update async for update in updates]
        assert [len(update.tokens) for update in slow.updates[1:-1]] == [64] * (len(slow.updates) - 2)
        kit.assert_same(expected, slow)


@pytest.mark.parametrize("late", [False, True])
async def test_a_relay_takes_what_is_between_the_first_update_and_the_last(config, kit, late):
    """At once, or the tokens of many steps together: the reader gets the first and the last, in all the same tokens."""
    async with Engine.open(config) as engine:
        request = kit.request("a", 30, kit.seeded(1, 200, logprobs=2))
        expected = await kit.read(engine, request)
        told, answer = [], kit.Answer()

        def relay(pending):
            told.append(pending)
            if pending.more and (not late or len(told) % 50 == 0):
                answer.updates.append(pending.passed())

        async with aclosing(engine.generate(request, relay=lambda: relay)) as updates:
            read = []
            async for update in updates:
                read.append(update)
                answer.updates.append(update)
        assert len(read) == 2 and len(told) > 100
        assert [update.finish for update in answer.updates[:-1]] == [None] * (len(answer.updates) - 1)
        kit.assert_same(expected, answer)
        assert_idle(engine)


async def test_an_error_is_the_readers_with_all_that_came_before_it(config, kit):
    relayed = []
    async with Engine.open(config) as engine:
        generating = engine.generate(kit.request("a", 30, kit.seeded(1, 500)), relay=lambda: relayed.append)
        async with aclosing(generating) as updates:
            await anext(updates)
            rest = asyncio.ensure_future(anext(updates))
            while not relayed:
                await asyncio.sleep(0)
            engine._close()
            update = await rest
            assert update.tokens and update.finish is None and not relayed[-1].more
            with pytest.raises(EngineClosed):
                await anext(updates)


async def test_refusals(config, kit):
    def ask(**fields):
        return Request("a", (1, 2, 3), SamplingParams(**{"max_tokens": 5, **fields}))

    bad = [
        Request("a", (), kit.greedy()),
        Request("a", (320,), kit.greedy()),
        Request("a", (-1,), kit.greedy()),
        Request("a", (1,), kit.greedy(), output=(400,)),
        *[ask(**{name: value}) for name, value in [("max_tokens", 0), ("min_tokens", -1), ("temperature", -0.1)]],
        *[ask(temperature=float("nan")), ask(temperature=float("inf")), ask(top_k=-1), ask(top_p=-0.1)],
        *[ask(top_p=1.01), ask(min_p=-0.1), ask(min_p=1.5), ask(repetition_penalty=0.0), ask(logprobs=-1)],
        *[ask(presence_penalty=float("nan")), ask(frequency_penalty=float("inf")), ask(logprobs=10**6)],
        *[ask(logit_bias={320: 1.0}), ask(logit_bias={1: float("nan")}), ask(stop_token_ids=frozenset({-4}))],
    ]
    async with Engine.open(config) as engine:
        for request in bad:
            with pytest.raises(RequestRefused):
                engine.check(request)
            with pytest.raises(RequestRefused):
                await kit.read(engine, request)
        with pytest.raises(RequestTooLong, match="1024"):
            await kit.read(engine, kit.request("a", 1000, kit.greedy(25)))
        assert len((await kit.read(engine, kit.request("a", 1000, kit.greedy(24)))).ids) == 24
        async with aclosing(engine.generate(kit.request("a", 10, kit.greedy()))) as updates:
            await anext(updates)
            with pytest.raises(EngineBusy, match="live"):
                await kit.read(engine, kit.request("a", 10, kit.greedy()))
    async with Engine.open(replace(config, kv_pool_tokens=64)) as engine:
        assert engine.max_model_len == 64  # a pool smaller than the model's context bounds it
        with pytest.raises(RequestTooLong, match="context of 64"):
            await kit.read(engine, kit.request("a", 60, kit.greedy(5)))
        assert len((await kit.read(engine, kit.request("a", 60, kit.greedy(4)))).ids) == 4


def test_bounds_of_sampling_are_the_gateways():
    """A request of another client than the gateway is refused by name where the gateway would."""
    for name, bound in SAMPLING_BOUNDS.items():
        theirs = BOUNDS[name]
        low = 0 if name == "top_k" else theirs.low  # -1 is a client's word for off
        assert (bound.low, bound.high) == (low, theirs.high), name
    assert MOST_BIASED == MAX_LOGIT_BIAS


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -2.1},
        {"frequency_penalty": 1e30},
        {"temperature": 1e9},
        {"logit_bias": {3: 101.0}},
        {"logprobs": 21},
        {"max_tokens": 2**40},
    ],
)
def test_beyond_the_bounds_is_refused_by_name(fields):
    [name] = fields
    with pytest.raises(RequestRefused, match=f"{name} must be between") as caught:
        check_sampling(SamplingParams(**{"max_tokens": 4, **fields}), 320)
    assert caught.value.field == name


async def test_full_line_refuses_at_once(config, kit):
    async with Engine.open(replace(config, max_running=1, max_waiting=2)) as engine:
        async with aclosing(engine.generate(kit.request("a", 10, kit.seeded(1, 500)))) as running:
            await anext(running)
            waiting = [asyncio.create_task(kit.read(engine, kit.request(id, 10, kit.seeded(1)))) for id in "bc"]
            while engine.stats().waiting != 2:
                await asyncio.sleep(0)
            with pytest.raises(EngineBusy):
                await kit.read(engine, kit.request("d", 10, kit.seeded(1)))
        assert [len((await task).ids) for task in waiting] == [24, 24]


class Broken:
    """A runner whose steps fail when they hold one of `culprits`, after they have computed."""

    def __init__(self, runner, culprits):
        self._step, self.culprits = runner.step, culprits
        self.calls = []

    def __call__(self, runs):
        names = [run.table[0].split("#")[0] for run in runs]
        self.calls.append(names)
        answers = self._step(runs)
        if met := self.culprits & set(names):
            raise RuntimeError(f"cannot compute {sorted(met)}")
        return answers


@pytest.mark.parametrize("culprits", [{"c"}, {"a"}, {"b", "g"}, set("abcdefg")])
async def test_a_step_fails_only_those_that_make_it_fail(config, kit, alone, monkeypatch, culprits):
    """Whatever they are: penalties, logprobs, chunks of a prompt; the others give the tokens that they give alone."""
    requests = kit.mixed()
    async with Engine.open(config) as engine:
        broken = Broken(engine._runner, culprits)
        monkeypatch.setattr(engine._runner, "step", broken)
        answers = await asyncio.gather(*[kit.read(engine, one) for one in requests], return_exceptions=True)
        for request, expected, answer in zip(requests, alone, answers, strict=True):
            if request.id in culprits:
                assert isinstance(answer, EngineError) and "cannot compute" in str(answer)
            else:
                kit.assert_same(expected, answer)
        assert engine.stats().failed_steps == len(culprits)
        assert_idle(engine)
        most = max(map(len, broken.calls))
        assert len(broken.calls) < 40 + len(culprits) * (2 * most), "a step is halved, not tried one by one"
        broken.culprits = set()
        for expected, again in zip(alone, await kit.read_all(engine, requests), strict=True):
            kit.assert_same(expected, again)


async def test_a_step_that_fails_once_costs_no_request(config, kit, monkeypatch):
    async with Engine.open(config) as engine:
        requests = [kit.request(id, 20, kit.seeded(1)) for id in "ab"]
        expected = await kit.read_all(engine, requests)
        step = engine._runner.step

        def fail(runs):
            if len(runs) > 1:
                monkeypatch.setattr(engine._runner, "step", step)
                raise RuntimeError("out of memory")
            return step(runs)

        monkeypatch.setattr(engine._runner, "step", fail)
        for one, other in zip(expected, await kit.read_all(engine, requests), strict=True):
            kit.assert_same(one, other)
        assert engine._runner.step == step and engine.stats().failed_steps == 0
        assert_idle(engine)


async def test_readers_that_leave_while_a_step_is_halved(config, kit, monkeypatch):
    async with Engine.open(config) as engine:
        loop, inside, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        step = engine._runner.step

        def fail(runs):
            if len(runs) > 1:
                raise RuntimeError("together it does not work")
            loop.call_soon_threadsafe(inside.set)
            assert go.wait(30)
            return step(runs)

        monkeypatch.setattr(engine._runner, "step", fail)
        requests = [kit.request(id, 20, kit.seeded(1)) for id in "abc"]
        reads = [asyncio.create_task(kit.read(engine, one)) for one in requests]
        await inside.wait()
        reads[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await reads[1]
        go.set()
        assert [len((await reads[at]).ids) for at in (0, 2)] == [24, 24]
        assert_idle(engine)


async def test_closing_ends_live_requests(config, kit):
    async with Engine.open(replace(config, max_running=1)) as engine:
        source = kit.Source([], gate=asyncio.Event())
        reads = [
            asyncio.create_task(kit.read(engine, kit.request("a", 10, kit.seeded(1, 900)))),
            asyncio.create_task(kit.read(engine, kit.request("b", 10, kit.seeded(1)))),
            asyncio.create_task(kit.read(engine, kit.request("c", 10, kit.seeded(1)), source)),
        ]
        await source.started.wait()
    for answer in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(answer, EngineClosed)
    with pytest.raises(EngineClosed):
        await kit.read(engine, kit.request("d", 10, kit.seeded(1)))
    assert_idle(engine)


async def test_error_of_the_caller_leaves_as_it_is(config):
    with pytest.raises(KeyError):
        async with Engine.open(config):
            raise KeyError("mine")


async def test_bfloat16_runs(config, kit):
    async with Engine.open(replace(config, dtype="bfloat16")) as engine:
        answers = await kit.read_all(engine, kit.mixed())
        assert all(answer.last.finish for answer in answers)
        assert engine.spec.dtype == "bfloat16" and engine.spec.block_bytes == 3 * 2 * 16 * 2 * 16 * 2
        assert_idle(engine)


async def test_kv_may_have_fewer_bits_than_weights(config, kit, caplog):
    caplog.set_level("INFO")
    async with Engine.open(replace(config, kv_dtype="int8")) as engine:
        answers = await kit.read_all(engine, kit.mixed())
        assert all(answer.last.finish for answer in answers)
        assert engine.spec.dtype == "float32, KV int8" and engine.spec.block_bytes == 3 * 2 * 16 * 2 * (16 + 4)
        assert_idle(engine)
        total = engine.stats().total_pages * 16
    assert f"KV of {total} tokens fits: {3 * 2 * 2 * (16 + 4)} bytes each in int8" in caplog.text


@pytest.mark.parametrize("given", [{"kv_dtype": "int4"}, {"kv_dtype": "int8", "device": "cuda"}])
def test_an_impossible_kv_dtype_is_refused(config, given):
    with pytest.raises(ValueError, match="kv_dtype"):
        replace(config, dtype="float32", **given)


def test_kv_that_weights_imply_has_their_identity(config):
    plain = replace(config, dtype="float32")
    assert replace(plain, kv_dtype="float32").identity == plain.identity == "float32"
    assert replace(config, dtype="int8", kv_dtype="bfloat16").identity == "int8"
    assert replace(config, dtype="bfloat16", kv_dtype="int8").identity == "bfloat16, KV int8"


async def test_it_says_what_its_weights_take(config):
    async with Engine.open(config) as engine:
        stats = engine.stats()
        layers = engine.checkpoint.parameters - engine.checkpoint.config.vocab_size * 64  # the embedding is not packed
        assert stats.weights_bytes == pytest.approx(4 * layers, rel=0.02)
        assert not stats.weights_shared
        assert re.fullmatch(r"\d+ MB \(private\), packed in [\d.]+ s", str(engine.packed))
        assert stats.peak_bytes > 50 << 20


async def test_the_loop_turns_while_a_step_runs(config, kit):
    """Requests come, go and are refused, while the engine's thread is held inside a step."""
    async with Engine.open(config) as engine:
        inside, go = threading.Event(), threading.Event()
        step = engine._runner.step

        def held(runs):
            inside.set()
            assert go.wait(30), "the step holds the loop"
            return step(runs)

        engine._runner.step = held
        first = asyncio.create_task(kit.read(engine, kit.request("a", 20, kit.greedy(3))))
        assert await asyncio.to_thread(inside.wait, 30)
        second = asyncio.create_task(kit.read(engine, kit.request("b", 20, kit.greedy(3))))
        leaving = asyncio.create_task(kit.read(engine, kit.request("c", 20, kit.greedy(3))))
        while engine.stats().waiting < 2:
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(RequestRefused):
            await kit.read(engine, kit.request("d", 0, kit.greedy(3)))
        assert engine.stats().steps == 0 and not first.done() and not second.done()
        go.set()
        assert [len((await task).ids) for task in (first, second)] == [3, 3]
