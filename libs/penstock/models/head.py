"""A draft head to train: it guesses from what the target's layers say, after EAGLE-3 (Li et al., arXiv 2503.01840).

Row t holds the target's features of token t and the embedding of token t+1, and guesses token t+2. The features are
hidden states after a few layers, side by side, brought to the model's width by one matrix. When it goes on from its own
guess, the head's own state stands for features that are not there yet; training does the same for a few steps.
Parameters have the names of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .net import Mlp, Net, NetShape, Norm, rotary, rotate


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head, and after how many of the target's layers it takes its hidden states."""

    layers: tuple[int, ...]
    body: NetShape
    """Width, vocabulary and rotation are the target's; `layers` is 1."""
    draft_vocabulary: int


class HeadAttention(nn.Module):
    """Attention over the rows before, and over the steps that a row has gone on by itself."""

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head, shape.kv_heads * shape.head
        self.q_proj = nn.Linear(2 * shape.width, query, bias=False)
        self.k_proj = nn.Linear(2 * shape.width, key, bias=False)
        self.v_proj = nn.Linear(2 * shape.width, key, bias=False)
        self.o_proj = nn.Linear(query, shape.width, bias=False)

    def heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """(rows, 2 width) -> (heads, rows, head), shared keys repeated."""
        found = cast(Tensor, projection(x)).view(len(x), -1, self.shape.head).transpose(0, 1)
        return found.repeat_interleave(self.shape.heads // len(found), 0)


class MidLayer(nn.Module):
    """The head's one layer: attention reads the embedding beside the state, each behind a norm of its own."""

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.epsilon)
        self.hidden_norm = Norm(shape.width, shape.epsilon)
        self.post_attention_layernorm = Norm(shape.width, shape.epsilon)
        self.self_attn = HeadAttention(shape)
        self.mlp = Mlp(shape)


class HeadNet(nn.Module):
    """The head of one target. `t2d` says which of the target's tokens it can guess; `d2t` what is to be added to the
    number of a guess for the target's number."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: HeadShape, known: Tensor) -> None:
        """`known`: bool [vocabulary], of which `draft_vocabulary` are true."""
        super().__init__()
        self.shape = shape
        width = shape.body.width
        self.fc = nn.Linear(len(shape.layers) * width, width, bias=False)
        self.midlayer = MidLayer(shape.body)
        self.norm = Norm(width, shape.body.epsilon)
        self.lm_head = nn.Linear(width, shape.draft_vocabulary, bias=False)
        self.register_buffer("t2d", known)
        self.register_buffer("d2t", known.nonzero().flatten() - torch.arange(shape.draft_vocabulary))

    def forward(
        self, features: Tensor, embedded: Tensor, steps: int, reach: int, wanted: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """The states behind 1 to `steps` tokens: for each number and text, (rows, width).

        `features` (texts, rows, layers * width); `embedded` (texts, rows, width) are those of the tokens behind;
        `wanted` are the rows of each text whose states are. A row looks at the last `reach` rows, its own among them.
        Behind its own guesses it is told the real token.
        """
        states: list[list[Tensor]] = [[] for _ in range(steps)]
        fused = self.fc(features)
        for text, rows in enumerate(wanted):
            for step, state in enumerate(self._unroll(fused[text], embedded[text], steps, reach, rows)):
                states[step].append(state)
        return states

    def _unroll(self, fused: Tensor, embedded: Tensor, steps: int, reach: int, rows: Tensor) -> list[Tensor]:
        """Of one text: the states of the `rows` behind 1 to `steps` tokens."""
        layer, attention, body = self.midlayer, self.midlayer.self_attn, self.shape.body
        scale, count = body.head**-0.5, len(fused)
        row = torch.arange(count, device=fused.device)
        seen = (row <= rows[:, None]) & (row > rows[:, None] - reach)
        cosine, sine = rotary(body, 0, count + steps, fused.device)
        x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(fused)), -1)
        before = rotate(attention.heads(attention.k_proj, x), cosine[:count], sine[:count])
        passed = attention.heads(attention.v_proj, x)
        ahead = F.pad(embedded, (0, 0, 0, steps))
        state, x = fused[rows], x[rows]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states = []
        for step in range(steps):
            turn = cosine[rows + step], sine[rows + step]
            if step:
                x = torch.cat((layer.input_layernorm(ahead[rows + step]), layer.hidden_norm(state)), -1)
                keys.append(rotate(attention.heads(attention.k_proj, x), *turn))
                values.append(attention.heads(attention.v_proj, x))
            query = rotate(attention.heads(attention.q_proj, x), *turn)
            scores = (query @ before.mT * scale).masked_fill(~seen, float("-inf"))
            own = [(query * key).sum(-1, keepdim=True) * scale for key in keys]
            weights = torch.cat((scores, *own), -1).softmax(-1)
            mixed = weights[..., :count] @ passed
            for number, value in enumerate(values):
                mixed = mixed + weights[..., count + number, None] * value
            state = state + attention.o_proj(mixed.transpose(0, 1).flatten(1))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            states.append(state)
        return states

    def logits(self, state: Tensor) -> Tensor:
        """Float32 logits over the tokens that it can guess."""
        return cast(Tensor, self.lm_head(self.norm(state))).float()

    def guess(self, state: Tensor) -> Tensor:
        """The most probable token, as the target numbers it."""
        best = self.logits(state).argmax(-1)
        return best + self.d2t[best]


@torch.no_grad()
def initialise_head(head: HeadNet, target: Net, seed: int) -> None:
    """Begins as something that hands on the last of the features, with the target's own way from there to tokens."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    head.midlayer.self_attn.o_proj.weight.mul_(0.2)
    head.midlayer.mlp.down_proj.weight.mul_(0.2)
    width = head.shape.body.width
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -width:] += torch.eye(width)
    head.norm.weight.copy_(0.4 * target.model.norm.weight)  # less sure of what it doesn't know yet
    head.lm_head.weight.copy_(target.model.embed_tokens.weight[head.t2d])
