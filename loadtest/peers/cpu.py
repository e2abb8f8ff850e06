"""What the processor can do."""

from __future__ import annotations

from pathlib import Path


def torch_dtype() -> str:
    """In which torch multiplies quicker: emulating bfloat16 takes several times as long as float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags else "float32"
