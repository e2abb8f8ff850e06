"""How fast tokens come when nothing but memory and the way between ranks takes time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.checkpoint import ModelConfig
from penstock.engine.config import kv_token_bytes
from penstock.sizing.devices import DeviceKind, PlannedSplit, Workload
from penstock.sizing.ranks import StageRank, alive_tokens, rank_form
from penstock.sizing.slabs import Owner, Slab


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Of one worker, at most: computing, sampling and starting kernels are taken to cost nothing."""

    streams: int
    batch: int
    """Of these, those that a step computes at a time."""
    weights_read: int
    """Bytes of weights that a rank of the slowest stage reads in a step."""
    kv_read: int
    """Bytes of KV."""
    step_s: float
    """From one token of a stream to its next."""

    @property
    def tokens_per_s(self) -> float:
        """Of all streams together."""
        return self.streams / self.step_s


def decode_rate(
    config: ModelConfig,
    slabs: Sequence[Slab],
    split: PlannedSplit,
    ranks: Sequence[StageRank],
    *,
    streams: int,
    devices: DeviceKind,
    work: Workload,
) -> DecodeRate:
    """Of `streams` sequences of `work.context` tokens. They are in as many batches as there are stages, if there are
    enough of them; a batch goes through all stages, which work on different ones at a time."""
    batches = min(split.pipeline, streams)
    batch = -(-streams // batches)
    seconds, reads = [], []
    for rank in ranks:
        weights = weights_read(config, slabs, split, rank.layers, batch)
        kv = kv_read(config, split, rank.layers, batch, work)
        reads.append((weights, kv))
        seconds.append((weights + kv) / devices.bandwidth + _waits(config, split, rank.layers) * devices.sync_us / 1e6)
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return DecodeRate(streams, batch, *reads[slowest], max(sum(seconds), batches * seconds[slowest]))


def weights_read(config: ModelConfig, slabs: Sequence[Slab], split: PlannedSplit, layers: range, batch: int) -> int:
    """Bytes that a rank reads in a step of `batch` sequences: of the embedding their rows, of routed experts those that
    are chosen, each by chance and evenly over the ranks; of the rest everything."""
    total = 0.0
    for slab in slabs:
        at = min(slab.layer, config.n_layers - 1)
        if slab.layer == -1:
            total += batch * slab.form.nbytes(1, slab.columns) / split.group if layers.start == 0 else 0
        elif at not in layers:
            continue
        elif slab.owner is Owner.EXPERT:
            assert config.experts is not None
            used = chosen_share(config.experts.count, config.experts.per_token, batch)
            total += slab.count * used * slab.one_held(split) / split.expert
        else:
            total += slab.held(split)
    return round(total)


def chosen_share(experts: int, per_token: int, tokens: int) -> float:
    """The share of experts that `tokens` choose together, expected when each chooses `per_token` of them by chance."""
    return 1 - (1 - per_token / experts) ** tokens


def kv_read(config: ModelConfig, split: PlannedSplit, layers: range, batch: int, work: Workload) -> int:
    """Bytes that a rank reads in a step of `batch` sequences: of each what it looks at."""
    form = rank_form(config.kv, split)
    own = -(-batch // split.replicas)
    return own * kv_token_bytes(work.kv_dtype, alive_tokens(config, layers, work.context), form)


def _waits(config: ModelConfig, split: PlannedSplit, layers: range) -> int:
    """Collectives of a stage: two in a layer, and one to the next stage."""
    return (2 * len(layers) if split.group > 1 else 0) + (1 if layers.stop < config.n_layers else 0)
