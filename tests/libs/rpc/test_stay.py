"""Staying connected: pauses that grow and begin anew, reasons that are logged once, defects that go out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from structlog import get_logger
from structlog.testing import capture_logs

from penstock.rpc.stay import Connection, Pauses, Unsuitable, stay

UNAVAILABLE, REFUSED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION


class Peer:
    """Answers each attempt as planned: a status code, "established" (then lost), or an exception."""

    def __init__(self, plan: Sequence[object]) -> None:
        self.plan = list(plan)
        self.pauses: list[float] = []

    async def __call__(self, connection: Connection) -> None:
        step = self.plan.pop(0)
        if isinstance(step, Exception):
            raise step
        if step == "established":
            connection.established = True
            return
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(step, metadata, metadata, f"as planned: {step}")  # type: ignore[arg-type]


class Over(Exception):
    """The plan has been carried out."""


async def run(plan: Sequence[object], monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[str]]:
    """The pauses and the logged events until the plan is over."""
    pauses: list[float] = []
    slept, own = asyncio.sleep, asyncio.current_task()

    async def sleep(seconds: float) -> None:
        if asyncio.current_task() is not own:  # services of other tests are on this loop, too
            return await slept(seconds)
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    with capture_logs() as lines, pytest.raises(Over):
        await stay(Peer([*plan, Over()]), peer="the peer", log=get_logger(), pauses=Pauses(0.1, 0.5, 3.0))
    return pauses, [line["event"] for line in lines]


async def test_pauses_double_up_to_the_longest_and_a_reason_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, events = await run([UNAVAILABLE] * 5, monkeypatch)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    assert events == ["not connected"]


async def test_a_connection_that_was_established_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, events = await run([UNAVAILABLE, UNAVAILABLE, "established", UNAVAILABLE], monkeypatch)
    assert pauses == pytest.approx([0.1, 0.2, 0.1, 0.2])
    assert events == ["not connected", "connection lost", "not connected"]


async def test_a_refusal_is_an_error_and_has_its_own_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, events = await run([REFUSED, REFUSED, UNAVAILABLE], monkeypatch)
    assert pauses == pytest.approx([3.0, 3.0, 0.4])
    assert events == ["connection refused", "not connected"]


async def test_a_peer_that_can_not_be_used_is_an_error_with_the_pause_of_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses, events = await run([Unsuitable("another model"), Unsuitable("another model"), "established"], monkeypatch)
    assert pauses == pytest.approx([3.0, 3.0, 0.1])
    assert events == ["connection refused", "connection lost"]


async def test_no_answer_in_time_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await run([TimeoutError(), TimeoutError()], monkeypatch) == ([0.1, 0.2], ["not connected"])


async def test_a_defect_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        await stay(Peer([ZeroDivisionError()]), peer="p", log=get_logger())
