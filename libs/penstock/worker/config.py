"""Settings that every worker has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.config import EngineConfig
from penstock.kv.host import host_id
from penstock.runtime.config import ConfigError, Size
from penstock.runtime.cores import parse_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker's settings. `model` is the only one without a default."""

    model: Path
    """A Hugging Face model directory."""
    model_name: str = ""
    """The name clients ask for; the directory's name when empty."""
    address: str = "127.0.0.1:0"
    """Where to listen; port 0 picks one."""
    router: str = ""
    """The router's address; empty: join none."""
    kvstore: str = ""
    """This host's kvstore; empty: compute everything."""
    host_id: str = ""
    """Members with one host id share memory; empty: this machine's."""
    dtype: str = "float32"
    """float32, bfloat16, int8, or float8 on a CUDA device (the last two: weights; their KV is bfloat16)."""
    kv_dtype: str = ""
    """float32, bfloat16 or int8, with a scale per head and token; empty: as dtype has it. All workers alike."""
    device: str = "cpu"
    """cpu, cuda or cuda:0, cuda:1..."""
    weights: str = "plain"
    """plain, or lossless: bfloat16 in 12 bits a weight."""
    threads: int = 0
    """Threads of one model step; 0: one for each core of this process, fewer for a small model."""
    cores: str = ""
    """Cores to stay on, such as 0-3 or 0,2; empty: wherever the system puts the worker."""
    packed_bytes: Size = 16 << 30
    """Disk for packed weights, in ~/.cache/penstock, which workers of a host share; 0: each has its own in memory."""
    max_model_len: int = 0
    """Tokens of one text; 0: the model's own limit, for longrope models their original context. All workers alike."""
    kv_pool_tokens: int = 32768
    """Room for the KV of live sequences, in tokens."""
    block_size: int = 16
    """Tokens per KV block."""
    max_batch_tokens: int = 512
    """Tokens of one step; longer prompts are computed in chunks."""
    itl_target_ms: float = 100.0
    """Milliseconds between tokens of running streams while prompts are computed beside them; 0: no target."""
    max_running: int = 64
    """Sequences in one batch."""
    max_waiting: int = 256
    """Sequences that may wait; more are refused."""
    store_timeout_s: float = 2.0
    """A store call that takes longer counts as a miss."""
    drain_s: float = 5.0
    """Seconds that running requests get when the worker stops."""
    metrics_address: str = ""
    """Where Prometheus may read, host:port; empty: nowhere."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= 1024:
            raise ConfigError("threads", self.threads, "use 0 for all cores, or 1 to 1024")
        try:
            parse_cores(self.cores)
        except ValueError as error:
            raise ConfigError("cores", self.cores, str(error)) from error
        if self.itl_target_ms < 0:
            raise ConfigError("itl_target_ms", self.itl_target_ms, "use 0 for no target, or milliseconds")
        if self.max_model_len < 0:
            raise ConfigError("max_model_len", self.max_model_len, "use 0 for the model's limit, or a number of tokens")
        if self.store_timeout_s <= 0:
            raise ConfigError("store_timeout_s", self.store_timeout_s, "must be positive")

    @property
    def served_name(self) -> str:
        """The name clients ask for."""
        return self.model_name or self.model.name

    @property
    def host(self) -> str:
        """The host id."""
        return self.host_id or host_id()

    def engine(self, **more: Any) -> EngineConfig:
        """The engine's part; `more` are further fields of EngineConfig."""
        try:
            return EngineConfig(
                model=self.model,
                dtype=self.dtype,
                weights=self.weights,
                kv_dtype=self.kv_dtype or None,
                device=self.device,
                block_size=self.block_size,
                kv_pool_tokens=self.kv_pool_tokens,
                max_batch_tokens=self.max_batch_tokens,
                itl_target_s=self.itl_target_ms / 1000 or None,
                max_running=self.max_running,
                max_waiting=self.max_waiting,
                max_model_len=self.max_model_len or None,
                threads=self.threads or None,
                packed_bytes=self.packed_bytes,
                **more,
            )
        except ValueError as error:
            raise ConfigError("engine", str(self.model), str(error)) from error
