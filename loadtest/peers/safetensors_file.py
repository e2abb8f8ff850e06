"""Reads bfloat16 tensors out of a safetensors file as they are, for numpy, which has no bfloat16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def tensors(file: Path) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.uint16]]]]:
    """Name and bits (uint16, mapped from the file) of every tensor. Raises ValueError for another type."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    everything = np.memmap(file, np.uint8, "r", 8 + length)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{file}: tensor {name} must be BF16, not {entry['dtype']}")
        begin, end = entry["data_offsets"]
        yield name, everything[begin:end].view(np.uint16).reshape(entry["shape"])
