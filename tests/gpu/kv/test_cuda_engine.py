"""An engine on the store's device copies blocks from there into its pages."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.libs.engine.test_device_pages import copies_both_kinds

from penstock.engine.kernels.cuda.memory import CudaMemory
from penstock.kv.device.cuda import open_cuda


def test_pages_from_a_device(tmp_path: Path) -> None:
    copies_both_kinds(open_cuda(), "cuda", tmp_path, CudaMemory(torch.device("cuda", 0)))
