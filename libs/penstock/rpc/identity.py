"""Who a member of the mesh is, where members reach each other over a network: a certificate that names its role.

Both sides of a connection show theirs, which the mesh's own authority has signed (TLS, RFC 8446; X.509, RFC 5280). A
certificate has the role in two forms: as a URI in the form of SPIFFE, which servers read of their callers, and as a DNS
name, which clients demand of the server they call: TLS itself checks that one. So a router's certificate is no
worker's, in either direction. `penstock ca` makes them, and so can any other authority.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, get_args

import grpc
import structlog

from penstock.runtime.config import ConfigError

MemberRole = Literal["gateway", "router", "worker", "store", "draft", "stage", "picker", "operator"]
"""What a member may do; see `penstock.rpc.methods`. Workers may change between prefill and decode, so they have one."""
ROLES: tuple[MemberRole, ...] = get_args(MemberRole)
DOMAIN = "penstock.internal"
CA, CERT, KEY = "ca.crt", "tls.crt", "tls.key"
"""Files of a member's directory, by the names that Kubernetes and cert-manager give them."""

_URI = re.compile(rf"spiffe://{re.escape(DOMAIN)}/(?P<role>[a-z]+)/(?P<name>[A-Za-z0-9._-]{{1,128}})")
_LOOK_S = 1.0
"""Least seconds between two looks at the files."""
_ONLY_TLS_1_3 = "ECDHE-PSK-AES128-CBC-SHA"
"""For gRPC, which has no setting for the least version of TLS: these are the suites of older versions, and nobody can
use this one without a shared key. TLS 1.3 has suites of its own."""


def role_host(role: MemberRole) -> str:
    """The DNS name in all certificates of a role."""
    return f"{role}.{DOMAIN}"


def role_uri(role: MemberRole, name: str) -> str:
    """The URI in a member's certificate."""
    return f"spiffe://{DOMAIN}/{role}/{name}"


@dataclass(frozen=True, slots=True)
class CallingMember:
    """Who calls, by its certificate."""

    role: MemberRole
    name: str
    hosts: frozenset[str]
    """Names and addresses at which it may listen; empty: anywhere."""

    def may_listen_at(self, host: str) -> bool:
        """Whether its certificate covers that host."""
        return not self.hosts or _plain(host) in self.hosts


_CALLER: ContextVar[CallingMember | None] = ContextVar("caller", default=None)


def current_caller() -> CallingMember | None:
    """Who made the call that is being handled; None where callers show no certificate."""
    return _CALLER.get()


@contextmanager
def called_by(caller: CallingMember) -> Iterator[None]:
    """For the length of the block."""
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)


def caller_of(shown: Mapping[str, Iterable[bytes]]) -> CallingMember | None:
    """Who has the certificate that gRPC says these things of (`ServicerContext.auth_context`); None: a member has
    another one."""
    return _named([name.decode(errors="replace") for name in shown.get("x509_subject_alternative_name", ())])


def _named(names: Sequence[str]) -> CallingMember | None:
    """Whom the names of a certificate are of."""
    found = [match for name in names if (match := _URI.fullmatch(name))]
    role = next((role for role in ROLES if found and role == found[0]["role"]), None)
    if len(found) != 1 or role is None:
        return None
    hosts = {_plain(name) for name in names if "://" not in name} - {role_host(role)}
    return CallingMember(role, found[0]["name"], frozenset(hosts))


def _plain(host: str) -> str:
    """One form of a name or an address."""
    host = host.strip("[]").lower()
    try:
        return str(ip_address(host))
    except ValueError:
        return host


@dataclass(frozen=True, slots=True)
class _Files:
    ca: bytes
    cert: bytes
    key: bytes


class MemberIdentity:
    """A member's certificate and key, and the authority that it believes. Changed files are used for the connections
    that come after; those that do not fit together are not used."""

    def __init__(
        self, directory: Path, role: MemberRole | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`role` is that which the certificate has to have; None: any. Raises ConfigError."""
        os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", _ONLY_TLS_1_3)
        self._directory = directory
        self._role = role
        self._clock = clock
        self._looked = clock()
        try:
            self._seen = self._state()
            self._files, self.own = self._read()
        except (OSError, ValueError) as error:
            right = f"must be a directory with {CA}, {CERT} and {KEY}, as `penstock ca issue` makes it"
            raise ConfigError("member_tls", str(directory), f"{right}: {_why(error)}") from None
        self.version = 0
        """Counts changes of the files."""

    @classmethod
    def of(cls, directory: Path | None, role: MemberRole | None = None) -> MemberIdentity | None:
        """That of a setting; None where there is none. Raises ConfigError."""
        return None if directory is None else cls(directory, role)

    def server(self) -> grpc.ServerCredentials:
        """For a server: it asks callers for certificates, and reads the files again for new connections."""
        return grpc.dynamic_ssl_server_credentials(self._for_server(), self._for_server, True)

    def channel(self) -> grpc.ChannelCredentials:
        """For a channel, with the files as they are now."""
        files = self._files
        return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)

    def look(self) -> int:
        """Reads the files again if they have changed; the version."""
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return self.version
        self._looked = now
        log = structlog.get_logger("penstock.rpc")
        try:
            if (state := self._state()) == self._seen:
                return self.version
            files, own = self._read()
        except (OSError, ValueError) as error:
            log.warning("the member's changed certificate is not used", reason=_why(error))
            return self.version
        self._seen, self._files, self.own = state, files, own
        self.version += 1
        log.info("the member's certificate was read again")
        return self.version

    def _for_server(self) -> grpc.ServerCertificateConfiguration:
        self.look()
        files = self._files
        return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.ca)

    def _state(self) -> tuple[int, ...]:
        found = [os.stat(self._directory / name) for name in (CA, CERT, KEY)]
        return tuple(part for one in found for part in (one.st_mtime_ns, one.st_size, one.st_ino))

    def _read(self) -> tuple[_Files, CallingMember]:
        """The files, and whom they name. Raises OSError, of which SSLError is one: they do not fit together; or
        ValueError: they are of no such member."""
        paths = [self._directory / name for name in (CA, CERT, KEY)]
        own = _named(_names(*paths))
        if own is None or own.role != (self._role or own.role):
            found = "no member of a mesh" if own is None else f"a {own.role}"
            raise ValueError(f"the certificate is of {found}, not of a {self._role or 'member'}")
        return _Files(*(path.read_bytes() for path in paths)), own


def _names(ca: Path, cert: Path, key: Path) -> list[str]:
    """Those of a certificate, as somebody finds them who believes `ca` and whom its holder has shown it. Raises
    OSError, of which SSLError is one: nobody believes it, or the key is not its own."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(cert, key)
    client.load_verify_locations(ca)
    client.check_hostname = False
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    holder, other = server.wrap_bio(there, back, server_side=True), client.wrap_bio(back, there)
    for side in (other, holder, other):  # hello; hello, certificate, proof; that is all that the other needs
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    shown: Any = other.getpeercert() or {}
    return [str(name) for _, name in shown.get("subjectAltName", ())]


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
