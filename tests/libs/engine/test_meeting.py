"""What ranks compute together, in shared memory and by torch.distributed; and what rank 0 tells the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import RankLost
from penstock.engine.kernels.cpu.meeting import SharedGroup
from penstock.engine.layers.adapters import AdapterWeights
from penstock.engine.ranks import group as ranks
from penstock.engine.ranks.group import TorchGroup
from penstock.engine.ranks.messages import PassedAt, PlainRows, StepListener, StepTeller

ROOM = 48


def shared(columns):
    """A group in this process, a member for each rank."""
    memory = memoryview(bytearray(SharedGroup.memory_bytes(len(columns), ROOM)))
    return [SharedGroup(memory, rank, columns, ROOM) for rank in range(len(columns))]


def by_torch(columns, directory):
    with ThreadPoolExecutor(len(columns)) as pool:
        made = [pool.submit(TorchGroup, str(directory / "meeting"), rank, columns) for rank in range(len(columns))]
        return [one.result() for one in made]


def together(members, work):
    """The result of each rank's work, which runs in a thread of its own."""
    with ThreadPoolExecutor(len(members)) as pool:
        return [one.result() for one in [pool.submit(work, rank, member) for rank, member in enumerate(members)]]


@pytest.fixture(params=["shared", "torch"])
def group(request, tmp_path):
    def of(columns):
        return shared(columns) if request.param == "shared" else by_torch(columns, tmp_path)

    return of


@pytest.mark.parametrize("columns", [[7, 5], [4, 4, 4], [16, 9, 3, 1]])
def test_sums_and_logits_are_those_of_all(group, columns):
    """Also of more numbers than ranks bring at a time, and many times over."""
    members = group(columns)
    random = torch.Generator().manual_seed(3)
    for rows in (1, 3, 0, 40, 2) * 3:
        own = [torch.randn(rows, 10, generator=random) for _ in columns]
        sums = together(members, lambda rank, member, own=own: member.add(own[rank].clone()))
        for found in sums:
            assert torch.equal(found, sums[0]), "the same bits everywhere"
            torch.testing.assert_close(found, torch.stack(own).sum(0))
        logits = [torch.randn(rows, count, generator=random) for count in columns]
        first, *others = together(members, lambda rank, member, own=logits: member.gather(own[rank]))
        assert torch.equal(first, torch.cat(logits, 1)) and others == [None] * len(others)
    for member in members:
        member.close()


def test_ranks_wait_for_one_that_loads_for_longer_than_a_step_may_take(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "TIMEOUT_S", 1.0)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(TorchGroup, str(tmp_path / "meeting"), 1, [4, 4])
        with pytest.raises(TimeoutError):
            early.result(2.0)
        members = [TorchGroup(str(tmp_path / "meeting"), 0, [4, 4]), early.result()]
    assert [sums.tolist() for sums in together(members, lambda _, one: one.add(torch.ones(2)))] == [[2.0, 2.0]] * 2
    for member in members:
        member.close()


def test_nobody_waits_for_a_rank_that_is_lost():
    one, other = shared([4, 4])
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(one.add, torch.ones(3))
        other.close()
        with pytest.raises(RankLost):
            waits.result(30)


RUNS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 5), st.lists(st.integers(0, 300), min_size=1)),
    unique_by=lambda run: run[0],
)


@given(st.lists(RUNS, max_size=6))
def test_steps_are_heard_as_they_are_told(steps):
    """A table has the same pages as long as its name and length are the same."""
    teller, listener = StepTeller(), StepListener()
    for number, step in enumerate(steps):
        runs = [
            PlainRows(ids, 3 * number, 1, (name, version), [version * 100 + page for page in range(length)], None)
            for name, version, length, ids in step
        ]
        changed = [number, 7], [number + 1]
        heard = listener.hear(teller.tell(runs, number % 2 == 0, [], changed=changed))
        assert heard == (runs, number % 2 == 0, PassedAt(), [], *changed)


def test_adapters_are_kept_until_they_are_forgotten():
    teller, listener = StepTeller(), StepListener()
    one, two = (AdapterWeights(name, (), 0) for name in ("one", "two"))
    runs = [PlainRows([5], 40, 1, (adapter.fingerprint, 1), [3], adapter) for adapter in (one, two)]
    for adapter in (one, two):
        told = listener.hear(teller.adapter(Path("/there"), adapter.fingerprint, []))
        assert (told.path, told.fingerprint) == ("/there", adapter.fingerprint)
        listener.keep(adapter)
    heard = listener.hear(teller.tell(runs, True, []))
    assert [run.adapter for run in heard.runs] == [one, two]
    assert listener.hear(teller.tell(runs[1:], True, ["one"])).runs[0].adapter is two
    with pytest.raises(KeyError):
        listener.hear(teller.tell(runs[:1], True, []))
    listener.hear(teller.adapter(Path("/there"), "one", ["two"]))
    listener.keep(one)
    with pytest.raises(KeyError):
        listener.hear(teller.tell(runs[1:], True, []))
    assert listener.hear(teller.tell(runs[:1], True, [])).runs[0].adapter is one


def test_a_table_is_told_once():
    teller = StepTeller()
    runs = [PlainRows([5], 40, 1, ("a", 1), list(range(1000)), None)]
    first, second = teller.tell(runs, True, []), teller.tell(runs, True, [])
    assert len(first) > 1000 and len(second) < 40
