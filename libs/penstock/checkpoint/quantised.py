"""Checkpoints whose matrices are stored in 8 or 4 bits with scales, and what belongs together in them.

Two forms are read. DeepSeek-V3's: float8 (e4m3) with a float32 scale for each block of 128 x 128 numbers, in
`NAME_scale_inv` beside `NAME`. Kimi K2's, from compressed-tensors: int4 with a scale for each group of a row's numbers,
as `NAME_packed` (eight numbers to an int32, the first in the lowest bits, each stored as number + 8), `NAME_scale`, and
`NAME_shape`. Which matrices are stored so is what the tensors say; the others are there as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.tensors import DTYPE_BYTES, TensorInfo

_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the quantised matrices of a checkpoint are stored."""

    kind: str
    """float8 or int4."""
    grid: tuple[int, int]
    """Rows and columns, [out, in], that have one scale."""


def parse_quantisation(file: Path, values: Mapping[str, Any]) -> Quantisation | None:
    """From config.json's `quantization_config`; None when there is none. Raises CheckpointError."""
    found = values.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(file, f"quantization_config must be an object, not {found!r}")
    read = Reader(file, found)
    method = found.get("quant_method")
    if method == "fp8":
        read.only("fmt", "e4m3", "e4m3")
        return Quantisation("float8", _block(read))
    if method == "compressed-tensors":
        return Quantisation("int4", (1, _group(read)))
    raise read.fail(
        f"quantization_config: quant_method {method!r} is not supported, only fp8 (in blocks) and compressed-tensors "
        "(4 bits in groups)"
    )


def _block(read: Reader) -> tuple[int, int]:
    block = read.values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise read.fail(f"quantization_config: weight_block_size must be two sizes, not {block!r}")
    return block[0], block[1]


def _group(read: Reader) -> int:
    read.only("format", "pack-quantized", "pack-quantized")
    groups = read.values.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(each := next(iter(groups.values())), dict):
        raise read.fail(f"quantization_config: config_groups must be one group, not {groups!r}")
    if each.get("input_activations") is not None:
        raise read.fail("quantization_config: quantised input_activations are not supported")
    weights = each.get("weights")
    if not isinstance(weights, dict):
        raise read.fail(f"quantization_config: the group's weights must be an object, not {weights!r}")
    own = read.inner(weights)
    for key, usual in (("num_bits", 4), ("type", "int"), ("symmetric", True), ("strategy", "group")):
        own.only(key, usual, usual)
    size = own.integer("group_size", 32)
    if size % _PER_WORD:
        raise read.fail(f"quantization_config: group_size must be a multiple of {_PER_WORD}, not {size}")
    return size


def folded(tensors: Mapping[str, TensorInfo], quantisation: Quantisation) -> dict[str, TensorInfo]:
    """`tensors` with one for each quantised matrix, under the name that it would have otherwise: its numbers, with its
    scales in `scale`. Raises CheckpointError."""
    ends = ("_scale_inv",) if quantisation.kind == "float8" else ("_packed", "_scale", "_shape")
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        end = next((end for end in ends if name.endswith(f".weight{end}")), None)
        if end is None:
            found.setdefault(name, info)
        elif end == "_scale_inv":
            found[name.removesuffix(end)] = _float8(tensors, name.removesuffix(end), info, quantisation)
        elif end == "_packed":
            found[name.removesuffix(end)] = _int4(tensors, name.removesuffix(end), info, quantisation)
    for info in found.values():
        if info.dtype not in DTYPE_BYTES and info.scale is None:
            raise CheckpointError(info.file, f"tensor {info.name} is {info.dtype}, and its scales are missing")
    return found


def _float8(tensors: Mapping[str, TensorInfo], name: str, scale: TensorInfo, quantisation: Quantisation) -> TensorInfo:
    matrix = tensors.get(name)
    if matrix is None or matrix.dtype != "F8_E4M3":
        raise CheckpointError(scale.file, f"tensor {scale.name} is there, and {name} in float8 is not")
    _check_scale(matrix, matrix.shape, scale, quantisation)
    return replace(matrix, scale=scale, grid=quantisation.grid)


def _int4(tensors: Mapping[str, TensorInfo], name: str, packed: TensorInfo, quantisation: Quantisation) -> TensorInfo:
    scale = tensors.get(f"{name}_scale")
    if scale is None:
        raise CheckpointError(packed.file, f"tensor {packed.name} is there, and {name}_scale is not")
    if packed.dtype != "I32" or len(packed.shape) != 2:
        raise CheckpointError(packed.file, f"tensor {packed.name} must be a matrix of I32")
    shape = (packed.shape[0], packed.shape[1] * _PER_WORD)
    _check_scale(packed, shape, scale, quantisation)
    return replace(packed, dtype="I4", shape=shape, scale=scale, grid=quantisation.grid)


def _check_scale(info: TensorInfo, shape: tuple[int, ...], scale: TensorInfo, quantisation: Quantisation) -> None:
    rows, columns = quantisation.grid
    wanted = (-(-shape[0] // rows), -(-shape[1] // columns)) if len(shape) == 2 else ()
    if scale.shape != wanted or scale.dtype not in DTYPE_BYTES:
        raise CheckpointError(
            scale.file,
            f"tensor {scale.name} is {scale.dtype} {list(scale.shape)}; for {info.name} of {list(shape)} with a scale "
            f"for each {rows} x {columns} it must be {list(wanted)} in {', '.join(DTYPE_BYTES)}",
        )
