"""Reads and checks the directory of a draft head in the layout of published EAGLE-3 checkpoints, without torch.

A head has the matrix `fc` for the target's features, one decoder layer `midlayer` whose attention reads an embedding
and a state side by side, a last norm, and `lm_head` over some of the target's tokens. `d2t` says what is to be added to
the number of a guess for the target's number; `t2d`, which of the target's tokens can be guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.directory import Checkpoint
from penstock.checkpoint.errors import CheckpointError
from penstock.checkpoint.families import FAMILIES
from penstock.checkpoint.files import read_object
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.rope import Rope, parse_rotation
from penstock.checkpoint.tensors import DTYPE_BYTES, TABLE_BYTES, TensorInfo, declared_tensors, weight_files

HEAD_EMBEDDING = "embed_tokens.weight"
"""The head's own embedding; without it the target's is used."""
_ARCHITECTURES = ("LlamaForCausalLMEagle3",)


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """A directory that was found to hold a head for its target."""

    path: Path
    layers: tuple[int, ...]
    """After how many of the target's layers it takes hidden states."""
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    hidden_size: int
    """The target's."""
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    tensors: Mapping[str, TensorInfo]


def inspect_head(path: str | Path, target: Checkpoint) -> HeadCheckpoint:
    """What the directory `path` holds, if that is a head for `target`. Raises CheckpointError."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(directory, "is not a directory")
    file = directory / "config.json"
    read = Reader(file, read_object(file))
    names = read.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise read.fail(f"architectures {names!r} is no draft head; supported is {', '.join(_ARCHITECTURES)}")
    for key, usual in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        read.only(key, usual, usual)
    read.only("norm_before_residual", False, False, None)
    head = _parse(directory, read, target)
    _check(head)
    return head


def _parse(directory: Path, read: Reader, target: Checkpoint) -> HeadCheckpoint:
    model = target.config
    for key, own in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        if read.integer(key) != own:
            raise read.fail(f"{key} is {read.integer(key)}, that of the target {target.path} is {own}")
    if read.integer("target_hidden_size", model.hidden_size) != model.hidden_size:
        raise read.fail(f"target_hidden_size must be that of the target, {model.hidden_size}")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    head_dim = read.integer("head_dim", max(1, model.hidden_size // heads))
    if heads % kv_heads:
        raise read.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise read.fail(f"head_dim {head_dim} is odd; the rotation needs pairs")
    draft_vocab = read.integer("draft_vocab_size", model.vocab_size)
    if draft_vocab > model.vocab_size:
        raise read.fail(f"draft_vocab_size {draft_vocab} is more than the target has, {model.vocab_size}")
    return HeadCheckpoint(
        path=directory,
        layers=_layers(read, model.n_layers),
        vocab_size=model.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=model.hidden_size,
        intermediate_size=read.integer("intermediate_size"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=read.number("rms_norm_eps", 1e-6),
        rope=parse_rotation(read, FAMILIES["LlamaForCausalLM"], head_dim, None).rope,
        tensors=_declared(directory),
    )


def _layers(read: Reader, count: int) -> tuple[int, ...]:
    """config.json numbers the layers whose outputs are taken, from 0. Without that they are those of the paper's heads:
    the third, one in the middle, and the last but three."""
    settings = read.values.get("eagle_config") or {}
    ids = settings.get("eagle_aux_hidden_state_layer_ids") if isinstance(settings, dict) else None
    if ids is None:
        ids = [1, count // 2 - 1, count - 4]
    if not isinstance(ids, list) or not all(type(each) is int for each in ids) or ids != sorted(set(ids)) or not ids:
        raise read.fail(f"eagle_aux_hidden_state_layer_ids must be growing numbers of layers, not {ids!r}")
    if ids[0] < 0 or ids[-1] > count - 2:
        raise read.fail(f"layers {ids} of the target are wanted, which has {count}; the last one's output is not kept")
    return tuple(each + 1 for each in ids)


def _declared(directory: Path) -> dict[str, TensorInfo]:
    pickled = directory / "pytorch_model.bin"
    if pickled.exists() and not (directory / "model.safetensors").exists():
        raise CheckpointError(pickled, "is pickled, which may run code: save the tensors as model.safetensors")
    return declared_tensors(weight_files(directory), {**DTYPE_BYTES, **TABLE_BYTES})


def _check(head: HeadCheckpoint) -> None:
    """Raises CheckpointError unless the tensors are what config.json describes."""
    needed = dict(_weights(head))
    if head.draft_vocab_size < head.vocab_size or "d2t" in head.tensors:
        needed["d2t"] = (head.draft_vocab_size,)
    if "t2d" in head.tensors:
        needed["t2d"] = (head.vocab_size,)
    if HEAD_EMBEDDING in head.tensors:
        needed[HEAD_EMBEDDING] = (head.vocab_size, head.hidden_size)
    for name, shape in needed.items():
        info = head.tensors.get(name)
        if info is None:
            raise CheckpointError(head.path, f"tensor {name} of a draft head is missing")
        if info.shape != shape:
            raise CheckpointError(
                info.file, f"tensor {name} has shape {list(info.shape)}, config.json makes it {list(shape)}"
            )
        table = {"d2t": "I64", "t2d": "BOOL"}.get(name)
        if (info.dtype != table) if table else (info.dtype in TABLE_BYTES):
            raise CheckpointError(info.file, f"tensor {name} is {info.dtype}, not {table or ', '.join(DTYPE_BYTES)}")
    for name in head.tensors.keys() - needed.keys():
        raise CheckpointError(head.tensors[name].file, f"tensor {name} is not part of a draft head")


def _weights(head: HeadCheckpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = head.hidden_size, head.intermediate_size
    query, key = head.n_heads * head.head_dim, head.n_kv_heads * head.head_dim
    yield "fc.weight", (hidden, len(head.layers) * hidden)
    yield "midlayer.self_attn.q_proj.weight", (query, 2 * hidden)
    yield "midlayer.self_attn.k_proj.weight", (key, 2 * hidden)
    yield "midlayer.self_attn.v_proj.weight", (key, 2 * hidden)
    yield "midlayer.self_attn.o_proj.weight", (hidden, query)
    yield "midlayer.mlp.gate_proj.weight", (inner, hidden)
    yield "midlayer.mlp.up_proj.weight", (inner, hidden)
    yield "midlayer.mlp.down_proj.weight", (hidden, inner)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield f"midlayer.{name}.weight", (hidden,)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (head.draft_vocab_size, hidden)
