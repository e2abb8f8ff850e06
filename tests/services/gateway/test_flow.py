"""One choice's way through the mesh, without a mesh: plans and reports are plain values that the test says."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from tests.services.gateway.fakes import one_pass

from penstock import gateway
from penstock.errors import InvalidRequest, Overloaded, Unavailable
from penstock.gateway.completing import flow
from penstock.gateway.completing.account import ChoiceAccount
from penstock.gateway.completing.attempt import Attempt
from penstock.gateway.completing.flow import Flow
from penstock.gateway.completing.prompts import with_output
from penstock.gateway.request.ask import Sampling
from penstock.gateway.request.work import (
    Assignment,
    ChoiceRequest,
    Finish,
    Gain,
    Lost,
    Placement,
    Promised,
    PromptUse,
    Reason,
    Receiver,
    Report,
    SampledToken,
)
from penstock.kv.hint import ReturnHint
from penstock.kv.identity import block_keys
from penstock.runtime.drafts import DraftAccount

PROMPT = range(20)
REQUEST = ChoiceRequest(
    id="r.0",
    model="tiny",
    tenant="default",
    namespace=b"",
    session="",
    prompt_ids=PROMPT,
    root=b"",
    keys=(),
    sampling=Sampling(),
    max_tokens=100,
    seed=1,
)
DECODE, PREFILL = Placement("decode-0", "d:1"), Placement("prefill-0", "p:1")
BOTH, ALONE = Assignment(DECODE, PREFILL), Assignment(DECODE)
GONE = Unavailable("gone")

SINGLY = False
"""Whether tokens with nothing else to report come one by one, as from a listener."""

Step = Report | Exception | asyncio.Event
Script = Callable[[Assignment, Sequence[int]], Sequence[Step]]


def tokens(*indices: int) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(index, 100 + index) for index in indices)


def use(computed: int = len(PROMPT), **cached: int) -> PromptUse:
    return PromptUse(computed, cached)


def decoded(*indices: int, finish: Finish | None = None, **more: object) -> Gain:
    return Gain(stage="decode", tokens=tokens(*indices), finish=finish, **more)  # type: ignore[arg-type]


def prefilled(index: int = 0, finish: Finish | None = None) -> Gain:
    return Gain(stage="prefill", tokens=tokens(index), finish=finish, use=use(len(PROMPT) + index))


def decode_lost(silent: bool = False, error: Exception = GONE) -> Lost:
    return Lost("decode", "decode-0", error, silent)  # type: ignore[arg-type]


def prefill_lost(silent: bool = False) -> Lost:
    return Lost("prefill", "prefill-0", GONE, silent)


@pytest.fixture(autouse=True, params=[False, True], ids=["reports", "tokens"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is one of both ways of tokens."""
    monkeypatch.setattr(sys.modules[__name__], "SINGLY", request.param)


@dataclass
class Plans:
    """Answers in turn; the last again and again."""

    answers: list[Assignment | Exception]
    asked: list[tuple[int, list[str]]] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    requests: list[ChoiceRequest] = field(default_factory=list)
    gone = False

    async def ask(self, request: ChoiceRequest, generated: int, avoid: Mapping[str, Reason]) -> Assignment:
        self.asked.append((generated, list(avoid)))
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def progress(self, generated: int) -> None:
        self.told.append(generated)

    async def farewell(self, generated: int, hint: ReturnHint, *, waits_for_tool: bool) -> None: ...

    def close(self) -> None: ...


@dataclass
class Workers:
    """Play one script per call; an event is waited for, an exception raised."""

    decodes: list[Script]
    prefills: list[Script] = field(default_factory=list)
    closed: int = 0

    def prefill(
        self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int], hear: Receiver
    ) -> Coroutine[None, None, None]:
        return self._play(self.prefills.pop(0)(chosen, output), hear)

    def decode(
        self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int], hear: Receiver
    ) -> Coroutine[None, None, None]:
        return self._play(self.decodes.pop(0)(chosen, output), hear)

    async def _play(self, steps: Sequence[Step], hear: Receiver) -> None:
        try:
            for step in steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    self.say(step, hear)
                    await asyncio.sleep(0)
        finally:
            self.closed += 1

    def say(self, report: Report, hear: Receiver) -> None:
        if SINGLY and isinstance(report, Gain) and report == Gain(stage="decode", tokens=report.tokens):
            for token in report.tokens:
                hear.token(token.index, token.id)
        else:
            hear.report(report)


def says(*steps: Step) -> Script:
    return lambda chosen, output: steps


class Bench:
    """A flow between scripts."""

    def __init__(self, plans: Plans, workers: Workers, *, failover_s: float = 5.0, stop_at: int | None = None) -> None:
        self.plans, self.workers = plans, workers
        self.accepted: list[int] = []
        self.stop_at = stop_at
        self.waits = 0
        self.pauses: list[float] = []
        self.flow = Flow(
            REQUEST,
            plans,
            workers,
            self.accept,
            hopeful=self.hopeful,
            failover_s=failover_s,
            grown=partial(with_output, 16),
        )

    def accept(self, token: SampledToken) -> bool:
        self.accepted.append(token.index)
        assert token.id == 100 + token.index
        return token.index == self.stop_at

    async def hopeful(self, pause_s: float) -> None:
        self.waits += 1
        self.pauses.append(pause_s)
        await asyncio.sleep(0)


async def test_the_first_token_is_prefills_and_the_rest_decodes() -> None:
    first = asyncio.Event()
    bench = Bench(
        Plans([BOTH]),
        Workers(
            [says(first, decoded(1, 2), decoded(3, finish="length", drafts=one_pass(4, 2)))], [says(prefilled(), first)]
        ),
    )
    asyncio.get_running_loop().call_later(0.01, first.set)
    assert await bench.flow.run() == "length"
    assert bench.accepted == [0, 1, 2, 3]
    assert bench.plans.told == [1]
    account = bench.flow.account
    assert (account.use, account.defects, account.drafts) == (use(), 0, one_pass(4, 2))
    assert bench.workers.closed == 2


async def test_the_router_hears_how_long_the_answer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then, and only when it has become longer."""
    monkeypatch.setattr(flow, "_FIRST_REPORT_S", 1e-6)
    monkeypatch.setattr(flow, "_LONGEST_REPORT_S", 1e-6)
    more = [asyncio.Event() for _ in range(2)]
    steps = decoded(0, use=use()), decoded(1), more[0], decoded(2), more[1], decoded(3, finish="length")
    bench = Bench(Plans([ALONE]), Workers([says(*steps)]))
    running = asyncio.create_task(bench.flow.run())
    for length, event in zip((2, 3), more, strict=True):
        async with asyncio.timeout(5):
            while length not in bench.plans.told:
                await asyncio.sleep(0)
        event.set()
    assert await running == "length"
    assert bench.plans.told == sorted(set(bench.plans.told))


async def test_nothing_is_taken_after_the_end_and_nothing_twice() -> None:
    again = [decoded(0, use=use()), decoded(1), decoded(0, 1, 2), decoded(2), decoded(3, 4), decoded(5)]
    bench = Bench(Plans([ALONE]), Workers([says(*again, asyncio.Event())]), stop_at=4)
    assert await bench.flow.run() == "stop"
    assert bench.accepted == [0, 1, 2, 3, 4]


async def test_a_reader_that_raises_fails_its_own_choice() -> None:
    class Faulty(Bench):
        def accept(self, token: SampledToken) -> bool:
            if token.index == 1:
                raise ZeroDivisionError
            return super().accept(token)

    bench = Faulty(Plans([ALONE]), Workers([says(decoded(0, use=use()), decoded(1), asyncio.Event())]))
    with pytest.raises(ZeroDivisionError):
        await bench.flow.run()
    assert bench.workers.closed == 1


async def test_tokens_wait_for_those_before_them() -> None:
    late = asyncio.Event()
    bench = Bench(
        Plans([BOTH]), Workers([says(decoded(2, 1), decoded(3, finish="stop"), late)], [says(late, prefilled())])
    )
    running = asyncio.ensure_future(bench.flow.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.accepted == []
    late.set()
    assert await running == "stop"
    assert bench.accepted == [0, 1, 2, 3]


async def test_the_choice_ends_where_its_reader_says() -> None:
    bench = Bench(Plans([ALONE]), Workers([says(decoded(0, 1, 2, use=use()), asyncio.Event())]), stop_at=1)
    assert await bench.flow.run() == "stop"
    assert bench.accepted == [0, 1]
    assert bench.workers.closed == 1


async def test_without_prefill_decode_computes_by_itself() -> None:
    bench = Bench(
        Plans([BOTH]),
        Workers([says(decoded(0, use=use(12, host=8)), decoded(1, finish="stop"))], [says(prefill_lost())]),
    )
    assert await bench.flow.run() == "stop"
    assert len(bench.plans.asked) == 1
    assert bench.flow.account.use == use(12, host=8)


async def test_a_token_that_prefill_took_with_it_is_made_again() -> None:
    bench = Bench(
        Plans([BOTH]),
        Workers(
            [says(decoded(1), asyncio.Event()), says(decoded(1, 2, finish="stop"), asyncio.Event())],
            [says(prefill_lost()), says(prefilled())],
        ),
    )
    assert await bench.flow.run() == "stop"
    assert bench.accepted == [0, 1, 2]
    assert bench.plans.asked == [(0, []), (0, ["prefill-0"])]


async def test_a_silent_prefill_worker_ends_the_wait_for_its_handoff() -> None:
    bench = Bench(
        Plans([BOTH, ALONE]),
        Workers([says(asyncio.Event()), says(decoded(0, finish="stop", use=use()))], [says(prefill_lost(silent=True))]),
    )
    assert await bench.flow.run() == "stop"
    assert bench.plans.asked == [(0, []), (0, ["prefill-0"])]


async def test_another_worker_goes_on_where_the_first_was_lost() -> None:
    def rest(chosen: Assignment, output: Sequence[int]) -> Sequence[Step]:
        assert output == (100, 101)
        return [decoded(2, use=use(5, host=17), drafts=one_pass(1, 1)), decoded(3, finish="stop")]

    bench = Bench(
        Plans([ALONE]),
        Workers([says(decoded(0, 1, use=use(), drafts=one_pass(2, 1)), decode_lost()), rest]),
    )
    assert await bench.flow.run() == "stop"
    assert bench.accepted == [0, 1, 2, 3]
    assert bench.plans.asked == [(0, []), (2, ["decode-0"])]
    account = bench.flow.account
    assert (account.replans, bench.waits) == (1, 0)
    both = DraftAccount(2, [0, 0, 3, 0], [0, 0, 2, 0], [2, 1], [2, 0])
    assert account.drafts == both, "of both workers"
    assert (account.use, account.defects) == (use(), 0), "the prompt is charged once, and the second report adds up too"


async def test_a_router_hears_of_the_blocks_of_an_answer_that_goes_on() -> None:
    """Who has them need not compute them: not only those of the prompt."""
    told = range(14)
    bench = Bench(
        Plans([ALONE]),
        Workers([says(decoded(*told, use=use()), decode_lost()), says(decoded(len(told), finish="stop"))]),
    )
    await bench.flow.run()
    first, second = bench.plans.requests
    assert not first.keys and not first.interrupted
    tokens = [*PROMPT, *(100 + index for index in told)]
    assert second.keys == block_keys(REQUEST.root, tokens, 16) and len(second.keys) == 2
    assert second.interrupted and second.prompt_ids == PROMPT


async def test_the_only_worker_may_take_its_time_to_come_back() -> None:
    bench = Bench(
        Plans([ALONE, ALONE, GONE, GONE, Overloaded("full"), ALONE]),
        Workers(
            [says(decoded(0, use=use()), decode_lost()), says(decode_lost()), says(decoded(1, finish="stop"))],
        ),
    )
    assert await bench.flow.run() == "stop"
    assert bench.waits == 4, "after the second loss, and for each plan that could not be had"
    assert bench.accepted == [0, 1]


async def test_no_router_at_first_is_waited_for() -> None:
    bench = Bench(Plans([GONE, GONE, ALONE]), Workers([says(decoded(0, finish="stop", use=use()))]))
    assert await bench.flow.run() == "stop"
    assert (bench.waits, bench.flow.account.replans) == (2, 0)


async def test_each_wait_asks_for_twice_the_pause_of_the_one_before_up_to_a_second() -> None:
    plans = Plans([*[GONE] * 7, ALONE, GONE, ALONE])
    bench = Bench(plans, Workers([says(decoded(0, use=use()), decode_lost()), says(decoded(1, finish="stop"))]))
    assert await bench.flow.run() == "stop"
    assert bench.pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.05]), "short again after a token"


async def test_what_became_of_each_attempt_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many; one that comes after them takes nobody's place."""
    monkeypatch.setattr(flow, "_MOST_NOTED", 2)
    lost = [decode_lost(error=Unavailable(str(number))) for number in range(3)]
    bench = Bench(Plans([ALONE]), Workers([*(says(one) for one in lost), says(decoded(0, finish="stop", use=use()))]))
    assert await bench.flow.run() == "stop"
    assert [one.lost for one in bench.flow.account.attempts] == lost[:2]
    assert bench.flow.account.replans == 3
    fine = Bench(Plans([ALONE]), Workers([says(lost[0]), says(decoded(0, finish="stop", use=use()))]))
    await fine.flow.run()
    assert [one.lost for one in fine.flow.account.attempts] == [lost[0], None]


async def test_waiting_ends() -> None:
    bench = Bench(Plans([GONE]), Workers([]), failover_s=0.05)
    with pytest.raises(Unavailable, match="gone"):
        await bench.flow.run()
    assert bench.waits > 1


async def test_without_fail_over_the_first_fault_is_the_last() -> None:
    lost = Bench(Plans([ALONE]), Workers([says(decode_lost()), says(decode_lost())]), failover_s=0)
    with pytest.raises(Unavailable):
        await lost.flow.run()


async def test_prefill_alone_does_not_go_on_for_ever() -> None:
    """Every attempt gives one token of prefill's and no more: the mesh has no decode worker that works."""

    class Endless(Workers):
        def prefill(
            self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int], hear: Receiver
        ) -> Coroutine[None, None, None]:
            return self._play([prefilled(len(output))], hear)

        def decode(
            self, request: ChoiceRequest, chosen: Assignment, output: Sequence[int], hear: Receiver
        ) -> Coroutine[None, None, None]:
            return self._play([decode_lost()], hear)

    bench = Bench(Plans([BOTH]), Endless([]), failover_s=0.05)
    with pytest.raises(Unavailable):
        await bench.flow.run()


async def test_a_refusal_for_overload_is_immediate() -> None:
    bench = Bench(Plans([Overloaded("full")]), Workers([]))
    with pytest.raises(Overloaded):
        await bench.flow.run()
    assert bench.waits == 0


async def test_a_full_worker_is_left_for_another_and_not_for_itself() -> None:
    full = decode_lost(error=Overloaded("full"))
    bench = Bench(Plans([ALONE]), Workers([says(full)]))
    with pytest.raises(Overloaded):
        await bench.flow.run()
    other = Assignment(Placement("decode-1", "d:2"))
    bench = Bench(Plans([ALONE, other]), Workers([says(full), says(decoded(0, finish="stop", use=use()))]))
    assert await bench.flow.run() == "stop"


async def test_a_refused_request_is_not_moved() -> None:
    bench = Bench(Plans([BOTH]), Workers([says(asyncio.Event())], [says(InvalidRequest("no", field="prompt"))]))
    with pytest.raises(InvalidRequest):
        await bench.flow.run()
    assert (len(bench.plans.asked), bench.workers.closed) == (1, 2)


async def test_cancelling_ends_every_call() -> None:
    bench = Bench(Plans([BOTH]), Workers([says(asyncio.Event())], [says(asyncio.Event())]))
    running = asyncio.ensure_future(bench.flow.run())
    for _ in range(5):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.workers.closed == 2


@pytest.mark.parametrize("wrong", [use(19), use(21), use(20, host=16), use(0)])
async def test_a_report_that_does_not_add_up_is_counted_and_kept_as_it_is(wrong: PromptUse) -> None:
    bench = Bench(Plans([ALONE]), Workers([says(decoded(0, finish="stop", use=wrong))]))
    await bench.flow.run()
    assert (bench.flow.account.use, bench.flow.account.defects) == (wrong, 1)


async def test_a_failed_handoff_charges_the_prompt_once() -> None:
    first = asyncio.Event()
    bench = Bench(
        Plans([BOTH]),
        Workers([says(first, decoded(0, 1, finish="stop", use=use(4, host=16)))], [says(prefilled(), first)]),
    )
    asyncio.get_running_loop().call_later(0.01, first.set)
    assert await bench.flow.run() == "stop"
    assert (bench.flow.account.use, bench.flow.account.defects) == (use(), 0)
    assert bench.accepted == [0, 1]


async def test_a_worker_that_reports_its_count_again_is_counted_once() -> None:
    first = asyncio.Event()
    reports = decoded(1, use=use(5, host=16)), decoded(2, use=use(5, host=16)), decoded(3, finish="stop")
    bench = Bench(Plans([BOTH]), Workers([says(first, *reports)], [says(prefilled(), first)]))
    asyncio.get_running_loop().call_later(0.01, first.set)
    assert await bench.flow.run() == "stop"
    assert bench.flow.account.again == {"host": 16, "computed": 5}


async def test_the_last_report_of_drafts_is_of_all_of_a_worker() -> None:
    reports = decoded(0, use=use(), drafts=one_pass(2, 1)), decoded(1, finish="stop", drafts=one_pass(4, 2))
    bench = Bench(Plans([ALONE]), Workers([says(*reports)]))
    await bench.flow.run()
    assert bench.flow.account.drafts == one_pass(4, 2)


async def test_the_error_of_a_choice_that_was_cancelled_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """Python would log an error that nobody has asked for."""
    attempt = Attempt(REQUEST, ALONE, [], ChoiceAccount(), lambda token: False)
    attempt.over(ZeroDivisionError())
    del attempt
    gc.collect()
    assert caplog.records == []


async def test_the_promise_that_speaks_of_more_blocks_counts() -> None:
    few, many = Promised(2, 60.0), Promised(5, 60.0)
    reports = [decoded(0, use=use(), promised=many), decoded(1, finish="stop", promised=few)]
    bench = Bench(Plans([ALONE]), Workers([says(*reports)]))
    await bench.flow.run()
    assert bench.flow.account.promised == many


async def test_what_decode_sent_before_it_was_lost_is_kept() -> None:
    """Its tokens overtook prefill's, which is on its way."""
    late = asyncio.Event()

    def rest(chosen: Assignment, output: Sequence[int]) -> Sequence[Step]:
        assert output == (100, 101, 102)
        return [decoded(3, finish="stop", use=use(3, host=20))]

    bench = Bench(Plans([BOTH, ALONE]), Workers([says(decoded(1, 2), decode_lost()), rest], [says(late, prefilled())]))
    asyncio.get_running_loop().call_later(0.01, late.set)
    assert await bench.flow.run() == "stop"
    assert bench.accepted == [0, 1, 2, 3]


async def test_an_answer_that_is_recalled_goes_on_behind_it() -> None:
    def rest(chosen: Assignment, output: Sequence[int]) -> Sequence[Step]:
        assert output == (100, 101, 102)
        return [decoded(3, finish="stop", use=use(3, host=20))]

    bench = Bench(Plans([ALONE]), Workers([rest]))
    bench.flow.recall([100, 101, 102], interrupted=True)
    assert await bench.flow.run() == "stop"
    assert bench.accepted == [3] and bench.plans.asked == [(3, [])]
    assert (bench.flow.account.recalled, bench.flow.account.defects) == (3, 0)


async def test_an_answer_that_is_recalled_waits_where_mesh_and_router_are_full() -> None:
    """Its client has a part of it already, and is not refused the rest."""
    full = Overloaded("full")
    bench = Bench(Plans([full, full, ALONE]), Workers([says(decoded(3, finish="stop", use=use(3)))]))
    bench.flow.recall([100, 101, 102], interrupted=True)
    assert await bench.flow.run() == "stop"
    assert bench.accepted == [3] and len(bench.plans.asked) == 3
    for recalled in ([], [100, 101, 102]):
        bench = Bench(Plans([full]), Workers([]))
        bench.flow.recall(recalled, interrupted=False)
        with pytest.raises(Overloaded):
            await bench.flow.run()
        assert len(bench.plans.asked) == 1, "its client had left it"


class Deaf(Plans):
    """Its router has gone, and no other answers."""

    gone = True

    async def progress(self, generated: int) -> None:
        await super().progress(generated)
        await asyncio.get_running_loop().create_future()


async def test_a_router_that_is_away_holds_up_no_end() -> None:
    bench = Bench(Deaf([ALONE]), Workers([says(decoded(0, use=use()), decoded(1), decoded(2, finish="stop"))]))
    async with asyncio.timeout(5):
        assert await bench.flow.run() == "stop"
    assert bench.accepted == [0, 1, 2] and bench.plans.told == [1]


def test_the_flow_knows_neither_messages_nor_grpc() -> None:
    code = (
        "import sys, penstock.gateway.completing.flow\n"
        "assert not {'grpc', 'google.protobuf', 'penstock.v1'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("floor", ["request", "completing", "accounts", "api"])
def test_the_floors_around_it_speak_no_messages(floor: str) -> None:
    texts = [path.read_text() for path in Path(gateway.__path__[0], floor).rglob("*.py")]
    assert texts
    assert not [text for text in texts if "penstock.v1" in text or "import grpc" in text]
