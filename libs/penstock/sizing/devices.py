"""What a model is to run on, and how."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from penstock.engine.config import DTYPES, KV_DTYPES
from penstock.runtime.config import ConfigError, at_least, more_than, one_of

MOST_DEVICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Equal devices. ConfigError names the field."""

    gpus: int = 1
    """How many there are."""
    gpu_memory: int
    """Bytes of one."""
    bandwidth: int
    """Bytes that one reads from its memory in a second."""
    reserve: int
    """Bytes of one that neither weights, KV nor activations get: the driver's context, buffers of collectives, captured
    steps, what is lost between allocations."""
    host_gpus: int
    """So many are in one host: a layer is divided only among those."""
    sync_us: float
    """Microseconds of a collective, or of handing over to the next stage, beyond what memory takes."""

    def __post_init__(self) -> None:
        at_least(self, 1, "gpus", "gpu_memory", "bandwidth", "host_gpus")
        at_least(self, 0, "reserve", "sync_us")
        if self.gpus > MOST_DEVICES:
            raise ConfigError("gpus", self.gpus, f"must be {MOST_DEVICES} or less")
        if self.reserve >= self.gpu_memory:
            raise ConfigError("reserve", self.reserve, f"must be less than gpu_memory, {self.gpu_memory}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be served. ConfigError names the field."""

    context: int
    """Tokens of each stream, prompt and output together."""
    streams: int
    """Sequences that are decoded at a time."""
    batch_tokens: int
    """Most tokens of one step, as --max-batch-tokens of workers."""
    dtype: str = "auto"
    """Of weights; auto: as the checkpoint has them, quantised matrices too."""
    kv_dtype: str = "bfloat16"
    redundant_experts: int = 0
    """As --redundant-experts of workers, for splits of which these have some: with expert ranks."""

    def __post_init__(self) -> None:
        more_than(self, 0, "context", "streams", "batch_tokens")
        at_least(self, 0, "redundant_experts")
        one_of(self, DTYPES, "dtype")
        one_of(self, KV_DTYPES, "kv_dtype")


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """One model over the ranks of a worker.

    Its layers are divided into `pipeline` stages. The `group` of ranks of a stage divides attention, dense blocks and
    the vocabulary among `tensor` of them, by heads, inner numbers and rows (Megatron-LM: Shoeybi et al., 2019), and
    experts among `expert` of them. Where `expert` is the smaller, the ranks that have the same experts divide each
    of these; where `tensor` is, there are several `replicas` of attention, each with sequences of its own.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    copied: Fraction = Fraction(0)
    """The share of a layer's experts of which each rank has copies beside its own."""

    def __post_init__(self) -> None:
        at_least(self, 1, "tensor", "pipeline", "expert")
        most, least = max(self.tensor, self.expert), min(self.tensor, self.expert)
        if most % least:
            raise ConfigError("ep", self.expert, f"must be a multiple or a divisor of tp, {self.tensor}")

    @property
    def group(self) -> int:
        """Ranks of a stage."""
        return max(self.tensor, self.expert)

    @property
    def ranks(self) -> int:
        """Of a worker."""
        return self.pipeline * self.group

    @property
    def replicas(self) -> int:
        """Of attention, in a stage."""
        return self.group // self.tensor

    @property
    def expert_parts(self) -> int:
        """Ranks among which each expert is divided."""
        return self.group // self.expert
