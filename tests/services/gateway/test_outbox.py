"""Deltas on their way to a reader: apart while it keeps up, merged while it does not."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import Unavailable
from penstock.gateway.completing.delta import CallDelta, Delta
from penstock.gateway.completing.outbox import Outbox


def texts(deltas: list[Delta]) -> list[tuple[int, str]]:
    """What deltas add, by choice."""
    return [(delta.choice, delta.content) for delta in deltas]


async def waiting(outbox: Outbox) -> asyncio.Task[list[Delta]]:
    """A reader that waits for the next deltas."""
    task = asyncio.ensure_future(outbox.next())
    await asyncio.sleep(0)
    return task


async def test_what_comes_at_once_stays_apart_for_a_reader_that_waits() -> None:
    outbox = Outbox(2)
    reader = await waiting(outbox)
    for choice, text in ((0, "a"), (1, "b"), (0, "c")):
        outbox.put(Delta(choice, text))
    assert texts(await reader) == [(0, "a"), (1, "b"), (0, "c")]


async def test_what_comes_while_the_reader_is_busy_is_one_delta_for_each_choice() -> None:
    outbox = Outbox(2)
    for number in range(100):
        outbox.put(Delta(number % 2, str(number % 10)))
    assert texts(await outbox.next()) == [(0, "02468" * 10), (1, "13579" * 10)]


async def test_apart_nothing_is_merged() -> None:
    outbox = Outbox(1, apart=True)
    for text in "ab":
        outbox.put(Delta(0, text))
    assert texts(await outbox.next()) == [(0, "a"), (0, "b")]
    reader = await waiting(outbox)
    outbox.put(Delta(0, "c", finish="stop"))
    assert texts(await reader) == [(0, "c")] and await outbox.next() == []


async def test_the_end_is_heard_after_the_last_delta_and_once() -> None:
    ends: list[bool] = []
    outbox = Outbox(1, lambda: ends.append(True))
    outbox.put(Delta(0, "a", finish="stop"))
    assert not outbox.ended
    assert texts(await outbox.next()) == [(0, "a")]
    assert outbox.ended and not ends
    assert await outbox.next() == [] and ends == [True]


async def test_a_nudge_lets_a_waiting_reader_go_and_ends_nothing() -> None:
    outbox = Outbox(1)
    outbox.nudge()  # nobody waits
    reader = await waiting(outbox)
    outbox.nudge()
    assert await reader == [] and not outbox.ended
    reader = await waiting(outbox)
    outbox.nudge()
    outbox.put(Delta(0, "a"))
    assert texts(await reader) == [(0, "a")]


async def test_an_error_comes_after_what_came_before_it() -> None:
    outbox = Outbox(1)
    reader = await waiting(outbox)
    outbox.put(Delta(0, "a"))
    outbox.fail(Unavailable("first"))
    outbox.fail(Unavailable("second"))
    assert texts(await reader) == [(0, "a")]
    for read in (outbox.next, outbox.next, outbox.whole):
        with pytest.raises(Unavailable, match="first"):
            await read()


async def test_the_whole_comes_at_the_end_merged_and_in_order() -> None:
    ends: list[bool] = []
    outbox = Outbox(2, lambda: ends.append(True))
    reader = asyncio.ensure_future(outbox.whole())
    await asyncio.sleep(0)
    for choice, text in ((1, "a"), (0, "b"), (1, "c")):
        outbox.put(Delta(choice, text))
        await asyncio.sleep(0)
    outbox.put(Delta(1, finish="stop"))
    await asyncio.sleep(0)
    assert not reader.done() and not ends
    outbox.put(Delta(0, finish="length"))
    found = await reader
    assert texts(found) == [(0, "b"), (1, "ac")] and [delta.finish for delta in found] == ["length", "stop"] and ends


def test_segments_tell_the_order_of_what_was_merged() -> None:
    one, two = Delta(0, "a"), Delta(0)
    assert one.plain and [(part.kind, part.text) for part in one.segments] == [("content", "a")]
    two.add_text("content", "b")
    two.add_call(CallDelta(0, "id", "look", "{"))
    two.add_call(CallDelta(0, arguments="}"))
    two.add_text("content", "c")
    one.merge(two)
    one.merge(Delta(0, "d"))
    assert [(part.kind, part.text) for part in one.segments] == [("content", "ab"), ("call", "{}"), ("content", "cd")]
    assert one.content == "abcd" and one.calls == [CallDelta(0, "id", "look", "{}")] and not one.plain
