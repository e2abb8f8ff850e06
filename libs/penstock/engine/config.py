"""How one engine is set up. Every setting is declared here once: workers and `penstock up` inherit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.checkpoint import KvForm
from penstock.runtime.config import ConfigError, Size, at_least, more_than, one_of, within

DTYPES = ("auto", "float32", "bfloat16", "int8", "int4", "float8")
KV_DTYPES = ("float32", "bfloat16", "int8")
WEIGHTS = ("auto", "plain", "lossless")
HEAD_PLACES = ("worker", "service")
_MOST_THREADS = 1024
_MOST_DRAFTS = 32
_MOST_RANKS = 64
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything but the model. Checked when made: ConfigError names the field."""

    dtype: str = "auto"
    """Type of weights and KV: auto, float32, bfloat16, int8, on a CPU int4, or on a CUDA device float8; with the last
    three KV is bfloat16. auto: that of the checkpoint's embedding, and bfloat16 for one in float16."""
    kv_dtype: str = ""
    """Type of keys and values: float32, bfloat16, or on a CPU int8 with a scale for each head and token. Empty: float32
    with weights in float32, else bfloat16. All workers need the same."""
    weights: str = "auto"
    """auto, plain, or lossless: on a CPU, bfloat16 weights take 12 bits each and give the same tokens. auto: lossless
    where the kernels are measured to be faster with them."""
    device: str = "cpu"
    """Where the model is computed: cpu, cuda, or cuda:0, cuda:1...; with `tp` and `pp` the first of as many CUDA
    devices as there are processes, one for each."""
    tp: int = 1
    """Processes of this host that compute the model together, each with a part of every layer (tensor parallel). It
    must divide the number of attention heads."""
    pp: int = 1
    """Stages among which the layers of the model are divided (pipeline parallel), each of `tp` processes here or, with
    a worker's `stage_hosts`, on another host. So many steps are computed at a time, of different requests."""
    ep: int = 1
    """Groups of the processes of a stage among which the experts of a model are divided, whole ones to each; the
    processes of a group divide each expert. It must divide their number, and that of the experts."""
    redundant_experts: int = 0
    """Most experts of each layer of which a group of `ep` has copies, so that busy ones are computed by several."""
    threads: int = 0
    """Threads that compute one step, in each rank; 0: one for each core of this process, fewer for a small model.
    `penstock up` divides the cores among its workers."""
    baton: str = "none"
    """Where workers of this host agree on turns on cores that they share: none (they take no turns), a directory in
    memory, or auto: /dev/shm/penstock-UID. On a CPU only."""
    packed_bytes: Size = 16 << 30
    """Disk space for packed weights in ~/.cache/penstock, which all workers of a host share; 0: each worker packs its
    own in memory."""
    max_model_len: int = 0
    """Most tokens of one text, prompt and output together; 0: the model's own limit, for longrope models their original
    context. All workers need the same."""
    kv_pool_tokens: int = 32768
    """Room for the KV of live sequences, in tokens, rounded up to whole blocks."""
    resident_share: float = 0.5
    """Share of that room, 0 to 1, in which blocks stay in host memory while no request uses them; they give way to
    requests. Each worker's memory grows that much beyond what its requests need at one time. Of one CUDA device all
    room is taken at the start, and blocks stay in all of it."""
    tenant_share: float = 1.0
    """Share of the blocks that no request uses, 0.01 to 1, beyond which a tenant's own leave first when room is needed;
    1: no bound. `penstock up` gives it to the store as well, for its tiers."""
    block_size: int = 16
    """Tokens in a block. All workers need the same."""
    max_batch_tokens: int = 512
    """Most tokens of one step: decode rows, drafts and chunks of prompts together."""
    itl_target_ms: float = 50.0
    """Target for the milliseconds between two tokens of a running stream while prompts are computed beside it; 0: none.
    Chunks of prompts are made short enough, but never shorter than 16 tokens or half the time of a decode step; one
    that ends within eight times the target is computed in one step."""
    yield_ms: float = 2.5
    """Most milliseconds of a step of lines of batches alone, and of others that yield: for so long a request that comes
    may have to wait for them. Such a step may take twice as long as the smallest in any case."""
    max_running: int = 64
    """Most sequences in one step."""
    max_waiting: int = 256
    """Most sequences that are being loaded or wait for their first step; further ones are refused."""
    draft_tokens: int = 16
    """Most drafts of each sequence that a decoding step verifies, whoever proposes them; 0: no drafts at all, not even
    those that a grammar forces."""
    draft_always: bool = False
    """Verify all drafts that there are, and wait for those of the draft service, whatever that costs: for tests."""
    draft_timeout_s: float = 0.05
    """Most seconds for which a step waits for the draft service."""
    lookup_tokens: Size = 1 << 21
    """Tokens of earlier prompts and answers in which a decode worker looks up what may come next, those of running
    requests apart; each takes 24 bytes of memory when it is there. 0: nothing is looked up."""
    draft_head: str = "none"
    """Directory of a draft head for the (first) model, in the layout of published EAGLE-3 checkpoints, which guesses in
    decode workers what comes next from what the model's layers say; or none."""
    draft_head_in: str = "worker"
    """Where the draft head guesses: in the decode worker, between its steps; or in the draft service, to which the
    worker tells what the model's layers say."""
    lora: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """LoRA adapters of the (first) model, NAME=DIR for each, in the format of PEFT; clients ask for MODEL:NAME. All
    workers need the same; more can be loaded while they run, see `penstock ctl lora`."""
    max_loras: int = 16
    """Most adapters in a worker's memory at a time; the one that was not used for longest leaves for another."""
    lora_bytes: Size = 1 << 30
    """Most bytes that these have together."""
    kernels: Annotated[bool, Parameter(parse=False)] = True
    """Use the C++ kernels on a CPU, when there is a compiler and the model suits them."""
    stages_apart: Annotated[bool, Parameter(parse=False)] = False
    """Each stage but the first is computed by another host."""
    shared_pages: Annotated[bool, Parameter(parse=False)] = False
    """Where pages are in host memory, have them where the store of the host can map them."""
    pages_apart: Annotated[bool, Parameter(parse=False)] = False
    """On a CPU, each of several processes computes in memory of its own, as on CUDA devices: for tests."""
    one_device: Annotated[bool, Parameter(parse=False)] = False
    """Several processes compute on one CUDA device: for tests."""
    stall_s: Annotated[float, Parameter(parse=False)] = 1.0
    """When no sequence could run for this long, the engine takes pages from loads that are still filling them."""
    again_s: Annotated[float, Parameter(parse=False)] = 0.2
    """When a sequence has waited for this long, its source is asked once more before its prompt is computed."""

    def __post_init__(self) -> None:
        self._check_numbers()
        one_of(self, DTYPES, "dtype")
        if self.kv_dtype:
            one_of(self, KV_DTYPES, "kv_dtype")
        one_of(self, WEIGHTS, "weights")
        one_of(self, HEAD_PLACES, "draft_head_in")
        at_least(self, 1, "max_loras", "lora_bytes")
        named_directories("lora", self.lora)
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or not (number.isdecimal() or self.device == kind):
            raise ConfigError("device", self.device, "must be cpu, cuda, or cuda and its number, such as cuda:0")
        if self.dtype != "auto" and kind != "cpu" and self.kv != _own_kv(self.dtype):
            right = f"must be {_own_kv(self.dtype)}, as dtype {self.dtype} has it, on {self.device}"
            raise ConfigError("kv_dtype", self.kv_dtype, right)
        if self.dtype == "float8" and kind == "cpu":
            raise ConfigError("dtype", self.dtype, "needs a CUDA device: use device cuda, or int8")
        if self.dtype == "int4" and kind != "cpu":
            raise ConfigError("dtype", self.dtype, f"needs device cpu, not {self.device}: use int8 or bfloat16")
        if self.weights == "lossless" and self.dtype not in ("auto", "bfloat16"):
            raise ConfigError("weights", self.weights, f"needs dtype bfloat16, not {self.dtype}")
        if self.weights == "lossless" and kind != "cpu":
            raise ConfigError("weights", self.weights, f"needs device cpu, not {self.device}")

    def _check_numbers(self) -> None:
        at_least(self, 1, "block_size", "kv_pool_tokens", "max_batch_tokens", "max_running", "max_waiting")
        at_least(self, 0, "max_model_len", "packed_bytes", "itl_target_ms", "lookup_tokens")
        within(self, 0, _MOST_THREADS, "threads")
        within(self, 1, _MOST_RANKS, "tp", "pp", "ep")
        at_least(self, 0, "redundant_experts")
        if self.redundant_experts and self.ep == 1:
            right = "needs ep of 2 or more, for copies to be in several groups"
            raise ConfigError("redundant_experts", self.redundant_experts, right)
        within(self, 0, 1, "resident_share")
        within(self, 0.01, 1, "tenant_share")
        within(self, 0, _MOST_DRAFTS, "draft_tokens")
        more_than(self, 0, "yield_ms", "draft_timeout_s", "stall_s", "again_s")
        if self.max_batch_tokens < self.max_running:
            right = f"must be at least max_running, {self.max_running}: each running sequence needs a row in every step"
            raise ConfigError("max_batch_tokens", self.max_batch_tokens, right)

    @property
    def pages(self) -> int:
        """Number of pages of `block_size` tokens that hold `kv_pool_tokens`."""
        return -(-self.kv_pool_tokens // self.block_size)

    @property
    def idle_pages(self) -> int:
        """Most pages with a block that no request uses. On a CUDA device all memory is taken at the start."""
        return int(self.resident_share * self.pages) if self.pages_on_host else self.pages

    @property
    def split(self) -> bool:
        """Whether several processes compute the model."""
        return self.tp > 1 or self.pp > 1

    @property
    def pages_on_host(self) -> bool:
        """Whether the engine's pages are in host memory, also where processes of CUDA devices have parts of them."""
        return self.device == "cpu" or self.split

    @property
    def copies_pages(self) -> bool:
        """Whether each process has its part of the pages in memory of its own as well."""
        return self.split and (self.device != "cpu" or self.pages_apart)

    @property
    def devices(self) -> Sequence[str]:
        """Where the processes of this host compute, stage by stage."""
        kind, _, number = self.device.partition(":")
        count = self.tp * (1 if self.stages_apart else self.pp)
        if kind == "cpu" or count == 1 or self.one_device:
            return [self.device] * count
        return [f"{kind}:{int(number or 0) + place}" for place in range(count)]

    def context(self, max_positions: int) -> int:
        """Most tokens of one text, prompt and output together, for a model of `max_positions` positions."""
        longest = min(max_positions, self.pages * self.block_size)
        return min(self.max_model_len or longest, longest)

    @property
    def itl_target_s(self) -> float | None:
        """`itl_target_ms` in seconds; None: no target."""
        return self.itl_target_ms / 1000 or None

    @property
    def has_head(self) -> bool:
        """Whether a draft head guesses."""
        return self.draft_head not in ("", "none") and self.draft_tokens > 0

    @property
    def tells_states(self) -> bool:
        """Whether the draft service is told what the model's layers say."""
        return self.draft_head_in == "service" and self.has_head

    @property
    def kv(self) -> str:
        """`kv_dtype` if it is given, else the KV type that `dtype` implies; not for `auto`, see `settled`."""
        return self.kv_dtype or _own_kv(self.dtype)

    @property
    def identity(self) -> str:
        """Names how numbers are kept: weights, and KV where that is not implied."""
        return self.dtype if self.kv == _own_kv(self.dtype) else f"{self.dtype}, KV {self.kv}"


def named_directories(field: str, entries: Sequence[str]) -> dict[str, Path]:
    """Directories by the names of a setting's NAME=DIR. Raises ConfigError."""
    found: dict[str, Path] = {}
    for entry in entries:
        name, _, directory = entry.partition("=")
        reason = "must be NAME=DIR" if not directory else adapter_name_misfit(name)
        if reason is None and name in found:
            reason = f"names {name!r} twice"
        if reason is not None:
            raise ConfigError(field, entry, reason)
        found[name] = Path(directory)
    return found


def adapter_name_misfit(name: str) -> str | None:
    """Why no adapter can have this name; None when one can."""
    if 1 <= len(name) <= _LONGEST_NAME and name.isprintable() and not set(name) & {":", "="}:
        return None
    return f"the name of an adapter has 1 to {_LONGEST_NAME} printable characters without : and =, not {name[:100]!r}"


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """A model and its engine's settings."""

    model: Path
    """A Hugging Face model directory."""


def kv_token_bytes(kv_dtype: str, layers: int, form: KvForm) -> int:
    """Bytes that `layers` layers keep of one token."""
    vector = {"float32": 4 * form.width, "bfloat16": 2 * form.width, "int8": form.width + 4}[kv_dtype]
    return layers * form.planes * form.heads * vector


def _own_kv(dtype: str) -> str:
    assert dtype != "auto", "not settled for a checkpoint"
    return "float32" if dtype == "float32" else "bfloat16"
