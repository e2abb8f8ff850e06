"""Requests with common beginnings: their KV is computed once and lies in one place, and their tokens stay the same."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.engine.engine import Engine
from penstock.engine.errors import NotFinite
from penstock.engine.hooks import LoadResult
from penstock.kv.identity import Chain
from penstock.testing.checkpoints import TinyModel, write_checkpoint

SIZE = 16
ROOT, OTHER = b"r" * 32, b"o" * 32
PREFIX = tuple(random.Random(1).choices(range(256), k=300))
SHARED = len(PREFIX) // SIZE * SIZE
TAIL, LEAST = len(PREFIX) - SHARED, 4


def agents(kit, count, prefix=PREFIX, **fields):
    """Requests with the same beginning and endings of their own."""
    own = [tuple(random.Random(f"own {number}").choices(range(256), k=20 + number)) for number in range(count)]
    return [
        replace(kit.request(f"agent {number}", 1, kit.seeded(number, **fields)), prompt=prefix + ending)
        for number, ending in enumerate(own)
    ]


def chain(request, root=ROOT):
    return Chain(root, SIZE, request.prompt + request.output)


async def shared(engine, kit, requests, root=ROOT):
    return await asyncio.gather(*[kit.read(engine, one, chain=chain(one, root)) for one in requests])


async def apart(config, kit, requests):
    """What they say without sharing."""
    async with Engine.open(replace(config, kv_pool_tokens=16384)) as engine:
        return [await kit.read(engine, one) for one in requests]


def counts(answer):
    return answer.last.cached_tokens, answer.last.shared_tokens, answer.last.computed_tokens


async def test_eight_that_start_together_compute_their_common_prefix_once(config, kit):
    requests = agents(kit, 8)
    expected = await apart(config, kit, requests)
    async with Engine.open(config) as engine:
        found = await shared(engine, kit, requests)
        for request, one, other in zip(requests, expected, found, strict=True):
            kit.assert_same(one, other)
            assert sum(counts(other)) == len(request.prompt)
        assert counts(found[0]) == (0, 0, len(requests[0].prompt))
        assert [answer.last.shared_tokens for answer in found[1:]] == [len(PREFIX)] * 7
        stats = engine.stats()
        own = sum(len(request.prompt) - len(PREFIX) for request in requests)
        assert stats.computed_tokens == len(PREFIX) + own + 8 * 23, "the last rows are those of decoding"
        assert stats.copied_tokens == 7 * TAIL
        assert stats.free_pages == stats.total_pages and stats.resident_pages > SHARED // SIZE


async def test_those_that_run_hold_the_common_pages_together(config, kit):
    requests = agents(kit, 4, max_tokens=200)
    async with Engine.open(config) as engine:
        generators = [engine.generate(one, chain=chain(one)) for one in requests]
        for generator in generators:
            await anext(generator)
        lives = engine._scheduler.situation({}).running
        assert len(lives) == 4
        assert len({tuple(live.pages[: SHARED // SIZE]) for live in lives}) == 1, "the same page numbers"
        assert engine.stats().shared_pages == SHARED // SIZE
        for generator in generators:
            await generator.aclose()
        while engine.stats().free_pages != engine.stats().total_pages:
            await asyncio.sleep(0)


async def test_the_next_turn_computes_its_new_tokens_only(config, kit):
    """Prompt and answer of the turn before are still there, though no request was."""
    [first] = agents(kit, 1)
    async with Engine.open(config) as engine:
        [answer] = await shared(engine, kit, [first])
        known = len(first.prompt) + 24 - 1
        turn = replace(first, id="turn 2", prompt=(*first.prompt, *answer.ids, 7, 8, 9))
        [expected] = await apart(config, kit, [turn])
        [found] = await shared(engine, kit, [turn])
        kit.assert_same(expected, found)
        assert found.last.shared_tokens == known


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 48, 160])
async def test_the_same_prompt_again(config, kit, length):
    """Its last token is computed, and the page that it is in is not shared."""
    one = kit.request("same", length, kit.seeded(3))
    [expected] = await apart(config, kit, [one])
    async with Engine.open(config) as engine:
        for number in range(3):
            pair = [kit.renamed(one, f"{number}{at}") for at in range(2)]
            for found in await shared(engine, kit, pair):
                kit.assert_same(expected, found)
                assert sum(counts(found)) == length
                if number:
                    assert found.last.shared_tokens == length - 1


async def test_another_tenant_shares_nothing(config, kit):
    requests = agents(kit, 2)
    async with Engine.open(config) as engine:
        await shared(engine, kit, requests)
        [other] = await shared(engine, kit, requests[:1], OTHER)
        assert counts(other) == (0, 0, len(requests[0].prompt))
        assert (await kit.read(engine, requests[0])).last.shared_tokens == 0, "nor one without names"


class Stepwise:
    """Holds each step of an engine until it is told to compute it."""

    def __init__(self, engine):
        self._step = engine._runner.step
        self._inside, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self.free = False
        engine._runner.step = self.step

    def step(self, runs):
        if not self.free:
            self._inside.release()
            assert self._go.acquire(timeout=30)
        return self._step(runs)

    async def begun(self):
        assert await asyncio.to_thread(self._inside.acquire, timeout=30)

    def go(self, ever=False):
        self.free = ever
        self._go.release()


async def test_the_queue_is_what_steps_will_compute(config, kit):
    """A common prefix counts once, what is in pages not at all, and so it is before each step. What is copied counts
    until then."""
    requests = agents(kit, 8, max_tokens=1)
    first = SHARED + sum(len(request.prompt) - SHARED for request in requests)
    ends = sum((len(request.prompt) - 1) % SIZE + 1 for request in requests)
    async with Engine.open(config) as engine:
        told, next_step = [], engine._scheduler.next_step

        def planned(*args):
            before = engine.stats()
            step = next_step(*args)
            if step:
                told.append((before.queued_tokens, before.computed_tokens + before.copied_tokens))
            return step

        engine._scheduler.next_step = planned
        for expected in (first, ends):
            told.clear()
            await shared(engine, kit, [replace(one, id=f"{one.id} of {expected}") for one in requests])
            end = engine.stats().computed_tokens + engine.stats().copied_tokens
            assert [queued for queued, _ in told] == [end - before for _, before in told]
            assert told[0][0] == expected
            again = [rows for request in requests if (rows := (len(request.prompt) - 1) % SIZE) >= LEAST]
            assert engine.stats().copied_tokens == 7 * TAIL + (sum(again) if expected == ends else 0)
            assert engine.stats().queued_tokens == 0


@pytest.mark.parametrize("during", [True, False], ids=["during its step", "between steps"])
async def test_the_next_one_takes_over_when_the_first_leaves(config, kit, during):
    """One chunk of the prefix is there; who waited for the rest computes it, and nothing of it twice."""
    requests = agents(kit, 3)
    expected = await apart(config, kit, requests)
    async with Engine.open(config) as engine:
        steps = Stepwise(engine)
        readers = [asyncio.create_task(kit.read(engine, one, chain=chain(one))) for one in requests]
        await steps.begun()
        steps.go()
        await steps.begun()
        if during:
            readers[0].cancel()
            await asyncio.wait([readers[0]])
            steps.go(ever=True)
        else:
            steps.go()
            readers[0].cancel()
            await steps.begun()
            steps.go(ever=True)
        for one, reader in zip(expected[1:], readers[1:], strict=True):
            kit.assert_same(one, await reader)
        first, second = (reader.result().last for reader in readers[1:])
        chunk = config.max_batch_tokens
        assert first.shared_tokens in ([chunk] if during else [chunk, 2 * chunk]), "what was in its pages counts"
        assert second.shared_tokens == len(PREFIX)
        assert sum(counts(readers[1].result())) == len(requests[1].prompt)


async def test_a_request_that_fails_holds_nobody_up(config, kit):
    requests = agents(kit, 3)
    expected = await apart(config, kit, requests)
    async with Engine.open(config) as engine:
        step, culprit = engine._runner.step, requests[0].sampling

        def failing(runs):
            if any(run.choice.params is culprit and run.start for run in runs):
                raise RuntimeError("this one")
            return step(runs)

        engine._runner.step = failing
        readers = [kit.read(engine, one, chain=chain(one)) for one in requests]
        found = await asyncio.gather(*readers, return_exceptions=True)
        assert isinstance(found[0], Exception)
        for one, other in zip(expected[1:], found[1:], strict=True):
            kit.assert_same(one, other)
        assert found[2].last.shared_tokens == len(PREFIX)


async def test_a_short_pool_and_a_common_prefix(config, kit):
    """Preempted ones come back to the pages that the others still hold, or compute them again."""
    requests = agents(kit, 6, max_tokens=120)
    expected = await apart(config, kit, requests)
    async with Engine.open(replace(config, kv_pool_tokens=SIZE * 34)) as engine:
        for one, other in zip(expected, await shared(engine, kit, requests), strict=True):
            kit.assert_same(one, other)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.free_pages == stats.total_pages


async def test_pages_that_nobody_holds_make_room(config, kit):
    async with Engine.open(replace(config, kv_pool_tokens=SIZE * 30)) as engine:
        for number in range(8):
            one = kit.request(f"one {number}", 200, kit.greedy(20))
            [found] = await shared(engine, kit, [one])
            assert counts(found) == (0, 0, 200)
        assert engine.stats().resident_pages <= 30
        assert engine.stats().free_pages == 30


async def test_a_flood_of_one_tenant_leaves_another_its_pages(config, kit):
    """Up to its share of them, also when they were used longest ago."""
    quiet = kit.request("quiet", 100, kit.greedy(4))
    pool = {"kv_pool_tokens": SIZE * 40, "resident_share": 1.0, "tenant_share": 0.25}
    async with Engine.open(replace(config, **pool)) as engine:
        await shared(engine, kit, [quiet])
        for number in range(8):
            await shared(engine, kit, [kit.request(f"flood {number}", 200, kit.greedy(4))], OTHER)
        [again] = await shared(engine, kit, [kit.renamed(quiet, "again")])
        assert counts(again)[1] >= 100 // SIZE * SIZE


async def test_a_source_shares_what_it_has_settled_and_takes_what_is_there(config, kit):
    class Careful(kit.Source):
        async def load(self, pages):
            taken = await pages.take(0, len(self.blocks))
            written = taken + await pages.write(taken, [memoryview(block) for block in self.blocks[taken:]])
            pages.settled(written)
            if taken < len(self.blocks):
                with pytest.raises(ValueError, match="share"):
                    await pages.write(taken, [memoryview(self.blocks[taken])])
            self.taken = taken
            return kit.LoadResult(written * SIZE, (), written * SIZE, stored_blocks=0 if taken else written)

    requests = agents(kit, 3)
    async with Engine.open(config) as engine:
        sink = kit.Sink()
        expected = [await kit.read(engine, requests[0], sink=sink), *(await apart(config, kit, requests[1:]))]
    blocks = [sink.blocks[number] for number in range(SHARED // SIZE)]
    async with Engine.open(config) as engine:
        for number, (request, one) in enumerate(zip(requests, expected, strict=True)):
            source, second = Careful(blocks), kit.Sink()
            found = await kit.read(engine, request, source, second, chain(request))
            kit.assert_same(one, found)
            assert source.taken == (len(blocks) if number else 0)
            copied = TAIL if number else 0
            assert counts(found) == (SHARED, copied, len(request.prompt) - SHARED - copied)
            assert min(second.blocks) == (0 if number else len(blocks)), "the store may lack what was taken"


class Slow:
    """Brings blocks when it is told to, or nothing; `asked` says of which it was asked for the bytes."""

    def __init__(self, blocks, broken=False, within_s=None):
        self.blocks, self.broken, self.within_s = blocks, broken, within_s
        self.asked, self.go = [], asyncio.Event()
        self.asking = asyncio.Event()

    async def load(self, pages):
        count = 0
        try:
            while count < len(self.blocks):
                count += await pages.take(count, len(self.blocks), self.within_s)
                if count == len(self.blocks):
                    break
                self.asked.append(count)
                self.asking.set()
                await self.go.wait()
                if self.broken:
                    break
                half = min(len(self.blocks), count + len(self.blocks) // 2)
                count += await pages.write(count, [memoryview(block) for block in self.blocks[count:half]])
                pages.settled(count)
        finally:
            pages.settled(count)
        return count * SIZE


async def stored(config, kit, requests):
    """Blocks of the common prefix, and what the requests say without sharing."""
    async with Engine.open(config) as engine:
        sink = kit.Sink()
        await kit.read(engine, requests[0], sink=sink)
    return [sink.blocks[number] for number in range(SHARED // SIZE)], await apart(config, kit, requests)


async def test_a_block_is_fetched_once_for_all_who_wait(config, kit):
    """The first one fetches in two parts; the others take each part as it is there."""
    requests = agents(kit, 4)
    blocks, expected = await stored(config, kit, requests)
    async with Engine.open(config) as engine:
        sources = [Slow(blocks) for _ in requests]
        readers = [
            asyncio.create_task(kit.read(engine, one, source, None, chain(one)))
            for one, source in zip(requests, sources, strict=True)
        ]
        await sources[0].asking.wait()
        sources[0].go.set()
        for one, reader in zip(expected, readers, strict=True):
            kit.assert_same(one, await reader)
            assert counts(reader.result())[0] == SHARED
        assert [source.asked for source in sources] == [[0, len(blocks) // 2], [], [], []]


@pytest.mark.parametrize("end", ["fails", "is dropped"])
async def test_none_waits_for_a_second_fetch_that_brings_nothing(config, kit, end):
    requests = agents(kit, 4)
    blocks, expected = await stored(config, kit, requests)
    async with Engine.open(config) as engine:
        sources = [Slow(blocks, broken=not number) for number in range(4)]
        readers = [
            asyncio.create_task(kit.read(engine, one, source, None, chain(one)))
            for one, source in zip(requests, sources, strict=True)
        ]
        await sources[0].asking.wait()
        if end == "fails":
            sources[0].go.set()
        else:
            readers[0].cancel()
        for source in sources[1:]:
            await source.asking.wait()  # all at once: none of them waits for another
            assert source.asked == [0]
        for source in sources[1:]:
            source.go.set()
        for one, reader in list(zip(expected, readers, strict=True))[1:]:
            kit.assert_same(one, await reader)


async def test_a_fetch_of_another_is_waited_for_no_longer_than_said(config, kit):
    """The first one has nothing before the second is done, which asks for all blocks itself."""
    requests = agents(kit, 2)
    blocks, expected = await stored(config, kit, requests)
    async with Engine.open(config) as engine:
        sources = [Slow(blocks), Slow(blocks, within_s=0.001)]
        readers = []
        for one, source in zip(requests, sources, strict=True):
            readers.append(asyncio.create_task(kit.read(engine, one, source, None, chain(one))))
            await source.asking.wait()
        for number in (1, 0):
            sources[number].go.set()
            kit.assert_same(expected[number], await readers[number])
            assert counts(readers[number].result())[0] == SHARED
        assert sources[1].asked == [0, len(blocks) // 2]


class Patient:
    """Has nothing at first. Asked again, it has all blocks, or fails when it has shared half of them."""

    def __init__(self, blocks, broken):
        self.blocks, self.broken, self.asked = blocks, broken, 0

    async def load(self, pages):
        self.asked += 1
        return 0

    async def load_more(self, pages):
        self.asked += 1
        end = len(self.blocks) // (1 + self.broken)
        assert await pages.take(0, end) == 0
        count = await pages.write(0, [memoryview(block) for block in self.blocks[:end]])
        pages.settled(count)
        if self.broken:
            raise OSError("gone")
        return count * SIZE


@pytest.mark.parametrize("broken", [False, True])
async def test_the_source_is_asked_again_when_its_sequence_has_waited(config, kit, broken):
    requests = agents(kit, 2)
    blocks, expected = await stored(config, kit, requests)
    async with Engine.open(replace(config, max_running=1, again_s=1e-9)) as engine:
        first = asyncio.create_task(kit.read(engine, kit.request("other", 100, kit.seeded(1, 50))))
        while not engine.stats().generated_tokens:
            await asyncio.sleep(0)
        source = Patient(blocks, broken)
        found = await kit.read(engine, requests[1], source, None, chain(requests[1]))
        await first
        kit.assert_same(expected[1], found)
        assert source.asked == 2 and sum(counts(found)) == len(requests[1].prompt)
        half = len(blocks) // 2 * SIZE
        assert counts(found)[:2] == ((0, half) if broken else (SHARED, 0)), "what it shared is there all the same"
        assert engine.stats().load_failures == broken


class Waiting(Patient):
    """Answers after others had something to compute."""

    async def load(self, pages):
        come = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1.0, come.set_result, None)
        await come
        return LoadResult(await super().load(pages), waited_s=1.0)


async def test_a_wait_for_others_does_not_make_asking_again_dearer(config, kit):
    """The tiny model computes the rest in less time than the source has waited."""
    requests = agents(kit, 2)
    blocks, expected = await stored(config, kit, requests)
    async with Engine.open(replace(config, max_running=1, again_s=1e-9)) as engine:
        first = asyncio.create_task(kit.read(engine, kit.request("other", 100, kit.seeded(1, 50))))
        source = Waiting(blocks, False)
        reader = asyncio.create_task(kit.read(engine, requests[1], source, None, chain(requests[1])))
        await first
        engine._counters.prefill_tokens_per_s = 1e3
        kit.assert_same(expected[1], await reader)
        assert source.asked == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_damaged_kv_is_never_shared(tmp_path, config, kit, dtype):
    """The blocks from the damaged one on stay without keys, however many steps the prompt takes."""
    directory = write_checkpoint(tmp_path / "model", TinyModel())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][77, 3] = np.nan
    save_file(tensors, directory / "model.safetensors")
    spoilt = (*(token if token != 77 else 78 for token in PREFIX[:100]), 77, *PREFIX[100:])
    small = replace(config, model=directory, dtype=dtype, max_batch_tokens=32)
    async with Engine.open(small) as engine:
        [one] = agents(kit, 1, spoilt)
        steps = Stepwise(engine)
        reader = asyncio.create_task(kit.read(engine, one, chain=chain(one)))
        for _ in range(8):
            await steps.begun()
            steps.go()
        await steps.begun()
        assert engine.stats().resident_pages == 96 // SIZE
        steps.go(ever=True)
        with pytest.raises(NotFinite):
            await reader
        assert engine.stats().resident_pages == 0, "nobody knows what else is wrong"
        sound = replace(one, id="sound", prompt=spoilt[:100], sampling=kit.greedy(1))
        assert (await shared(engine, kit, [sound]))[0].last.computed_tokens == 100


async def test_readers_that_leave_at_any_time(config, kit):
    """Random comings and goings over a few common prefixes, on a pool that is too small."""
    luck = random.Random(5)
    requests = [
        replace(one, id=f"{number}", prompt=PREFIX[: luck.choice([40, 160, 300])] + one.prompt[-luck.randint(1, 40) :])
        for number, one in enumerate(agents(kit, 24))
    ]
    expected = await apart(config, kit, requests)
    async with Engine.open(replace(config, kv_pool_tokens=SIZE * 50, max_batch_tokens=48)) as engine:

        async def one(request, whole):
            for _ in range(luck.randint(0, 60)):
                await asyncio.sleep(0)
            patience, seen = luck.choice([0, 1, 3, 1000, 1000]), kit.Answer()
            async with aclosing(engine.generate(request, chain=chain(request))) as updates:
                if patience == 0:
                    task = asyncio.ensure_future(anext(updates))
                    for _ in range(luck.randint(0, 60)):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                    return
                async for update in updates:
                    seen.updates.append(update)
                    if len(seen.updates) == patience:
                        break
            assert seen.ids == whole.ids[: len(seen.ids)]
            assert sum(counts(seen)) == len(request.prompt)

        await asyncio.gather(*[one(*each) for each in zip(requests, expected, strict=True)])
        while engine.stats().free_pages != engine.stats().total_pages:
            await asyncio.sleep(0)
        assert engine.stats().failed_steps == 0
