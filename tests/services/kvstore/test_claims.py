"""Blocks that clients compute: who claims them, who waits for them, and how every wait ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.services.kvstore.helpers import client_of, eventually, keys, puts, raw, refusal, settings
from tests.services.kvstore.two import contents, two

from penstock.kv.client.claiming import Claimed
from penstock.kv.client.client import StoreClient, StoreFault
from penstock.kv.identity import MAX_KEYS
from penstock.kv.pace import HARDLY, LONGEST_WAIT_S, Pace
from penstock.kvstore.service import KvStore, open_kvstore
from penstock.kvstore.table.claims import Claims
from penstock.v1 import kvstore_pb2

PATIENT = Pace(queue_s=1e6, block_s=1.0)
"""Of a client that would need so long itself that it waits for everybody."""
FAST = Pace(queue_s=0.0, block_s=1e-6)
MOST = 12


@dataclass
class NaiveClaim:
    owner: str
    number: int
    keys: list[bytes]
    pace: Pace
    made: float
    stored: set[bytes]

    @property
    def left(self) -> list[bytes]:
        return [key for key in self.keys if key not in self.stored]


class ClaimMachine(RuleBasedStateMachine):
    """Beside a list of claims in which everything is looked for again each time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 50.0
        self.claims = Claims(MOST)
        self.naive: list[NaiveClaim] = []
        self.told: list[str] = []
        self.expected: list[str] = []
        self.waits: list[tuple[NaiveClaim, bytes, str]] = []

    def _tidy(self) -> None:
        """What is over leaves, and those who wait for it hear of it."""
        for claim in [one for one in self.naive if not one.left]:
            self._over(claim)

    def _over(self, claim: NaiveClaim) -> None:
        self.naive.remove(claim)
        self.expected += [name for one, _, name in self.waits if one is claim]
        self.waits = [wait for wait in self.waits if wait[0] is not claim]

    @rule(
        owner=st.sampled_from("pq"),
        number=st.integers(1, 4),
        chain=st.sampled_from("ab"),
        start=st.integers(0, 3),
        count=st.integers(1, 5),
        step=st.integers(1, 3),
        behind=st.sets(st.integers(1, 4)),
    )
    def make(self, owner: str, number: int, chain: str, start: int, count: int, step: int, behind: set[int]) -> None:
        self._passes(0.0)
        pace = Pace(queue_s=0.5 * number, block_s=0.3, growth_s=0.1, step_blocks=step)
        names = keys(8, chain)[start : start + count]
        stored = {name for at, name in enumerate(names) if at in behind}
        for claim in [one for one in self.naive if (one.owner, one.number) == (owner, number)]:
            self._over(claim)
        self.naive.append(NaiveClaim(owner, number, names, pace, self.now, set(stored)))
        mine = [one for one in self.naive if one.owner == owner]
        while sum(len(one.left) for one in mine) > MOST:
            self._over(mine.pop(0))
        self.claims.make(owner, number, names, pace, now=self.now, stored=stored)

    @rule(chain=st.sampled_from("ab"), at=st.integers(0, 7))
    def store(self, chain: str, at: int) -> None:
        key = keys(8, chain)[at]
        self.expected += [name for _, wanted, name in self.waits if wanted == key]
        self.waits = [wait for wait in self.waits if wait[1] != key]
        for claim in self.naive:
            claim.stored.add(key)
        self._tidy()
        block: Any = SimpleNamespace(key=key)
        self.claims.block_stored(block)

    @rule(owner=st.sampled_from("pq"), number=st.integers(1, 4))
    def withdraw(self, owner: str, number: int) -> None:
        for claim in [one for one in self.naive if (one.owner, one.number) == (owner, number)]:
            self._over(claim)
        self.claims.withdraw(owner, number)

    @rule(owner=st.sampled_from("pq"))
    def leave(self, owner: str) -> None:
        for claim in [one for one in self.naive if one.owner == owner]:
            self._over(claim)
        self.claims.leave(owner)

    @rule(seconds=st.floats(0, 5))
    def passes(self, seconds: float) -> None:
        self._passes(seconds)

    def _passes(self, seconds: float) -> None:
        self.now += seconds
        for claim in list(self.naive):
            if claim.made + 2 * claim.pace.seconds(len(claim.keys)) + 1 <= self.now:
                self._over(claim)
        self.claims.expire(self.now)

    @rule(
        owner=st.sampled_from("pqr"),
        chain=st.sampled_from("ab"),
        start=st.integers(0, 7),
        patience=st.floats(0, 6),
        block_s=st.floats(0, 1),
    )
    def ask(self, owner: str, chain: str, start: int, patience: float, block_s: float) -> None:
        self._passes(0.0)
        names = keys(8, chain)[start:]

        def until(count: int) -> float:
            return self.now + patience + count * block_s

        best: tuple[int, float] | None = None
        for claim in self.naive:
            count = next((at for at, key in enumerate(names) if key not in claim.left), len(names))
            if claim.owner == owner or not count:
                continue
            place = claim.keys.index(names[count - 1]) + 1
            steps = -(-place // claim.pace.step_blocks)
            blocks = min(len(claim.keys), steps * claim.pace.step_blocks)
            seconds = sum(claim.pace.block_s + at * claim.pace.growth_s for at in range(blocks))
            at = claim.made + claim.pace.queue_s + seconds
            at = max(at, self.now + (self.now - at))
            if at <= until(count) + 1e-9 and (best is None or (count, -at) > (best[0], -best[1] + 1e-9)):
                best = count, at
        try:
            claim_found, count = self.claims.best(owner, names, until, self.now)
        except LookupError:
            assert best is None or best[1] > until(best[0]) - 1e-6
            return
        assert best is not None and count == best[0]
        [naive] = [one for one in self.naive if (one.owner, one.number) == (claim_found.owner, claim_found.number)]
        name = f"wait {len(self.told) + len(self.waits)} at {self.now}"
        self.waits.append((naive, names[count - 1], name))
        claim_found.wait(names[count - 1], lambda: self.told.append(name))

    @invariant()
    def same(self) -> None:
        assert len(self.claims) == len(self.naive)
        assert self.claims.blocks == len({key for claim in self.naive for key in claim.left})
        assert self.claims.waiting == len(self.waits)
        assert sorted(self.told) == sorted(self.expected), "each wait ends once, when it should"


TestClaims = ClaimMachine.TestCase
TestClaims.settings = hypothesis_settings(max_examples=80, stateful_step_count=40)


def test_those_who_wait_hear_of_the_end_in_the_order_in_which_they_came() -> None:
    claims, heard = Claims(), []
    claim = claims.make("p", 1, keys(4), FAST, now=0.0)
    for at in (3, 0, 2, 0):
        claim.wait(keys(4)[at], lambda at=at: heard.append(at))
    claims.leave("p")
    assert heard == [3, 0, 2, 0]


def test_blocks_that_are_expected_just_in_time_are_waited_for() -> None:
    claims, wanted = Claims(), keys(2)
    claim = claims.make("p", 1, wanted, Pace(queue_s=1.0, block_s=1.0), now=0.0)
    at = claim.expected(wanted[1], 0.0)
    assert claims.best("q", wanted, lambda count: at, 0.0) == (claim, 2)
    with pytest.raises(LookupError):
        claims.best("q", wanted, lambda count: at - 1e-6, 0.0)


def test_ones_own_claims_and_late_ones_hide_no_others() -> None:
    claims, wanted, late = Claims(), keys(2), Pace(queue_s=50.0, block_s=1.0)
    claims.make("q", 1, wanted, FAST, now=0.0)
    claims.make("p", 1, wanted, late, now=0.0)
    other = claims.make("p", 2, wanted[:1], FAST, now=0.0)
    assert claims.best("q", wanted, lambda count: 10.0, 0.0) == (other, 1)


def test_nothing_is_left_of_those_whose_claims_are_over() -> None:
    claims = Claims()
    for number in range(5):
        claims.make(f"client {number}", 1, keys(2), FAST, now=0.0)
        claims.withdraw(f"client {number}", 1)
    assert not claims._of and not claims._by_key


def test_a_pace_counts_every_block_and_whole_steps() -> None:
    pace = Pace(queue_s=2.0, block_s=1.0, growth_s=0.5, step_blocks=4)
    for blocks in range(1, 12):
        assert pace.seconds(blocks) == pytest.approx(2.0 + sum(1.0 + 0.5 * at for at in range(blocks)))
        assert pace.patience_s(blocks) == pytest.approx(min(LONGEST_WAIT_S, HARDLY * pace.seconds(blocks)))
        assert pace.ready_s(blocks, 10) == pace.seconds(min(10, (blocks + 3) // 4 * 4))
        rest = pace.later(0.5, blocks)
        assert pace.seconds(blocks) - 2.0 + rest.seconds(3) - rest.queue_s == pytest.approx(
            pace.seconds(blocks + 3) - 2.0
        )
    assert pace.later(9.0, 0).queue_s == 0.0


@asynccontextmanager
async def opened(clients: int, **other: Any) -> AsyncIterator[tuple[KvStore, list[StoreClient]]]:
    """A store and its clients, who give up no call because this machine is slow."""
    async with open_kvstore(settings(64, **other)) as store:
        entered = [client_of(store.address, timeout_s=30.0) for _ in range(clients)]
        opened = [await one.__aenter__() for one in entered]
        try:
            yield store, opened
        finally:
            for one in entered:
                await one.__aexit__(None, None, None)


async def waiting(store: KvStore, client: StoreClient, names: list[bytes], pace: Pace = PATIENT) -> Any:
    """A claim that waits by now; the task gives the answer."""
    before = store.store.claims.waiting
    task = asyncio.create_task(client.claim(client.next_claim(), names, pace))
    await eventually(lambda: task.done() or store.store.claims.waiting == before + 1)
    assert not task.done(), task.result()
    return task


async def test_who_comes_first_claims_and_others_wait_until_the_blocks_are_stored() -> None:
    async with opened(2) as (store, (owner, other)):
        assert await owner.claim(owner.next_claim(), keys(6), FAST) == Claimed(0, "none")
        task = await waiting(store, other, [*keys(4), *keys(2, "own")])
        await owner.put(puts(6)[:3])
        assert store.store.claims.waiting == 1, "the fourth is missing"
        await owner.put(puts(6))
        assert await task == Claimed(4, "stored")
        assert store.store.claims.blocks == 2, "its own two, for others to wait for"


async def test_a_client_does_not_wait_for_itself() -> None:
    async with opened(1) as (_, (client,)):
        assert await client.claim(client.next_claim(), keys(4), FAST) == Claimed(0, "none")
        assert await client.claim(client.next_claim(), keys(4), PATIENT) == Claimed(0, "none")


async def test_what_is_stored_is_neither_claimed_nor_waited_for() -> None:
    async with opened(2) as (store, (owner, other)):
        await owner.put(puts(3))
        assert await owner.claim(owner.next_claim(), keys(3), FAST) == Claimed(3, "none")
        assert await other.claim(other.next_claim(), keys(5), PATIENT) == Claimed(3, "none")
        assert store.store.claims.blocks == 2


async def test_what_is_stored_behind_a_gap_is_neither_claimed_nor_waited_for() -> None:
    """Its owner computes it again, and would never store it: who waited for that would wait for ever."""
    async with opened(2) as (store, (owner, other)):
        await owner.put([*puts(6)[:2], *puts(6)[3:5]])
        assert await owner.claim(owner.next_claim(), keys(5), FAST) == Claimed(2, "none")
        assert store.store.claims.blocks == 1
        task = await waiting(store, other, keys(5))
        await owner.put(puts(5))
        assert await task == Claimed(5, "stored")
        assert len(store.store.claims) == 0


def test_what_is_stored_behind_a_gap_takes_its_time_all_the_same() -> None:
    """It is computed like the others: what follows it comes no sooner."""
    claims, names, pace = Claims(), keys(4), Pace(queue_s=0.0, block_s=1.0)
    claim = claims.make("p", 1, names, pace, now=0.0, stored=set(names[1:3]))
    assert (claims.blocks, claim.expected(names[3], 0.0)) == (2, 4.0)


@pytest.mark.parametrize("how", ["withdrawn", "dead", "failed"])
async def test_the_first_who_waits_takes_over_at_once_and_the_next_waits_for_it(how: str) -> None:
    """No clock ends these waits: their patience is longer than the test's."""
    async with opened(2) as (store, (first, second)), raw(store.address) as owner:
        attachment, names = await owner.attach(), keys(5)
        pace = kvstore_pb2.Pace(block_s=1e-6)
        claim = kvstore_pb2.ClaimRequest(attachment_id=attachment, number=7, keys=names, pace=pace)
        await owner.stub.Claim(claim)
        same = Pace(queue_s=0.0, block_s=8.0)
        tasks = [await waiting(store, first, names, same), await waiting(store, second, names, same)]
        if how == "dead":
            owner.calls[0].cancel()
        elif how == "withdrawn":
            await owner.stub.Withdraw(kvstore_pb2.WithdrawRequest(attachment_id=attachment, numbers=[1, 7]))
        else:
            claim.ClearField("keys")
            await owner.stub.Claim(claim)
        async with asyncio.timeout(same.patience_s(5) / 2):
            assert await tasks[0] == Claimed(0, "left")
            assert not tasks[1].done()
            await first.put(puts(5))
            assert await tasks[1] == Claimed(5, "stored")
        await eventually(lambda: store.store.claims.blocks == 0)


async def test_a_slow_owner_costs_no_more_than_computing() -> None:
    """It is expected at once, and never comes. The one who waits gets what has come by then, and claims the rest."""
    async with opened(2) as (store, (owner, other)):
        await owner.claim(owner.next_claim(), keys(6), FAST)
        task = await waiting(store, other, keys(6), Pace(queue_s=0.0, block_s=0.2))
        begin = store.store.now()
        await owner.put(puts(2))
        assert await task == Claimed(2, "late")
        assert store.store.now() - begin >= 0.5, "it has waited for long"
        assert store.store.claims.blocks == 4
        third = await waiting(store, owner, keys(6))
        await other.put(puts(6))
        assert (await third).wait == "stored", "whoever comes now waits for the second"


async def test_nobody_waits_for_one_who_is_slower() -> None:
    async with opened(2) as (_, (owner, other)):
        await owner.claim(owner.next_claim(), keys(6), Pace(queue_s=10.0, block_s=0.1))
        assert await other.claim(other.next_claim(), keys(6), Pace(queue_s=0.0, block_s=0.1)) == Claimed(0, "none")


async def test_who_computes_at_the_same_time_is_waited_for() -> None:
    """As fast as the one who asks, and asked a moment before: it will hardly be later."""
    async with opened(2) as (store, (owner, other)):
        await owner.claim(owner.next_claim(), keys(6), Pace(queue_s=0.0, block_s=5.0))
        task = await waiting(store, other, keys(6), Pace(queue_s=0.0, block_s=5.0))
        await owner.put(puts(6))
        assert await task == Claimed(6, "stored")


async def test_a_wait_that_is_cancelled_leaves_nothing() -> None:
    async with opened(2) as (store, (owner, other)):
        await owner.claim(owner.next_claim(), keys(6), FAST)
        task = await waiting(store, other, keys(6))
        task.cancel()
        await eventually(lambda: store.store.claims.waiting == 0)
        await owner.put(puts(6))
        await eventually(lambda: len(store.store.claims) == 0)


async def test_a_client_that_dies_while_it_waits_claims_nothing() -> None:
    async with opened(1) as (store, (owner,)), raw(store.address) as other:
        number = owner.next_claim()
        await owner.claim(number, keys(6), FAST)
        request = kvstore_pb2.ClaimRequest(
            attachment_id=await other.attach(), keys=keys(6), pace=kvstore_pb2.Pace(queue_s=1e6)
        )
        call = other.stub.Claim(request)
        await eventually(lambda: store.store.claims.waiting == 1)
        other.calls[0].cancel()
        await eventually(lambda: store.stats().attachments == 1)
        owner.withdraw(number)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert refusal(caught.value)[0] == "NOT_FOUND"
        assert len(store.store.claims) == 0


async def test_a_store_that_stops_keeps_nobody_waiting() -> None:
    async with opened(2) as (store, (owner, other)):
        await owner.claim(owner.next_claim(), keys(6), FAST)
        task = await waiting(store, other, keys(6))
        await store.store.stop()
        with pytest.raises(StoreFault):
            await task
        assert len(store.store.claims) == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"keys": [b"short"]}, "keys[0]"),
        ({"keys": [bytes(32)] * (MAX_KEYS + 1)}, "keys"),
        ({"sources": ["x" * 300]}, "sources"),
        ({"pace": {"queue_s": -1.0}}, "pace.queue_s"),
        ({"pace": {"block_s": float("nan")}}, "pace.block_s"),
        ({"pace": {"growth_s": float("inf")}}, "pace.growth_s"),
    ],
)
async def test_a_bad_claim_is_refused_with_its_field(fields: dict[str, Any], field: str) -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.stub.Claim(kvstore_pb2.ClaimRequest(attachment_id=await one.attach(), **fields))
        code, text = refusal(caught.value)
        assert code == "INVALID_ARGUMENT" and text.startswith(field)


async def test_only_who_is_attached_can_claim() -> None:
    async with open_kvstore(settings()) as store, raw(store.address) as one:
        for call in (
            one.stub.Claim(kvstore_pb2.ClaimRequest(attachment_id="nobody", keys=keys(1))),
            one.stub.Withdraw(kvstore_pb2.WithdrawRequest(attachment_id="nobody", numbers=[1])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert refusal(caught.value)[0] == "NOT_FOUND"


async def test_blocks_of_a_client_of_another_store_are_waited_for() -> None:
    """The client then takes them from there; nothing of it is claimed there."""
    async with two() as pair, client_of(pair.second.address, timeout_s=30.0) as other:
        here, there = pair.second.store.claims, pair.first.store.claims
        await pair.writer.claim(pair.writer.next_claim(), keys(6), FAST)
        sources = [pair.relay.address]
        task = asyncio.create_task(other.claim(other.next_claim(), [*keys(4), *keys(2, "own")], PATIENT, sources))
        await eventually(lambda: there.waiting == 1)
        await pair.writer.put(puts(6))
        assert await task == Claimed(4, "stored")
        assert (here.blocks, len(there)) == (2, 0)
        assert await pair.lease(keys(4)) == contents(puts(4))


@pytest.mark.parametrize("how", ["withdrawn", "unreachable", "killed"])
async def test_whatever_becomes_of_another_host_the_first_who_waits_takes_over(how: str) -> None:
    async with (
        two(stall_s=10.0) as pair,
        client_of(pair.second.address, timeout_s=30.0) as first,
        client_of(pair.second.address, timeout_s=30.0) as second,
    ):
        here, there, number = pair.second.store.claims, pair.first.store.claims, pair.writer.next_claim()
        await pair.writer.claim(number, keys(5), FAST)
        if how == "unreachable":
            pair.relay.target = "127.0.0.1:1"
        same = Pace(queue_s=0.0, block_s=8.0)
        tasks = []
        for count, client in enumerate((first, second)):
            asked = client.claim(client.next_claim(), keys(5), same, [pair.relay.address])
            tasks.append(asyncio.create_task(asked))
            if how != "unreachable":
                await eventually(lambda count=count: there.waiting == count + 1)  # type: ignore[misc]
        if how == "withdrawn":
            pair.writer.withdraw(number)
        elif how == "killed":
            await pair.first.store.stop()
        async with asyncio.timeout(same.patience_s(5) / 2):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            [one] = done
            assert one.result().found == 0
            await eventually(lambda: here.waiting == 1)
            await (first if one is tasks[0] else second).put(puts(5))
            [found] = [await task for task in tasks if task is not one]
            assert found == Claimed(5, "stored")


async def test_a_store_that_no_mesh_knows_is_not_asked() -> None:
    async with open_kvstore(settings(64)) as stranger, opened(1) as (store, (client,)):
        assert await client.claim(client.next_claim(), keys(5), PATIENT, [stranger.address]) == Claimed(0, "none")
        assert store.store.claims.blocks == 5
