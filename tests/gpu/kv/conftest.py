"""These tests need a CUDA device that cupy can reach; elsewhere they are skipped, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.kv.device.cuda import open_cuda
from penstock.kv.device.memory import DeviceFault


def _missing() -> str:
    try:
        open_cuda()
    except DeviceFault as fault:
        return str(fault)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    if mine and (reason := _missing()):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))
