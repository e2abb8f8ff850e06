"""`python -m penstock.rpc.probe ADDRESS [NAME] [--member-tls DIRECTORY]`: asks a service's gRPC health, for the health
checks of containers.

Ends with 0 if the service says that it takes requests, else with 1 and a line that says why. Without NAME the question
is about the service as a whole; `penstock.live` asks whether it works at all (server.py). DIRECTORY is that of the
service itself, where it asks for certificates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.rpc.identity import MemberIdentity, role_host
from penstock.runtime.addresses import UNIX
from penstock.runtime.config import ConfigError

_LIMIT_S = 3.0
_USAGE = "usage: python -m penstock.rpc.probe ADDRESS [NAME] [--member-tls DIRECTORY]"


def ailment(address: str, name: str = "", member: MemberIdentity | None = None) -> str:
    """Why the service at `address` ("host:port" or "unix:/path") takes no requests; empty if it does. `member` is who
    the service is."""
    with _channel(address, member) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=_LIMIT_S).status
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    if status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}"


def _channel(address: str, member: MemberIdentity | None) -> grpc.Channel:
    options: tuple[tuple[str, int | str], ...] = (("grpc.enable_http_proxy", 0),)  # it is of this host or its mesh
    if member is None or address.startswith(UNIX):
        return grpc.insecure_channel(address, options)
    options += (("grpc.ssl_target_name_override", role_host(member.own.role)),)
    return grpc.secure_channel(address, member.channel(), options)


def main() -> int:
    """Returns the status of the process."""
    asked, member = sys.argv[1:], None
    try:
        if asked[-2:-1] == ["--member-tls"]:
            *asked, _, directory = asked
            member = MemberIdentity(Path(directory))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if len(asked) not in (1, 2):
        print(_USAGE, file=sys.stderr)
        return 2
    if reason := ailment(asked[0], asked[1] if asked[1:] else "", member):
        print(reason, file=sys.stderr)
    return int(bool(reason))


if __name__ == "__main__":
    sys.exit(main())
