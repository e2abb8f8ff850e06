"""A model directory, inspected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.families import FAMILIES
from penstock.checkpoint.files import Json, read_object, read_object_if_there
from penstock.checkpoint.model_config import ModelConfig, parse_config, text_values
from penstock.checkpoint.pictures.form import PicturePart
from penstock.checkpoint.pictures.part import picture_part
from penstock.checkpoint.quantised import Quantisation, folded, parse_quantisation
from penstock.checkpoint.tensors import (
    DTYPE_BYTES,
    EMBEDDING,
    HEAD,
    QUANTISED_BYTES,
    TensorInfo,
    check_tensors,
    declared_tensors,
    decoder_tensors,
    text_tensors,
    weight_files,
)
from penstock.checkpoint.tokenizer_file import tokenizer_file

ExpertCopies = tuple[tuple[tuple[int, ...], ...], ...]
"""By layer of a model and by group of ranks: experts of other groups of which that one has copies."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One of several processes that compute layers of a model together."""

    number: int
    ranks: int
    expert_groups: int = 1
    """Experts are divided among so many groups of ranks; the ranks of a group divide each."""
    layers: range | None = None
    """Those that they compute; None: all."""
    copies: ExpertCopies | None = None
    """None: each expert is in one group."""

    @property
    def beside(self) -> int:
        """Ranks that have the same experts."""
        return self.ranks // self.expert_groups


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one of several processes has of a model, see split."""

    rank: Rank
    pieces: Mapping[str, tuple[TensorInfo, ...]]
    """What it has of each tensor that is cut, put one behind the other along the axis that was cut."""
    fingerprint: str
    """Of the whole model."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that was found to be complete and consistent: the engine can load it."""

    path: Path
    config: ModelConfig
    weight_files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    """By the name that the decoder knows them by."""
    tokenizer: Path
    chat_template: Path | None
    """chat_template.jinja, or the tokenizer_config.json that holds a `chat_template`; None when there is neither."""
    eos_token_ids: frozenset[int]
    """From generation_config.json, else config.json."""
    bos_token_id: int | None
    quantisation: Quantisation | None = None
    part: RankPart | None = None
    """None: the whole model."""
    pictures: PicturePart | None = None
    """None: it is served without pictures."""
    no_pictures: str = ""
    """Why."""

    @property
    def dtype(self) -> str:
        """Of the embedding, as safetensors calls it: F32, BF16 or F16."""
        return self.tensors[EMBEDDING].dtype

    @property
    def stores_int4(self) -> bool:
        """Whether matrices of the decoder are stored in 4 bits; config.json may say so of none that is there."""
        return any(info.dtype == "I4" for info in self.tensors.values())

    @property
    def adds(self) -> bool:
        """Whether this process adds the biases of what is summed over all."""
        return self.part is None or self.part.rank.number == 0

    @property
    def layers(self) -> range:
        """Those that this process has."""
        own = None if self.part is None else self.part.rank.layers
        return range(self.config.n_layers) if own is None else own

    @property
    def ends(self) -> bool:
        """Whether this process has the last layer, and so the last matrix."""
        return self.layers.stop == self.config.n_layers

    def pieces(self, name: str) -> tuple[TensorInfo, ...]:
        """What this process has of a tensor."""
        own = None if self.part is None else self.part.pieces.get(name)
        return (self.tensors[name],) if own is None else own

    @property
    def parameters(self) -> int:
        """Elements in all weights."""
        total = 0
        for info in self.tensors.values():
            count = 1
            for extent in info.shape:
                count *= extent
            total += count
        return total


def inspect(path: str | Path, context: int | None = None) -> Checkpoint:
    """What the directory `path` holds.

    `context` is the longest text that will be served, in tokens. It matters to models that have one rotation for short
    and another for long contexts (longrope): without it they get the one for short contexts.

    Reads the small JSON files and the headers of the weights; every declared tensor is checked against the size
    of its file and against the architecture. Raises CheckpointError.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(directory, "is not a directory")
    config_file = directory / "config.json"
    values = text_values(config_file, read_object(config_file))
    config = parse_config(config_file, values, context)
    quantisation = parse_quantisation(config_file, values)
    files = weight_files(directory)
    tensors = declared_tensors(files, {**DTYPE_BYTES, **QUANTISED_BYTES} if quantisation else DTYPE_BYTES)
    pictures: PicturePart | str = "this is a model of texts"
    if FAMILIES[config.architecture].text_part:
        pictures = picture_part(config_file, values, tensors, config.hidden_size)
        tensors = text_tensors(tensors)
    if quantisation is not None:
        tensors = folded(tensors, quantisation)
    if config.tied and HEAD in tensors:  # a head that is there counts, whatever config.json says: it may differ
        config = replace(config, tied=False)
    tensors = decoder_tensors(tensors, config)
    check_tensors(directory, config, tensors)
    generation = directory / "generation_config.json"
    generation_values = read_object_if_there(generation)
    eos = _token_ids(generation, generation_values, "eos_token_id", config.vocab_size)
    bos = _token_ids(config_file, values, "bos_token_id", config.vocab_size)
    return Checkpoint(
        path=directory,
        config=config,
        weight_files=files,
        tensors=tensors,
        tokenizer=_tokenizer(directory, config.vocab_size),
        chat_template=_chat_template(directory),
        eos_token_ids=eos or _token_ids(config_file, values, "eos_token_id", config.vocab_size),
        bos_token_id=min(bos, default=None),
        quantisation=quantisation,
        pictures=None if isinstance(pictures, str) else pictures,
        no_pictures=pictures if isinstance(pictures, str) else "",
    )


def _token_ids(file: Path, values: Json, key: str, vocab_size: int) -> frozenset[int]:
    """One id, a list of ids or nothing; ids outside the vocabulary are refused."""
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(file, f"{key} {token!r} is not a token id below vocab_size {vocab_size}")
    return frozenset(ids)


def _tokenizer(directory: Path, vocab_size: int) -> Path:
    file = tokenizer_file(directory)
    model = read_object(file).get("model")
    if not isinstance(model, dict):
        raise CheckpointError(file, "has no model: this is not a tokenizer")
    largest = _largest_id(file, model.get("vocab"))
    if largest >= vocab_size:
        reason = f"uses token id {largest}, but vocab_size is {vocab_size}: is it another model's tokenizer?"
        raise CheckpointError(file, reason)
    return file


def _largest_id(file: Path, vocab: object) -> int:
    if isinstance(vocab, list):  # Unigram: the id is the place in the list
        return len(vocab) - 1
    if not isinstance(vocab, dict) or not all(type(token) is int for token in vocab.values()):
        raise CheckpointError(file, "has no vocabulary")
    return max(vocab.values(), default=-1)


def _chat_template(directory: Path) -> Path | None:
    template, settings = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if template.exists():
        return template
    return settings if read_object_if_there(settings).get("chat_template") else None
