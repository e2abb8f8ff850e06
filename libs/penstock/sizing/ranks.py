"""What one rank of a split holds, and reads for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.checkpoint import EMBEDDING, KvForm, ModelConfig
from penstock.engine.config import kv_token_bytes
from penstock.sizing.devices import DeviceKind, PlannedSplit, Workload
from penstock.sizing.slabs import Owner, Slab
from penstock.sizing.source import Described
from penstock.sizing.stages import stages


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRank:
    """Each rank of one stage. All but the layers are bytes."""

    layers: range
    weights: int
    """`experts` and `pictures` included."""
    experts: int
    """Of routed experts."""
    pictures: int
    kv_token: int
    """Of one token's KV."""
    activations: int
    """At most, in a step."""
    room: int
    """Left for KV; negative: the rank needs more than it has."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits."""
        return max(0, self.room // self.kv_token)


def stage_ranks(
    model: Described, slabs: Sequence[Slab], split: PlannedSplit, devices: DeviceKind, work: Workload
) -> list[StageRank]:
    """The ranks of each stage. Layers are divided by the bytes of weights that a rank holds: in decoding, where a step
    takes as long as reading them, that is by time. The part for pictures is whole on each rank of the first stage."""
    config, found = model.config, []
    pictures = _in_memory(model, work.dtype)
    for own in stages(_costs(slabs, split, config.n_layers), split.pipeline):
        held = [slab for slab in slabs if _at(slab, config.n_layers) in own]
        first = pictures if own.start == 0 else 0
        weights = sum(slab.held(split) for slab in held) + first
        activations = activation_peak(config, split, work, last=own.stop == config.n_layers)
        found.append(
            StageRank(
                layers=own,
                weights=weights,
                experts=sum(slab.held(split) for slab in held if slab.owner is Owner.EXPERT),
                pictures=first,
                kv_token=kv_token_bytes(work.kv_dtype, len(own), rank_form(config.kv, split)),
                activations=activations,
                room=devices.gpu_memory - devices.reserve - activations - weights,
            )
        )
    return found


def rank_form(form: KvForm, split: PlannedSplit) -> KvForm:
    """What a layer keeps on one rank: the whole of a latent plane, of heads its own; a head that is on several ranks
    where there are fewer heads than ranks."""
    return form if form.planes == 1 else KvForm(form.planes, -(-form.heads // split.tensor), form.width)


def alive_tokens(config: ModelConfig, layers: range, context: int) -> int:
    """Tokens of a text of `context` that its next token looks at, of all these layers together, at most: layers with a
    window or chunks look at no more than those have."""
    return sum(min(context, config.windows[layer] or context) for layer in layers)


def activation_peak(config: ModelConfig, split: PlannedSplit, work: Workload, *, last: bool) -> int:
    """Bytes of what a step has in memory at a time, about: the rows of hidden state and their norm, and beside them
    what the widest of attention, feed-forward block and (in the `last` stage) output projection makes of them.
    Attention scores are not laid out."""
    size = 4 if work.dtype == "float32" else 2
    rows, hidden, heads = work.batch_tokens, config.hidden_size, config.n_heads // split.tensor
    widest = rows * (_attention_width(config, split) + hidden) * size
    if config.latent is not None:  # keys and values of all heads are made of a prompt's common vectors
        widest += work.context * heads * (config.head_dim + config.latent.value_dim) * size
    widest = max(widest, *_feed_forward_bytes(config, split, rows, size))
    if last:
        sampled = -(-work.streams // split.replicas)
        widest = max(widest, sampled * -(-config.vocab_size // split.tensor) * (size + 4))
    return 2 * rows * hidden * size + widest


def _attention_width(config: ModelConfig, split: PlannedSplit) -> int:
    """Numbers of a row: what is made of the hidden state, queries turned, and what the scores mix."""
    heads, form, latent = config.n_heads // split.tensor, rank_form(config.kv, split), config.latent
    kept = form.planes * form.heads * form.width
    if latent is None:
        return kept + 3 * heads * config.head_dim
    return kept + (latent.query_rank or 0) + heads * (config.head_dim + form.width + latent.rank + latent.value_dim)


def _feed_forward_bytes(config: ModelConfig, split: PlannedSplit, rows: int, size: int) -> list[int]:
    """Of a dense block and of one with experts, where there are any: gate and up, their product, and the sum."""
    hidden, experts = config.hidden_size, config.experts
    found = []
    if experts is None or not all(experts.layers):
        found.append(rows * (3 * config.intermediate_size // split.tensor + hidden) * size)
    if experts is not None:
        sent = -(-rows * split.replicas * experts.per_token // split.expert)
        inner = 3 * experts.intermediate_size // split.expert_parts
        shared = rows * 3 * experts.shared_size // split.tensor
        found.append((sent * (2 * hidden + inner) + shared) * size + rows * hidden * 4)
    return found


def misfit(config: ModelConfig, slabs: Sequence[Slab], split: PlannedSplit) -> str | None:
    """Why the model cannot be divided so: the field, its value and what would be right. None: it can."""
    tensor, heads, kept = split.tensor, config.n_heads, config.kv.heads
    if heads % tensor:
        return f"tp {tensor} must divide the {heads} attention heads"
    if config.kv.planes > 1 and kept % tensor and tensor % kept:
        return f"tp {tensor} must divide the {kept} KV heads, or be a multiple of them"
    if split.pipeline > config.n_layers:
        return f"pp {split.pipeline} must not be more than the {config.n_layers} layers"
    if split.expert > 1 and config.experts is None:
        return f"ep {split.expert} must be 1: the model has no experts"
    if config.experts is not None and config.experts.count % split.expert:
        return f"ep {split.expert} must divide the {config.experts.count} experts"
    for what, inner, name, ranks in _inner_sizes(config, split):
        if inner % ranks:
            return f"{name} {ranks} must divide the {inner} numbers inside {what}"
    return next((reason for slab in slabs if (reason := _cut_blocks(slab, split))), None)


def _inner_sizes(config: ModelConfig, split: PlannedSplit) -> list[tuple[str, int, str, int]]:
    """Of feed-forward blocks: what they are, their inner size, and into how many parts it is divided, and why."""
    experts, found = config.experts, []
    if experts is None or not all(experts.layers):
        found.append(("a dense block", config.intermediate_size, "tp", split.tensor))
    if experts is not None:
        found.append(("the shared expert", experts.shared_size, "tp", split.tensor))
        found.append(("an expert", experts.intermediate_size, "tp / ep", split.expert_parts))
    return found


def _cut_blocks(slab: Slab, split: PlannedSplit) -> str | None:
    """Whether numbers that have one scale would be on two ranks."""
    whole, part = (slab.rows, slab.columns), slab.part(split)
    for extent, own, piece in zip(whole, part, slab.form.grid, strict=True):
        if slab.form.quantised and own != extent and own % piece and piece < extent:
            name, ranks = _dividers(slab, split)
            return f"{name} {ranks} leaves {own} of {extent} numbers to a rank, and scales are for {piece} each"
    return None


def _dividers(slab: Slab, split: PlannedSplit) -> tuple[str, int]:
    return ("tp", split.tensor) if slab.owner is Owner.TENSOR else ("tp / ep", split.expert_parts)


def _at(slab: Slab, layers: int) -> int:
    """The layer whose stage holds it."""
    return min(max(slab.layer, 0), layers - 1)


def _costs(slabs: Sequence[Slab], split: PlannedSplit, layers: int) -> list[int]:
    costs = [0] * layers
    for slab in slabs:
        costs[_at(slab, layers)] += slab.held(split)
    return costs


def _in_memory(model: Described, dtype: str) -> int:
    """Bytes of the part for pictures, which is not rounded to 8 bits."""
    if dtype == "auto":
        return model.picture_bytes
    return model.picture_bytes * (32 if dtype == "float32" else 16) // model.forms[EMBEDDING].bits
