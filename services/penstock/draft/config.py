"""Settings of the draft service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.kv.sealing import check_seal
from penstock.runtime.addresses import HostPort
from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    Addresses,
    OptionalAddress,
    OptionalPortAddress,
    address_lists,
    addresses,
    at_least,
    more_than,
    one_of,
    optional_addresses,
    optional_port_addresses,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A draft service. `model` is the only setting without a default."""

    model: str
    """A Hugging Face model directory."""
    head: str = "none"
    """Directory of a draft head for `model`, which is then the target itself: the head guesses from what the target's
    layers say, as decode workers tell it. none: `model` guesses from tokens."""
    address: Address = HostPort("127.0.0.1:0")
    """Address to listen on, host:port or unix:/path; port 0 picks a free port."""
    advertise: OptionalAddress = None
    """Address that routers are told, host:port or unix:/path; empty: that of `address`."""
    router: Addresses = ()
    """Addresses of all routers, host:port or unix:/path, with commas between them; the service joins each, for
    `penstock ctl`. Empty: none."""
    dtype: str = "auto"
    """Type of the weights: auto, float32, bfloat16, int8, on a CPU int4, or on a CUDA device float8. auto: that
    of the checkpoint's embedding, and bfloat16 for one in float16."""
    device: str = "cpu"
    """Where the model is computed: cpu, cuda, or cuda:0, cuda:1..."""
    threads: int = 1
    """Threads that compute one step."""
    kv_pool_tokens: int = 0
    """Room for the KV of the sequences that are drafted for, in tokens; 0: what a sixteenth of the memory holds. Where
    it is too small for all, the youngest get no drafts."""
    max_batch_tokens: int = 512
    """Most tokens of one step: guesses, and what sequences have to catch up."""
    max_running: int = 64
    """Most sequences in one step."""
    kvstore: OptionalAddress = None
    """Address of this host's kvstore, host:port or unix:/path; empty: none, and every text is computed."""
    seal: bool = False
    """Encrypt and authenticate blocks in the store, as the workers do; see their `seal`."""
    host_id: str = ""
    """A store with the same host id shares its memory; empty: this machine's id."""
    store_timeout_s: float = 2.0
    """Seconds after which a call to the store counts as a miss."""
    max_streams: int = 64
    """Most decode workers that are served at once."""
    max_stream_sequences: int = 1024
    """Most sequences of one decode worker at a time; the youngest of the tenant that has most get no drafts."""
    max_stream_tokens: int = 1 << 22
    """Most tokens in all sequences of one decode worker together; each takes about 40 bytes of memory. The youngest of
    the tenant that has most get no drafts."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue`, for a mesh over a network: the services show each other certificates. Without
    it nothing is asked of who calls, so nobody else may reach the address."""
    metrics_address: OptionalPortAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        addresses(self, "address")
        address_lists(self, "router")
        optional_addresses(self, "advertise", "kvstore")
        optional_port_addresses(self, "metrics_address")
        more_than(self, 0, "store_timeout_s")
        at_least(self, 0, "kv_pool_tokens")
        at_least(self, 1, "threads", "max_streams", "max_stream_sequences", "max_stream_tokens")
        one_of(self, LOG_LEVELS, "log_level")
        check_seal(self.seal)
        self.engine(1)  # checks the rest

    def engine(self, kv_pool_tokens: int) -> EngineConfig:
        """The settings as an engine has them. Raises ConfigError."""
        return EngineConfig(
            model=Path(self.model),
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            kv_pool_tokens=kv_pool_tokens,
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
        )
