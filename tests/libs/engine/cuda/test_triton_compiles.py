"""The Triton kernels compile for GPUs of several generations, without one being there; skipped without triton."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

PROGRAM = """
import json, re, subprocess, sys
from types import SimpleNamespace
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from penstock.engine.kernels.cuda import triton_kernels
from penstock.engine.kernels.cuda.paged import Heads
from penstock.engine.kernels.cuda.triton_paged import _shape

arch, dim, group, dtype, windowed, split, capped, cubin = json.loads(sys.argv[1])
dtype = getattr(torch, dtype)
memory = SimpleNamespace(data=torch.zeros(1, dtype=dtype), block_size=16)
shape = _shape(Heads(2 * group, 2, dim, 1.0, 3.0 if capped else None, (None,)), memory)
number = "*fp32" if dtype == torch.float32 else "*bf16"
pointers = {name: number for name in ("query", "keys", "values", "out")} | {"parts": "*fp32", "lse": "*fp32"}
pointers |= {name: "*i32" for name in ("tables", "starts", "ends", "order", "owners", "items")}
pointers |= {"scale": "fp32", "softcap": "fp32"}
for kernel, more in ((triton_kernels.partial, {"WINDOWED": windowed, "SPLIT": split}), (triton_kernels.merge, {})):
    constants = {name: value for name, value in {**shape, **more}.items() if name in kernel.arg_names}
    kinds = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    if split and kernel is triton_kernels.partial:
        kinds["out"] = "*fp32"
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(kernel.arg_names) if kinds[name][0] == "*"}
    made = compile(ASTSource(kernel, kinds, constants, aligned), target=GPUTarget("cuda", arch, 32),
                   options={"num_warps": 4, "num_stages": 2})
    with open(cubin, "wb") as file:
        file.write(made.asm["cubin"])
    told = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin], capture_output=True, text=True)
    (stack,) = re.findall(r"STACK:(\\d+)", told.stdout)
    print(json.dumps({"kernel": kernel.__name__, "shared": made.metadata.shared, "stack": int(stack)}))
"""


@pytest.mark.parametrize("case", [
    (80, 64, 4, "bfloat16", True, True, False), (90, 128, 8, "bfloat16", False, True, False),
    (80, 128, 16, "bfloat16", True, True, False), (90, 256, 4, "float32", False, False, True),
    (80, 256, 16, "bfloat16", True, True, True), (120, 96, 4, "bfloat16", True, False, True),
])  # fmt: skip
def test_compiles_and_fits(tmp_path, monkeypatch, case):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    what = json.dumps([*case, str(tmp_path / "cubin")])
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["kernel"] for one in made] == ["partial", "merge"]
    assert all(one["shared"] <= 99 << 10 for one in made), "what the smallest of them has"
    assert all(one["stack"] == 0 for one in made), "numbers fit the registers"
