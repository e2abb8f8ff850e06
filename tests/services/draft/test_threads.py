"""A draft model computes with the threads that its settings say, from its first product on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Thread

import pytest
import torch

from penstock.draft.config import DraftConfig
from penstock.draft.drafts import load_draft
from penstock.engine.forward import runner
from penstock.engine.forward.model import set_threads
from penstock.models import NAMES, embedded


async def test_the_kernels_get_the_threads_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before, given = torch.get_num_threads(), []

    class Counted(runner.Machine):
        def __init__(self, threads: int) -> None:
            given.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(runner, "Machine", Counted)
    monkeypatch.setattr(runner, "_BYTES_PER_THREAD", 1)
    try:
        for threads in (1, 3):
            await asyncio.to_thread(load_draft, DraftConfig(model=str(embedded(NAMES[1])), threads=threads))
    finally:
        torch.set_num_threads(before)
    assert given == [1, 3]


def test_a_thread_keeps_its_number_when_another_sets_its_own() -> None:
    before, seen = torch.get_num_threads(), []

    def compute() -> None:
        set_threads(3)
        _in_a_thread(lambda: set_threads(1))
        seen.append(torch.get_num_threads())

    try:
        _in_a_thread(compute)
    finally:
        torch.set_num_threads(before)
    assert seen == [3]


def _in_a_thread(call: Callable[[], None]) -> None:
    """In a new one, which has never looked at torch's number."""
    thread = Thread(target=call)
    thread.start()
    thread.join()
