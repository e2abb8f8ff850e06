"""What services without torch may import."""

from __future__ import annotations

import subprocess
import sys

LIGHT = (
    "request",
    "hooks",
    "errors",
    "config",
    "scheduling.live",
    "scheduling.plan",
    "scheduling.scheduler",
    "speculation.drafting",
    "stats",
    "checks",
    "speculation.depths",
    "speculation.guess",
    "speculation.trust",
    "sampling.reference",
)


def test_no_torch_in_the_plain_half():
    modules = [f"penstock.engine.{name}" for name in LIGHT]
    modules += [
        "penstock.runtime.drafts",
        "penstock.checkpoint",
        "penstock.engine.pages",
        "penstock.kv.identity",
        "penstock.kv.spec",
    ]
    script = f"import sys; import {', '.join(modules)}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


_ON_A_CPU = """
import sys
from pathlib import Path
import torch
from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner
from penstock.testing.checkpoints import write_checkpoint
from penstock.worker.device import check_device, device_of

directory = write_checkpoint(Path(sys.argv[1]))
check_device(EngineConfig(model=directory))
assert device_of("cpu") is None
Runner(inspect(directory), EngineConfig(model=directory, kv_pool_tokens=64))
print(*[name for name in sys.modules if name.startswith("penstock.engine.kernels.cuda")])
"""


def test_a_cpu_gets_nothing_of_cuda(tmp_path):
    """No module of kernels/cuda, which would cost time and memory, and may fail with some build of a library."""
    command = (sys.executable, "-c", _ON_A_CPU, str(tmp_path / "model"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
