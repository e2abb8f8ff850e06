"""Settings of the KV store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.kv.eviction import POLICIES
from penstock.kv.host import host_id
from penstock.kvstore.events.wire.format import STYLES
from penstock.runtime.addresses import HostPort, socket_address
from penstock.runtime.capacity import check_host_bytes, check_nvme
from penstock.runtime.config import (
    LOG_LEVELS,
    Address,
    Addresses,
    ConfigError,
    OptionalAddress,
    OptionalPortAddress,
    Size,
    address_lists,
    addresses,
    format_size,
    one_of,
    optional_addresses,
    optional_port_addresses,
)

_LEAST_GPU_BYTES = 1 << 16
_LEAST_WRITES = 1 << 20
_MOST_PARTITIONS = 64


@dataclass(frozen=True, kw_only=True)
class KvStoreConfig:
    """The KV store: blocks in memory that the workers of this host share."""

    address: Address = HostPort("127.0.0.1:0")
    """Address to listen on, host:port or unix:/path; port 0 picks a free port."""
    host_bytes: Size = 1 << 30
    """Size of the shared memory, such as 512MiB or 2GiB. It takes memory only as blocks arrive."""
    partitions: int = 1
    """How many models' blocks are kept side by side. Each has an equal share of each tier, and what one model stores
    evicts nothing of another. When all are taken, another model gets that of one whose workers have left."""
    draft_bytes: Size = 0
    """Size of the shared memory for blocks of draft models, beside `host_bytes`; 0: none are kept. It has as many
    partitions. They are never written to a disk or a device: a draft model has computed them anew as soon."""
    gpu_bytes: Size = 0
    """Device memory for blocks that will be used again, such as 8GiB; 0: none. It is allocated at the start, and so is
    all of `host_bytes`, because copies need pinned memory. Needs penstock[cuda12] or penstock[cuda13]."""
    gpu_device: int = 0
    """Number of the CUDA device, as this process counts them."""
    router: Addresses = ()
    """Addresses of all routers, host:port or unix:/path, with commas between them; the store joins each. Empty: none,
    and clients have to know the store's address."""
    host_id: str = field(default_factory=host_id)
    """Clients with this host id map the shared memory; all others stream blocks."""
    lease_s: float = 30.0
    """Most seconds for which a client may lease blocks."""
    reserve_s: float = 10.0
    """Seconds that a client has to write the blocks that it has reserved."""
    bring_s: float = 1.0
    """Most seconds for which a lease waits until blocks are brought from slower tiers."""
    cooling_s: float = 5.0
    """Seconds for which a slot is not used again after its writer has vanished."""
    eviction: str = "worth"
    """How blocks are chosen for eviction when room is needed: worth, s3-fifo or lru."""
    tenant_share: float = 1.0
    """Share of each tier beyond which a tenant's own blocks go first when room is needed; 1: no bound."""
    retain_share: float = 0.25
    """Share of each tier that may be promised to clients who ask that their blocks are kept; 0: none."""
    retain_tenant_share: float = 0.125
    """Share of each tier that may be promised to one tenant."""
    retain_s: float = 3600.0
    """Most seconds of such a promise; each hit renews it."""
    nvme_dir: Path | None = None
    """A directory on a local disk, of this store alone, for blocks that outlive the process."""
    nvme_bytes: Size = 0
    """Most bytes that the directory may take."""
    nvme_write_bytes_per_s: Size = 256 << 20
    """Most bytes that are written to the directory in a second."""
    nvme_write_bytes_per_day: Size = 200 << 30
    """Most bytes that are written to the directory in a day (UTC), because disks wear out."""
    nvme_flush_s: float = 5.0
    """Most seconds for which a store still writes after it was told to stop."""
    nvme_direct: bool = True
    """Read and write past the page cache, where the file system allows that."""
    advertise: OptionalAddress = None
    """Address at which others reach this store, host:port or unix:/path; empty: that of `address`."""
    peers: tuple[str, ...] = ()
    """Addresses of other stores, host:port each, in addition to those that the router knows. Blocks are pulled from
    no other store."""
    stall_s: float = 1.0
    """Seconds after which another store that sends nothing is asked again over a new connection."""
    mooncake_master: OptionalPortAddress = None
    """Address of the master of a Mooncake pool that stores of several hosts share, host:port; empty: none."""
    mooncake_host: str = "127.0.0.1"
    """Address at which the other members of the Mooncake pool reach this host."""
    mooncake_lend_bytes: Size = 1 << 30
    """Memory that this store lends to the Mooncake pool; 0B: none."""
    mooncake_any_interface: bool = False
    """Confirms that Mooncake may listen on every interface of the host, because its ports are guarded."""
    home_keys: int = 200_000
    """Most keys whose holders this store remembers for the other stores; each takes about 200 bytes of memory."""
    max_clients: int = 256
    """Most clients that are attached at a time."""
    events_address: str = ""
    """Address where block events are published as vLLM does it, tcp://host:port; empty: none. Needs
    penstock[events]."""
    events_replay_address: str = ""
    """Address where subscribers ask for events that they missed, tcp://host:port; empty: none."""
    events_topic: str = ""
    """Topic of the events: the first part of each message."""
    events_style: str = "map"
    """Form of the events: map, as vLLM publishes them now, or array, as it did until 2026."""
    member_tls: Path | None = None
    """A directory of `penstock ca issue`, for a mesh over a network: the services show each other certificates. Without
    it nothing is asked of who calls, so nobody else may reach the address."""
    metrics_address: OptionalPortAddress = None
    """Address where Prometheus can read metrics, host:port; empty: none."""
    log_level: str = "info"
    """Least severe lines to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        """Raises ConfigError on a setting that can't work."""
        addresses(self, "address")
        address_lists(self, "router")
        optional_addresses(self, "advertise")
        optional_port_addresses(self, "mooncake_master", "metrics_address")
        check_host_bytes("host_bytes", self.host_bytes)
        if self.draft_bytes:
            check_host_bytes("draft_bytes", self.draft_bytes)
        self._check_partitions()
        if self.gpu_bytes and self.gpu_bytes < _LEAST_GPU_BYTES:
            raise ConfigError(
                "gpu_bytes", format_size(self.gpu_bytes), f"0, or at least {format_size(_LEAST_GPU_BYTES)}"
            )
        if self.gpu_device < 0:
            raise ConfigError("gpu_device", self.gpu_device, "0 or more")
        for name in ("lease_s", "reserve_s", "bring_s", "stall_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise ConfigError(name, getattr(self, name), "more than 0 and at most 3600 seconds")
        _check_peers(self.peers)
        if self.home_keys < 1:
            raise ConfigError("home_keys", self.home_keys, "at least 1")
        if not 0 <= self.cooling_s <= 3600:
            raise ConfigError("cooling_s", self.cooling_s, "0 to 3600 seconds")
        one_of(self, POLICIES, "eviction")
        if not 0.01 <= self.tenant_share <= 1:
            raise ConfigError("tenant_share", self.tenant_share, "0.01 to 1")
        for name in ("retain_share", "retain_tenant_share"):
            if not 0 <= getattr(self, name) <= 0.9:
                raise ConfigError(name, getattr(self, name), "0 to 0.9: something must be left for others")
        if not 0 <= self.retain_s <= 30 * 86_400:
            raise ConfigError("retain_s", self.retain_s, "0 to 2592000 seconds, which is 30 days")
        if not 1 <= self.max_clients <= 10_000:
            raise ConfigError("max_clients", self.max_clients, "1 to 10000")
        self._check_nvme()
        _check_tcp("events_address", self.events_address)
        _check_tcp("events_replay_address", self.events_replay_address)
        one_of(self, STYLES, "events_style")
        if not self.host_id:
            raise ConfigError("host_id", self.host_id, "a name for this host")
        one_of(self, LOG_LEVELS, "log_level")

    def share(self) -> KvStoreConfig:
        """The settings of one partition. Raises ConfigError when it would be too small."""
        number = self.partitions
        return replace(
            self,
            partitions=1,
            host_bytes=self.host_bytes // number,
            draft_bytes=self.draft_bytes // number,
            gpu_bytes=self.gpu_bytes // number,
            nvme_bytes=self.nvme_bytes // number,
            nvme_flush_s=self.nvme_flush_s / number,
        )

    def of_draft(self) -> KvStoreConfig:
        """The settings of the partition of a draft model, of those of a partition."""
        return replace(
            self,
            host_bytes=self.draft_bytes,
            draft_bytes=0,
            gpu_bytes=0,
            nvme_dir=None,
            nvme_bytes=0,
            mooncake_master=None,
        )

    def _check_partitions(self) -> None:
        if not 1 <= self.partitions <= _MOST_PARTITIONS:
            raise ConfigError("partitions", self.partitions, f"1 to {_MOST_PARTITIONS}")
        if self.partitions == 1:
            return
        if self.mooncake_master:
            raise ConfigError("partitions", self.partitions, "1 with a Mooncake pool: start a store for each model")
        try:
            self.share()
        except ConfigError as error:
            raise ConfigError("partitions", self.partitions, f"fewer: of each share, {error}") from None

    def _check_nvme(self) -> None:
        for name in ("nvme_write_bytes_per_s", "nvme_write_bytes_per_day"):
            if getattr(self, name) < _LEAST_WRITES:
                raise ConfigError(name, format_size(getattr(self, name)), f"at least {format_size(_LEAST_WRITES)}")
        if not 0 <= self.nvme_flush_s <= 600:
            raise ConfigError("nvme_flush_s", self.nvme_flush_s, "0 to 600 seconds")
        check_nvme("nvme_dir", self.nvme_dir, "nvme_bytes", self.nvme_bytes)


def _check_peers(peers: tuple[str, ...]) -> None:
    for peer in peers:
        try:
            socket_address(peer)
        except ValueError as error:
            raise ConfigError("peers", peer, str(error)) from None


def _check_tcp(name: str, address: str) -> None:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if address and (scheme != "tcp" or host in ("", "*") or not port.isdigit() or int(port) > 65535):
        raise ConfigError(name, address, "write tcp://host:port with an address of this host, as tcp://127.0.0.1:5557")
