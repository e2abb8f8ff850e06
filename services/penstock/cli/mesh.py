"""The processes that make a mesh on this host, and their settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from penstock.chat.formats.families import FORMATS
from penstock.checkpoint import Checkpoint, CheckpointError, ModelConfig, inspect, inspect_adapter, inspect_head
from penstock.cli.beside import pace_beside
from penstock.cli.child import ChildSpec
from penstock.cli.hub import model_directory, public_name
from penstock.cli.ports import Ports
from penstock.engine.checks import settled
from penstock.engine.config import EngineSettings, kv_token_bytes, named_directories
from penstock.engine.speculation.drafting import draft_misfit
from penstock.models import NAMES
from penstock.runtime.addresses import HostPort, SocketAddress, is_loopback, socket_address
from penstock.runtime.capacity import check_blocks, check_gpu_bytes, check_host_bytes, check_nvme
from penstock.runtime.config import (
    LOG_LEVELS,
    ConfigError,
    Size,
    arguments,
    at_least,
    format_size,
    one_of,
    within,
)
from penstock.runtime.cores import Share, available_cores, format_cores, have_own_cores, host_shares, own_cores

_GATEWAY, _WORKERS, _DRAFT, _STORE, _ROUTER = range(5)
"""The order of stopping: no service loses another that it still needs."""
_DRAFT_SHARE = 8
"""The KV of a draft model gets that part of the memory of the target's, beside it."""
_OWN_PACE = 0.75
"""Workers that keep this share of their pace beside each other have cores of their own; two on one core keep half."""
_TENANT_SHARE = 0.5
_SEALED: dict[bool, tuple[str, ...]] = {False: (), True: ("--seal",)}
_SAID = ("dtype", "weights", "device", "itl_target_ms")
"""Engine settings that `up` decides for all workers; the others may also be set for prefill or decode workers alone."""


Sockets = Literal["unix", "tcp"]


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The mesh that `penstock up` starts."""

    host: str = "127.0.0.1"
    """The address on which both APIs listen; others than 127.0.0.1 need api-keys."""
    port: int = 8080
    """Port of the HTTP API; 0 picks a free port."""
    grpc_port: int = 0
    """Port of the gRPC API; 0 picks a free port."""
    api_keys: Path | None = None
    """The file of `penstock keys add`; without it all clients are one tenant, and only this host is served."""
    server_key_file: Path | None = None
    """A file with 32 hex digits or more, which keeps tenants apart in the cache; needed with api-keys."""
    tls_cert: Path | None = None
    """The PEM file of a certificate with its chain, for HTTPS and for gRPC over TLS; needs tls-key."""
    tls_key: Path | None = None
    """The PEM file of its key."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the gateway, such as https://chat.example; * for all."""
    batch_store: str = ""
    """Where files and batches are kept, for /v1/files and /v1/batches: a directory, or the address of a Redis. Default:
    they are off."""
    models: Annotated[tuple[str, ...], Parameter(name="--model", negative=())] = (NAMES[0],)
    """A Hugging Face model directory, its name on the hub as ORG/NAME, or the name of an embedded model. Give it once
    for each model: all are served side by side, by their names, each with workers of its own and an equal share of the
    memory and the disk for cached KV."""
    tool_format: str = ""
    """How the first model writes tool calls, see docs/design/tool-calls.md. Default: as its chat template shows."""
    draft: str = ""
    """What drafts for the first model: a model directory or name, host:port of a draft service that runs already, or
    none. Default: the draft of an embedded model, else none."""
    prefill: int | None = None
    """Number of prefill workers of each model. Default: 1 where prefill and decode have cores of their own, two or more
    each, else as with aggregated."""
    decode: int = 1
    """Number of decode workers of each model."""
    routers: int = 1
    """Number of routers; requests go on when one of several dies."""
    gateways: int = 1
    """Number of gateways; the others listen on free ports."""
    redis: bool = False
    """Start a redis-server for what routers and gateways share, and for what outlasts one of them."""
    aggregated: bool = False
    """No prefill workers: every decode worker computes its own prompts."""
    kv_host_bytes: Size = 1 << 30
    """Memory for cached KV, for example 512MiB; where there are drafts, that of draft models has an eighth as much
    beside it."""
    kv_nvme_dir: Path | None = None
    """A directory on a fast disk, for cached KV that outlives the mesh; needs kv-nvme-bytes."""
    kv_nvme_bytes: Size = 0
    """Most bytes of that disk to use, for example 20GiB."""
    kv_gpu_bytes: Size = 0
    """GPU memory for cached KV, for example 2GiB; 0: none."""
    seal: Literal["auto", "on", "off"] = "auto"
    """Encrypt and authenticate cached KV, for each tenant with a key of its own, derived from that of server-key-file.
    auto: where there is such a file, and a disk for KV, and no GPU memory for it, which can't be sealed."""
    engine: Annotated[EngineSettings, Parameter(name="*")] = field(default_factory=EngineSettings)
    """How the workers compute."""
    drain_s: float = 5.0
    """Seconds that running requests get to end when the mesh stops."""
    sockets: Sockets = "unix"
    """How the services reach each other: over Unix sockets in a directory that only this user may enter, or over ports
    of 127.0.0.1, which every user of this host can reach. Clients use ports in either case."""
    hung_s: float = 30.0
    """Seconds after which a service that answers no health check is killed and started again; 0: never."""
    stuck_s: float = 120.0
    """Seconds after which a worker that reports itself stuck (see its --step-limit-s) is killed and started again; 0:
    never."""
    log_level: str = "warning"
    """Least severe lines of the services to show: debug, info, warning or error."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("model", "", "name at least one model")
        for number, name in enumerate(self.names):
            if name in self.names[:number]:
                raise ConfigError("model", self.models[number], f"clients ask by name, and two would be {name!r}")
        if self.prefill is not None:
            within(self, 0, 256, "prefill")
        within(self, 1, 256, "decode")
        within(self, 1, 64, "routers", "gateways")
        within(self, 0, 65535, "port", "grpc_port")
        at_least(self, 0, "drain_s", "hung_s", "stuck_s")
        check_host_bytes("--kv-host-bytes", self.kv_host_bytes)
        check_nvme("--kv-nvme-dir", self.kv_nvme_dir, "--kv-nvme-bytes", self.kv_nvme_bytes)
        check_gpu_bytes("--kv-gpu-bytes", self.kv_gpu_bytes)
        one_of(self, LOG_LEVELS, "log_level")
        one_of(self, get_args(Sockets), "sockets")
        one_of(self, ("auto", "on", "off"), "seal")
        if self.seal == "on" and self.server_key_file is None:
            raise ConfigError("seal", "on", "needs server-key-file: the keys of tenants are derived from it")
        if self.seal == "on" and self.kv_gpu_bytes:
            raise ConfigError("seal", "on", "blocks on a GPU can't be sealed: kv-gpu-bytes must be 0")
        if self.tool_format:
            one_of(self, tuple(FORMATS), "tool_format")
        if self.api_keys is None and not is_loopback(self.host):
            raise ConfigError("host", self.host, "must be 127.0.0.1 unless api-keys is set: nobody else may use it")
        if self.api_keys is not None and self.server_key_file is None:
            right = "must be set with api-keys; make one with `openssl rand -hex 32 > FILE`"
            raise ConfigError("server_key_file", "", right)

    @property
    def seals(self) -> bool:
        """Whether cached KV is sealed."""
        keeps = self.server_key_file is not None and self.kv_nvme_dir is not None and not self.kv_gpu_bytes
        return self.seal == "on" or (self.seal == "auto" and keeps)

    @property
    def names(self) -> tuple[str, ...]:
        """The public names of the models."""
        return tuple(public_name(model) for model in self.models)

    @property
    def undecided(self) -> bool:
        """Whether the machine decides if prefill and decode have workers of their own."""
        return not self.aggregated and self.prefill is None

    @property
    def draft_service(self) -> SocketAddress | None:
        """The address of one that runs already and drafts for the first model."""
        try:
            return socket_address(self.draft)
        except ValueError:
            return None

    def draft_of(self, number: int) -> str:
        """What drafts for one of the models: a model directory or name, an address, or `none`."""
        if self.draft and (number == 0 or self.draft == "none"):
            return self.draft
        return NAMES[1] if self.models[number] == NAMES[0] else "none"


@dataclass(frozen=True, kw_only=True)
class DemoOptions(MeshOptions):
    """The mesh of the demo: like any other, on a port of its own."""

    port: int = 0
    """Port of the HTTP API on 127.0.0.1; 0 picks a free port."""
    prefill: int | None = 1
    """Number of prefill workers: the hand-off to decode is part of what is shown."""
    seed: int = 1
    """Draws the held-out sessions that are played behind the scripted one."""


@dataclass(frozen=True)
class MeshPlan:
    """The processes to start, and the addresses at which the mesh will answer."""

    url: str
    children: tuple[ChildSpec, ...]
    grpc: str = ""
    others: tuple[str, ...] = ()
    """The URLs of further gateways."""
    note: str = ""
    """What was decided by the machine, for the user; empty: nothing."""
    router: str = ""
    """Where `penstock ctl` reaches the mesh."""


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model that the mesh serves."""

    name: str
    directory: Path
    weights_bytes: int
    draft: Path | None
    """The directory of the model with which the mesh's own draft service drafts."""
    draft_address: SocketAddress | None
    """Of its draft service, the mesh's own or another one, when there is one."""
    head: Path | None
    """The directory of the head that guesses for it."""
    lora: tuple[str, ...]
    """Its adapters, NAME=DIR."""
    told: bool
    """The head guesses in the draft service, which is told what the model's layers say."""


def _models(options: MeshOptions, ports: Ports) -> Iterator[_Model]:
    """The models of `options`, checked. Raises ConfigError."""
    for number, chosen in enumerate(options.models):
        directory = model_directory("model", chosen)
        checkpoint = inspect(directory)
        _check_tiers(options, settled(options.engine, checkpoint), checkpoint.config)
        service = options.draft_service if number == 0 else None
        told = number == 0 and options.engine.tells_states
        if told and not service and options.draft not in ("", "none"):
            right = "must be none, or the address of a draft service, where the draft head guesses in the service"
            raise ConfigError("draft", options.draft, right)
        draft = None if service or told else _draft(options.draft_of(number), checkpoint)
        yield _Model(
            name=options.names[number],
            directory=directory,
            weights_bytes=sum(file.stat().st_size for file in checkpoint.weight_files),
            draft=draft,
            draft_address=_inside(options, ports, f"draft-{number}") if draft or (told and not service) else service,
            head=_head(options.engine.draft_head, checkpoint) if number == 0 else None,
            lora=tuple(_adapters(options.engine.lora, checkpoint)) if number == 0 else (),
            told=told,
        )


def _draft(chosen: str, target: Checkpoint) -> Path | None:
    """The directory of the model that drafts for `target`. Raises ConfigError."""
    if chosen == "none":
        return None
    directory = model_directory("draft", chosen)
    reason = draft_misfit(target, inspect(directory))
    if reason is not None:
        raise ConfigError("draft", chosen, f"has other tokens than the model: {reason}")
    return directory


def _head(chosen: str, target: Checkpoint) -> Path | None:
    """The directory of the head that guesses for `target`. Raises ConfigError."""
    if chosen in ("", "none"):
        return None
    directory = Path(chosen).expanduser().resolve()
    try:
        inspect_head(directory, target)
    except CheckpointError as error:
        raise ConfigError("draft_head", chosen, str(error)) from error
    return directory


def _adapters(entries: Sequence[str], model: Checkpoint) -> Iterator[str]:
    """The adapters of `model` with whole paths. Raises ConfigError."""
    for name, chosen in named_directories("lora", entries).items():
        directory = chosen.expanduser().resolve()
        try:
            inspect_adapter(directory, model.config)
        except CheckpointError as error:
            raise ConfigError("lora", f"{name}={chosen}", str(error)) from error
        yield f"{name}={directory}"


def plan_mesh(options: MeshOptions, ports: Ports, *, redis: str = "") -> MeshPlan:
    """All processes and their addresses; `redis` is the address of one that runs. Raises ConfigError for an unusable
    model and for a port that is taken."""
    options, note = _decided(_shared(options))
    models = list(_models(options, ports))
    http = _address("port", options.host, options.port, ports)
    grpc = _address("grpc_port", options.host, options.grpc_port, ports)
    routers = [_inside(options, ports, f"router-{number}") for number in range(options.routers)]
    store = _inside(options, ports, "kvstore")
    doors = [(http, grpc)]
    doors += [(ports.reserve(0, options.host), ports.reserve(0, options.host)) for _ in range(1, options.gateways)]
    worker = _worker_arguments(options.engine, routers, store)
    first, *others = models
    served: tuple[str, ...] = ("--model-dir", str(first.directory), "--model-name", first.name)
    served += tuple(word for model in others for word in ("--also", f"{model.name}={model.directory}"))
    children: list[ChildSpec] = [*_workers(options, ports, worker, models), *_drafts(options, models, routers, store)]
    children += [
        *_routers(options, routers, redis),
        _child(options, "kvstore", _STORE, "--address", store, "--router", ",".join(routers), *_tiers(options, models)),
        *_gateways(options, doors, routers, served, redis=redis),
    ]
    scheme = "https" if options.tls_cert else "http"
    url, *further = (f"{scheme}://{_reachable(address)}" for address, _ in doors)
    told = tuple(replace(child, environment={**child.environment, **ports.environment}) for child in children)
    return MeshPlan(url, told, _reachable(grpc), tuple(further), note, router=routers[0])


def added_worker(
    options: MeshOptions,
    role: str,
    address: SocketAddress,
    *,
    routers: Sequence[SocketAddress],
    store: str,
    host: str,
    name: str,
    more: Sequence[str] = (),
) -> ChildSpec:
    """One more worker for the first model of `options`, in a mesh that runs: as `plan_mesh` has it, but for drafts and
    cores of its own, and nobody forks it. `store` is the address of its store, `host` that one's host; both may be
    empty; `more` are further options. Raises ConfigError for an unusable model."""
    directory = model_directory("model", options.models[0])
    own: tuple[str, ...] = ("--address", address, "--model", str(directory), "--model-name", options.names[0])
    own += ("--draft", "none")
    if options.engine.lora:
        own += tuple(
            word for adapter in _adapters(options.engine.lora, inspect(directory)) for word in ("--lora", adapter)
        )
    own += (*(("--host-id", host) if host else ()), *more)
    child = _child(options, role, _WORKERS, *_worker_arguments(options.engine, routers, store), *own)
    return replace(child, name=name, imports="")


def _worker_arguments(engine: EngineSettings, routers: Sequence[SocketAddress], store: str) -> tuple[str, ...]:
    """What all workers of a mesh are told."""
    where = ("--kvstore", store) if store else ()
    return ("--router", ",".join(routers), *where, *arguments(replace(engine, draft_head="none", lora=()), _SAID))


def _routers(options: MeshOptions, addresses: Sequence[SocketAddress], redis: str) -> Iterator[ChildSpec]:
    for number, address in enumerate(addresses):
        shared = ("--state", redis, "--name", f"router-{number}") if redis else ()
        which = number if len(addresses) > 1 else None
        yield _child(options, "router", _ROUTER, "--address", address, *shared, number=which)


def _gateways(
    options: MeshOptions,
    doors: Sequence[tuple[HostPort, HostPort]],
    routers: Sequence[SocketAddress],
    arguments: tuple[str, ...],
    *,
    redis: str,
) -> Iterator[ChildSpec]:
    """Each prefers another router. What a gateway's own environment says of the stores in a Redis holds."""
    settings = ("LEDGER", "RESPONSES_STORE", "ANSWER_STORE") if redis else ()
    names = [f"PENSTOCK_GATEWAY_{setting}" for setting in settings]
    shared = {name: redis for name in names if name not in os.environ}
    for number, (http, grpc) in enumerate(doors):
        first = number % len(routers)
        order = ",".join([*routers[first:], *routers[:first]])
        listen = ("--http-address", http, "--grpc-address", grpc, "--drain-s", str(options.drain_s), *_door(options))
        which = number if len(doors) > 1 else None
        child = _child(options, "gateway", _GATEWAY, *listen, "--router", order, *arguments, number=which)
        yield replace(child, environment={**child.environment, **shared})


def _shared(options: MeshOptions) -> MeshOptions:
    """Where there are tenants none of them may push out all that others have cached, unless the options bound it."""
    if options.api_keys is None or options.engine.tenant_share < 1:
        return options
    return replace(options, engine=replace(options.engine, tenant_share=_TENANT_SHARE))


def _decided(options: MeshOptions) -> tuple[MeshOptions, str]:
    """The options with what they leave to the machine, and what that is. On cores that they share, and on one GPU, a
    prefill and a decode worker only wait for each other. Where the number of cores does not say whether they would
    share them, that is measured, once on a machine."""
    if not options.undecided:
        return options, ""
    on_cpu, workers = options.engine.device == "cpu", len(options.models) * (1 + options.decode)
    apart, why = have_own_cores(workers) if on_cpu else False, ""
    if apart is None:
        apart, why = _measured(own_cores(workers))
    if apart:
        what = f"prefill and decode are workers of their own{why}"
        return replace(options, prefill=1), f"{what}; --aggregated makes them one"
    devices = "the same devices" if options.engine.split else "one device"
    where = f"{available_cores()} cores" if on_cpu else devices
    what = f"one worker is prefill and decode: on {where} two would wait for each other{why}"
    return replace(options, aggregated=True), f"{what}; --prefill 1 makes them two"


def _measured(cores: Sequence[tuple[int, ...]]) -> tuple[bool, str]:
    """Whether workers on these cores leave each other alone, and what shows it."""
    try:
        pace = pace_beside(cores)
    except OSError as error:
        return False, f" (it could not be measured: {error})"
    return pace >= _OWN_PACE, f" (measured: side by side they compute at {pace:.0%} of their pace alone)"


def _workers(
    options: MeshOptions, ports: Ports, worker: tuple[str, ...], models: Sequence[_Model]
) -> Iterator[ChildSpec]:
    prefill = 0 if options.aggregated or options.prefill is None else options.prefill
    each, role = prefill + options.decode, ("--role", "both" if options.aggregated else "decode")
    for place, model in enumerate(models):
        shares = iter(host_shares(each * len(models), model.weights_bytes)[place * each :])
        what = (*worker, "--model", str(model.directory), "--model-name", model.name, *_SEALED[options.seals])
        what += tuple(word for adapter in model.lora for word in ("--lora", adapter))
        draft = ("--draft", model.draft_address or "none")
        for number in range(place * prefill, (place + 1) * prefill):
            asked = ("--draft", "none") if model.told else draft  # it tells no states, and a head needs them
            own = _cores(options, next(shares))
            at = _inside(options, ports, f"prefill-{number}")
            yield _child(options, "prefill", _WORKERS, "--address", at, *what, *asked, *own, number=number)
        what += draft
        head = () if model.head is None else ("--draft-head", str(model.head))
        for number in range(place * options.decode, (place + 1) * options.decode):
            own = _cores(options, next(shares))
            at = _inside(options, ports, f"decode-{number}")
            yield _child(options, "decode", _WORKERS, "--address", at, *what, *role, *own, *head, number=number)


def _cores(options: MeshOptions, share: Share) -> Iterator[str]:
    """This worker's part of the cores; nothing when the settings say how many threads there are."""
    if not options.engine.threads:
        yield from ("--threads", str(max(1, share.threads // (options.engine.tp * options.engine.pp))))
        if share.cores:
            yield from ("--cores", format_cores(share.cores))


def _tiers(options: MeshOptions, models: Sequence[_Model]) -> Iterator[str]:
    yield from ("--host-bytes", format_size(options.kv_host_bytes))
    if any(model.draft for model in models):
        yield from ("--draft-bytes", format_size(max(options.kv_host_bytes // _DRAFT_SHARE, len(models) << 16)))
    if len(options.models) > 1:
        yield from ("--partitions", str(len(options.models)))
    if options.kv_nvme_dir is not None:
        yield from ("--nvme-dir", str(options.kv_nvme_dir.absolute()))
        yield from ("--nvme-bytes", format_size(options.kv_nvme_bytes))
    if options.kv_gpu_bytes:
        yield from ("--gpu-bytes", format_size(options.kv_gpu_bytes))
    if options.engine.tenant_share < 1:
        yield from ("--tenant-share", str(options.engine.tenant_share))


def _drafts(
    options: MeshOptions, models: Sequence[_Model], routers: Sequence[SocketAddress], store: SocketAddress
) -> Iterator[ChildSpec]:
    for place, model in enumerate(models):
        if model.told and not options.draft_service:
            what: tuple[str | SocketAddress, ...] = ("--model", str(model.directory), "--head", str(model.head))
        elif model.draft is not None:
            what = ("--model", str(model.draft), "--kvstore", store, *_SEALED[options.seals])
        else:
            continue
        own = ("--address", model.draft_address or "", "--threads", "1", "--device", options.engine.device)
        joins = ("--router", ",".join(routers))
        yield _child(options, "draft", _DRAFT, *what, *own, *joins, number=place if len(models) > 1 else None)


def _child(options: MeshOptions, service: str, stage: int, *arguments: str, number: int | None = None) -> ChildSpec:
    return ChildSpec(
        name=service if number is None else f"{service}-{number}",
        command=(sys.executable, "-m", f"penstock.{service}", *arguments),
        stop_stage=stage,
        imports=f"penstock.{service}.service" if stage in (_WORKERS, _DRAFT) else "",  # the others don't need torch
        environment={
            f"PENSTOCK_{service.upper()}_LOG_LEVEL": options.log_level,
            "GRPC_VERBOSITY": "NONE",
            # OpenMP threads that spin while they wait starve the other processes of the mesh.
            "OMP_WAIT_POLICY": "PASSIVE",
        },
    )


def _check_tiers(options: MeshOptions, engine: EngineSettings, shape: ModelConfig) -> None:
    """A tier holds a few blocks of each model at least. Raises ConfigError."""
    token_bytes = kv_token_bytes(engine.kv, shape.n_layers, shape.kv)
    for name in ("kv_host_bytes", "kv_nvme_bytes", "kv_gpu_bytes"):
        share = getattr(options, name) // len(options.models)
        check_blocks(f"--{name.replace('_', '-')}", share, engine.block_size * token_bytes)


def _door(options: MeshOptions) -> Iterator[str]:
    """The settings of the gateway that `up` has too."""
    for name in ("api_keys", "server_key_file", "tls_cert", "tls_key"):
        if (path := getattr(options, name)) is not None:
            yield from (f"--{name.replace('_', '-')}", str(path.absolute()))
    if where := options.batch_store:
        yield from ("--batch-store", where if "://" in where else str(Path(where).expanduser().absolute()))
    for origin in options.cors_origins:
        yield from ("--cors-origins", origin)
    if options.tool_format:
        yield from ("--tool-format", options.tool_format)


def _inside(options: MeshOptions, ports: Ports, name: str) -> SocketAddress:
    """Where a service listens that only other services use. Raises ConfigError."""
    if options.sockets == "tcp":
        return ports.reserve()
    try:
        return ports.socket(name)
    except OSError as error:
        raise ConfigError("sockets", options.sockets, str(error)) from error


def _reachable(address: HostPort) -> str:
    """An address at which a client on this host finds what listens at `address`."""
    return address.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")


def _address(field: str, host: str, port: int, ports: Ports) -> HostPort:
    try:
        return ports.reserve(port, host)
    except OSError as error:
        raise ConfigError(field, port, f"{error}; choose another, or 0 for a free one") from error
