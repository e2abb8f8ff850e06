"""Pictures are computed between steps, a part at a time."""

from __future__ import annotations

import asyncio
import threading
import warnings
from dataclasses import replace

import pytest
from tests.libs.engine.rank_threads import in_threads
from tests.libs.engine.seeing import asked, engine_config
from tests.libs.engine.test_pictures import GREEDY, Seeing, drawn, prompt

from penstock.engine.engine import Engine
from penstock.engine.errors import EngineError
from penstock.engine.request import Request
from penstock.kv.identity import Chain
from penstock.pictures.picture import Grid, spans


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Seeing(tmp_path_factory.mktemp("llama4"))


class Slow:
    """A tower whose pictures are ready when somebody says so."""

    def __init__(self, tower):
        self._tower = tower
        self.ready = False
        self.parts_made = 0

    @property
    def form(self):
        return self._tower.form

    def parts(self, pixels):
        while not self.ready:
            self.parts_made += 1
            yield
        return (yield from self._tower.parts(pixels))


def slowed(engine):
    engine.shown._tower = tower = Slow(engine.shown._tower)
    return tower


@pytest.mark.parametrize("stages", [1, 2])
async def test_streams_go_on_and_others_begin_beside_a_picture_that_takes_long(seeing, kit, stages):
    async with Engine.open(replace(engine_config(seeing), pp=stages), load=in_threads) as engine:
        tower = slowed(engine)
        stream = engine.generate(kit.request("stream", 20, kit.greedy(400)))
        await anext(stream)
        looking = asyncio.create_task(asked(engine, kit, seeing, "picture", prompt(seeing.form, 9, drawn(1), 12)))
        tokens = 0
        while tokens < 20 or not tower.parts_made:
            tokens += len((await anext(stream)).tokens)
        others = await kit.read_all(engine, [kit.request(f"other {at}", 30, kit.greedy(5)) for at in range(6)])
        assert [len(other.ids) for other in others] == [5] * 6, "more than may run at a time"
        assert not looking.done()
        tower.ready = True
        assert await looking == 0
        await stream.aclose()
        assert engine.shown.computed == 1


class Listening:
    """A tower whose parts wait until the reader of a stream has all of its tokens."""

    def __init__(self, tower, live):
        self._tower, self._live = tower, live
        self._heard = threading.Condition()
        self._read = 0
        self.had_all = []

    def hears(self, tokens):
        with self._heard:
            self._read += tokens
            self._heard.notify()

    def parts(self, pixels):
        for _ in range(3):
            with self._heard:
                self.had_all.append(self._heard.wait_for(lambda: self._read == self._live.generated, 10))
            yield
        return (yield from self._tower.parts(pixels))


async def test_tokens_are_handed_out_while_a_picture_is_computed(seeing, kit):
    """Those of the step before, whose reader need not wait for the next step."""
    async with Engine.open(engine_config(seeing)) as engine:
        stream = engine.generate(kit.request("stream", 20, kit.greedy(200)))
        first = await anext(stream)
        [outlet] = engine._outlets.values()
        engine.shown._tower = tower = Listening(engine.shown._tower, outlet.live)
        tower.hears(len(first.tokens))
        looking = asyncio.create_task(asked(engine, kit, seeing, "picture", prompt(seeing.form, 9, drawn(9), 12)))
        while not looking.done():
            tower.hears(len((await anext(stream)).tokens))
        await stream.aclose()
        assert await looking == 0
    assert tower.had_all == [True] * 3


async def test_the_text_before_a_picture_is_computed_meanwhile(seeing, kit):
    tokens, shown = prompt(seeing.form, 37, drawn(2), 9)
    async with Engine.open(engine_config(seeing)) as engine:
        tower, sink = slowed(engine), kit.Sink()
        chain = Chain(b"r" * 32, 16, tokens, pictures=spans(shown))
        request = Request("r", tuple(tokens), GREEDY, pictures=shown)
        reading = asyncio.create_task(kit.read(engine, request, sink=sink, chain=chain))
        await until(lambda: tower.parts_made and len(sink.blocks) == 2)
        lately = [0.0]

        def fell():
            lately.append(engine.stats().in_step_s)
            return lately[-1] < lately[-2]

        await until(fell)  # each part counts for itself: none makes a step look stuck
        assert not reading.done()
        tower.ready = True
        answer = await reading
    assert answer.ids == seeing.greedy(tokens, [one.picture for one in shown], 4)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def test_who_leaves_takes_the_picture_along(seeing, kit):
    """What was begun of it is given up, and the next one is computed."""
    first, second = prompt(seeing.form, 5, drawn(3, Grid(2, 1)), 9), prompt(seeing.form, 5, drawn(4), 9)
    async with Engine.open(engine_config(seeing)) as engine:
        tower = slowed(engine)
        leaving = asyncio.create_task(asked(engine, kit, seeing, "leaves", first))
        await until(lambda: tower.parts_made and engine.shown.begun)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(lambda: not engine.shown.begun)
        tower.ready = True
        assert await asked(engine, kit, seeing, "stays", second) == 0
        assert engine.shown.computed == 1


async def test_a_picture_that_fails_takes_its_request_alone(seeing, kit, monkeypatch):
    """Not the stream beside it, and the next request with the same one is answered."""
    shows = prompt(seeing.form, 5, drawn(5), 9)
    async with Engine.open(engine_config(seeing)) as engine:
        stream = engine.generate(kit.request("stream", 20, kit.greedy(400)))
        await anext(stream)
        with monkeypatch.context() as patched:
            patched.setattr(engine.shown._tower, "parts", _failing)
            with pytest.raises(EngineError, match="a picture can't be computed: no memory"):
                await asked(engine, kit, seeing, "fails", shows)
        assert (await anext(stream)).tokens
        await asked(engine, kit, seeing, "again", shows)
        assert (await anext(stream)).tokens
        await stream.aclose()


def _failing(pixels):
    yield
    raise MemoryError("no memory")


async def test_embeddings_are_forgotten_once_they_are_in_pages(seeing, kit):
    """Also of a sequence that has the pages of another one with the same pictures."""
    tokens, shown = prompt(seeing.form, 5, drawn(6), 9, drawn(7), 40)
    async with Engine.open(engine_config(seeing)) as engine:
        chain = Chain(b"r" * 32, 16, tokens, pictures=spans(shown))
        requests = [Request(id, tuple(tokens), kit.greedy(200), pictures=shown) for id in ("one", "two")]
        streams = [engine.generate(request, chain=chain) for request in requests]
        await asyncio.gather(*map(anext, streams))
        lives = [outlet.live for outlet in engine._outlets.values()]
        assert [live.pictures._ready for live in lives] == [{}, {}]
        assert sum(live.shared_tokens for live in lives) > 40
        assert engine.shown.computed == 2
        for stream in streams:
            await stream.aclose()


async def test_pictures_of_who_yields_wait_for_the_streams_of_others(seeing, kit):
    tokens, shown = prompt(seeing.form, 5, drawn(8), 9)
    async with Engine.open(engine_config(seeing)) as engine:
        tower = slowed(engine)
        tower.ready = True
        stream = engine.generate(kit.request("stream", 20, kit.greedy(60)))
        await anext(stream)
        request = Request("line", tuple(tokens), GREEDY, pictures=shown, yields=True)
        line = asyncio.create_task(kit.read(engine, request))
        async for _ in stream:
            assert engine.shown.computed == 0 or engine.stats().running == 0
        assert (await line).ids == seeing.greedy(tokens, [one.picture for one in shown], 4)
