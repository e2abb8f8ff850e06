"""Devices that are not there are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engine.config import EngineConfig, EngineSettings
from penstock.engine.kernels.cuda import setup
from penstock.runtime.config import ConfigError
from penstock.runtime.metrics import WorkerMetrics
from penstock.testing.checkpoints import TinyModel, write_checkpoint
from penstock.v1 import router_pb2
from penstock.worker import opening
from penstock.worker.config import WorkerConfig
from penstock.worker.device import check_device
from penstock.worker.opening import open_worker


@pytest.fixture
def three(monkeypatch):
    """CUDA devices, of which the last is old."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device.index == 2 else (9, 0))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), TinyModel())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tp": 2}, None),
        ({"device": "cuda:1"}, None),
        ({"tp": 2, "pp": 2, "one_device": True}, None),
        ({"tp": 2, "pp": 2, "stages_apart": True}, None),
        ({"tp": 4}, r"tp = 4: needs 4 CUDA devices from cuda:0 on, one for each process, and there are 3 in all"),
        ({"tp": 2, "pp": 2}, r"tp = 2: needs 4 CUDA devices from cuda:0 on"),
        ({"pp": 3, "device": "cuda:1"}, r"pp = 3: needs 3 CUDA devices from cuda:1 on"),
        ({"device": "cuda:3"}, r"device = 'cuda:3': .*there are only 3"),
        (
            {"pp": 3, "dtype": "bfloat16"},
            r"device = 'cuda': cuda:2 is one of 3: dtype bfloat16 needs compute",
        ),
    ],
    ids=str,
)
def test_each_process_has_a_device(three, directory, fields, says):
    config = EngineConfig(directory, **{"device": "cuda", "threads": 1, **fields})
    if says is None:
        check_device(config)
        return
    with pytest.raises(ConfigError, match=says):
        check_device(config)


async def test_stages_of_other_hosts_need_no_device_here(three, directory, monkeypatch):
    """What is asked for here is what this host computes."""
    asked = []
    monkeypatch.setattr(opening, "check_device", lambda settings: asked.append(settings.devices) or refuse())
    engine = EngineConfig(directory, device="cuda:1", pp=3, threads=1)
    config = WorkerConfig(engine=engine, stage_hosts=("127.0.0.1:1", "127.0.0.1:2"))
    with pytest.raises(ConfigError):
        await open_worker(config, router_pb2.ROLE_DECODE, refuse, (), metrics=WorkerMetrics()).__aenter__()
    assert asked == [["cuda:1"]]


def refuse(*_: object):
    raise ConfigError("device", "-", "is enough for this test")


def test_without_any_it_says_so(directory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device = 'cuda': .*finds no CUDA device: use cpu"):
        check_device(EngineConfig(directory, device="cuda", tp=2))


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({}, ["cpu"]),
        ({"tp": 2, "pp": 2}, ["cpu"] * 4),
        ({"device": "cuda"}, ["cuda"]),
        ({"device": "cuda:3"}, ["cuda:3"]),
        ({"device": "cuda", "tp": 2}, ["cuda:0", "cuda:1"]),
        ({"device": "cuda:2", "tp": 2, "pp": 2}, ["cuda:2", "cuda:3", "cuda:4", "cuda:5"]),
        ({"device": "cuda:2", "tp": 2, "pp": 2, "stages_apart": True}, ["cuda:2", "cuda:3"]),
        ({"device": "cuda:2", "tp": 2, "one_device": True}, ["cuda:2", "cuda:2"]),
    ],
    ids=str,
)
def test_devices_follow_the_first(fields, devices):
    assert EngineSettings(**fields).devices == devices


@pytest.mark.parametrize(
    ("fields", "on_host", "copied"),
    [
        ({}, True, False),
        ({"tp": 2}, True, False),
        ({"tp": 2, "pages_apart": True}, True, True),
        ({"device": "cuda"}, False, False),
        ({"device": "cuda", "tp": 2}, True, True),
        ({"device": "cuda", "pp": 2}, True, True),
    ],
    ids=str,
)
def test_pages_of_several_processes_are_in_host_memory(fields, on_host, copied):
    """So only there blocks stay within a share of them."""
    settings = EngineSettings(**fields, kv_pool_tokens=1600, resident_share=0.25)
    assert (settings.pages_on_host, settings.copies_pages) == (on_host, copied)
    assert settings.idle_pages == (25 if on_host else 100)


def test_the_check_needs_no_device_of_its_own(three):
    setup.check("float32", torch.device("cuda:2"))
    with pytest.raises(ValueError, match="compute capability"):
        setup.check("bfloat16", torch.device("cuda:2"))
