"""The tensors a directory declares, the ones an architecture needs, and whether the two agree.

Only headers are read: a safetensors file starts with the length of its header (8 bytes, little-endian) and the
header itself, a JSON object from tensor name to dtype, shape and the bytes' place behind the header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import mul
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.files import read_object
from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.naming import LayerNames, layer_names

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""The element types of weights that this engine loads."""
TABLE_BYTES = {"I64": 8, "BOOL": 1}
"""Those of tables that some checkpoints have beside their weights."""
QUANTISED_BYTES = {"F8_E4M3": 1, "I32": 4, **TABLE_BYTES}
"""Those of quantised matrices, and of what is beside them; see quantised."""
_BYTES = {**DTYPE_BYTES, **QUANTISED_BYTES}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""The output projection, where it is not the embedding."""
_OF_PICTURES = ("vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector.", "visual.")
_MAX_HEADER = 100_000_000
_MOST_AXES, _BEYOND = 16, 1 << 63
"""Of a tensor, and for its numbers: more of either means harm."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    file: Path
    name: str
    """In the file."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of the tensor's first byte in the file."""
    scale: TensorInfo | None = None
    """By what its numbers are to be multiplied, see quantised."""
    grid: tuple[int, int] = (1, 1)
    """Rows and columns that have one scale."""
    phase: tuple[int, int] = (0, 0)
    """Rows and columns before the first number that have the first scale too."""
    steps: tuple[int, ...] = ()
    """Of a part with gaps: bytes in the file from one index of each axis to the next, the last axis apart. Empty: the
    numbers lie one behind the other."""
    whole: TensorInfo | None = None
    """The tensor of the file of which this is a part."""

    @property
    def nbytes(self) -> int:
        """In the file, without scales and gaps."""
        return self._bytes(math.prod(self.shape))

    def cut(self, axis: int, some: range) -> TensorInfo:
        """The part with `some` consecutive indices of an axis. Of I4, columns go in pairs."""
        if (some.start, some.stop) == (0, self.shape[axis]):
            return self
        assert 0 <= some.start <= some.stop <= self.shape[axis], f"{some} of {self.shape[axis]}"
        steps = self.steps or self._gapless
        last = axis == len(self.shape) - 1
        assert not (last and self.dtype == "I4" and (some.start % 2 or len(some) % 2)), "half a byte"
        shape = (*self.shape[:axis], len(some), *self.shape[axis + 1 :])
        found = replace(
            self, shape=shape, offset=self.offset + (self._bytes(some.start) if last else some.start * steps[axis])
        )
        found = replace(found, steps=steps if found._gaps(steps) else ())
        if self.scale is None or axis > 1:
            return found
        size, before = self.grid[axis], self.phase[axis]
        scales = range((before + some.start) // size, -(-(before + some.stop) // size))
        phase = [*self.phase]
        phase[axis] = (before + some.start) % size
        return replace(found, scale=self.scale.cut(axis, scales), phase=(phase[0], phase[1]))

    def ranges(self, some: range | None = None) -> Iterator[tuple[int, int]]:
        """(first byte in the file, bytes) of what holds the numbers, in their order, or those with `some` consecutive
        indices of the first axis."""
        some = range(self.shape[0]) if some is None else some
        if not self.steps:
            size = self._bytes(math.prod(self.shape[1:]))
            yield self.offset + some.start * size, len(some) * size
            return
        depth, run = len(self.shape) - 1, self._bytes(self.shape[-1])
        while depth > 1 and self.steps[depth - 1] == run:
            depth, run = depth - 1, run * self.shape[depth - 1]
        for index in product(some, *map(range, self.shape[1:depth])):
            yield self.offset + sum(map(mul, index, self.steps)), run

    def _bytes(self, count: int) -> int:
        return count // 2 if self.dtype == "I4" else count * _BYTES[self.dtype]

    def _gaps(self, steps: tuple[int, ...]) -> bool:
        """Whether indices so many bytes from each other leave gaps."""
        return any(
            extent > 1 and step != gapless
            for extent, step, gapless in zip(self.shape, steps, self._gapless, strict=False)
        )

    @property
    def _gapless(self) -> tuple[int, ...]:
        """`steps` if there were no gaps."""
        return tuple(self._bytes(math.prod(self.shape[axis + 1 :])) for axis in range(len(self.shape) - 1))

    def part(self, number: int) -> TensorInfo:
        """The tensor [number] of a tensor of several, which has no scales."""
        assert self.scale is None
        step = (self.steps or self._gapless)[0]
        found = replace(self, shape=self.shape[1:], offset=self.offset + number * step, steps=(), whole=self)
        return replace(found, steps=self.steps[1:] if found._gaps(self.steps[1:]) else ())


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of `directory`, in the order of their names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return (single,)
    if not index.exists():
        raise CheckpointError(directory, "holds neither model.safetensors nor model.safetensors.index.json")
    placement = read_object(index).get("weight_map")
    if not isinstance(placement, dict) or not placement:
        raise CheckpointError(index, "has no weight_map")
    if not all(isinstance(name, str) and _is_file_name(name) for name in placement.values()):
        raise CheckpointError(index, "weight_map must name files of this directory")
    return tuple(directory / name for name in sorted(set(placement.values())))


def _is_file_name(text: str) -> bool:
    return text != "" and text == Path(text).name and text.isprintable()  # neither a zero nor half a character


def declared_tensors(
    files: tuple[Path, ...], dtypes: Mapping[str, int] = MappingProxyType(DTYPE_BYTES)
) -> dict[str, TensorInfo]:
    """Every tensor of `files`, each file's header checked against the file's size. `dtypes` are the element types that
    are allowed, with their bytes."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_header(file, dtypes):
            if name in tensors:
                raise CheckpointError(file, f"repeats tensor {name} of {tensors[name].file.name}")
            tensors[name] = info
    return tensors


def text_tensors(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The text part of a vision-language model's tensors, without its prefix."""
    return {
        name.removeprefix("language_model."): info
        for name, info in tensors.items()
        if not name.removeprefix("model.").startswith(_OF_PICTURES)
    }


def decoder_tensors(tensors: dict[str, TensorInfo], config: ModelConfig) -> dict[str, TensorInfo]:
    """All but those of the layers that predict further tokens."""
    beyond = tuple(f"model.layers.{config.n_layers + number}." for number in range(config.predictors))
    return {name: info for name, info in tensors.items() if not name.startswith(beyond)} if beyond else tensors


def _read_header(file: Path, dtypes: Mapping[str, int]) -> Iterator[tuple[str, TensorInfo]]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(file, f"is cut short: {size} bytes cannot hold its header")
            raw = stream.read(length)
    except FileNotFoundError:
        raise CheckpointError(file, "the file is missing") from None
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror}") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise CheckpointError(file, "its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(file, "its header is not a JSON object")
    return _entries(file, header, dtypes, 8 + length, size - 8 - length)


def _entries(
    file: Path, header: dict[str, Any], dtypes: Mapping[str, int], data_at: int, data_bytes: int
) -> Iterator[tuple[str, TensorInfo]]:
    """The header's tensors; their places must tile the data exactly: no gap, no overlap, nothing left over."""
    header.pop("__metadata__", None)
    entries = [(name, *_entry(file, name, value, dtypes, data_at)) for name, value in header.items()]
    expected = 0
    for name, info, begin, end in sorted(entries, key=lambda entry: entry[2:]):
        if begin != expected:
            raise CheckpointError(file, f"tensor {name} starts at byte {begin}, expected {expected}")
        if end > data_bytes:
            raise CheckpointError(file, f"is cut short: tensor {name} ends at byte {end} of {data_bytes}")
        expected = end
        yield name, info
    if expected != data_bytes:
        raise CheckpointError(file, f"holds {data_bytes - expected} bytes that no tensor declares")


def _entry(file: Path, name: str, value: Any, dtypes: Mapping[str, int], data_at: int) -> tuple[TensorInfo, int, int]:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, begin, end)
        sound = isinstance(dtype, str) and all(type(number) is int and 0 <= number < _BEYOND for number in numbers)
        sound = sound and len(shape) <= _MOST_AXES  # their product takes long, if there are many
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(file, f"the header entry of tensor {name} is malformed")
    if dtype not in dtypes:
        raise CheckpointError(
            file, f"tensor {name} is {dtype}; supported are {', '.join(dtypes)} (quantised weights are not)"
        )
    if end - begin != math.prod(shape) * dtypes[dtype]:
        raise CheckpointError(file, f"tensor {name} declares {end - begin} bytes for shape {list(shape)} {dtype}")
    return TensorInfo(file, name, dtype, shape, data_at + begin), begin, end


def needed_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the decoder reads."""
    hidden = config.hidden_size
    needed: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        needed[HEAD] = (config.vocab_size, hidden)
    names = layer_names(config)
    for layer in range(config.n_layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, bias in (*_attention(config, names), *_feed_forward(config, names, layer)):
            needed[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                needed[f"{prefix}{name}.bias"] = (rows,)
        for name, width in _norms(config, names):
            needed[f"{prefix}{name}.weight"] = (width,)
        for name, shape in _tables(config, names, layer):
            needed[f"{prefix}{name}"] = shape
    return needed


def layer_matrices(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the matrices of a layer that are tensors of their own, by their names there."""
    names = layer_names(config)
    linears = (*_attention(config, names), *_feed_forward(config, names, layer))
    return {name: (rows, columns) for name, rows, columns, _ in linears}


_Linear = tuple[str, int, int, bool]
"""A matrix: name, rows, columns, whether it has a bias."""


def _attention(config: ModelConfig, names: LayerNames) -> Iterator[_Linear]:
    hidden, heads, latent = config.hidden_size, config.n_heads, config.latent
    queries, kept = heads * config.head_dim, config.n_kv_heads * config.head_dim
    if latent is None or names.latent is None:
        yield from _stacked(names.qkv, (queries, kept, kept), hidden, config.qkv_bias)
        yield names.out, hidden, queries, config.o_bias
        return
    asked, made = names.qkv
    yield asked, latent.query_rank or queries, hidden, config.qkv_bias and latent.query_rank is not None
    yield made, latent.rank + config.rotary_dim, hidden, config.qkv_bias
    if latent.query_rank is not None:
        yield names.latent.query, queries, latent.query_rank, False
    yield names.latent.keys_values, heads * (latent.plain_dim + latent.value_dim), latent.rank, False
    yield names.out, hidden, heads * latent.value_dim, config.o_bias


def _feed_forward(config: ModelConfig, names: LayerNames, layer: int) -> Iterator[_Linear]:
    hidden, experts = config.hidden_size, config.experts
    if experts is None or not experts.layers[layer]:
        inner = config.intermediate_size
        yield from _stacked(names.gate_up, (inner, inner), hidden, config.mlp_bias)
        yield names.down, hidden, inner, config.mlp_bias
        return
    yield names.router, experts.count, hidden, False
    if experts.shared_size:
        yield from _stacked(names.shared_gate_up, (experts.shared_size, experts.shared_size), hidden, False)
        yield names.shared_down, hidden, experts.shared_size, False
    if names.all_gate_up is not None:
        return
    inner = experts.intermediate_size
    for expert in range(experts.count):
        own = [name.format(expert) for name in names.expert_gate_up]
        yield from _stacked(own, (inner, inner), hidden, False)
        yield names.expert_down.format(expert), hidden, inner, False


def _stacked(names: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> Iterator[_Linear]:
    """One matrix for each name, or all in one."""
    for name, height in zip(names, rows if len(names) > 1 else [sum(rows)], strict=True):
        yield name, height, columns, bias


def _norms(config: ModelConfig, names: LayerNames) -> Iterator[tuple[str, int]]:
    yield names.input_norm, config.hidden_size
    yield names.mlp_norm, config.hidden_size
    if config.post_norms:
        yield names.attention_post_norm, config.hidden_size
        yield names.mlp_post_norm, config.hidden_size
    if config.qk_norm:
        yield names.q_norm, config.head_dim
        yield names.k_norm, config.head_dim
    if config.latent is not None and names.latent is not None:
        if config.latent.query_rank is not None:
            yield names.latent.query_norm, config.latent.query_rank
        yield names.latent.norm, config.latent.rank


def _tables(config: ModelConfig, names: LayerNames, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Whole names and shapes of what is neither a matrix nor a norm."""
    experts, hidden = config.experts, config.hidden_size
    if experts is None or not experts.layers[layer]:
        return
    if experts.corrected:
        yield names.router_bias, (experts.count,)
    if names.all_gate_up is not None and names.all_down is not None:
        yield names.all_gate_up, (experts.count, hidden, 2 * experts.intermediate_size)
        yield names.all_down, (experts.count, experts.intermediate_size, hidden)


def check_tensors(directory: Path, config: ModelConfig, tensors: dict[str, TensorInfo]) -> None:
    """Raises CheckpointError unless `tensors` are exactly what `config` describes."""
    each = config.experts is not None and layer_names(config).all_gate_up is None
    least = config.n_layers + (sum(config.experts.layers) * config.experts.count if config.experts and each else 0)
    if least > len(tensors):  # known before the names of millions are made
        raise CheckpointError(
            directory,
            f"holds {len(tensors)} tensors; what config.json describes has {least} or more",
        )
    needed = needed_tensors(config)
    for name, shape in needed.items():
        info = tensors.get(name)
        if info is None:
            raise CheckpointError(directory, f"tensor {name} of {config.architecture} is missing")
        if info.shape != shape:
            raise CheckpointError(
                info.file, f"tensor {name} has shape {list(info.shape)}, config.json makes it {list(shape)}"
            )
    for name in tensors.keys() - needed.keys():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # a table that the rope settings already give
        raise CheckpointError(
            tensors[name].file, f"tensor {name} is not part of {config.architecture} as config.json describes it"
        )
