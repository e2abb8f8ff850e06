"""`python -m penstock.rpc.probe HOST:PORT [NAME]`: asks a service's gRPC health, for the health checks of containers.

Ends with 0 if the service says that it takes requests, else with 1 and a line that says why. Without NAME the question
is about the service as a whole; `penstock.live` asks whether it works at all (server.py).
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_LIMIT_S = 3.0
_USAGE = "usage: python -m penstock.rpc.probe HOST:PORT [NAME]"


def ailment(address: str, name: str = "") -> str:
    """Why the service at `address` ("host:port") takes no requests; empty if it does."""
    options = (("grpc.enable_http_proxy", 0),)  # a service of this host or its mesh is not behind one
    with grpc.insecure_channel(address, options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=_LIMIT_S).status
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    if status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}"


def main() -> int:
    """Returns the status of the process."""
    asked = sys.argv[1:]
    if len(asked) not in (1, 2):
        print(_USAGE, file=sys.stderr)
        return 2
    if reason := ailment(*asked):
        print(reason, file=sys.stderr)
    return int(bool(reason))


if __name__ == "__main__":
    sys.exit(main())
