"""Members that know each other by certificates, over real TLS."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from penstock.cli import authority
from penstock.errors import Forbidden
from penstock.rpc.channels import Channels, open_channels
from penstock.rpc.errors import from_rpc
from penstock.rpc.identity import (
    CA,
    CERT,
    KEY,
    ROLES,
    CallingMember,
    MemberIdentity,
    MemberRole,
    caller_of,
    current_caller,
    role_host,
)
from penstock.rpc.methods import METHODS
from penstock.rpc.server import RpcServer, serve
from penstock.runtime.config import ConfigError
from penstock.v1 import (
    checkup_pb2,
    decode_pb2,
    draft_pb2,
    kvstore_pb2,
    pictures_pb2,
    prefill_pb2,
    router_pb2,
    stage_pb2,
)

pytestmark = pytest.mark.attack


_FILES = (router_pb2, prefill_pb2, decode_pb2, pictures_pb2, draft_pb2, kvstore_pb2, stage_pb2, checkup_pb2)
_SERVICES: list[ServiceDescriptor] = [
    service for file in _FILES for service in file.DESCRIPTOR.services_by_name.values()
]
_ALL = {f"/{service.full_name}/{method.name}": method for service in _SERVICES for method in service.methods}
_EXAMINE = "/penstock.v1.Checkup/Examine"
_REACHED = grpc.StatusCode.DATA_LOSS
"""What the services here answer; nothing else does."""


class Mesh:
    """An authority, and members."""

    def __init__(self, directory: Path) -> None:
        self.ca = directory / "ca"
        self._directory = directory
        authority.init(directory=self.ca)

    def issue(self, role: str, name: str = "", *hosts: str) -> Path:
        """A member's directory."""
        out = self._directory / (name or role)
        authority.issue(role, name or role, directory=self.ca, out=out, hosts=hosts)
        return out

    def member(self, role: str, name: str = "", *hosts: str) -> MemberIdentity:
        """One that looks at its files whenever it is asked."""
        ticks = iter(range(1 << 30))
        return MemberIdentity(self.issue(role, name, *hosts), clock=lambda: 10.0 * next(ticks))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    return Mesh(tmp_path_factory.mktemp("mesh"))


class _Everything(grpc.GenericRpcHandler):
    """Each method of each service; they answer _REACHED."""

    callers: list[CallingMember | None]

    def __init__(self) -> None:
        self.callers = []

    def service(self, details: Any) -> Any:
        method = _ALL.get(details.method)
        if method is None:
            return None

        async def whole(request: Any, context: Any) -> None:
            self.callers.append(current_caller())
            await context.abort(_REACHED, "reached")

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            self.callers.append(current_caller())
            await context.abort(_REACHED, "reached")
            yield b""

        shape = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        parse = GetMessageClass(method.input_type).FromString
        return make(stream if method.server_streaming else whole, parse, lambda raw: raw)


@asynccontextmanager
async def served(member: MemberIdentity | None, everything: _Everything | None = None) -> AsyncIterator[RpcServer]:
    handlers = everything or _Everything()
    async with serve(
        "127.0.0.1:0", lambda server: server.add_generic_rpc_handlers((handlers,)), [], member=member
    ) as server:
        await server.set_serving(True)
        yield server


async def outcome(channel: grpc.aio.Channel, name: str, *, stream: Sequence[bytes] = (b"",)) -> grpc.StatusCode:
    """How a call with an empty message ends; where there may be many, with those of `stream`."""
    method = _ALL[name]
    shape = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    asked: Any = iter(stream) if method.client_streaming else b""
    call = getattr(channel, shape)(name)(asked, timeout=10)
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_the_table_has_each_method_and_no_other() -> None:
    assert set(METHODS) == set(_ALL)
    assert all(roles for roles in METHODS.values()), "a method that nobody may call is no method"


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_reaches_its_methods_and_no_other(mesh: Mesh, role: MemberRole) -> None:
    everything = _Everything()
    async with served(mesh.member("store"), everything) as server, open_channels(mesh.member(role)) as channels:
        channel = channels.to(f"127.0.0.1:{server.port}", "store")
        # grpc.aio says INTERNAL of a call that is refused while a message of it is on its way
        found = {name: await outcome(channel, name, stream=()) for name in _ALL}
    refused = grpc.StatusCode.PERMISSION_DENIED
    reached = dict.fromkeys(METHODS, _REACHED) | {_EXAMINE: grpc.StatusCode.OK}  # each server has that one itself
    assert found == {name: reached[name] if role in roles else refused for name, roles in METHODS.items()}
    assert {caller.role for caller in everything.callers if caller} == ({role} if everything.callers else set())
    assert None not in everything.callers


async def test_without_a_certificate_no_method_is_reached(mesh: Mesh, tmp_path: Path) -> None:
    stranger = Mesh(tmp_path)
    roots = (mesh.ca / CA).read_bytes()
    options = (("grpc.ssl_target_name_override", "store.penstock.internal"),)
    async with served(mesh.member("store")) as server:
        address = f"127.0.0.1:{server.port}"
        foreign = MemberIdentity(stranger.issue("gateway"))
        key, cert = ((stranger.issue("worker") / name).read_bytes() for name in (KEY, CERT))
        for channel in (
            grpc.aio.insecure_channel(address),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots, key, cert), options),
            Channels(foreign).to(address, "store"),
        ):
            async with channel:
                for name in _ALL:
                    assert await outcome(channel, name) is grpc.StatusCode.UNAVAILABLE, name


async def test_a_router_is_no_worker_and_no_stranger_is_a_router(mesh: Mesh, tmp_path: Path) -> None:
    method = "/penstock.v1.Decode/Generate"
    async with open_channels(mesh.member("gateway")) as channels:
        for pretender in (mesh.member("router"), MemberIdentity(Mesh(tmp_path).issue("worker")), None):
            async with served(pretender) as server:
                channel = channels.to(f"127.0.0.1:{server.port}", "worker")
                assert await outcome(channel, method) is grpc.StatusCode.UNAVAILABLE
                await channels.forget(f"127.0.0.1:{server.port}")
        async with served(mesh.member("worker")) as server:
            assert await outcome(channels.to(f"127.0.0.1:{server.port}", "worker"), method) is _REACHED


async def test_who_is_refused_hears_who_may(mesh: Mesh) -> None:
    async with served(mesh.member("router")) as server, open_channels(mesh.member("worker")) as channels:
        plan = channels.to(f"127.0.0.1:{server.port}", "router").stream_stream("/penstock.v1.Router/Plan")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await plan(iter([b""])).read()
    error = from_rpc(caught.value)
    assert isinstance(error, Forbidden)
    assert error.message == "/penstock.v1.Router/Plan may not be called by a worker: a certificate of gateway may"


async def test_older_versions_of_tls_are_refused(mesh: Mesh) -> None:
    """By a process: gRPC reads which versions there are once, when it starts."""
    command = (sys.executable, "-m", "penstock.router", "--member-tls", str(mesh.issue("router")))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            said = await process.stderr.readline()
        port = int(re.search(rb"127.0.0.1:(\d+)", said)[1])  # type: ignore[index]
        files = mesh.issue("gateway")
        for newest, spoken in ((ssl.TLSVersion.TLSv1_2, None), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
            context = ssl.create_default_context(cafile=str(mesh.ca / CA))
            context.load_cert_chain(files / CERT, files / KEY)
            context.maximum_version = newest
            context.set_alpn_protocols(["h2"])
            assert await _spoken(context, port) == spoken
    finally:
        process.terminate()
        await process.wait()


async def _spoken(context: ssl.SSLContext, port: int) -> str | None:
    name = role_host("router")
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    except (ssl.SSLError, ConnectionError):
        return None
    version: str = writer.get_extra_info("ssl_object").version()
    writer.close()
    return version


async def test_certificates_and_keys_change_under_a_mesh_that_runs(tmp_path: Path) -> None:
    """At each moment each member reaches each, over new connections too; who keeps a certificate of the old key is a
    stranger in the end."""
    mesh = Mesh(tmp_path)
    method = "/penstock.v1.Decode/Generate"
    worker, gateway, late = (mesh.member(*who) for who in (("worker",), ("gateway",), ("gateway", "late")))

    async def reached(member: MemberIdentity) -> bool:
        async with open_channels(member) as channels:
            return await outcome(channels.to(address, "worker"), method) is _REACHED

    async with served(worker) as server, open_channels(gateway) as channels:
        address = f"127.0.0.1:{server.port}"
        old = channels.to(address, "worker").unary_stream(method)
        for step in range(3):
            authority.rotate(directory=mesh.ca)
            for role in ("worker", "gateway"):
                mesh.issue(role)
                assert await reached(gateway), f"step {step}: the {role} is new"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await old(b"").read()
            assert caught.value.code() is _REACHED, "also by a stub that was there before"
            shutil.copy(mesh.ca / CA, tmp_path / "late")
            assert await reached(late) is (step < 2), "its certificate is of the old key"
        assert (worker.version, gateway.version) == (3, 3)


def test_files_that_do_not_fit_are_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Mesh(tmp_path)
    member, other = mesh.member("worker"), mesh.issue("worker", "other")
    (mesh.issue("worker") / KEY).write_bytes((other / KEY).read_bytes())
    assert member.look() == 0
    mesh.issue("worker")
    assert member.look() == 1
    (tmp_path / "worker" / CA).unlink()
    assert member.look() == 1
    for missing in (tmp_path / "nowhere", tmp_path / "worker"):
        with pytest.raises(ConfigError, match=r"member_tls = .*must be a directory with ca.crt, tls.crt and tls.key"):
            MemberIdentity(missing)


@pytest.mark.parametrize(
    ("names", "right"),
    [
        (["spiffe://penstock.internal/worker/w"], CallingMember("worker", "w", frozenset())),
        (
            ["worker.penstock.internal", "spiffe://penstock.internal/worker/w", "10.0.0.1", "Node.Example"],
            CallingMember("worker", "w", frozenset({"10.0.0.1", "node.example"})),
        ),
        ([], None),
        (["worker.penstock.internal"], None),
        (["spiffe://penstock.internal/king/w"], None),
        (["spiffe://elsewhere/worker/w"], None),
        (["spiffe://penstock.internal/worker/w/x"], None),
        (["spiffe://penstock.internal/worker/w", "spiffe://penstock.internal/router/r"], None),
    ],
)
def test_who_a_certificate_names(names: list[str], right: CallingMember | None) -> None:
    assert caller_of({"x509_subject_alternative_name": [name.encode() for name in names]}) == right


def test_where_a_member_may_listen() -> None:
    anywhere = CallingMember("worker", "w", frozenset())
    there = CallingMember("worker", "w", frozenset({"10.0.0.1", "::1", "node.example"}))
    assert anywhere.may_listen_at("10.9.9.9")
    assert all(map(there.may_listen_at, ("10.0.0.1", "[::1]", "0:0:0:0:0:0:0:1", "NODE.example")))
    assert not any(map(there.may_listen_at, ("10.0.0.2", "::2", "example")))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda ca: authority.init(directory=ca), "dir = "),
        (lambda ca: authority.issue("king", "k", directory=ca), "role = 'king': must be one of gateway, router"),
        (lambda ca: authority.issue("worker", "a/b", directory=ca), "name = 'a/b'"),
        (lambda ca: authority.issue("worker", "w", directory=ca, hosts=("a b",)), "host = 'a b'"),
        (lambda ca: authority.issue("worker", "w", directory=ca, days=0), "days = 0"),
        (lambda ca: authority.issue("worker", "w", directory=ca / "none"), "must be that of `penstock ca init`"),
        (lambda ca: authority.rotate(directory=ca / "none"), "must be that of `penstock ca init`"),
    ],
)
def test_what_the_authority_refuses(
    mesh: Mesh, wrong: Callable[[Path], None], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=field):
        wrong(mesh.ca)
    assert not list(tmp_path.iterdir())


def test_a_certificate_of_another_role_is_not_taken(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    with pytest.raises(ConfigError, match=r"the certificate is of a router, not of a worker$"):
        MemberIdentity(mesh.issue("router"), "worker")
    ticks = iter(range(100))
    member = MemberIdentity(mesh.issue("worker"), "worker", clock=lambda: 10.0 * next(ticks))
    assert member.own == CallingMember("worker", "worker", frozenset())
    for name in (CERT, KEY):
        shutil.copy(tmp_path / "router" / name, tmp_path / "worker")
    assert (member.look(), member.own.role) == (0, "worker")


def test_a_certificate_that_names_nobody_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another authority, which knows nothing of roles; and one that nobody believes."""
    mesh, other = Mesh(tmp_path), Mesh(tmp_path / "other")
    monkeypatch.setattr(authority, "role_uri", lambda role, name: f"https://{role}.example/{name}")
    with pytest.raises(ConfigError, match="the certificate is of no member of a mesh"):
        MemberIdentity(mesh.issue("worker"))
    shutil.copy(other.ca / CA, mesh.issue("worker"))
    with pytest.raises(ConfigError, match="certificate verify failed"):
        MemberIdentity(tmp_path / "worker")


def test_keys_are_their_owners(mesh: Mesh) -> None:
    files = [mesh.ca / "ca.key", mesh.issue("worker") / KEY]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
    assert (mesh.issue("worker")).stat().st_mode & 0o777 == 0o700
