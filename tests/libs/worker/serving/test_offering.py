"""The rendezvous of the gateway's and the decode worker's calls."""

import asyncio

import pytest

from penstock.engine.request import TokenOut
from penstock.errors import NotFound
from penstock.kv.identity import Chain
from penstock.worker.publishing import BlockSink
from penstock.worker.serving.offering import Handoffs

NAME = ("request", 1)
TOKEN = TokenOut(0, 5, None)


def sink():
    return BlockSink(publisher=None, chain=Chain(b"", 16))


async def test_decode_may_come_first():
    handoffs = Handoffs(wait_s=5, keep_s=0)
    taken = asyncio.ensure_future(handoffs.take(NAME))
    await asyncio.sleep(0)
    with handoffs.offer(NAME, sink()) as entry:
        assert await taken is entry
        entry.finish(TOKEN)
    assert not entry.failed


async def test_decode_may_come_after_the_prefill_has_ended():
    handoffs = Handoffs(wait_s=5, keep_s=5)
    with handoffs.offer(NAME, sink()) as entry:
        entry.finish(TOKEN)
        entry.sink.finished(3, None)
    assert (await handoffs.take(NAME)).ready
    assert len(handoffs) == 0


async def test_nobody_offers():
    handoffs = Handoffs(wait_s=0.01, keep_s=5)
    with pytest.raises(NotFound, match="epoch 1"):
        await handoffs.take(NAME)
    assert len(handoffs) == 0


async def test_a_prefill_that_ends_early_fails_the_handoff():
    handoffs = Handoffs(wait_s=5, keep_s=5)
    taken = asyncio.ensure_future(handoffs.take(NAME))
    await asyncio.sleep(0)
    with pytest.raises(ValueError), handoffs.offer(NAME, sink()):
        raise ValueError("the step failed")
    assert (await taken).failed
    assert len(handoffs) == 0


async def test_a_prefill_that_failed_before_decode_asked_is_known_to_have_failed():
    handoffs = Handoffs(wait_s=5, keep_s=5)
    with pytest.raises(ValueError), handoffs.offer(NAME, sink()):
        raise ValueError("no place in the batch")
    async with asyncio.timeout(1):
        assert (await handoffs.take(NAME)).failed
    assert len(handoffs) == 0


async def test_an_untaken_handoff_is_dropped_in_time():
    handoffs = Handoffs(wait_s=5, keep_s=0)
    with handoffs.offer(NAME, sink()) as entry:
        entry.finish(TOKEN)
    while len(handoffs):
        await asyncio.sleep(0)


async def test_another_epoch_is_another_handoff():
    handoffs = Handoffs(wait_s=0.01, keep_s=5)
    with handoffs.offer(("request", 2), sink()) as entry:
        with pytest.raises(NotFound):
            await handoffs.take(NAME)
        entry.finish(TOKEN)


async def test_a_prefill_under_an_old_name_takes_the_place_of_what_nobody_took():
    """The stream of plans broke before decode came, and the next one counts its epochs anew."""
    handoffs = Handoffs(wait_s=5, keep_s=5)
    with handoffs.offer(NAME, sink()) as old:
        old.finish(TOKEN)
    with handoffs.offer(NAME, sink()) as new:
        assert await handoffs.take(NAME) is new
        new.finish(TokenOut(1, 6, None))
    assert len(handoffs) == 0
