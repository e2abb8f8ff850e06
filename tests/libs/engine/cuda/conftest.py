"""A device that only says it is one, for whole steps."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from tests.libs.engine.cuda.pretend import CUDA, Pretend
from tests.libs.engine.cuda.test_steps import Recorder

from penstock.engine.kernels.cuda import setup, streams
from penstock.engine.kernels.cuda.paged import GatherPaged, Heads


@pytest.fixture
def pretend(monkeypatch):
    mode = Pretend()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: mode.stream)
    monkeypatch.setattr(streams, "current", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(setup, "check", lambda dtype, device: None)
    monkeypatch.setattr(streams, "use", lambda device: None)
    monkeypatch.setattr(setup, "CudaCapture", Recorder)
    copies = SimpleNamespace(mark=lambda wait: mode.waits.append("mark") if wait else None)
    memory = SimpleNamespace(arena=lambda nbytes: None, copies=lambda content: copies)
    monkeypatch.setattr(setup, "memory_on", lambda device: memory)

    def gathering(config, of):
        if config.latent is not None or config.chunked:
            return None  # as no backend reads such pages
        backend = GatherPaged(Heads.of(config), of)
        backend.most_rows = 8
        return backend

    def take(info):
        with safe_open(info.file, framework="pt") as stored:
            tensor = stored.get_tensor(info.name)
        return tensor.to(CUDA)

    monkeypatch.setattr(setup, "attention_for", gathering)
    monkeypatch.setattr(setup, "uploading", lambda checkpoint, device: nullcontext(SimpleNamespace(take=take)))
    with mode:
        yield mode
