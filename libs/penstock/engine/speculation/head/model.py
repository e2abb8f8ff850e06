"""The head's arithmetic. `penstock.models.head` is the same as a network to train, one text at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.checkpoint import HEAD_EMBEDDING, CheckpointError, HeadCheckpoint
from penstock.engine.layers.attention import attend
from penstock.engine.layers.feedforward import Dense, feed_forward
from penstock.engine.layers.linear import linear
from penstock.engine.layers.norm import rms_norm
from penstock.engine.layers.rope import rope_tables, rotate

ROOM = 512
"""Most rows that a text's context has; when it is full its older half goes."""


class HeadContext:
    """Keys and values of one text's rows: those of consecutive positions up to `end`."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._kept: Tensor | None = None

    @property
    def held(self) -> bool:
        """Whether it has memory."""
        return self._kept is not None

    def restart(self, position: int) -> None:
        """Forgets all rows; the next one stands there."""
        self.begin = self.end = position

    def cut(self, end: int) -> None:
        """Forgets the rows from position `end` on."""
        self.end = max(self.begin, min(self.end, end))

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends rows [rows, kv_heads, head_dim], fewer than a context has room for; returns all keys and all values
        that they may look at."""
        rows = len(keys)
        if self._kept is None:
            self._kept = keys.new_empty(2, ROOM, *keys.shape[1:])
        length = self.end - self.begin
        if length + rows > ROOM:
            left = min(length, ROOM // 2, ROOM - rows)
            self._kept[:, :left] = self._kept[:, length - left : length].clone()
            self.begin, length = self.end - left, left
        self._kept[0, length : length + rows] = keys
        self._kept[1, length : length + rows] = values
        self.end += rows
        whole = self._kept[:, : length + rows]
        return whole[0], whole[1]


@dataclass(slots=True)
class HeadRows:
    """Consecutive rows of one text, which stand behind its context."""

    context: HeadContext
    ids: Sequence[int]
    """Of each row, the token behind the one whose features, or state, it has."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """Matrices are [in, out]."""

    fc: Tensor
    input_norm: Tensor
    hidden_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    mlp: Dense
    norm: Tensor
    lm_head: Tensor


class HeadModel:
    """One head, in float32 on its target's device. One thread at a time."""

    def __init__(
        self, head: HeadCheckpoint, embed: Callable[[Tensor], Tensor], max_positions: int, device: torch.device
    ) -> None:
        """`embed` gives the target's embeddings: ids [N] -> [N, hidden]. Raises CheckpointError."""
        self.head = head
        stored = {name: _read(head, name, device) for name in head.tensors}
        self._weights = _weights(stored)
        own = stored.get(HEAD_EMBEDDING)
        self._embed = embed if own is None else lambda ids: own.index_select(0, ids)
        self._device = device
        self._eps = torch.tensor(head.rms_eps, dtype=torch.float32, device=device)
        tables = rope_tables(head.rope, head.head_dim, max_positions, torch.float32)
        self._cosine, self._sine = (table.to(device).unsqueeze(1) for table in tables)
        self.known = _known(head, stored)
        """[draft vocabulary]: the target's numbers of the tokens that it can guess."""

    def fuse(self, features: Tensor) -> Tensor:
        """[N, layers * hidden] -> states [N, hidden]."""
        return linear(features.float(), self._weights.fc)

    def forward(self, state: Tensor, texts: Sequence[HeadRows]) -> Tensor:
        """[N, hidden], the rows of the texts end to end -> the states behind them; adds them to the contexts."""
        weights, head = self._weights, self.head
        ids = torch.tensor([token for text in texts for token in text.ids], dtype=torch.int64, device=self._device)
        embedded = self._norm(self._embed(ids).float(), weights.input_norm)
        fused = linear(torch.cat((embedded, self._norm(state, weights.hidden_norm)), 1), weights.qkv)
        heads = fused.view(len(ids), -1, head.head_dim)
        positions = [place for text in texts for place in range(text.context.end, text.context.end + len(text.ids))]
        turn = torch.tensor(positions, dtype=torch.int64, device=self._device)
        turned = rotate(heads[:, : -head.n_kv_heads], self._cosine[turn], self._sine[turn])
        mixed, first = [], 0
        for text in texts:
            rows = slice(first, first + len(text.ids))
            mixed.append(self._attend(text.context, turned[rows], heads[rows, -head.n_kv_heads :]))
            first = rows.stop
        state = state + linear(torch.cat(mixed), weights.out)
        return state + feed_forward(self._norm(state, weights.mlp_norm), weights.mlp, "silu")

    def logits(self, state: Tensor) -> Tensor:
        """[S, hidden] -> float32 [S, draft vocabulary]."""
        return linear(self._norm(state, self._weights.norm), self._weights.lm_head)

    def spread(self, logits: Tensor) -> Tensor:
        """[S, draft vocabulary] -> [S, vocabulary], minus infinity for tokens that it can't guess."""
        whole = logits.new_full((len(logits), self.head.vocab_size), float("-inf"))
        whole[:, self.known] = logits
        return whole

    def _attend(self, context: HeadContext, turned: Tensor, values: Tensor) -> Tensor:
        """`turned`: queries and keys [rows, heads + kv_heads, head_dim] -> [rows, heads * head_dim]."""
        head, rows = self.head, len(turned)
        keys, values = context.add(turned[:, head.n_heads :], values)
        mask = None
        if 1 < rows < len(keys):
            mask = torch.full((rows, len(keys)), float("-inf"), device=self._device).triu_(len(keys) - rows + 1)
        return attend(
            turned[None, :, : head.n_heads],
            keys[None],
            values[None],
            mask,
            causal=1 < rows == len(keys),
            scale=head.head_dim**-0.5,
        )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)


def _read(head: HeadCheckpoint, name: str, device: torch.device) -> Tensor:
    info = head.tensors[name]
    try:
        with safe_open(info.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except Exception as error:
        raise CheckpointError(info.file, f"tensor {name} can't be read: {error}") from None
    return tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _weights(stored: dict[str, Tensor]) -> _Weights:
    layer = "midlayer."

    def matrix(*names: str) -> Tensor:
        return torch.cat([stored[f"{name}.weight"] for name in names]).t().contiguous()

    return _Weights(
        fc=matrix("fc"),
        input_norm=stored[f"{layer}input_layernorm.weight"],
        hidden_norm=stored[f"{layer}hidden_norm.weight"],
        qkv=matrix(*(f"{layer}self_attn.{name}_proj" for name in "qkv")),
        out=matrix(f"{layer}self_attn.o_proj"),
        mlp_norm=stored[f"{layer}post_attention_layernorm.weight"],
        mlp=Dense(matrix(f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"), None, matrix(f"{layer}mlp.down_proj"), None),
        norm=stored["norm.weight"],
        lm_head=matrix("lm_head"),
    )


def _known(head: HeadCheckpoint, stored: dict[str, Tensor]) -> Tensor:
    """Raises CheckpointError where the tables don't make sense, or contradict each other."""
    count = head.draft_vocab_size
    device = stored["lm_head.weight"].device
    known = torch.arange(count, device=device)
    if "d2t" in stored:
        known = known + stored["d2t"]
        sound = bool((known >= 0).all()) and bool((known < head.vocab_size).all()) and len(set(known.tolist())) == count
        if not sound:
            raise CheckpointError(head.tensors["d2t"].file, f"d2t names no {count} tokens of {head.vocab_size}")
    if "t2d" in stored:
        claimed = stored["t2d"].nonzero().flatten()
        if len(claimed) != count or not torch.equal(claimed, known.sort().values):
            raise CheckpointError(head.tensors["t2d"].file, "t2d and d2t name different tokens")
    return known
