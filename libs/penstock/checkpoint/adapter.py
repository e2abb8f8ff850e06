"""Reads and checks the directory of a LoRA adapter (Hu et al., 2021) in the format of PEFT, without torch.

An adapter adds to some matrices of its base model a product of two thin ones: y = W x + scale * B (A x). PEFT calls
them lora_A and lora_B; `adapter_config.json` says which matrices have them, and how large scale is.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from penstock.checkpoint.directory import Checkpoint, Rank
from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.files import read_object
from penstock.checkpoint.fingerprint import add_file
from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.naming import LayerNames, layer_names
from penstock.checkpoint.patterns import ExpressionRefused, matching
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.split import TensorCut, config_of_rank, cuts_of, inner_of_rank
from penstock.checkpoint.tensors import TensorInfo, declared_tensors, layer_matrices

MAX_RANK = 1024
ALL_LINEAR = "all-linear"
_PREFIX = "base_model.model."
_BASE = "base_layer"
"""What PEFT calls a module that has a parameter adapted already, inside of what adapts the next one."""
_TEXT_PARTS = ("model.language_model.", "language_model.model.")
"""What some models have before their layers' names, instead of `model.`."""
_ROUTER = "router"
_EXPERT = re.compile(r"\.experts\.\d+\.")
_NAME = re.compile(r"(?P<module>.+)\.(?P<which>lora_[AB])\.weight")
_UNSUPPORTED = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "lora_bias": "a bias of lora_B is not supported",
    "modules_to_save": "whole modules beside the matrices are not supported",
    "layer_replication": "layers that are used several times are not supported",
    "trainable_token_indices": "adapted embeddings are not supported",
    "alora_invocation_tokens": "adapters that begin at a token are not supported",
    "fan_in_fan_out": "matrices that are stored the other way round are not supported",
}
"""Fields that must be absent, null, false or empty, and what they would mean."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""How lora_A and lora_B began, where the base model stayed as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPart:
    """What an adapter adds to one matrix of the checkpoint, which is part of a matrix of the decoder."""

    layer: int
    matrix: str
    """Its name in the layer."""
    stack: str
    """The decoder's matrix in the layer: qkv, out, gate_up, down, query, router; or gate_up.N, down.N of expert N."""
    first: int
    """The first of its columns there."""
    columns: int
    rank: int
    scale: float
    down: TensorInfo
    """lora_A: [rank, inputs]."""
    up: TensorInfo
    """lora_B: [columns, rank]."""
    cut: TensorCut | None = None
    """What one of several processes has of the matrix, and so of lora_B's rows or lora_A's columns; None: all of it."""
    expert: int | None = None
    """Whose matrix it is."""
    together: int = 0
    """How many experts the tensors are of, as PEFT has them where one parameter is of all: lora_A [experts * rank,
    inputs], and lora_B [columns, rank * experts], for each rank the experts side by side. 0: of this one alone."""
    turned: bool = False
    """The parameter is stored the other way round, so lora_A and lora_B stand in each other's place."""

    @property
    def numbers(self) -> int:
        """In both."""
        return (math.prod(self.down.shape) + math.prod(self.up.shape)) // max(1, self.together)

    @property
    def nbytes(self) -> int:
        """Of both, in the file."""
        return (self.down.nbytes + self.up.nbytes) // max(1, self.together)


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """A directory that was found to hold an adapter of its base model."""

    path: Path
    file: Path
    """With the tensors."""
    parts: tuple[AdaptedPart, ...]
    fingerprint: str
    """sha256 (hex) of the tensors' bytes, and of what the configuration says of each: KV computed with one is never
    used with another."""
    by_torch: bool = False
    """Whether the whole of it has parts that the kernels of a CPU do not compute: of experts, or of their router."""

    @property
    def numbers(self) -> int:
        """In all its matrices."""
        return sum(part.numbers for part in self.parts)


def inspect_adapter(path: str | Path, config: ModelConfig) -> AdapterCheckpoint:
    """What the directory `path` holds, if that is an adapter of a model with this `config`. Reads all of its tensors,
    for the fingerprint. Raises CheckpointError that names the file, and the field or tensor."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(directory, "is not a directory")
    layers = range(config.n_layers)
    modules = [f"model.layers.{layer}.{name}" for layer in layers for name in layer_matrices(config, layer)]
    parameters = [f"model.layers.{layer}.{own.parameter}" for layer in layers for own in _parameters(config, layer)]
    settings = _Settings(directory / "adapter_config.json", modules, parameters)
    file = directory / "adapter_model.safetensors"
    pickled = directory / "adapter_model.bin"
    if pickled.exists() and not file.exists():
        raise CheckpointError(pickled, "is pickled, which may run code: save the tensors as adapter_model.safetensors")
    tensors = {}
    for name, info in declared_tensors((file,)).items():
        tensors[_known_name(file, name)] = info
    parts = tuple(_Parts(settings, file, tensors, config).all())
    for name in tensors:
        raise CheckpointError(file, f"tensor {_PREFIX}{name}: {_misfit(name, config)}")
    if not parts:
        raise settings.fail(f"target_modules {settings.targets!r} names no matrix of {config.architecture}")
    by_torch = any(part.expert is not None or part.stack == _ROUTER for part in parts)
    return AdapterCheckpoint(directory, file, parts, _fingerprint(file, parts), by_torch)


def adapter_of_rank(found: AdapterCheckpoint, checkpoint: Checkpoint, rank: Rank) -> AdapterCheckpoint:
    """What a rank has of an adapter of a whole model, see split, for the layers that it has: of a matrix that is cut by
    rows, all of lora_A and its rows of lora_B; of one that is cut by columns, its columns of lora_A and all of
    lora_B."""
    own, cuts = config_of_rank(checkpoint.config, rank), cuts_of(checkpoint, rank)
    experts = checkpoint.config.experts
    inner = None if experts is None else inner_of_rank(experts, rank)
    names, parts = layer_names(own), list[AdaptedPart]()
    for layer, adapted in groupby(found.parts, lambda part: part.layer):
        if rank.layers is not None and layer not in rank.layers:
            continue
        matrices = layer_matrices(own, layer)
        places = dict(_places(names, matrices))
        held = set() if own.experts is None else {one.number for one in own.experts.own(layer)}
        for part in adapted:
            if part.expert is not None:
                if part.expert in held and experts is not None and inner is not None:
                    parts.append(_of_expert(part, experts.intermediate_size, inner))
                continue
            (_, first), (columns, _) = places[part.matrix], matrices[part.matrix]
            cut = cuts.get(f"model.layers.{layer}.{part.matrix}.weight")
            parts.append(replace(part, first=first, columns=columns, cut=cut))
    return replace(found, parts=tuple(parts))


def _of_expert(part: AdaptedPart, size: int, own: range) -> AdaptedPart:
    """What a rank has of a part of one expert, of whose inner size it has `own`."""
    if part.stack.startswith("down."):
        return replace(part, cut=TensorCut(1, (own,)))
    gate_up = (own, range(size + own.start, size + own.stop))
    if part.columns > size:
        return replace(part, columns=2 * len(own), cut=TensorCut(0, gate_up))
    first = len(own) if part.first else 0
    return replace(part, first=first, columns=len(own), cut=TensorCut(0, (own,)))


class _Settings:
    """adapter_config.json, for a model that has linear modules and other parameters of these names."""

    def __init__(self, file: Path, modules: Sequence[str], parameters: Sequence[str]) -> None:
        self._names = [*modules, *parameters]
        self._read = read = Reader(file, read_object(file))
        self.fail = read.fail
        read.only("peft_type", None, "LORA")
        read.only("bias", "none", "none")
        for field, reason in _UNSUPPORTED.items():
            if value := read.values.get(field):
                raise read.fail(f"{field} {value!r}: {reason}")
        read.only("init_lora_weights", True, *_PLAIN_STARTS)
        self.targets = read.values.get("target_modules")
        self._parameters = self._named_parameters(parameters)
        self._targeted = self._matcher("target_modules", needed=not self._parameters)
        self._excluded = self._matcher("exclude_modules")
        self._rooted = read.flag("use_rslora", False)
        self._rank, self._alpha = read.integer("r"), read.number("lora_alpha")
        self._ranks = self._patterns("rank_pattern")
        self._alphas = self._patterns("alpha_pattern")
        layers = read.values.get("layers_to_transform")
        self._layers = [layers] if type(layers) is int else layers
        if self._layers is not None and not (
            isinstance(self._layers, list) and all(type(layer) is int for layer in self._layers)
        ):
            raise read.fail(f"layers_to_transform must be a number or numbers of layers, not {layers!r}")

    def targeted(self, module: str, layer: int) -> bool:
        """Whether a linear module of a layer is adapted."""
        if self._layers and layer not in self._layers:
            return False
        return self._targeted(module) and not self._excluded(module)

    def targeted_parameter(self, parameter: str) -> bool:
        """Whether a parameter that has no linear module of its own is adapted: by its end, in any layer."""
        return f".{parameter}".endswith(self._parameters)

    def _named_parameters(self, known: Sequence[str]) -> tuple[str, ...]:
        """The ends of the names that target_parameters has, of those that are known."""
        value = self._read.values.get("target_parameters") or []
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise self.fail(f"target_parameters must be a list of names, not {value!r}")
        ends = tuple(f".{each}" for each in value)
        for end in ends:
            if not any(f".{name}".endswith(end) for name in known):
                raise self.fail(f"target_parameters {end[1:]!r}: only parameters of experts and routers are supported")
        return ends

    def of(self, module: str) -> tuple[int, float]:
        """(rank, scale) of a module."""
        rank, alpha = _by_pattern(self._ranks, module, self._rank), _by_pattern(self._alphas, module, self._alpha)
        if not (type(rank) is int and 0 < rank <= MAX_RANK):
            raise self.fail(f"the rank of {module} must be from 1 to {MAX_RANK}, not {rank!r}")
        return rank, alpha / (math.sqrt(rank) if self._rooted else rank)

    def _matcher(self, field: str, *, needed: bool = False) -> Callable[[str], bool]:
        """Which modules a field names: by their ends in a list, by a regular expression, or all."""
        value = self._read.values.get(field)
        if value is None and not needed:
            return lambda module: False
        if value == ALL_LINEAR:
            return lambda module: True
        if isinstance(value, str):
            [named] = self._matching(field, [value], [value])
            return named.__contains__
        if isinstance(value, list) and all(isinstance(each, str) and each for each in value):
            ends = tuple(f".{each}" for each in value)
            return lambda module: f".{module}".endswith(ends)
        raise self.fail(f"{field} must be a list of names, a regular expression or {ALL_LINEAR!r}, not {value!r}")

    def _patterns(self, field: str) -> list[tuple[frozenset[str], Any]]:
        """Names of modules, and the number of each."""
        value = self._read.values.get(field) or {}
        if not isinstance(value, dict):
            raise self.fail(f"{field} must be an object from names to numbers, not {value!r}")
        for name, number in value.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
                raise self.fail(f"{field} must give {name!r} a positive number, not {number!r}")
        found = self._matching(field, [rf"(.*\.)?({name})" for name in value], [*value])
        return [*zip(found, value.values(), strict=True)]

    def _matching(self, field: str, expressions: list[str], given: list[str]) -> list[frozenset[str]]:
        """The model's matrices that each of some regular expressions names; the file has them as `given`."""
        try:
            return matching(expressions, self._names)
        except ExpressionRefused as error:
            raise self.fail(f"{field} {given[error.number]!r} {error}") from None


def _by_pattern(patterns: list[tuple[frozenset[str], Any]], module: str, usual: Any) -> Any:
    """The number of the first pattern that names the module."""
    return next((number for named, number in patterns if module in named), usual)


def _known_name(file: Path, name: str) -> str:
    """A tensor's name as the base model's checkpoint would begin it. Raises CheckpointError."""
    if not name.startswith(_PREFIX):
        raise CheckpointError(file, f"tensor {name} does not begin with {_PREFIX}: it is not PEFT's")
    own = name.removeprefix(_PREFIX)
    for text in _TEXT_PARTS:
        if own.startswith(text):
            return f"model.{own.removeprefix(text)}"
    return own


class _Parameter(NamedTuple):
    """What no linear module of its own has in transformers since version 5."""

    module: str
    """In the layer, as PEFT knows it."""
    name: str
    stack: str
    columns: int
    inputs: int

    @property
    def parameter(self) -> str:
        """Its whole name in the layer."""
        return f"{self.module}.{self.name}"


def _parameters(config: ModelConfig, layer: int) -> Sequence[_Parameter]:
    """Those of a layer's experts, in the order in which PEFT puts what adapts them around their module, and the
    router's."""
    experts, hidden = config.experts, config.hidden_size
    if experts is None or not experts.layers[layer]:
        return ()
    names, inner = layer_names(config), experts.intermediate_size
    return (
        _Parameter(names.experts_module, "gate_up_proj", "gate_up", 2 * inner, hidden),
        _Parameter(names.experts_module, "down_proj", "down", hidden, inner),
        _Parameter(names.router_module, "weight", _ROUTER, experts.count, hidden),
    )


class _Parts:
    """What is added to each matrix that the settings name."""

    def __init__(self, settings: _Settings, file: Path, tensors: dict[str, TensorInfo], config: ModelConfig) -> None:
        """Its parts' tensors are taken out of `tensors`."""
        self._settings, self._file, self._tensors = settings, file, tensors
        self._config, self._names = config, layer_names(config)
        self._apart = any(_EXPERT.search(name) for name in tensors)
        """Experts have tensors of their own. Since version 5 of transformers they have no modules that target_modules
        could name, though it may."""

    def all(self) -> Iterator[AdaptedPart]:
        """Layer by layer."""
        for layer in range(self._config.n_layers):
            yield from self._modules(layer)
            yield from self._of_parameters(layer)

    def _modules(self, layer: int) -> Iterator[AdaptedPart]:
        matrices = layer_matrices(self._config, layer)
        places, experts = dict(_places(self._names, matrices)), dict(self._experts(layer))
        for name, (rows, inputs) in matrices.items():
            module = f"model.layers.{layer}.{name}"
            if not self._settings.targeted(module, layer) or (name in experts and not self._apart):
                continue
            if name == self._names.router and f"{module}.lora_A.weight" not in self._tensors:
                continue  # as those of experts
            expert, place = experts.get(name, (None, places.get(name)))
            if place is None:
                raise self._settings.fail(f"target_modules names {module}: {_REASON}")
            rank, scale = self._settings.of(module)
            stack, first = place
            yield AdaptedPart(
                layer=layer,
                matrix=name,
                stack=stack,
                first=first,
                columns=rows,
                rank=rank,
                scale=scale,
                down=self._take(f"{module}.lora_A.weight", (rank, inputs)),
                up=self._take(f"{module}.lora_B.weight", (rows, rank)),
                expert=expert,
            )

    def _experts(self, layer: int) -> Iterator[tuple[str, tuple[int, tuple[str, int]]]]:
        """(the expert, the stack and the first column there) of each matrix of an expert, by its name."""
        experts = self._config.experts
        if experts is None or not experts.layers[layer]:
            return
        for expert in range(experts.count):
            for place, name in enumerate(self._names.expert_gate_up):
                yield name.format(expert), (expert, (f"gate_up.{expert}", place * experts.intermediate_size))
            yield self._names.expert_down.format(expert), (expert, (f"down.{expert}", 0))

    def _of_parameters(self, layer: int) -> Iterator[AdaptedPart]:
        """Of several of one module PEFT has the first innermost."""
        prefix = f"model.layers.{layer}."
        every = _parameters(self._config, layer)
        named = [own for own in every if self._settings.targeted_parameter(f"{prefix}{own.parameter}")]
        for number, own in enumerate(named):
            around = sum(other.module == own.module for other in named[number + 1 :])
            module = ".".join((f"{prefix}{own.module}", *[_BASE] * around))
            rank, scale = self._settings.of(f"{prefix}{own.parameter}")
            yield from self._of_parameter(own, layer, module, rank=rank, scale=scale)

    def _of_parameter(
        self, own: _Parameter, layer: int, module: str, *, rank: int, scale: float
    ) -> Iterator[AdaptedPart]:
        experts, down, up = self._config.experts, f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        assert experts is not None
        count = 1 if own.stack == _ROUTER else experts.count
        shapes = (count * rank, own.inputs), (own.columns, count * rank)
        found = self._tensors.get(down)
        turned = self._names.all_gate_up is not None and found is not None and found.shape != shapes[0]
        if turned:
            shapes = (count * rank, own.columns), (own.inputs, count * rank)
        part = AdaptedPart(
            layer=layer,
            matrix=self._names.router,
            stack=_ROUTER,
            first=0,
            columns=own.columns,
            rank=rank,
            scale=scale,
            down=self._take(down, shapes[0]),
            up=self._take(up, shapes[1]),
        )
        if own.stack == _ROUTER:
            yield part
            return
        for expert in range(count):
            yield replace(
                part,
                matrix=own.parameter,
                stack=f"{own.stack}.{expert}",
                expert=expert,
                together=count,
                turned=turned,
            )

    def _take(self, name: str, shape: tuple[int, int]) -> TensorInfo:
        info = self._tensors.pop(name, None)
        if info is None:
            raise CheckpointError(self._file, f"tensor {_PREFIX}{name} is missing")
        if info.shape != shape:
            what = f"tensor {_PREFIX}{name} has shape {list(info.shape)}, the configurations make it {list(shape)}"
            raise CheckpointError(self._file, what)
        return info


_REASON = "an adapter of what latent keys and values are made by is not supported"


def _places(names: LayerNames, matrices: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, tuple[str, int]]]:
    """(the stack, the first column there) of each matrix that can be adapted, by its name."""
    stacks: dict[str, tuple[str, ...]] = {"qkv": names.qkv, "out": (names.out,)}
    if names.latent is not None:
        stacks["query"] = (names.latent.query,)
    if names.router in matrices:
        stacks[_ROUTER] = (names.router,)
    for gate_up, down in ((names.gate_up, names.down), (names.shared_gate_up, names.shared_down)):
        if down in matrices:
            stacks["gate_up"], stacks["down"] = gate_up, (down,)
    for stack, members in stacks.items():
        first = 0
        for name in members:
            if name in matrices:
                yield name, (stack, first)
                first += matrices[name][0]


def _misfit(name: str, config: ModelConfig) -> str:
    """Why a tensor is not used."""
    if "lora_embedding_" in name or name.startswith("model.embed_tokens."):
        return "adapted embeddings are not supported"
    if name.startswith("lm_head."):
        return "an adapted last matrix is not supported"
    found = _NAME.fullmatch(name)
    if found is None:
        return "is neither a lora_A nor a lora_B"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", found["module"])
    if layer is None or int(layer[1]) >= config.n_layers:
        return f"{config.architecture} has no such matrix"
    if layer[2].removesuffix(f".{_BASE}") in {own.module for own in _parameters(config, int(layer[1]))}:
        return "neither target_parameters nor target_modules names what this adapts"
    if layer[2] not in layer_matrices(config, int(layer[1])):
        return f"{config.architecture} has no such matrix"
    return "target_modules does not name this matrix"


def _fingerprint(file: Path, parts: tuple[AdaptedPart, ...]) -> str:
    digest = hashlib.sha256(b"penstock adapter v1")
    said = json.dumps([(part.layer, part.stack, part.first, part.rank, part.scale) for part in parts]).encode()
    digest.update(len(said).to_bytes(8, "little") + said)
    add_file(digest, file)
    return digest.hexdigest()
