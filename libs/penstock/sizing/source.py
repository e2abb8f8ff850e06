"""What is known of a checkpoint before its weights are there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.checkpoint import EMBEDDING, CheckpointError, ModelConfig, layer_names
from penstock.checkpoint.families import FAMILIES
from penstock.checkpoint.files import Json, read_object
from penstock.checkpoint.model_config import parse_config, text_values
from penstock.checkpoint.quantised import Quantisation, folded, parse_quantisation
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.tensors import (
    DTYPE_BYTES,
    HEAD,
    QUANTISED_BYTES,
    check_tensors,
    declared_tensors,
    decoder_tensors,
    needed_tensors,
    text_tensors,
    weight_files,
)
from penstock.engine.kernels.groups import GROUP, keeps_stored
from penstock.sizing.forms import FLOAT32, NumberForm, plain_form, quantised_form, stored_form
from penstock.sizing.pictures import picture_numbers

INDEX = "model.safetensors.index.json"
_MOST_EXPERTS = 1_000_000
"""Of all layers together: what is described by a config.json alone may be anything."""
_PREFIX = "language_model."
_SHAPE_BYTES = 16
"""A matrix in groups of int4 has its shape beside it, two int64."""
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Described:
    """A checkpoint, as far as it says what it is."""

    file: Path
    """config.json."""
    config: ModelConfig
    forms: Mapping[str, NumberForm]
    """How the decoder's tensors are stored, by name."""
    quantisation: Quantisation | None
    picture_bytes: int
    """Of the part for pictures, as it is stored."""
    stored_bytes: int
    """Of all tensors on disk."""
    by: str
    """What says so: headers, index or config."""
    keeps_int4: bool = True
    """Whether workers keep what is stored in 4 bits, if anything is; without headers, by the groups alone."""


def describe(model: Path) -> Described:
    """`model` is a directory with a config.json, or such a file. The headers of its weights are read if all of its
    files are there; else the index, if there is one. Raises CheckpointError."""
    file = model / "config.json" if model.is_dir() else model
    whole = read_object(file)
    values = text_values(file, whole)
    config = parse_config(file, values)
    if config.experts is not None and config.experts.count * config.n_layers > _MOST_EXPERTS:
        most = f"num_hidden_layers {config.n_layers} times that must be at most {_MOST_EXPERTS}"
        raise CheckpointError(file, f"describes {config.experts.count} experts in each layer: {most}")
    quantisation = parse_quantisation(file, values)
    if (files := _files(file.parent)) is not None:
        return _by_headers(file, config, quantisation, files)
    index = file.parent / INDEX
    names, total = _indexed(index) if index.exists() else (None, None)
    if config.tied and names is not None and HEAD in names:
        config = replace(config, tied=False)
    plain = plain_form(_stored_dtype(file, values))
    form_of = _form_of(file, values, config, quantisation, plain=plain, names=names, index=index)
    forms, decoder = {}, 0
    for name, shape in needed_tensors(config).items():
        forms[name] = form = form_of(name, shape)
        decoder += form.nbytes(math.prod(shape[:-1]), shape[-1]) + (
            _SHAPE_BYTES if form.quantised and form.bits == 4 else 0
        )
    pictures = picture_numbers(Reader(file, whole), config.architecture, config.hidden_size) * plain.bits // 8
    if total is not None and pictures and not config.predictors:
        pictures = max(0, total - decoder)
    stored = decoder + pictures if total is None else total
    by = "config" if names is None else "index"
    keeps = all(form.grid[1] % GROUP == 0 for form in forms.values() if form.bits == 4)
    return Described(file, config, forms, quantisation, pictures, stored, by, keeps)


def _files(directory: Path) -> tuple[Path, ...] | None:
    """The files of weights, if they are all there."""
    if not any((directory / name).exists() for name in ("model.safetensors", INDEX)):
        return None
    files = weight_files(directory)
    return files if all(file.exists() for file in files) else None


def _by_headers(
    file: Path, config: ModelConfig, quantisation: Quantisation | None, files: tuple[Path, ...]
) -> Described:
    declared = declared_tensors(files, {**DTYPE_BYTES, **QUANTISED_BYTES} if quantisation else DTYPE_BYTES)
    own = text_tensors(declared) if FAMILIES[config.architecture].text_part else declared
    kept = {info.name for info in own.values()}
    pictures = sum(info.nbytes for info in declared.values() if info.name not in kept)
    if quantisation is not None:
        own = folded(own, quantisation)
    if config.tied and HEAD in own:
        config = replace(config, tied=False)
    own = decoder_tensors(own, config)
    check_tensors(file.parent, config, own)
    forms = {name: stored_form(own[name]) for name in needed_tensors(config)}
    total = sum(info.nbytes for info in declared.values())
    return Described(file, config, forms, quantisation, pictures, total, "headers", keeps_stored(own.values()))


def _indexed(index: Path) -> tuple[Collection[str], int | None]:
    """Names of tensors, the text part's without its prefix; and the bytes of all, if the index says so."""
    values = read_object(index)
    placement, metadata = values.get("weight_map"), values.get("metadata")
    if not isinstance(placement, dict) or not placement:
        raise CheckpointError(index, "has no weight_map")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and (type(total) is not int or total <= 0):
        raise CheckpointError(index, f"metadata: total_size must be the bytes of all tensors, not {total!r}")
    return {name.removeprefix(_PREFIX) for name in placement}, total


def _stored_dtype(file: Path, values: Json) -> str:
    """Of what is not quantised, as safetensors calls it."""
    name = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    if name not in _DTYPES:
        raise CheckpointError(file, f"dtype {name!r} is not supported, only {', '.join(_DTYPES)}")
    return _DTYPES[name]


_FormOf = Callable[[str, tuple[int, ...]], NumberForm]


def _form_of(
    file: Path,
    values: Json,
    config: ModelConfig,
    quantisation: Quantisation | None,
    *,
    plain: NumberForm,
    names: Collection[str] | None,
    index: Path,
) -> _FormOf:
    """How a tensor is stored: by the names of the index, or by what config.json says of quantised ones."""
    form = None if quantisation is None else quantised_form(quantisation)
    excepted = _excepted(file, values) if form is not None and names is None else (lambda name: False)
    router = f"{layer_names(config).router}.weight"

    def of(name: str, shape: tuple[int, ...]) -> NumberForm:
        if name.endswith("e_score_correction_bias"):
            return FLOAT32
        if names is None:
            matrix = len(shape) == 2 and name not in (EMBEDDING, HEAD) and not name.endswith(router)
            return form if form is not None and matrix and not excepted(name) else plain
        if form is not None and (f"{name}_packed" in names or f"{name}_scale_inv" in names):
            return form
        if name not in names:
            raise CheckpointError(index, f"tensor {name} of {config.architecture} is missing")
        return plain

    return of


def _excepted(file: Path, values: Json) -> Callable[[str], bool]:
    """Which matrices are not quantised, by config.json: those that a name in `ignore` (compressed-tensors; behind `re:`
    a pattern that begins where the name does) or `modules_to_not_convert` (fp8; a part of names) means."""
    settings: dict[str, Any] = values["quantization_config"]
    found: list[Callable[[str], object]] = []
    for key in ("ignore", "modules_to_not_convert"):
        given = settings.get(key) or []
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise CheckpointError(file, f"quantization_config: {key} must be a list of names, not {given!r}")
        for each in given:
            found.append(_meant(file, key, each))

    def excepted(name: str) -> bool:
        module = name.removesuffix(".weight")
        return any(means(module) or means(_PREFIX + module) for means in found)

    return excepted


def _meant(file: Path, key: str, given: str) -> Callable[[str], object]:
    if key == "modules_to_not_convert":
        return lambda module: given in module
    if not given.startswith("re:"):
        return lambda module: module == given
    try:
        return re.compile(given.removeprefix("re:")).match
    except re.error as error:
        raise CheckpointError(
            file, f"quantization_config: ignore has {given!r}, no regular expression: {error}"
        ) from None
