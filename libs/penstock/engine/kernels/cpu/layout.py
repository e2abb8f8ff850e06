"""What Python and the C++ files agree on: the numbers of kinds, the structures, the functions.

This is the only definition. `header` makes layout.h from it when the library is built, with checks of every size and
offset; and the library reports by `VERSION` with which layout it was built. So neither side can change alone: the
library would not compile, or would not be loaded.

Comments say what a field holds; a pointer is named by the C++ type to which it points.
"""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from typing import Any


class Kind(IntEnum):
    """How numbers are kept."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # with scales
    LOSSLESS = 3  # packed matrices only: bfloat16 in 12 bits, see lossless.py
    FLOAT16 = 4  # stored matrices only
    INT4 = 5  # packed matrices only: with a scale for each group, see pack.py

    @classmethod
    def of(cls, name: object) -> Kind:
        """The kind that is named `float32`, `torch.float32`, `lossless`..."""
        return cls[str(name).removeprefix("torch.").upper()]


def pointer(to: str) -> type[c_void_p]:
    """The type of a pointer to the C++ type `to`."""
    return type(f"PointerTo {to}", (c_void_p,), {"to": to})


BYTES = pointer("const void")
ROOM = pointer("void")
FLOATS = pointer("const float")
FLOAT_ROOM = pointer("float")
INTS = pointer("const int32_t")


class LinearArgs(Structure):
    """`Linear` in C++: a packed matrix with its bias. See pack.py and lossless.py for the order of its numbers."""

    _fields_ = (
        ("kind", c_int32),
        ("inputs", c_int32),  # even
        ("outputs", c_int32),  # a multiple of 16; columns beyond the model's own are zero
        ("data", BYTES),
        ("scale", FLOATS),  # [outputs], of INT8
        ("bias", FLOATS),  # [outputs] or null
        ("start", pointer("const int64_t")),  # [outputs / 16], of LOSSLESS: where each panel begins in `data`
        ("parts", pointer("const uint8_t")),  # [2, 16], of LOSSLESS: upper and lower bits of the palette's exponents
    )


class ExpertPlaceArgs(Structure):
    """`ExpertPlace` in C++: where a process has an expert, and for which rows: those at positions that leave `turn`
    when they are divided by `copies`."""

    _fields_ = (
        ("number", c_int32),  # in `gate_ups` and `downs`; -1: others have it
        ("turn", c_int32),
        ("copies", c_int32),
    )


class LayerArgs(Structure):
    """`Layer` in C++."""

    _fields_ = (
        ("input_norm", FLOATS),  # [hidden]
        ("qk_norm", FLOATS),  # [heads + kv_heads, head_dim] or null
        ("mlp_norm", FLOATS),  # [hidden]
        ("qkv", LinearArgs),
        ("output", LinearArgs),
        # of the block that all rows go through: all columns of gate, then those of up; no inputs where there is none
        ("gate_up", LinearArgs),
        ("down", LinearArgs),
        ("router", FLOATS),  # [experts, up to a multiple of 4, hidden], zeros behind the last; null: there are none
        ("correction", FLOATS),  # [experts] what counts in a choice, and not in the weight; or null
        ("places", pointer("const ExpertPlace")),  # [experts]
        ("gate_ups", pointer("const Linear")),  # of those that this process has
        ("downs", pointer("const Linear")),  # likewise
        ("window", c_int32),  # tokens that a row looks at, itself included, or those of a chunk; 0: all
        ("unturned", c_int32),  # attention turns nothing by position
        # Of latent attention, see LatentWeights:
        ("query", LinearArgs),  # what makes queries of a vector that `qkv` makes; no inputs: `qkv` makes queries
        ("query_norm", FLOATS),  # [query_rank]
        ("latent_norm", FLOATS),  # [rank]
        ("absorb", pointer("const Linear")),  # [heads] of plain_dim inputs and rank columns
        ("release", pointer("const Linear")),  # [heads] of rank inputs and value_dim columns
    )


class RanksArgs(Structure):
    """`Ranks` in C++: the processes that compute a model together, see meeting.h."""

    _fields_ = (
        ("memory", ROOM),  # shared, zeros at first
        ("room", c_int64),  # floats in a place
        ("turn", c_uint64),  # the number of the last meeting
        ("rank", c_int32),  # of this process
        ("ranks", c_int32),
    )


class ModelArgs(Structure):
    """`Model` in C++."""

    _fields_ = (
        ("layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),  # with latent attention so many parts of the heads, each of which looks by itself
        ("head_dim", c_int32),  # what a head looks at: with latent attention rank + turned_dim
        ("rank", c_int32),  # of the vectors that latent attention keeps; 0: keys and values are kept
        ("query_rank", c_int32),  # of the vectors from which its queries are made; 0: from the hidden state
        ("plain_dim", c_int32),  # of a head's query, before what turns
        ("turned_dim", c_int32),
        ("value_dim", c_int32),  # of a head's value
        ("latent_eps", c_float),  # of the norms of these vectors
        ("intermediate", c_int32),  # most of a block that all rows go through
        ("experts", c_int32),  # in each layer that has some
        ("expert_rows", pointer("int64_t")),  # [layers, experts]: rows that have chosen each so far
        ("per_token", c_int32),  # experts that a row uses
        ("normalised", c_int32),  # the weights of a row's experts are made to sum to 1
        ("expert_intermediate", c_int32),
        ("sigmoid", c_int32),  # their weights are sigmoids of the scores, and not a softmax
        ("groups", c_int32),  # of experts, as many in each, ...
        ("groups_used", c_int32),  # ... among which a row chooses: the ones whose two best are best together
        ("scaling", c_float),  # the factor of weights
        ("weighs_inputs", c_int32),  # weights multiply what goes into an expert, not what comes out
        ("eps", c_float),
        ("scale", c_float),  # the factor of products of queries and keys
        ("kv_kind", c_int32),  # FLOAT32, BFLOAT16, or INT8: see int8_kv.py
        ("block_size", c_int32),  # tokens of a page
        ("chunked", c_int32),  # windows do not slide: they are chunks of the text, and a row looks at its own
        ("interleaved", c_int32),  # neighbouring dimensions turn together, not those of the two halves
        ("key_norm", c_int32),  # queries and keys are normalised when they have turned
        ("warm_tokens", c_int32),  # where nothing turns, queries grow every so many tokens; 0: they do not
        ("warm_strength", c_float),  # see Temperature
        ("vocab", c_int32),  # how many columns of the head are computed
        ("cosine", FLOATS),  # [positions, head_dim or turned_dim], see layers/rope.py
        ("sine", FLOATS),  # likewise, with the signs of those reversed that are first of a pair
        ("norm", FLOATS),  # [hidden]
        ("layer", pointer("const Layer")),  # [layers]
        ("head", LinearArgs),  # where the last layers are others', any matrix: steps give no logits
        ("table", BYTES),  # [vocab, hidden], the embeddings of `ids`; null: a step brings them in `x`
        ("table_kind", c_int32),  # FLOAT32 or BFLOAT16
        # [pages, page_layers, 2, block_size, row_heads, head_dim], or 1 where keys and values are one; INT8: with
        # row_heads scales after each token
        ("memory", ROOM),
        ("page_layers", c_int32),  # layers of a page, ...
        ("first_layer", c_int32),  # ... of which this model has `layers` from here on
        ("row_heads", c_int32),  # KV heads of a token in the memory, ...
        ("first_head", c_int32),  # ... of which this model has `kv_heads` from here on
        ("ranks", pointer("Ranks")),  # who computes the rest of the model; null: nobody
    )


class LegalArgs(Structure):
    """`Legal` in C++: what grammars allow in a step. Another thread may still be writing the bits when it begins."""

    _fields_ = (
        ("bits", pointer("const uint32_t")),  # [rows, words], one for each token, the lowest of the first word first
        ("words", c_int32),
        ("row", INTS),  # [samples] the row of each; -1: everything is legal
        ("ready", INTS),  # not 0: the bits are written
    )


class AdapterPartArgs(Structure):
    """`AdapterPart` in C++: what an adapter adds to some columns of a product, see layers/adapters.py."""

    _fields_ = (
        ("down", BYTES),  # [rank, inputs]
        ("up", BYTES),  # [panels, rank, 16]
        ("rank", c_int32),  # a multiple of 4
        ("first", c_int32),  # panel
        ("panels", c_int32),
        ("at", c_int32),  # where its numbers are in the row of all parts of the product
    )


class AdapterArgs(Structure):
    """`Adapter` in C++: at most 3 parts for each product of a layer: qkv, output, gate_up, down and query."""

    _fields_ = (
        ("kind", c_int32),  # FLOAT32 or BFLOAT16
        ("part", pointer("const AdapterPart")),
        ("begin", INTS),  # [layers * 5 + 1] numbers of parts
    )


class StepArgs(Structure):
    """`Step` in C++: a few rows of some sequences. The rows of one sequence are neighbours and stand at consecutive
    positions."""

    _fields_ = (
        ("rows", c_int32),
        ("sequences", c_int32),
        ("samples", c_int32),
        ("first", INTS),  # [sequences + 1] row numbers
        ("position", INTS),  # [rows]
        ("turned", INTS),  # [rows] by which place in `cosine` and `sine` each is turned
        ("table", INTS),  # page numbers, one sequence's after the other's
        ("table_at", INTS),  # [sequences]
        ("sampled", INTS),  # [samples] row numbers
        ("ids", INTS),  # [rows] tokens
        ("x", FLOAT_ROOM),  # [rows, hidden]: embeddings, unless the model has a table; then what layers make of them
        ("logits", FLOAT_ROOM),  # [samples, vocab]; null: none are computed
        (
            "best",
            pointer("int32_t"),
        ),  # [samples] the most probable tokens, the first of several, -1 if none is finite; or null
        ("legal", pointer("const Legal")),  # where `best` looks for them; null: everywhere
        ("taps", INTS),  # [tap_count] after how many layers states are kept, growing; not the last of the model
        ("tap_count", c_int32),
        ("featured", INTS),  # [features] numbers of the rows whose states are kept
        ("features", c_int32),
        ("states", FLOAT_ROOM),  # [features, tap_count, hidden]
        ("between", ROOM),  # a function without arguments, to call after each layer; or null
        ("adapter", pointer("const Adapter *const")),  # [rows] that of each, or null; null: no row has one
        ("thin", c_int32),  # the most ranks that parts of one product have together
    )


STRUCTURES: tuple[type[Structure], ...] = (
    LinearArgs,
    ExpertPlaceArgs,
    LayerArgs,
    RanksArgs,
    ModelArgs,
    LegalArgs,
    AdapterPartArgs,
    AdapterArgs,
    StepArgs,
)

_TEAM, _CORPUS = pointer("Team"), pointer("Corpus")
_RANKS = pointer("Ranks")
_LINEAR, _MODEL, _STEP = pointer("const Linear"), pointer("const Model"), pointer("const Step")
_WORDS, _INDEX, _TEXTS = pointer("const uint16_t"), pointer("const uint8_t"), pointer("const Corpus")

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # The type of the result, then those of the arguments. The definitions in C++ say what the functions do.
    "layout": (c_uint64,),
    "open": (_TEAM, c_int32),
    "close": (None, _TEAM),
    "rounds": (c_int32, c_int32),
    "forward": (c_int32, _TEAM, _MODEL, _STEP),
    "attend": (None, _TEAM, _MODEL, _STEP, FLOATS, FLOAT_ROOM),
    "meet": (c_int32, _RANKS),
    "add": (c_int32, _RANKS, FLOAT_ROOM, c_int64),
    "linear": (None, _TEAM, _LINEAR, FLOATS, c_int32, FLOAT_ROOM),
    "unpack": (None, _TEAM, _LINEAR, c_int32, c_int32, FLOAT_ROOM),
    "count_exponents": (None, _WORDS, c_int64, pointer("int64_t")),
    "lossless_sizes": (None, _WORDS, c_int32, c_int32, _INDEX, pointer("int64_t")),
    "compress": (None, _WORDS, c_int32, c_int32, _INDEX, pointer("const int64_t"), pointer("uint8_t")),
    "pack": (None, BYTES, c_int64, c_int32, c_int32, c_int32, ROOM, FLOAT_ROOM, BYTES),
    "regroup": (None, BYTES, c_int64, c_int32, _WORDS, ROOM),
    "checksum": (None, BYTES, c_int64, c_int64, pointer("uint64_t")),
    "read": (c_double, BYTES, c_int64, c_int32, c_int32, pointer("uint64_t")),
    "draw": (
        None,
        FLOATS,
        c_int32,
        c_int32,
        FLOATS,
        INTS,
        pointer("const uint64_t"),
        pointer("const int32_t *const"),
        pointer("int32_t"),
    ),
    "corpus_open": (_CORPUS, c_int64),
    "corpus_close": (None, _CORPUS),
    "corpus_append": (None, _CORPUS, INTS, c_int64),
    "guess": (c_int32, _TEXTS, _TEXTS, _TEXTS, INTS, c_int32, INTS, c_int32, pointer("int32_t"), pointer("double")),
}

_PLAIN = {
    None: "void",
    c_int32: "int32_t",
    c_int64: "int64_t",
    c_uint64: "uint64_t",
    c_float: "float",
    c_double: "double",
}


def header() -> str:
    """The text of layout.h, with the version."""
    return f"{_declarations()}namespace penstock {{ constexpr uint64_t kLayout = {VERSION}ull; }}\n"


def _declarations() -> str:
    parts = ["#pragma once", "#include <cstddef>", "#include <cstdint>", "", "namespace penstock {"]
    parts += ["struct Team;", "struct Corpus;"]
    parts += ["enum Kind : int32_t {", *(f"  {kind.name} = {kind.value}," for kind in Kind), "};"]
    for structure in STRUCTURES:
        parts += _structure(structure)
    parts.append('extern "C" {')
    parts += [
        f"{_cpp(result)}penstock_{name}({', '.join(_cpp(each).strip() for each in arguments)});"
        for name, (result, *arguments) in FUNCTIONS.items()
    ]
    return "\n".join((*parts, "}", "}", ""))


def _structure(structure: type[Structure]) -> list[str]:
    """The definition of a structure, and checks that the compiler lays it out as ctypes does."""
    name = _name(structure)
    lines = [f"struct {name} {{", *(f"  {_cpp(kind)}{field};" for field, kind in _fields(structure)), "};"]
    checks = [f"sizeof({name}) == {ctypes.sizeof(structure)}"]
    checks += [f"offsetof({name}, {field}) == {getattr(structure, field).offset}" for field, _ in _fields(structure)]
    return lines + [f'static_assert({check}, "layout.py says otherwise");' for check in checks]


def _fields(structure: type[Structure]) -> list[tuple[str, Any]]:
    return [(field[0], field[1]) for field in structure._fields_]


def _name(structure: type[Structure]) -> str:
    return structure.__name__.removesuffix("Args")


def _cpp(kind: Any) -> str:
    """A type as C++ writes it before a name."""
    if kind in _PLAIN:
        return f"{_PLAIN[kind]} "
    return f"{_name(kind)} " if issubclass(kind, Structure) else f"{kind.to} *"


VERSION = int.from_bytes(hashlib.sha256(_declarations().encode()).digest()[:8], "little")
"""The answer of penstock_layout() in a library that was built with this layout."""


def declare(library: ctypes.CDLL) -> None:
    """Gives the library's functions their types."""
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, f"penstock_{name}")
        function.restype = c_void_p if result in (_TEAM, _CORPUS) else result
        function.argtypes = arguments
