"""The table of one GPU. `python -m tests.gpu.engine.speed DIRECTORY` prints it as JSON, a line per dtype."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tests.gpu.engine.measure import speed

from penstock.checkpoint import inspect
from penstock.engine.config import EngineConfig
from penstock.engine.forward.runner import Runner


def line(directory: Path, dtype: str) -> dict[str, object]:
    """Loading and speed of one model; what can't be had says why."""
    start = time.perf_counter()
    try:
        runner = Runner(
            inspect(directory),
            EngineConfig(model=directory, dtype=dtype, device="cuda", kv_pool_tokens=65536, max_model_len=4096),
        )
    except ValueError as reason:
        return {"dtype": dtype, "missing": str(reason)}
    torch.cuda.synchronize()
    loaded = time.perf_counter() - start
    attention = runner._device._attention if runner._device is not None else None
    name = "gather" if attention is None else attention.name
    return {"dtype": dtype, "attention": name, "load_s": round(loaded, 2)} | asdict(speed(runner))


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    for kind in ("float32", "bfloat16", "int8", "float8"):
        print(json.dumps(line(Path(sys.argv[1]), kind)))
