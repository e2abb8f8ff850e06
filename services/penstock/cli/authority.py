"""`penstock ca`: the authority of a mesh whose members reach each other over a network.

Its directory holds `ca.crt`, the certificates that members believe, and `ca.key`, the key of the first of them, which
signs and which members never need. A member has a directory of its own, as `penstock.rpc.identity` reads it.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from penstock.rpc.identity import CA, CERT, KEY, ROLES, MemberRole, role_host, role_uri
from penstock.runtime.config import ConfigError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ConfigError("ca", "", "needs the package cryptography: pip install 'penstock[ca]'") from error

app = App(name="ca", help="Makes the certificates by which the members of a mesh know each other.")

_CA_KEY, _NEXT_KEY = "ca.key", "next.key"
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
_SKEW = timedelta(hours=1)
"""Clocks of other hosts may be behind by so much."""
_Directory = Annotated[Path, Parameter(name=("--dir", "-d"))]
_DEFAULT = Path("ca")


@app.command
def init(*, directory: _Directory = _DEFAULT, days: int = 3650) -> None:
    """Makes the authority of a new mesh.

    Parameters
    ----------
    directory:
        Where it is kept; whoever can read its key can be any member.
    days:
        How long its certificate holds.
    """
    if (directory / _CA_KEY).exists():
        raise ConfigError("dir", str(directory), "has an authority already; `penstock ca rotate` replaces its key")
    cert, key = _new_authority(days)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(directory / _CA_KEY, _pem_key(key), 0o600)
    _write(directory / CA, _pem(cert), 0o644)
    print(f"{directory / CA} is what members believe; keep {directory / _CA_KEY} to yourself", file=sys.stderr)


@app.command
def issue(
    role: str,
    name: str,
    *,
    directory: _Directory = _DEFAULT,
    out: Path | None = None,
    hosts: Annotated[tuple[str, ...], Parameter(name="--host", negative=())] = (),
    days: int = 90,
) -> None:
    """Makes a member's certificate and key. A service follows its directory without a restart.

    Parameters
    ----------
    role:
        gateway, router, worker, store, draft, picker, or operator for `penstock ctl` and `penstock scale`.
    name:
        Whose it is, for logs.
    directory:
        That of the authority.
    out:
        The member's directory, which `--member-tls` names. Default: the name.
    hosts:
        A name or an address at which it may listen; give it once for each. Default: anywhere.
    days:
        How long the certificate holds.
    """
    if role not in ROLES:
        raise ConfigError("role", role, f"must be one of {', '.join(ROLES)}")
    if not 1 <= len(name) <= 64 or not name.replace("-", "").replace(".", "").replace("_", "").isalnum():
        raise ConfigError("name", name, "must be 1 to 64 letters, digits or . _ -")
    authority, signing = _authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    cert = _signed(_leaf(role, name, hosts), key.public_key(), days, authority, signing)
    where = out or Path(name)
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(where / KEY, _pem_key(key), 0o600)
    _write(where / CERT, _pem(cert), 0o644)
    _write(where / CA, (directory / CA).read_bytes(), 0o644)
    print(f"{where}: a {role}, until {cert.not_valid_after_utc:%Y-%m-%d}", file=sys.stderr)


@app.command
def rotate(*, directory: _Directory = _DEFAULT, days: int = 3650) -> None:
    """Replaces the key in three steps, one with each call, so that at any time all members believe each other: a new
    key is believed; it signs; the old one is believed no more. Issue all members anew after each step.

    Parameters
    ----------
    directory:
        That of the authority.
    days:
        How long the new certificate holds.
    """
    authority, _ = _authority(directory)
    next_key, others = directory / _NEXT_KEY, [one for one in _believed(directory) if one != authority]
    if next_key.exists():
        _write(directory / CA, b"".join(map(_pem, [others[-1], authority, *others[:-1]])), 0o644)
        os.replace(next_key, directory / _CA_KEY)
        said = "the new key signs from now on: issue all members anew, and rotate again"
    elif others:
        _write(directory / CA, _pem(authority), 0o644)
        said = "the old key is believed no more by members that are issued anew: that ends the rotation"
    else:
        cert, key = _new_authority(days)
        _write(next_key, _pem_key(key), 0o600)
        _write(directory / CA, b"".join(map(_pem, [authority, cert])), 0o644)
        said = "a new key is believed: issue all members anew, and rotate again"
    print(said, file=sys.stderr)


def _new_authority(days: int) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A key, and its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Penstock mesh {os.urandom(4).hex()}")])
    use = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = (
        x509.CertificateBuilder(subject_name=name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(use, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _dated(builder, name, key.public_key(), days).sign(key, hashes.SHA256()), key


def _leaf(role: MemberRole, name: str, hosts: Sequence[str]) -> x509.CertificateBuilder:
    """What a member's certificate says of it. Raises ConfigError."""
    names: list[x509.GeneralName] = [
        x509.DNSName(role_host(role)),
        x509.UniformResourceIdentifier(role_uri(role, name)),
    ]
    for host in hosts:
        try:
            names.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            if not _HOST.fullmatch(host):
                raise ConfigError("host", host, "must be the name or the address of a host") from None
            names.append(x509.DNSName(host))
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder(subject_name=subject)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    )


def _signed(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePublicKey,
    days: int,
    authority: x509.Certificate,
    signing: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    builder = builder.add_extension(issuer, critical=False)
    return _dated(builder, authority.subject, key, days).sign(signing, hashes.SHA256())


def _dated(
    builder: x509.CertificateBuilder, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    if not 1 <= days <= 36500:
        raise ConfigError("days", days, "must be 1 to 36500")
    now = datetime.now(UTC)
    dated = builder.issuer_name(issuer).public_key(key).serial_number(x509.random_serial_number())
    return dated.not_valid_before(now - _SKEW).not_valid_after(now + timedelta(days=days))


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The certificate and the key that sign. Raises ConfigError."""
    try:
        key = serialization.load_pem_private_key((directory / _CA_KEY).read_bytes(), None)
        cert = _believed(directory)[0]
    except (OSError, ValueError) as error:
        raise ConfigError("dir", str(directory), f"must be that of `penstock ca init`: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise ConfigError("dir", str(directory), f"{_CA_KEY} is not the key of the first certificate in {CA}")
    return cert, key


def _believed(directory: Path) -> list[x509.Certificate]:
    """Those that have not run out; the first of them signs."""
    now = datetime.now(UTC)
    found = x509.load_pem_x509_certificates((directory / CA).read_bytes())
    return [cert for cert in found if cert.not_valid_after_utc > now]


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole, or as it was before."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
