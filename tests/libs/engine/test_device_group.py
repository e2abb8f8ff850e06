"""Sums and logits of ranks that have a device each, over a stand-in for NCCL with its documented arguments."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from tests.libs.engine.cuda.pretend import Pretend, there

from penstock.engine.config import EngineSettings
from penstock.engine.errors import RankLost
from penstock.engine.ranks import group
from penstock.engine.ranks.group import DeviceGroup, TorchGroup, open_group

COLUMNS = [3, 5, 4]
CPU = torch.device("cpu")


class StandIn:
    """Gloo, behind NCCL's arguments."""

    aborted: list[int]

    class Options:
        def __init__(self, is_high_priority_stream=False):
            self._timeout = None

    def __init__(self, store, rank, size, options):
        assert options._timeout.total_seconds() > group.TIMEOUT_S, "the host gives up first"
        own = dist.ProcessGroupGloo._Options()
        own._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        own._timeout = options._timeout
        self.rank = rank
        self.group = dist.ProcessGroupGloo(store, rank, size, own)

    def allreduce(self, tensors):
        assert all(tensor.is_contiguous() for tensor in tensors)
        return self.group.allreduce(tensors)

    def gather(self, rooms, tensors, options):
        assert bool(rooms) == (self.rank == options.rootRank == 0)
        assert all(tensor.is_contiguous() for tensor in tensors)
        return self.group.gather(rooms, tensors, options)

    def abort(self):
        self.aborted.append(self.rank)


class Devices:
    """Whether devices are done with what they were told."""

    def __init__(self):
        self.busy = threading.Event()
        self.looked = threading.Event()

    def over(self):
        if self.busy.is_set():
            self.looked.set()
        return not self.busy.is_set()


@pytest.fixture
def devices(monkeypatch):
    StandIn.aborted = []
    found = Devices()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(DeviceGroup, "_over", lambda self: found.over)
    return found


@pytest.fixture
def ranks(tmp_path, devices):
    """The groups of three ranks, which call in threads."""
    with ThreadPoolExecutor(3) as threads:
        yield [*threads.map(lambda rank: DeviceGroup(str(tmp_path / "meeting"), rank, COLUMNS, CPU), range(3))]


def together(ranks, call):
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [*threads.map(call, range(len(ranks)), ranks)]


def test_sums_and_logits(ranks):
    own = [torch.randn(4, 6).t() for _ in ranks]
    for found in together(ranks, lambda rank, group: group.add(own[rank].clone())):
        torch.testing.assert_close(found, sum(own))
    logits = [torch.randn(2, count) for count in COLUMNS]
    found, *others = together(ranks, lambda rank, group: group.gather(logits[rank]))
    assert torch.equal(found, torch.cat(logits, 1)) and others == [None, None]
    nothing, *others = together(ranks, lambda rank, group: group.gather(logits[rank][:0]))
    assert nothing.shape == (0, 12) and others == [None, None]
    together(ranks, lambda rank, group: group.wait())
    for one in ranks:
        one.close()


def test_who_waits_hears_that_a_rank_has_ended(ranks, devices):
    devices.busy.set()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks[0].wait)
        assert devices.looked.wait(10)
        ranks[0].close()
        with pytest.raises(RankLost, match="has ended"):
            waiting.result(10)
    devices.busy.clear()
    for call in (ranks[0].wait, lambda: ranks[0].add(torch.ones(1)), lambda: ranks[0].gather(torch.ones(1, 3))):
        with pytest.raises(RankLost):
            call()
    ranks[0].close()
    for thread in threading.enumerate():
        if thread.name == "abort":
            thread.join()
    assert StandIn.aborted == [0], "once"


def test_a_device_that_is_never_done_is_given_up(ranks, devices, monkeypatch):
    monkeypatch.setattr(group, "TIMEOUT_S", 0.01)
    devices.busy.set()
    with pytest.raises(RankLost, match="does not answer"):
        ranks[1].wait()
    for thread in threading.enumerate():
        if thread.name == "abort":
            thread.join()
    assert StandIn.aborted == [1]


@pytest.mark.parametrize(
    ("fields", "nccl", "alone"),
    [
        ({}, True, False),
        ({"device": "cuda:2"}, True, True),
        ({"device": "cuda:2"}, False, False),
        ({"device": "cuda:2", "one_device": True}, True, False),
    ],
)
def test_who_has_a_device_alone_uses_it(tmp_path, monkeypatch, fields, nccl, alone):
    made = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(group, "DeviceGroup", lambda *given: made.append(given))
    meeting = str(tmp_path / "meeting")
    open_group(meeting, 0, [4], EngineSettings(**fields))
    assert made == ([(meeting, 0, [4], torch.device("cuda:2"))] if alone else [])


def test_on_one_device_sums_go_by_way_of_the_host(tmp_path):
    def of(rank):
        with Pretend():
            one = TorchGroup(str(tmp_path / "meeting"), rank, [2, 2])
            own = torch.full((3, 2), 1.0 + rank, device="cuda")
            summed, logits = one.add(own), one.gather(own)
            assert there(summed) and there(own)
            return summed.tolist(), None if logits is None else (there(logits), logits.tolist())

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(of, range(2))
    assert first == ([[3.0, 3.0]] * 3, (True, [[1.0, 1.0, 2.0, 2.0]] * 3))
    assert second == ([[3.0, 3.0]] * 3, None)


def test_devices_that_do_not_find_each_other_are_told_of(tmp_path, devices, monkeypatch):
    """Also where the first call never returns."""
    stuck = threading.Event()

    class Alone(StandIn):
        def __init__(self, store, rank, size, options):
            pass

        def allreduce(self, tensors):
            stuck.wait()
            raise RuntimeError("no peers")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Alone, raising=False)
    for name in ("one", "two"):
        dist.FileStore(str(tmp_path / name), 2).set("here/1", "")  # the other rank has loaded
    with monkeypatch.context() as soon:
        soon.setattr(group, "TIMEOUT_S", 0.01)
        with pytest.raises(RankLost, match="not all are there"):
            DeviceGroup(str(tmp_path / "one"), 0, [4, 4], CPU)
    stuck.set()
    with pytest.raises(RankLost, match="no peers"):
        DeviceGroup(str(tmp_path / "two"), 0, [4, 4], CPU)
