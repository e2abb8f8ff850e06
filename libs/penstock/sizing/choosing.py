"""Which split serves a workload best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from penstock.checkpoint import ModelConfig
from penstock.engine.config import kv_token_bytes
from penstock.engine.kernels.groups import NOT_KEPT
from penstock.runtime.config import ConfigError
from penstock.sizing.devices import MOST_DEVICES, DeviceKind, PlannedSplit, Workload
from penstock.sizing.ranks import StageRank, alive_tokens, misfit, stage_ranks
from penstock.sizing.rates import DecodeRate, decode_rate
from penstock.sizing.slabs import Slab, parameters, slabs_of
from penstock.sizing.source import Described


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A split, and what it gives."""

    split: PlannedSplit
    workers: int
    """Each with a whole model, on all devices together."""
    ranks: tuple[StageRank, ...]
    """Of each stage."""
    context: int
    wanted: int
    """Streams, of all workers together."""
    alone: DecodeRate
    """Of one stream."""
    together: DecodeRate
    """Of all streams of a worker."""

    @property
    def streams(self) -> int:
        """Wanted of each worker."""
        return -(-self.wanted // self.workers)

    @property
    def held(self) -> int:
        """Of the streams that are wanted, those that fit."""
        return min(self.wanted, self.workers * self.most_streams)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits into a worker: each replica of attention has sequences of its own."""
        return min(rank.kv_tokens for rank in self.ranks) * self.split.replicas

    @property
    def most_streams(self) -> int:
        """Of `context` tokens, that fit into a worker."""
        return min(rank.kv_tokens for rank in self.ranks) // self.context * self.split.replicas

    @property
    def fits(self) -> bool:
        """Whether all streams do."""
        return self.held == self.wanted

    @property
    def tokens_per_s(self) -> float:
        """Of all workers, when they have the streams that are wanted."""
        return self.wanted / self.together.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A model, and the ways to serve it."""

    parameters: int
    """Of the decoder."""
    used: int
    """Of these, by one token."""
    kv_token: int
    """Bytes of one token's KV, on all ranks of a worker that repeats nothing."""
    kv_stream: int
    """Bytes of a stream's, of all its tokens, which are kept whole."""
    kv_alive: int
    """Of these, what its next token looks at, at most: less where layers have windows or chunks."""
    ways: tuple[Sized, ...]
    """The best first; never empty."""


def size(
    model: Described,
    devices: DeviceKind,
    work: Workload,
    *,
    tensor: int = 0,
    pipeline: int = 0,
    expert: int = 0,
) -> Sizing:
    """Every way to serve `model` on all of `devices`, the best first: the one that holds most of the streams, then the
    one that decodes them fastest, then the one with the fewest ranks to a worker. `tensor`, `pipeline` and `expert` are
    what is asked for, 0: anything. Raises ConfigError when no way is possible."""
    config, layers = model.config, range(model.config.n_layers)
    if work.context > config.max_positions:
        right = f"must be at most {config.max_positions}, the model's own limit"
        raise ConfigError("context", work.context, right)
    if work.dtype == "int4" and not model.keeps_int4:
        raise ConfigError("dtype", work.dtype, NOT_KEPT)
    if work.redundant_experts and config.experts is None:
        raise ConfigError("redundant_experts", work.redundant_experts, "must be 0: the model has no experts")
    slabs = slabs_of(config, model.forms, work.dtype)
    possible = _splits(config, slabs, devices, (tensor, pipeline, expert))
    splits = (_with_copies(config, split, work) for split in possible)
    numbers, used = parameters(config, slabs)
    return Sizing(
        parameters=numbers,
        used=used,
        kv_token=kv_token_bytes(work.kv_dtype, len(layers), config.kv),
        kv_stream=kv_token_bytes(work.kv_dtype, len(layers), config.kv) * work.context,
        kv_alive=kv_token_bytes(work.kv_dtype, alive_tokens(config, layers, work.context), config.kv),
        ways=tuple(sorted((_sized(model, slabs, split, devices, work) for split in splits), key=_worse)),
    )


def enough(
    model: Described,
    devices: DeviceKind,
    work: Workload,
    *,
    tensor: int = 0,
    pipeline: int = 0,
    expert: int = 0,
) -> Sized | None:
    """The best way on the fewest such devices that hold all streams: twice as many as `devices`, four times, ... None:
    none is found up to 64 times."""
    for times in (2, 4, 8, 16, 32, 64):
        if devices.gpus * times > MOST_DEVICES:
            break
        more = replace(devices, gpus=devices.gpus * times)
        best = size(model, more, work, tensor=tensor, pipeline=pipeline, expert=expert).ways[0]
        if best.fits:
            return best
    return None


def _worse(one: Sized) -> tuple[float, ...]:
    room = min(rank.room for rank in one.ranks)
    return (
        -one.held,
        -one.tokens_per_s if one.held else -room,
        one.split.ranks,
        one.split.pipeline,
        one.split.expert,
    )


def _splits(
    config: ModelConfig, slabs: Sequence[Slab], devices: DeviceKind, asked: tuple[int, int, int]
) -> Iterator[PlannedSplit]:
    """Raises ConfigError when there is none."""
    if all(asked):
        split = PlannedSplit(*asked)
        if devices.gpus % split.ranks:
            right = f"must be a multiple of the {split.ranks} ranks of tp {asked[0]}, pp {asked[1]}, ep {asked[2]}"
            raise ConfigError("gpus", devices.gpus, right)
        possible = [split]
    else:
        possible = list(_possible(config, devices, asked))
    reason, any_ = "", False
    for split in possible:
        if (why := misfit(config, slabs, split)) is None:
            any_ = True
            yield split
        elif not reason:
            reason = why
    if not any_:
        names = ", ".join(f"{name} {value}" for name, value in zip(("tp", "pp", "ep"), asked, strict=True) if value)
        right = reason or f"must be a multiple of the ranks of a worker, and within a host of {devices.host_gpus}"
        raise ConfigError("gpus", devices.gpus, f"cannot be divided by {names or 'this model'}: {right}")


def _possible(config: ModelConfig, devices: DeviceKind, asked: tuple[int, int, int]) -> Iterator[PlannedSplit]:
    """All whose ranks divide the devices, and whose layers are within a host unless that is asked for."""
    divisors = [count for count in range(1, devices.gpus + 1) if devices.gpus % count == 0]
    experts = divisors if config.experts is not None else [1]
    for tensor in [asked[0]] if asked[0] else divisors:
        for expert in [asked[2]] if asked[2] else experts:
            if max(tensor, expert) % min(tensor, expert):
                continue
            if max(tensor, expert) > devices.host_gpus and not (asked[0] or asked[2]):
                continue
            for pipeline in [asked[1]] if asked[1] else divisors:
                split = PlannedSplit(tensor, pipeline, expert)
                if devices.gpus % split.ranks == 0:
                    yield split


def _with_copies(config: ModelConfig, split: PlannedSplit, work: Workload) -> PlannedSplit:
    """The split with the copies of experts that its workers have."""
    if config.experts is None or split.expert == 1:
        return split
    count = config.experts.count
    return replace(split, copied=Fraction(min(work.redundant_experts, count - count // split.expert), count))


def _sized(model: Described, slabs: Sequence[Slab], split: PlannedSplit, devices: DeviceKind, work: Workload) -> Sized:
    workers = devices.gpus // split.ranks
    ranks = stage_ranks(model, slabs, split, devices, work)

    def rate(count: int) -> DecodeRate:
        return decode_rate(model.config, slabs, split, ranks, streams=count, devices=devices, work=work)

    return Sized(
        split=split,
        workers=workers,
        ranks=tuple(ranks),
        context=work.context,
        wanted=work.streams,
        alone=rate(1),
        together=rate(-(-work.streams // workers)),
    )
